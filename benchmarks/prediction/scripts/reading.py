"""What the scripts of this folder share: the device to run on, and where to leave what they read."""

from __future__ import annotations

import json
import os
from typing import Any

DEVICE = os.environ.get("MEMFIT_PREDICTION_DEVICE", "cuda")
"""``cuda`` in a dry run and on a GPU, ``meta`` under the portable engine."""


def tell(value_bytes: int, **details: Any) -> None:
    """Leave the figure that a row is held against, and what else is worth comparing."""
    keep({"reading": value_bytes, **details})


def keep(told: dict[str, Any]) -> None:
    """In a file, which a dry run keeps apart from the user's."""
    with open("memfit-prediction-reading.json", "w", encoding="utf-8") as file:
        json.dump(told, file)
