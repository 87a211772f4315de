"""Pieces that the page's sections share: a section, a table with numbers, a category's swatch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memfit.planning.figures import StepFigures
from memfit.reports.markup import Content, Markup, tag
from memfit.reports.report import FitReport


def section(title: str, identifier: str, *content: Content) -> Markup:
    """A section with its heading."""
    return tag("section", tag("h2", title, id=identifier), *content, aria_labelledby=identifier)


def gpu_name(report: FitReport) -> str:
    """The GPU's name, or what the result calls it."""
    return report.result.gpu if report.gpu is None else report.gpu.name


def steps_shown(report: FitReport) -> list[tuple[str, StepFigures]]:
    """The steps to show side by side: the plain one, and the planned one where it differs."""
    steps = [("plain", report.result.plain)]
    if report.changes_something and report.result.planned is not None:
        steps.append(("planned", report.result.planned))
    return steps


def swatch(key: str) -> Markup:
    """A small square in a category's colour."""
    return tag("span", class_=f"swatch fill-{key}", aria_hidden="true")


def number_table(caption: str, heads: Sequence[tuple[str, bool]], rows: Iterable[Markup]) -> Markup:
    """A table that scrolls where the screen is narrow; each head says whether its column holds numbers."""
    cells = [tag("th", text, scope="col", class_="number" if number else None) for text, number in heads]
    table = tag("table", tag("caption", caption), tag("thead", tag("tr", cells)), tag("tbody", rows))
    return tag("div", table, class_="scroll")


def number_row(cells: Iterable[str], heads: Sequence[tuple[str, bool]]) -> Markup:
    """A row of such a table, of its texts."""
    pairs = zip(cells, heads, strict=True)
    return tag("tr", (number(cell) if is_number else tag("td", cell) for cell, (_, is_number) in pairs))


def number(text: str) -> Markup:
    """A cell that holds a number."""
    return tag("td", text, class_="number")


def percent(part: int, whole: int) -> str:
    """A share as text; empty where there is no whole."""
    return f"{100 * part / whole:.1f} %" if whole else ""
