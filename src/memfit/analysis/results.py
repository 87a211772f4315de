"""What an analysis says: sentences, tables and perhaps a figure, which text and pages show alike."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from memfit.core.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEMA_VERSION = 1
_NUMBER = re.compile(r"(?<=\.)\d+(?![^.])")


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of texts.

    Attributes:
        title: what it shows.
        heads: the columns' headings; one that begins with ``>`` is a column of numbers, set to the right.
        rows: as many cells as there are heads in each.
    """

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        wrong = next((row for row in self.rows if len(row) != len(self.heads)), None)
        if wrong is not None:
            raise ValueError(f"table {self.title!r} has {len(self.heads)} columns, and a row {wrong!r}")

    @property
    def columns(self) -> tuple[tuple[str, bool], ...]:
        """Each column's heading, and whether it holds numbers."""
        return tuple((head.removeprefix(">"), head.startswith(">")) for head in self.heads)


class Result(ABC):
    """What an analysis found; a frozen dataclass that says it in these four ways."""

    title: ClassVar[str]

    @abstractmethod
    def sentences(self) -> Sequence[str]:
        """The findings, one each, the most important first."""

    @abstractmethod
    def tables(self) -> Sequence[Table]:
        """The figures behind them."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Everything as plain values: bytes are whole numbers, seconds floats."""

    def figure(self) -> Figure | None:
        """A picture for the report; None where there is nothing to draw."""
        return None

    def __str__(self) -> str:
        parts = [self.title, *(f"  {sentence}" for sentence in self.sentences())]
        return "\n".join([*parts, *(line for table in self.tables() for line in _table_lines(table))])


def byte_table(title: str, label: str, rows: Mapping[str, int], whole: int, most: int = 8) -> Table:
    """Bytes by a label, the largest first, with their share of the whole; the rest in one row."""
    listed = list(rows.items())
    rest = sum(size for _, size in listed[most:])
    left = len(listed) - most
    shown = [*listed[:most], *([(f"{left} other{'' if left == 1 else 's'}", rest)] if rest else [])]
    return Table(
        title=title,
        heads=(label, ">bytes", ">share"),
        rows=tuple((name or "–", format_bytes(size), share_text(size, whole)) for name, size in shown),
    )


def layers_together(rows: Mapping[str, int]) -> dict[str, int]:
    """The rows of a model's repeated layers as one: ``h.0.mlp`` and ``h.1.mlp`` are ``h.*.mlp``."""
    sums: dict[str, int] = {}
    for name, size in rows.items():
        layer = without_number(name)
        sums[layer] = sums.get(layer, 0) + size
    return dict(sorted(sums.items(), key=lambda item: (-item[1], item[0])))


def without_number(module: str) -> str:
    """A module's name with its numbers as ``*``."""
    return _NUMBER.sub("*", module)


def share_text(part: float, whole: float) -> str:
    """A share as text; empty where there is no whole."""
    return f"{100 * part / whole:.1f} %" if whole else ""


def _table_lines(table: Table) -> list[str]:
    if not table.rows:
        return []
    heads = tuple(name for name, _ in table.columns)
    cells = [heads, *table.rows]
    widths = [max(len(row[place]) for row in cells) for place in range(len(heads))]
    lines = ["", f"  {table.title}"]
    for row in cells:
        texts = [
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, (_, number) in zip(row, widths, table.columns, strict=True)
        ]
        lines.append(f"    {'  '.join(texts)}".rstrip())
    return lines
