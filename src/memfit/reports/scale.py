"""How a workload trains on several GPUs, as text and as a page: the answer, and a row for each way."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memfit.core.units import format_bytes, format_seconds
from memfit.distributed.scaling_values import NO_STEP_SECONDS, PLAN_TITLES, ScaleCase, ScaleResult
from memfit.reports.elements import number_row, number_table, section
from memfit.reports.markup import tag
from memfit.reports.page import page
from memfit.reports.words import plan_rows

HEADS: tuple[tuple[str, bool], ...] = (
    ("GPUs", True),
    ("strategy", False),
    ("plan", False),
    ("batch", True),
    ("reserves", True),
    ("GPU memory", True),
    ("fits", False),
    ("compute", True),
    ("sends", True),
)
"""Columns of the table, and whether each holds numbers."""
ROWS_NOTE = (
    "Per GPU, of the rank that needs most. Batch: its samples. Reserves: PyTorch's segments; GPU memory: "
    "with CUDA context and NCCL. Compute: the operators of a step, predicted; sends: what its collectives "
    "send, counted. Checkpointed: every block."
)


def headline(result: ScaleResult) -> str:
    """The answer in a sentence."""
    best, gpu, total = result.best, result.gpu, format_bytes(result.nvml_total_bytes)
    if best is None:
        lean = result.leanest
        least = f"; {_leanest(lean)}" if lean is not None else ""
        return f"Nothing fits on up to {_gpus(max(c.gpus for c in result.cases))}{least}."
    if best.gpus == 1:
        how = {"plain": "as it is", "full": "with full checkpointing", "planned": "with memfit's plan"}
        return f"One {gpu} is enough, {how[best.plan]}: {_memory(best)} of {total}."
    return f"At least {_gpus(best.gpus)} ({gpu}): {best.title}, {_memory(best)} of {total} each."


def _leanest(case: ScaleCase) -> str:
    where = "" if case.gpus == 1 else f" on {_gpus(case.gpus)}"
    return (
        f"the leanest, {case.title}{where}, reserves {format_bytes(case.peak_reserved_bytes)} where "
        f"{format_bytes(case.limit_bytes)} may be"
    )


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _memory(case: ScaleCase) -> str:
    return format_bytes(case.device_total_bytes)


def heads(result: ScaleResult) -> tuple[tuple[str, bool], ...]:
    """Columns; where the links are known, with the upper bound of the step's time for that of computing."""
    known = result.link_bytes_per_second is not None
    return tuple(("step ≤", True) if known and name == "compute" else (name, num) for name, num in HEADS)


def row(result: ScaleResult, case: ScaleCase) -> tuple[str, ...]:
    """The cells of one case that ran."""
    verdict = "tightly" if case.tight else "yes" if case.fits else "no"
    seconds = case.compute_seconds if case.step_seconds_bounds is None else case.step_seconds_bounds[1]
    return (
        str(case.gpus),
        case.strategy,
        {"full": "checkpointed"}.get(case.plan, PLAN_TITLES[case.plan]),
        str(case.samples),
        format_bytes(case.peak_reserved_bytes),
        _memory(case),
        verdict,
        "–" if seconds is None else format_seconds(seconds),
        "–" if case.gpus == 1 else format_bytes(case.sent_bytes),
    )


def left_out(result: ScaleResult) -> tuple[str, ...]:
    """What has no row, and why; each reason once."""
    found: dict[str, dict[str, None]] = {}
    for case in result.cases:
        if case.problem is not None:
            name = f"{case.strategy} on {_gpus(case.gpus)}" if case.gpus > 1 else "one GPU"
            name += " with memfit's plan" if case.plan == "planned" else ""
            found.setdefault(case.problem, {})[name] = None
    return tuple(f"{_several(list(names))}: {problem}" for problem, names in found.items())


