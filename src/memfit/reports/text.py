"""Reports as text: renderables for a terminal, or plain strings of a given width."""

from __future__ import annotations

import io
from collections.abc import Mapping

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memfit.core.units import format_bytes, format_seconds
from memfit.planning.figures import StepFigures
from memfit.reports import verdict
from memfit.reports.account import Account
from memfit.reports.palette import CATEGORY_PAINTS, PAINTS, in_order
from memfit.reports.report import FitReport
from memfit.reports.words import EXACTNESS_WORDS, ORDINALS, mentions_ordinals, plan_rows

BAR_COLUMNS = 22


def to_text(renderable: RenderableType, *, width: int = 80) -> str:
    """`renderable` as plain text of at most `width` columns, without colour or trailing blanks."""
    console = Console(
        file=io.StringIO(), width=width, color_system=None, force_terminal=False, highlight=False
    )
    with console.capture() as capture:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def composition(by_category: Mapping[str, int], *, total_bytes: int) -> Table:
    """What is alive at a peak, category by category, with shares of `total_bytes`."""
    sizes = in_order(by_category)
    unnamed = total_bytes - sum(sizes.values())
    if unnamed > 0:
        sizes["other"] = sizes.get("other", 0) + unnamed
    table = _bar_table()
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        table.add_row(*_bar_row(CATEGORY_PAINTS[name].label, name, size, total_bytes))
    return table


def account(value: Account) -> RenderableType:
    """The account: each part of the device's memory, their sum, and what the device has."""
    table = _bar_table()
    for row in value.rows:
        table.add_row(*_bar_row(row.label, row.key, row.size_bytes, value.total_bytes))
    table.add_row(
        Text("Device total", style="bold"), Text(format_bytes(value.total_bytes), style="bold"), "100.0 %", ""
    )
    if value.capacity_bytes is not None:
        over = value.total_bytes - value.capacity_bytes
        note = f"{format_bytes(abs(over))} {'more than there is' if over > 0 else 'free'}"
        table.add_row("of the GPU's", format_bytes(value.capacity_bytes), "", note)
    return table


def _bar_table() -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True, overflow="crop")
    return table


def _bar_row(label: str, key: str, size_bytes: int, total_bytes: int) -> tuple[RenderableType, ...]:
    share = size_bytes / total_bytes if total_bytes else 0.0
    bar = Text(bar_text(share), style=PAINTS[key].dark)
    return (label, format_bytes(size_bytes), f"{100 * share:.1f} %", bar)


def bar_text(share: float, columns: int = BAR_COLUMNS) -> str:
    """A bar of up to `columns` characters in steps of an eighth; anything above nothing is seen."""
    eighths = max(round(share * columns * 8), 1 if share > 0 else 0)
    full, rest = divmod(min(eighths, columns * 8), 8)
    return "█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")


def fit_text(report: FitReport) -> RenderableType:
    """The whole report of a fit, in the order in which one asks."""
    result = report.result
    parts: list[RenderableType] = [
        _header(report),
        "",
        _heading("Where the memory goes", "plain step, at its peak"),
    ]
    peak = result.plain.peak_requested_bytes
    parts += [_indent(composition(result.plain.peak_by_category, total_bytes=peak)), "", _heading("Verdict")]
    statements = verdict.verdicts(result, allow=report.allow)
    parts += [_statement(statement) for statement in statements]
    if result.planned is None:
        return Group(*parts, "", *_what_to_try(report), *_notes(report))
    if report.changes_something:
        parts += ["", _heading("The plan"), *_plan(report)]
        parts += ["", _heading("What it costs"), _indent(_cost_table(report))]
        parts += [_indent(Text(bound)) for bound in verdict.bounds(result)]
        parts += ["", _heading("Verified"), _statement(verdict.verification(result))]
    return Group(*parts, *_notes(report), *_apply(report))


