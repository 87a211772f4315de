"""Findings as text: what happened, on what evidence, and what to type, the main one first.

`memfit explain` and `memfit diagnose` print with this. What is typed stands alone on its lines, to be copied.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memfit.analysis.findings import Advice, Confidence, Finding, Severity, Verdict
from memfit.core.units import format_bytes

VERDICT_WORDS: dict[Verdict | None, str] = {
    "fragmentation": "Fragmentation",
    "device_full": "The GPU is full",
    "other_process": "Another process holds the memory",
    "process_limit": "A limit of this process",
    "request_exceeds_device": "One request is larger than the device",
    "preallocated": "Memory was taken up front",
    "budget_too_small": "The program's own budget is too small",
    "host_memory": "The host's memory (RAM)",
    "shared_memory": "Shared memory (/dev/shm)",
    "misreported_capacity": "The capacity is not what is reported",
    "not_memory": "Not a shortage of memory",
    "unknown": "Not known",
    None: "Finding",
}
_STYLES: dict[Severity, str] = {"error": "red", "warning": "yellow", "info": "cyan"}
_MARKS: dict[Severity, str] = {"error": "✗", "warning": "!", "info": "·"}
_SURE: dict[Confidence, str] = {"high": "sure", "medium": "likely", "low": "a guess"}
_TYPED_INDENT = 7


def findings_text(
    findings: Sequence[Finding], *, most_advice: int = 4, by_rule: bool = False
) -> RenderableType:
    """All findings, one after another; at most `most_advice` pieces of advice each.

    Args:
        by_rule: head each by its rule's id, instead of its verdict.
    """
    parts: list[RenderableType] = []
    for place, finding in enumerate(findings):
        if place:
            parts.append("")
        parts += _finding(finding, most_advice, by_rule)
    return Group(*parts)


def _finding(finding: Finding, most_advice: int, by_rule: bool) -> list[RenderableType]:
    style = _STYLES[finding.severity]
    title = VERDICT_WORDS[finding.verdict] if finding.verdict else finding.rule.replace("_", " ").capitalize()
    title = finding.rule if by_rule else title
    head = Text.assemble((f"{_MARKS[finding.severity]} ", f"bold {style}"), (title, f"bold {style}"))
    head.append(f"  {_SURE[finding.confidence]}", style="dim")
    if finding.where:
        head.append(f", {finding.where}", style="dim")
    parts: list[RenderableType] = [head, Padding(Text(_sentence(finding.summary)), (0, 0, 0, 2))]
    if finding.evidence:
        parts += [_heading("Why"), _points(finding.evidence)]
    if finding.advice:
        parts.append(_heading("What to do"))
        for number, advice in enumerate(finding.advice[:most_advice], 1):
            parts += _advice(number, advice)
        rest = len(finding.advice) - most_advice
        if rest > 0:
            parts.append(Padding(Text(f"and {rest} more with --json", style="dim"), (0, 0, 0, 4)))
    return parts


def _heading(title: str) -> Padding:
    return Padding(Text(title, style="bold cyan"), (0, 0, 0, 2))


def _points(lines: Sequence[str]) -> Padding:
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(width=1)
    table.add_column()
    for line in lines:
        table.add_row(Text("·", style="dim"), Text(line))
    return Padding(table, (0, 0, 0, 4))


def _advice(number: int, advice: Advice) -> list[RenderableType]:
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(width=2)
    table.add_column()
    text = Text(_sentence(advice.action))
    if advice.saving_bytes:
        text.append(f" Saves up to {format_bytes(advice.saving_bytes)}.", style="green")
    table.add_row(Text(f"{number}.", style="bold"), text)
    parts: list[RenderableType] = [Padding(table, (0, 0, 0, 4))]
    if advice.typed is not None:
        lines = [_typed(line, advice) for line in advice.typed.splitlines()]
        parts.append(Padding(Group(*lines), (0, 0, 0, _TYPED_INDENT)))
    notes = [f"{name}: {value}" for name, value in (("Costs", advice.cost), ("Mind", advice.risks)) if value]
    if notes:
        parts.append(
            Padding(Text("\n".join(_sentence(note) for note in notes), style="dim"), (0, 0, 0, _TYPED_INDENT))
        )
    return parts


def _typed(line: str, advice: Advice) -> Text:
    style = "bold"
    if advice.kind == "diff":
        style = "green" if line.startswith("+") else "red" if line.startswith("-") else "bold"
    return Text(line, style=style, overflow="fold")


def _sentence(text: str) -> str:
    """With a capital and a full stop."""
    text = text.strip()
    word = text.split(" ", 1)[0]
    if word.islower() and word.replace("'", "").isalpha() and " " in text:
        text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?", "…", ":")) else f"{text}."
