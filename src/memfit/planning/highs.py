"""The solver: scipy's HiGHS, kept from writing to standard output, where JSON may be expected."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp

from memfit.core.standard_output import standard_output_aside

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
    with _LOCK, standard_output_aside():
        return milp(
            costs,
            constraints=constraint,
            bounds=bounds,
            integrality=np.full(len(costs), integral, dtype=int),
            options=dict(options),
        )
