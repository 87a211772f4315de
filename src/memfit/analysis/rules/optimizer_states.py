"""What optimizers keep per parameter, and what 8 bits would save of it."""

from __future__ import annotations

import numpy as np

from memfit.analysis.configuration import Configuration
from memfit.analysis.edits import Edit, Window
from memfit.analysis.evidence import Evidence

BYTES_OF_AN_ELEMENT = 4
"""Optimizer states are fp32 unless something else is asked for."""
EIGHT_BIT_BYTES = 1.015
"""Of an element in 8 bits, with an fp32 scale per block of 256."""
LEAST_ELEMENTS = 4096
"""bitsandbytes keeps smaller tensors in 32 bits (its documentation, min_8bit_size)."""
STATE_BYTES = {"adafactor": 0.1, "adam": 8.0, "lamb": 8.0, "lion": 4.0, "rmsprop": 4.0, "adagrad": 4.0}
EIGHT_BIT_STATE_BYTES = 2.03


def state_bytes_per_parameter(job: Configuration) -> float | None:
    """What the job's optimizer keeps per parameter; ``None`` where it is not known."""
    if job.optimizer is None:
        return None
    if job.asks_for_eight_bit:
        return EIGHT_BIT_STATE_BYTES
    for name, size in STATE_BYTES.items():
        if name in job.optimizer:
            return size
    return 4.0 if "momentum" in job.optimizer or "sgdm" in job.optimizer else 0.0


def trainable_count(case: Evidence) -> int:
    """Elements that are trained: as said, or as many as the gradients have of four bytes."""
    said = case.configuration.trainable_parameters or case.configuration.parameters
    return said if said is not None else case.trainable_bytes // BYTES_OF_AN_ELEMENT


def eight_bit_edit(case: Evidence) -> tuple[int, Edit]:
    """What 8-bit states would save at the peak, and the trace with them."""
    if case.trace is None or not len(case.trace):
        held = int(case.by_category.get("optimizer_state", 0))
        saving = int(held * (1 - EIGHT_BIT_BYTES / BYTES_OF_AN_ELEMENT))
        return saving, Edit(by_category={"optimizer_state": saving})
    blocks = case.blocks
    least = LEAST_ELEMENTS * BYTES_OF_AN_ELEMENT
    states = case.category_mask("optimizer_state") & (blocks.size >= least)
    shrunk = (blocks.size * EIGHT_BIT_BYTES / BYTES_OF_AN_ELEMENT).astype(np.int64)
    windows = {
        int(blocks.ids[i]): (Window(int(blocks.born[i]), int(blocks.freed[i]), int(shrunk[i])),)
        for i in np.flatnonzero(states).tolist()
    }
    return case.bytes_at_peak(states) - int(shrunk[states & case.live_at_peak].sum()), Edit(windows=windows)
