"""A ladder as one HTML page that needs nothing else: the table, the figure, and what is missing with why."""

from __future__ import annotations

import base64

from memfit.analysis.ladder_values import Ladder
from memfit.reports.elements import number_row, number_table, section
from memfit.reports.ladder import HEADS, headline, ladder_rows, quality_sentence, reasons, subtitle
from memfit.reports.ladder_figure import ladder_png
from memfit.reports.markup import Markup, tag
from memfit.reports.page import FIGURE_CSS, page, paint_css
from memfit.reports.words import EXACTNESS_WORDS, plan_rows

APPLIED = "In the order of the rungs; what the others must find in place is applied before them"


def ladder_page(ladder: Ladder) -> str:
    """The page, as text to write to a file."""
    title = f"Ladder of {ladder.workload}"
    top = tag(
        "header",
        tag("h1", title),
        tag("p", subtitle(ladder), class_="muted"),
        tag("ul", tag("li", headline(ladder), class_="neither"), class_="verdicts"),
    )
    body = tag("main", top, _figure(ladder), _table(ladder), _techniques(ladder), _missing(ladder))
    return page(title, body, css=paint_css() + FIGURE_CSS)


def _figure(ladder: Ladder) -> Markup:
    data = base64.b64encode(ladder_png(ladder)).decode("ascii")
    image = tag("img", src=f"data:image/png;base64,{data}", alt=f"Peak memory by rung: {headline(ladder)}")
    return section("Rung by rung", "rungs", tag("figure", image))


def _table(ladder: Ladder) -> Markup:
    rows = (number_row(row.cells, HEADS) for row in ladder_rows(ladder))
    sentence = quality_sentence(ladder)
    note = None if sentence is None else tag("p", sentence)
    return section("Figures", "figures", number_table("Each rung has all above it", HEADS, rows), note)


def _techniques(ladder: Ladder) -> Markup | None:
    applied = [rung for rung in ladder.climbed if rung.settings is not None]
    if not applied:
        return None
    rows = (
        tag(
            "tr",
            tag("td", rung.name.replace("_", " ")),
            tag("td", "; ".join(f"{row.where}: {row.keeps}" for row in plan_rows([rung.settings or {}]))),
            tag("td", f"{rung.exactness}: {EXACTNESS_WORDS[rung.exactness]}" if rung.exactness else "–"),
        )
        for rung in applied
    )
    heads = (("technique", False), ("what it does", False), ("results", False))
    return section("What was applied", "techniques", number_table(APPLIED, heads, rows))


def _missing(ladder: Ladder) -> Markup | None:
    found = reasons(ladder)
    if not found:
        return None
    return section("To mind", "to-mind", tag("ul", (tag("li", reason) for reason in found)))
