"""What generation needs, as text."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memfit.core.units import format_bytes
from memfit.planning.inference import GenerationFigures, GenerationResult


def generation_text(result: GenerationResult) -> RenderableType:
    """A row per kind of cache, and the largest sizes where they were asked for."""
    first = result.rows[0]
    head = Text.assemble((result.workload, "bold"), " generating on ", (result.gpu, "bold"))
    head.append(
        f"\nbatch {first.batch}, prompt {first.prompt}, {first.new_tokens} new tokens; weights "
        f"{format_bytes(result.weight_bytes)}; budget {format_bytes(result.budget_bytes)} of reserved memory",
        style="dim",
    )
    parts: list[RenderableType] = [head, "", Padding(_table(result.rows), (0, 0, 0, 2))]
    if result.maximize is not None:
        name = "largest batch" if result.maximize == "batch" else "longest prompt"
        parts += ["", Text(f"The {name} that fits, cache by cache", style="bold cyan")]
        parts.append(Padding(_table(result.largest), (0, 0, 0, 2)))
    if result.sliding_window:
        parts += [
            "",
            Text(f"· layers with a sliding window keep {result.sliding_window} tokens", style="dim"),
        ]
    return Group(*parts)


def _table(rows: Sequence[GenerationFigures]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    table.add_column("cache")
    for name in ("batch", "prompt", "cache at the end", "per token", "prefill", "peak reserved"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for row in rows:
        sizes = [row.cache, str(row.batch), str(row.prompt)]
        if row.failure is not None:
            table.add_row(*sizes, "–", "–", "–", "–", Text(row.failure, style="yellow"))
            continue
        grown = format_bytes(int(row.bytes_per_token)) if row.bytes_per_token else "–"
        table.add_row(
            *sizes,
            format_bytes(row.cache_bytes),
            grown,
            format_bytes(row.prefill_reserved_bytes),
            format_bytes(row.reserved_bytes),
            Text("fits", style="green") if row.fits else Text("does not fit", style="red"),
        )
    return table
