"""Questions about autocast that may be asked of any device, also of those that have none (meta)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The type that products run in under the autocast that is on now; ``None`` where none is."""
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return None
    dtype: torch.dtype = torch.get_autocast_dtype(device_type)
    return dtype


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Runs its body without autocast."""
    available = torch.amp.is_autocast_available(device_type)
    return torch.autocast(device_type, enabled=False) if available else nullcontext()
