"""A diagnosis as one HTML page that needs nothing else: no server, no network, no second file."""

from __future__ import annotations

from memfit.analysis.diagnosis import Diagnosis
from memfit.analysis.findings import Advice, Finding
from memfit.core.units import format_bytes
from memfit.reports.diagnosis import CHAIN_WORDS
from memfit.reports.elements import number, number_table, section
from memfit.reports.markup import Markup, tag
from memfit.reports.page import page

_CLASS = {"error": "bad", "warning": "neither", "info": "neither"}


def diagnosis_page(diagnosis: Diagnosis) -> str:
    """The page, as text to write to a file. Everything from the files is escaped."""
    name = ", ".join(diagnosis.case.names) or "this case"
    findings = [_finding(place, finding) for place, finding in enumerate(diagnosis.findings)]
    body = tag("main", _head(diagnosis, name), findings, _chain(diagnosis))
    return page(f"diagnosis of {name}", body)


def _head(diagnosis: Diagnosis, name: str) -> Markup:
    case, chain = diagnosis.case, diagnosis.chain
    tiles = [("Live at most", case.peak_bytes), ("Saved by all the advice", diagnosis.total_saving_bytes)]
    if chain.steps:
        tiles.append(("Peak after it", chain.after_bytes))
    verdicts = [
        tag("li", f"{finding.rule}: {finding.summary}", class_=_CLASS[finding.severity])
        for finding in diagnosis.findings
    ]
    return tag(
        "header",
        tag("h1", name),
        tag("p", f"{len(diagnosis.looked)} rules looked, {len(diagnosis.findings)} findings", class_="muted"),
        tag("ul", verdicts or tag("li", "Nothing found.", class_="good"), class_="verdicts"),
        tag(
            "dl",
            (
                tag("div", tag("dt", text), tag("dd", format_bytes(size)), class_="tile")
                for text, size in tiles
            ),
            class_="tiles",
        ),
    )


def _finding(place: int, finding: Finding) -> Markup:
    where = None if finding.where is None else tag("p", f"at {finding.where}", class_="muted")
    return section(
        f"{finding.rule}: {finding.summary}",
        f"finding-{place}",
        tag("p", f"{finding.severity}, confidence {finding.confidence}", class_="muted"),
        where,
        tag("ul", (tag("li", line) for line in finding.evidence)),
        (_advice(advice) for advice in finding.advice),
    )


def _advice(advice: Advice) -> Markup:
    facts = [
        f"Saves {format_bytes(advice.saving_bytes)}." if advice.saving_bytes else "",
        f"Cost: {advice.cost}." if advice.cost else "",
        advice.risks or "",
        f"Source: {advice.source}." if advice.source else "",
    ]
    typed = None if advice.typed is None else tag("pre", tag("code", advice.typed))
    return tag(
        "div",
        tag("p", advice.action),
        typed,
        tag("p", " ".join(fact for fact in facts if fact), class_="muted"),
    )


def _chain(diagnosis: Diagnosis) -> Markup | None:
    chain = diagnosis.chain
    if not chain.steps:
        return None
    rows = [tag("tr", tag("td", "now"), number(""), number(""), number(format_bytes(chain.before_bytes)))]
    rows += [
        tag(
            "tr",
            tag("td", step.rule),
            number(format_bytes(step.saving_bytes)),
            number(format_bytes(step.alone_bytes)),
            number(format_bytes(step.peak_bytes)),
        )
        for step in chain.steps
    ]
    heads = [("after", False), ("saves then", True), ("by itself", True), ("peak", True)]
    title = "All of it, one after another"
    return section(title, "chain", number_table(CHAIN_WORDS[chain.of].capitalize(), heads, rows))
