"""Sparse rows of a linear program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scipy.optimize import LinearConstraint
from scipy.sparse import coo_array


class Rows:
    """Sparse rows of a linear constraint, added one by one."""

    def __init__(self) -> None:
        self._values: list[float] = []
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._low: list[float] = []
        self._high: list[float] = []

    def add(self, terms: Sequence[tuple[int, float]], low: float, high: float) -> None:
        """One row: ``low <= sum(coefficient * variable) <= high``."""
        row = len(self._low)
        for column, value in terms:
            self._rows.append(row)
            self._columns.append(column)
            self._values.append(value)
        self._low.append(low)
        self._high.append(high)

    def __len__(self) -> int:
        return len(self._low)

    @property
    def low(self) -> tuple[float, ...]:
        """The lower end of each row."""
        return tuple(self._low)

    def matrix(self, width: int) -> Any:
        """The coefficients, for ``width`` variables."""
        return coo_array((self._values, (self._rows, self._columns)), shape=(len(self), width)).tocsr()

    def constraint(self, width: int) -> LinearConstraint:
        """All rows at once."""
        return LinearConstraint(self.matrix(width), self._low, self._high)
