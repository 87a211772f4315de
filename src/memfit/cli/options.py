"""Arguments, options and choices that several commands have."""

from __future__ import annotations

from enum import StrEnum

import typer

WORKLOAD = typer.Argument(
    metavar="WORKLOAD",
    help="What is trained: file.py:function (returns a memfit.Workload), hf:gpt2,batch=8,seq=1024 or "
    "tv:resnet50,batch=32.",
)
GPU = typer.Option("--gpu", metavar="GPU", help="A name from `memfit gpus`, or a description: 24GiB,sm89.")


class Allow(StrEnum):
    """How far a plan may move the results of training."""

    exact = "exact"
    reordered = "reordered"
    approximate = "approximate"


class Results(StrEnum):
    """How far techniques that are tried may move the results of training."""

    exact = "exact"
    reordered = "reordered"
    approximate = "approximate"
    changes = "changes training"


class EngineChoice(StrEnum):
    """What measures the memory of a step."""

    auto = "auto"
    dryrun = "dryrun"
    portable = "portable"
