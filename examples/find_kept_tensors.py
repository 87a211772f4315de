"""What still holds the memory after an exception: a traceback, a closure, a cycle; and clearing it.

python examples/find_kept_tensors.py
"""

from __future__ import annotations

import traceback

import torch

import memfit


def train_step(batch: torch.Tensor) -> None:
    """Fails with an activation in hand."""
    activations = [batch * 2, batch * 3]
    raise RuntimeError(f"out of memory with {len(activations)} activations")


def main() -> None:
    """Find the tensors that a stored exception keeps, then let them go."""
    stored = None
    try:
        train_step(torch.ones(1000, 1000))
    except RuntimeError as error:
        stored = error  # a logger, a list of failures, a notebook's Out: all do this
    found = memfit.collect(least_bytes=1 << 20)
    print(found)
    assert stored is not None
    traceback.clear_frames(stored.__traceback__)
    print(f"{memfit.collect(least_bytes=1 << 20).kept_bytes} bytes kept after clear_frames")


if __name__ == "__main__":
    main()
