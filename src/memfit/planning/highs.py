"""The solver: scipy's HiGHS, kept from writing to standard output, where JSON may be expected."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp

_LOCK = threading.Lock()


def minimise(
    costs: npt.NDArray[np.float64],
    *,
    constraint: LinearConstraint,
    bounds: Bounds,
    integral: bool | npt.NDArray[np.int64],
    options: Mapping[str, Any],
) -> Any:
    """`scipy.optimize.milp`: the variables of least cost; all of them are integers, none, or those told."""
    with _LOCK, _standard_output_aside():
        return milp(
            costs,
            constraints=constraint,
            bounds=bounds,
            integrality=np.full(len(costs), integral, dtype=int),
            options=dict(options),
        )


@contextlib.contextmanager
def _standard_output_aside() -> Iterator[None]:
    """What C code prints meanwhile goes nowhere: some paths of HiGHS print a line whatever they are told."""
    try:
        sys.stdout.flush()
        kept = os.dup(1)
    except (OSError, ValueError, AttributeError):  # there is no standard output to protect
        yield
        return
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
        yield
    finally:
        if os.name == "posix":
            ctypes.CDLL(None).fflush(None)  # what C has buffered belongs to this time
        os.dup2(kept, 1)
        os.close(kept)
