"""Sources whose rows do not say enough, or need more than one script, to be run again."""

from __future__ import annotations

from prediction.case import Source, left_out


def _source(name: str, title: str, reason: str) -> Source:
    return Source(
        name=name, title=title, goal="", goal_percent=0.0, workloads=lambda file: left_out(file, reason)
    )


SOURCES = (
    _source(
        "hta_ddp_trace",
        "HolisticTraceAnalysis test data",
        "the trace names no model (it is replayed by benchmarks/recorded_traces.py instead)",
    ),
    _source(
        "stalloc",
        "STAlloc/STWeaver released analysis tables",
        "Megatron-LM pipelines with CPU-offloaded ZeRO: models and schedules are not in the rows",
    ),
    _source(
        "torchtune",
        "torchtune README memory table (Sept 2024)",
        "the counter and the recipe's options are not stated, all rows are compiled, and those of one model "
        "and method on two cards are twice apart",
    ),
)
