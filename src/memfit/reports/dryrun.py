"""A dry run as text: the peaks, the account against the GPU's memory, the verdict, and what is not known."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memfit.core.units import format_bytes, format_seconds
from memfit.dryrun.result import DryRunResult, Interval, OutOfMemory, ValueRead
from memfit.reports import text
from memfit.reports.account import Account
from memfit.reports.several import devices_table, place_in_job, ranks_table
from memfit.reports.spread import device_memory_line

PHASE_LABELS = {
    "init": "Before the first forward",
    "forward": "Forward",
    "backward": "Backward",
    "recompute": "Recomputed in backward",
    "optimizer": "Optimizer step",
    "other": "Elsewhere",
}
MOST_READS = 8


def dry_run_text(result: DryRunResult) -> RenderableType:
    """The whole outcome of a dry run."""
    account = Account.of(
        result,
        context_bytes=result.context_bytes,
        device_total_bytes=result.device_total_bytes,
        capacity_bytes=result.nvml_total_bytes,
    )
    parts: list[RenderableType] = [
        "",
        Text(_headline(result), style="bold"),
        "",
        _peaks(result),
        *_section("Where the device's memory goes", text.account(account)),
    ]
    if len(result.devices) > 1:
        parts += _section("Each GPU (the figures above are the fullest one's)", devices_table(result.devices))
    if result.ranks:
        parts += _section("Each rank (the figures above are the fullest one's)", ranks_table(result))
    if result.peak_by_phase:
        parts += _section("Alive at the peak, by the phase that allocated it", _phases(result))
    parts += ["", _verdict(result), *(Text(line) for line in (*_device_memory(result), *_trust(result)))]
    if result.oom is not None:
        parts += [Padding(_shortage(result.oom), (0, 0, 0, 2))]
    parts += [Text(line) for line in _notes(result)]
    return Group(*parts)


def _headline(result: DryRunResult) -> str:
    steps = f"{result.steps_done} optimizer step{'' if result.steps_done == 1 else 's'}"
    seconds = format_seconds(result.wall_seconds)
    return f"Dry run on {result.gpu}{place_in_job(result)}: {steps}, {seconds}, torch {result.torch}"


def _section(title: str, body: RenderableType) -> list[RenderableType]:
    return ["", Text(title, style="bold"), Padding(body, (0, 0, 0, 2))]


def _peaks(result: DryRunResult) -> Table:
    table = _table()
    rows = (
        ("Peak requested", result.peak_requested_bytes, "what the operations asked for"),
        ("Peak allocated", result.peak_allocated_bytes, "torch.cuda.max_memory_allocated"),
        ("Peak reserved", result.peak_reserved_bytes, "torch.cuda.max_memory_reserved"),
        ("Device total", result.device_total_bytes, "what nvidia-smi would show"),
    )
    for label, size, meaning in rows:
        table.add_row(label, format_bytes(size), Text(meaning, style="dim"))
    return table


def _phases(result: DryRunResult) -> Table:
    table = _table()
    for phase, size in sorted(result.peak_by_phase.items(), key=lambda item: -item[1]):
        share = 100 * size / max(result.peak_requested_bytes, 1)
        table.add_row(PHASE_LABELS.get(phase, phase), format_bytes(size), f"{share:.1f} %")
    return table


def _table() -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="left")
    return table


def _verdict(result: DryRunResult) -> Text:
    total, capacity = format_bytes(result.device_total_bytes), format_bytes(result.nvml_total_bytes)
    if result.ended in ("interrupted", "timeout"):
        why = "interrupted" if result.ended == "interrupted" else "out of time"
        return Text(f"Ended early ({why}): this is what was known by then.", style="bold yellow")
    if result.oom is not None:
        end = "the script caught it and went on" if result.oom.caught else "the script ended with it"
        return Text(f"Does not fit: the GPU ran out of memory ({end}).", style="bold red")
    if result.error is not None or result.exit_code != 0:
        return Text(_failure(result), style="bold red")
    if not result.fits:
        over = format_bytes(result.device_total_bytes - result.nvml_total_bytes)
        return Text(f"Does not fit: {total} of {capacity}, {over} too much.", style="bold red")
    spare = format_bytes(result.nvml_total_bytes - result.device_total_bytes)
    return Text(f"Fits: {total} of {capacity}, {spare} to spare.", style="bold green")


def _failure(result: DryRunResult) -> str:
    if result.error is None:
        return f"The script itself ended with exit code {result.exit_code}."
    error = result.error
    place = f" ({_place(error.file, error.line, error.function)})" if error.file else ""
    return f"The script itself failed: {error.type}{place}. The peaks are those up to there."


def _shortage(oom: OutOfMemory) -> Text:
    what = f"{oom.op or 'an allocation'} asked for {format_bytes(oom.asked_bytes)}"
    left = f"{format_bytes(oom.free_bytes)} were free, PyTorch held {format_bytes(oom.reserved_bytes)}"
    module = f", module {oom.module}" if oom.module else ""
    place = _place(oom.file, oom.line, oom.function)
    return Text(f"{what}; {left}.\nAt {place}, in the {oom.phase} phase{module}.")


def _device_memory(result: DryRunResult) -> Iterable[str]:
    """The device's memory as low, expected and high, with what makes the difference."""
    if result.device_memory is None:
        return
    yield device_memory_line(result.device_memory)
    if result.fits and result.device_memory.high_bytes > result.nvml_total_bytes:
        yield "It may not fit: the highest of that is more than the GPU has."