def _plan(report: FitReport) -> list[RenderableType]:
    exactness = f"{report.result.exactness}: {EXACTNESS_WORDS[report.result.exactness]}"
    notes = [_indent(Text(ORDINALS, style="dim"))] if mentions_ordinals(report.result.techniques) else []
    return [_indent(Text(exactness, style="dim")), _indent(_plan_table(report)), *notes]


def _header(report: FitReport) -> Text:
    result = report.result
    gpu = result.gpu if report.gpu is None else report.gpu.name
    torch = f", torch {result.torch}" if result.torch else ""
    engine = "made-up GPU (dry run)" if result.engine == "dryrun" else "portable engine"
    text = Text.assemble((result.workload, "bold"), " on ", (gpu, "bold"))
    text.append(
        f"\n{engine}{torch}; budget {format_bytes(result.budget_bytes)} of reserved memory", style="dim"
    )
    if result.engine_reason and result.engine != "dryrun":
        text.append(f"\nno dry run here: {result.engine_reason}", style="dim")
    return text


def _heading(title: str, note: str = "") -> Text:
    text = Text(title, style="bold cyan")
    return text.append(f"  {note}", style="dim not bold") if note else text


def _indent(content: RenderableType) -> Padding:
    return Padding(content, (0, 0, 0, 2))


def _statement(value: verdict.Verdict) -> RenderableType:
    mark, style = {True: ("✓", "green"), False: ("✗", "red"), None: ("·", "dim")}[value.good]
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(width=1)
    table.add_column()
    table.add_row(Text(mark, style=f"bold {style}"), Text(value.text))
    return _indent(table)


def _plan_table(report: FitReport) -> Table:
    rows = plan_rows(report.result.techniques)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    for heading in ("where", "kept in memory", "computed again")[
        : 3 if any(row.recomputes for row in rows) else 2
    ]:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*(row.where, row.keeps, row.recomputes)[: len(table.columns)])
    return table


def _cost_table(report: FitReport) -> Table:
    result = report.result
    assert result.planned is not None
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    table.add_column("")
    for heading in ("plain", "planned", "change"):
        table.add_column(heading, justify="right", no_wrap=True)
    for label, name in PEAKS:
        plain, planned = (int(getattr(figures, name)) for figures in (result.plain, result.planned))
        change = verdict.signed_percent(100 * (planned / plain - 1)) if plain else ""
        table.add_row(label, format_bytes(plain), format_bytes(planned), change)
    change = verdict.signed_percent(verdict.time_change_percent(result) or 0.0)
    times = (format_seconds(figures.step_seconds) for figures in (result.plain, result.planned))
    table.add_row("step time, predicted", *times, change)
    if result.planned.host_bytes:
        table.add_row("host memory", "–", format_bytes(result.planned.host_bytes), "")
    return table


PEAKS = (
    ("peak requested", "peak_requested_bytes"),
    ("peak allocated", "peak_allocated_bytes"),
    ("peak reserved", "peak_reserved_bytes"),
)


def _what_to_try(report: FitReport) -> list[RenderableType]:
    steps = verdict.next_steps(report.result, allow=report.allow)
    return [_heading("What would help"), *(_point(step) for step in steps)]


def _notes(report: FitReport) -> list[RenderableType]:
    lines = verdict.to_mind(report.result)
    return ["", _heading("Mind"), *(_point(line) for line in lines)] if lines else []


def _point(text: str) -> RenderableType:
    return _statement(verdict.Verdict(good=None, text=text))


def _apply(report: FitReport) -> list[RenderableType]:
    if not report.changes_something or report.is_refuted:
        return []
    path = report.plan_path or "plan.json"
    note = "" if report.plan_path else f"save the plan with --plan {path}, then"
    lines = [_indent(Text(line)) for line in verdict.apply_lines(report.result, path)]
    return ["", _heading("Use it", note), *lines]


def step_figures_text(figures: StepFigures) -> str:
    """The three peaks of a step in one line."""
    return ", ".join(
        f"{label.removeprefix('peak ')} {format_bytes(getattr(figures, name))}" for label, name in PEAKS
    )
