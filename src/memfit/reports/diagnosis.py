"""A diagnosis, a difference and a check as text."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memfit.analysis.chain import Chain
from memfit.analysis.diagnosis import Diagnosis
from memfit.analysis.difference import Change, Difference
from memfit.analysis.findings import SEVERITIES
from memfit.analysis.peaks import FIGURES, Figure, LimitCheck
from memfit.analysis.rules import Rule
from memfit.core.units import format_bytes
from memfit.reports.findings import findings_text

CHAIN_WORDS = {
    "reserved": "reserved peak, PyTorch's allocator replayed",
    "needed": "least memory with which the run goes through",
    "requested": "live peak",
}
MOST_CHANGES = 8
LEAST_SHARE = 0.001
"""Of the peak: smaller changes are not shown."""
ASPECT_TITLES = {
    "category": "category",
    "phase": "phase",
    "module": "module",
    "op": "operation",
    "where": "line",
}


def diagnosis_text(diagnosis: Diagnosis) -> RenderableType:
    """What was found, the most severe first; then what following all the advice saves."""
    case = diagnosis.case
    peak = f": {format_bytes(case.peak_bytes)} live at most" if case.peak_bytes else ""
    phase = f", in the {case.peak_phase} phase" if case.peak_phase not in ("", "other") else ""
    parts: list[RenderableType] = [
        "",
        Text.assemble((", ".join(case.names) or "this case", "bold"), f"{peak}{phase}"),
        Text(f"{len(diagnosis.looked)} rules looked, {len(diagnosis.findings)} findings", style="dim"),
    ]
    if diagnosis.findings:
        parts += ["", findings_text(diagnosis.findings, by_rule=True)]
    if diagnosis.chain.steps:
        parts += [
            "",
            Text("All of it, one after another", style="bold cyan"),
            _indented(_chain(diagnosis.chain)),
        ]
    notes = case.recording.notes if case.recording is not None else ()
    parts += [Text(note, style="dim") for note in notes]
    return Group(*parts, "", _verdict(diagnosis))


def _chain(chain: Chain) -> RenderableType:
    table = _table(("after", "left"), ("saves then", "right"), ("by itself", "right"), ("peak", "right"))
    table.add_row("now", "", "", format_bytes(chain.before_bytes))
    for step in chain.steps:
        name = f"{step.rule} (the peak has moved to it)" if step.exposed else step.rule
        saved = format_bytes(step.saving_bytes) if step.saving_bytes else "nothing more"
        alone = "" if step.exposed else format_bytes(step.alone_bytes)
        table.add_row(name, saved, alone, format_bytes(step.peak_bytes))
    return Group(Text(CHAIN_WORDS[chain.of], style="dim"), table)


def _verdict(diagnosis: Diagnosis) -> Text:
    if not diagnosis.findings:
        return Text("Nothing found.", style="bold green")
    counts = {
        severity: sum(finding.severity == severity for finding in diagnosis.findings)
        for severity in reversed(SEVERITIES)
    }
    told = ", ".join(f"{count} {name}{'s' if count > 1 else ''}" for name, count in counts.items() if count)
    saving = diagnosis.total_saving_bytes
    return Text(
        f"{told}." + (f" All the advice together saves {format_bytes(saving)}." if saving > 0 else ""),
        style="bold",
    )


def rules_text(rules: Sequence[Rule]) -> RenderableType:
    """The list of rules."""
    table = _table(("", "right"), ("rule", "left"), ("finds", "left"), ("looks at", "left"))
    for rule in rules:
        table.add_row(str(rule.number), rule.id, Text(rule.title), ", ".join(rule.needs))
    return table


def rule_text(rule: Rule) -> RenderableType:
    """One rule in full."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    rows = {
        "looks at": ", ".join(rule.needs),
        "tells it by": rule.detection,
        "saves": rule.saving,
        "source": rule.source,
        "followed": rule.stage,
        "thresholds": ", ".join(f"{name} = {value}" for name, value in rule.settings().items()) or "none",
    }
    for name, text in rows.items():
        table.add_row(name, Text(text))
    return Group(Text.assemble((f"{rule.number}  {rule.id}", "bold"), f"  {rule.title}"), _indented(table))


def difference_text(difference: Difference) -> RenderableType:
    """Two runs side by side, and what makes the difference."""
    a, b = difference.a, difference.b
    peaks = _table(("peak", "left"), ("A", "right"), ("B", "right"), ("B − A", "right"), ("", "left"))
    for figure, meaning in FIGURES.items():
        before, after = getattr(a.peaks, f"{figure}_bytes"), getattr(b.peaks, f"{figure}_bytes")
        if before is not None and after is not None:
            row = (figure, format_bytes(before), format_bytes(after), _signed(after - before))
            peaks.add_row(*row, Text(meaning, style="dim"))
    parts: list[RenderableType] = [
        "",
        Text.assemble(("A ", "bold"), a.name, ("   B ", "bold"), b.name),
        "",
        peaks,
    ]
    least = LEAST_SHARE * max(a.peaks.requested_bytes, b.peaks.requested_bytes)
    for aspect, changes in difference.changes.items():
        named = [change for change in changes if change.text and abs(change.delta_bytes) >= least]
        if named:
            title = f"By {ASPECT_TITLES[aspect]}, live at the peak of each"
            parts += ["", Text(title, style="bold cyan"), _indented(_changes(named))]
    return Group(*parts, "", *(Text(sentence, style="bold") for sentence in difference.sentences()))


def _changes(changes: Sequence[Change]) -> RenderableType:
    table = _table(("", "left"), ("A", "right"), ("B", "right"), ("B − A", "right"))
    for change in changes[:MOST_CHANGES]:
        sizes = (format_bytes(change.before_bytes), format_bytes(change.after_bytes))
        table.add_row(Text(change.text), *sizes, _signed(change.delta_bytes))
    rest = changes[MOST_CHANGES:]
    if rest:
        table.add_row(f"{len(rest)} more", "", "", _signed(sum(change.delta_bytes for change in rest)))
    return table


def check_text(check: LimitCheck) -> RenderableType:
    """Whether a limit is kept."""
    peak, limit = format_bytes(check.peak_bytes), format_bytes(check.limit_bytes)
    over = check.peak_bytes - check.limit_bytes
    if check.peaks.out_of_memory:
        return Text(f"{check.name}: ran out of memory, with a {check.of} peak of {peak}.", style="bold red")
    if over > 0:
        text = f"{check.name}: {check.of} peak {peak}, {format_bytes(over)} over the limit of {limit}."
        return Text(text, style="bold red")
    text = f"{check.name}: {check.of} peak {peak}, {format_bytes(-over)} below the limit of {limit}."
    return Text(text, style="bold green")


def figure_words(figure: Figure) -> str:
    """What a figure is, for help texts."""
    return f"{figure} ({FIGURES[figure]})"


def _signed(size: int) -> str:
    return f"+{format_bytes(size)}" if size > 0 else format_bytes(size) if size else "0 B"


def _table(*columns: tuple[str, str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    for heading, justify in columns:
        table.add_column(heading, justify=justify, no_wrap=justify == "right", overflow="fold")  # type: ignore[arg-type]
    return table


def _indented(body: RenderableType) -> RenderableType:
    return Padding(body, (0, 0, 0, 2))