def _trust(result: DryRunResult) -> Iterable[str]:
    """The interval, and how far the figures can be trusted."""
    interval = result.interval
    if interval is not None and interval.repeats:
        low, high = (
            format_bytes(size) for size in (interval.reserved.low_bytes, interval.reserved.high_bytes)
        )
        runs = f"{interval.repeats} more run{'' if interval.repeats == 1 else 's'}"
        spread = f"{low} to {high}" if low != high else f"{low} in all of them"
        yield f"With other answers to what it read: peak reserved {spread} ({runs}, {_seconds(interval)})."
        if interval.may_run_out and result.oom is None:
            yield "With another answer the memory runs out (see below)."
    if interval is not None and interval.left_out:
        yield f"{interval.left_out} places that may steer the script have answers not tried (--repeats N)."
    yield f"Confidence: {result.confidence}"
    yield from (f"  {reason}" for reason in result.confidence_reasons)


def _seconds(interval: Interval) -> str:
    return format_seconds(interval.seconds)


def _notes(result: DryRunResult) -> Iterable[str]:
    if result.value_reads:
        yield "\nValues that the script read from the device are not real here; it was told:"
        places: dict[object, list[ValueRead]] = {}
        for read in sorted(result.value_reads, key=lambda read: -read.count):
            places.setdefault(read.site or read, []).append(read)
        for reads in list(places.values())[:MOST_READS]:
            yield f"  {_read(reads)}"
        if len(places) > MOST_READS:
            yield f"  … and {len(places) - MOST_READS} more places (--json lists all)"
    others = [note for note in result.not_modelled if note not in result.confidence_reasons]
    if others:
        yield "\nNot modelled:"
        yield from (f"  {note}" for note in others)
    if result.scratch_folder is not None:
        yield f"\nThe script's files were kept away from your own, in {result.scratch_folder}"


def _read(reads: Sequence[ValueRead]) -> str:
    """One place, with what it was told."""
    read, count = reads[0], sum(read.count for read in reads)
    times = "" if count == 1 else f", {count} times"
    answers = ", ".join(read.answer for read in reads)
    text = f"{_place(read.file, read.line, read.function)}: {answers} ({read.op}{times})"
    if read.peak_change_bytes is not None:
        sign = "-" if read.peak_change_bytes < 0 else "+"
        change = (
            f"{sign}{format_bytes(abs(read.peak_change_bytes))}" if read.peak_change_bytes else "no change"
        )
        return f"{text}; {read.other_answer} instead: {change}"
    return f"{text}; {read.why}" if read.other_answer is not None else text


def _place(file: str | None, line: int, function: str) -> str:
    if not file:
        return "an unknown place"
    shown = os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file
    return f"{shown}:{line}" + (f" in {function}" if function and function != "<module>" else "")
