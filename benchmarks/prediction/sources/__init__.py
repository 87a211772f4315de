"""Who can rebuild which rows: one file for each source, and this table of them."""

from __future__ import annotations

from prediction.case import Source
from prediction.sources import (
    apple_cce,
    course_traces,
    hf_transformers_single_gpu,
    kineto_resnet50,
    liger_kernel,
    litgpt,
    not_rebuilt,
    torchao_optim,
    torchtitan,
    xmem,
)

SOURCES: tuple[Source, ...] = (
    apple_cce.SOURCE,
    course_traces.MEASUREMENTS,
    course_traces.SNAPSHOTS,
    hf_transformers_single_gpu.SOURCE,
    kineto_resnet50.SOURCE,
    liger_kernel.SOURCE,
    litgpt.SOURCE,
    xmem.SOURCE,
    torchao_optim.SOURCE,
    torchtitan.SOURCE,
    *not_rebuilt.SOURCES,
)
