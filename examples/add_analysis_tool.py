"""Adds an analysis of your own: which sizes a job asks for, and what rounding them up costs.

    python examples/add_analysis_tool.py [PICTURE.png]

The result has sentences, a table and a figure. `memfit analyze` would show all three, on the terminal, in its
JSON and on its page. Within memfit, the same file would be `src/memfit/analysis/sizes.py`, and its row one
line of `ANALYSES`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from memfit import TraceBuilder, format_bytes
from memfit.analysis.analyses import Analysis, analyze, register_analysis
from memfit.analysis.results import Result, Table
from memfit.analysis.subject import Subject
from memfit.core.trace import Action

ROUND_BYTES = 512  # what PyTorch's allocator rounds every request up to


@dataclass(frozen=True, kw_only=True)
class SizeClasses(Result):
    """Requests by powers of two: how many, their bytes, and the bytes that rounding adds."""

    title: ClassVar[str] = "Sizes of requests"

    rows: tuple[tuple[int, int, int, int], ...]  # largest size, requests, bytes, bytes that rounding adds

    def sentences(self) -> Sequence[str]:
        wasted, asked = sum(row[3] for row in self.rows), sum(row[2] for row in self.rows)
        return (f"Rounding adds {format_bytes(wasted)} to {format_bytes(asked)} of requests.",)

    def tables(self) -> Sequence[Table]:
        cells = tuple(
            (format_bytes(most), f"{count:,}", format_bytes(size), format_bytes(wasted))
            for most, count, size, wasted in self.rows
        )
        heads = (">up to", ">requests", ">bytes", ">added by rounding")
        return (Table(title="Requests by size", heads=heads, rows=cells),)

    def to_json(self) -> dict[str, Any]:
        names = ("most_bytes", "requests", "bytes", "rounding_bytes")
        return {"size_classes": [dict(zip(names, row, strict=True)) for row in self.rows]}

    def figure(self) -> Any:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.4, 3), layout="constrained")
        axes = figure.subplots()
        axes.bar(range(len(self.rows)), [row[2] / 2**20 for row in self.rows], color="#0f766e")
        axes.set_xticks(
            range(len(self.rows)), [format_bytes(row[0]) for row in self.rows], rotation=60, fontsize=7
        )
        axes.set_ylabel("MiB requested")
        axes.set_title("Sizes of requests", loc="left", fontsize=10)
        return figure


def size_classes(subject: Subject, progress: Any) -> SizeClasses:
    """The analysis: a function from a subject to a result."""
    trace = subject.trace
    assert trace is not None  # `lacks` below says so where there is none
    sizes = trace.size_bytes[trace.action == Action.ALLOC]
    classes = np.ceil(np.log2(np.maximum(sizes, 1))).astype(int)
    rounding = -sizes % ROUND_BYTES
    rows = [
        (1 << int(power), int(ours.sum()), int(sizes[ours].sum()), int(rounding[ours].sum()))
        for power in np.unique(classes)
        for ours in [classes == power]
    ]
    return SizeClasses(rows=tuple(rows))


register_analysis(
    "sizes",
    Analysis(
        help="Which sizes are asked for.",
        run=size_classes,
        lacks=lambda subject: None if subject.trace is not None else "needs allocation events",
    ),
)


def main() -> None:
    builder = TraceBuilder()
    for layer in range(12):
        builder.alloc(768 * 768 * 4, category="parameter", module=f"h.{layer}")
        builder.alloc(768 * 4, category="parameter", module=f"h.{layer}")
        builder.free(builder.alloc(8 * 1024 * 768 * 2 + 100, category="activation", module=f"h.{layer}"))
    analysed = analyze(Subject.of(builder.build()), only=("sizes",))
    result = analysed.results["sizes"]
    print(result)
    if len(sys.argv) > 1:
        result.figure().savefig(sys.argv[1], dpi=150)
        print("picture:", sys.argv[1])


if __name__ == "__main__":
    main()
