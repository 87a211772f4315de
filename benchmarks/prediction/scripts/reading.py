"""What the scripts of this folder share: the device to run on, and where to leave what they read."""

from __future__ import annotations

import json
import os
from typing import Any

import torch

DEVICE = os.environ.get("MEMFIT_PREDICTION_DEVICE", "cuda")
"""``cuda`` in a dry run and on a GPU, ``meta`` under the portable engine."""


def tell(value_bytes: int, **details: Any) -> None:
    """Leave the figure that a row is held against, and what else is worth comparing."""
    keep({"reading": value_bytes, **details})


def keep(told: dict[str, Any]) -> None:
    """In a file, which a dry run keeps apart from the user's."""
    with open("memfit-prediction-reading.json", "w", encoding="utf-8") as file:
        json.dump(told, file)


def recorded_sizes() -> list[int]:
    """What was allocated since PyTorch's history began, in order; nothing where there is no such history."""
    if DEVICE != "cuda":
        return []
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    return [event["size"] for event in events if event["action"] == "alloc"]