def _several(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def notes(result: ScaleResult) -> tuple[str, ...]:
    """What to know of the figures."""
    multiple = any(case.gpus > 1 and case.problem is None for case in result.cases)
    bounds = "Step ≤: computing and communicating one after the other; it takes at least the longer of both."
    known = (bounds,) if multiple and result.link_bytes_per_second is not None else ()
    unknown = (
        (f"No step times: {NO_STEP_SECONDS}.",) if multiple and result.link_bytes_per_second is None else ()
    )
    tight = any(case.tight for case in result.cases)
    explained = ("Tightly: only as PyTorch gives back cached memory when it runs short.",) if tight else ()
    return (
        ROWS_NOTE,
        *(f"{note[0].upper()}{note[1:]}." for note in result.notes),
        *explained,
        *known,
        *unknown,
    )


def proofs(result: ScaleResult) -> tuple[str, ...]:
    """What real steps on ranks showed."""
    return tuple(str(one) for one in result.verified)


def how_to(result: ScaleResult) -> str | None:
    """The call that makes a model so, where ranks are needed."""
    best = result.best
    if best is None or best.gpus == 1:
        return None
    plan = ", plan=…" if best.techniques else ""
    return f'memfit.distributed.wrap(model, strategy="{best.strategy}"{plan}, optimizer=…)'


def changes(case: ScaleCase) -> tuple[str, ...]:
    """What the case's plan does, in words."""
    return tuple(f"{one.where}: {one.keeps}" for one in plan_rows(case.techniques))


def scale_text(result: ScaleResult) -> RenderableType:
    """The comparison for a terminal or a pipe."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for name, is_number in heads(result):
        table.add_column(name, justify="right" if is_number else "left", no_wrap=True)
    for case in result.cases:
        if case.problem is None:
            style = "bold" if case == result.best else "" if case.fits else "dim"
            table.add_row(*(Text(cell, style=style) for cell in row(result, case)))
    head = Text.assemble((result.workload, "bold"), " on ", (result.gpu, "bold"))
    budget = (
        "" if result.budget_bytes is None else f", PyTorch may reserve {format_bytes(result.budget_bytes)}"
    )
    head.append(f"\na dry run of a rank of each{budget}; {format_seconds(result.wall_seconds)}", style="dim")
    best = result.best
    parts: list[RenderableType] = [head, "", Text(headline(result), style="bold"), ""]
    parts += [Padding(table, (0, 0, 0, 1)), ""]
    if best is not None and best.techniques:
        parts += [Text("The plan", style="bold"), *(Text(f"  {line}") for line in changes(best)), ""]
    parts += [
        Text(f"✓ {line}" if one.passed else f"✗ {line}")
        for one, line in zip(result.verified, proofs(result), strict=True)
    ]
    call = how_to(result)
    parts += [Text.assemble(("Make it so: ", "dim"), call), ""] if call else []
    parts += [Text(f"· {line}", style="dim") for line in (*left_out(result), *notes(result))]
    return Group(*parts)


def scale_page(result: ScaleResult, *, command: str | None = None) -> str:
    """The comparison as one HTML page that needs nothing else."""
    title = f"{result.workload} on several {result.gpu}"
    columns = heads(result)
    rows = [number_row(row(result, case), columns) for case in result.cases if case.problem is None]
    best, call = result.best, how_to(result)
    words = changes(best) if best is not None else ()
    main = tag(
        "main",
        tag(
            "header",
            tag("h1", title),
            tag(
                "ul", tag("li", headline(result), class_="good" if result.fits else "bad"), class_="verdicts"
            ),
        ),
        section("Every way", "ways", number_table("A row for each way to train", columns, rows)),
        section("The plan", "plan", tag("ul", [tag("li", line) for line in words])) if words else None,
        section("Proof", "proof", [tag("p", line) for line in proofs(result)]) if result.verified else None,
        section(
            "What to know", "notes", tag("ul", [tag("li", s) for s in (*left_out(result), *notes(result))])
        ),
        section("Make it so", "call", tag("pre", tag("code", call))) if call else None,
        section("Make this again", "again", tag("pre", tag("code", command))) if command else None,
    )
    return page(title, main)
