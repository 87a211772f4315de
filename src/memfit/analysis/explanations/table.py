"""Which function explains which kind of message."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from memfit.analysis.explanations.bare import explain_bare, explain_nccl, explain_status
from memfit.analysis.explanations.clues import Clues
from memfit.analysis.explanations.device import explain_device
from memfit.analysis.explanations.host import explain_host, explain_killed, explain_pinned, explain_shared
from memfit.analysis.explanations.libraries import explain_library, explain_llama, explain_mps
from memfit.analysis.explanations.serving import (
    explain_budget,
    explain_length,
    explain_profiling,
    explain_sampler,
    explain_sglang,
    explain_startup,
    explain_tgi,
)
from memfit.analysis.explanations.strings import explain_option
from memfit.analysis.explanations.symptoms import SYMPTOMS, explain_checkpoint, explain_symptom
from memfit.analysis.explanations.xla import explain_xla
from memfit.analysis.findings import Finding
from memfit.formats.messages import Message

Explainer = Callable[[Message, Clues], Finding]


def _library_status(message: Message, clues: Clues) -> Finding:
    """A status in a program of JAX or TensorFlow is about what they took up front."""
    if message.framework in ("tensorflow", "jax/xla") and message.words["status"] in (
        "ALLOC_FAILED",
        "NOT_INITIALIZED",
        "INTERNAL_ERROR",
    ):
        return explain_xla(message, clues)
    return explain_status(message, clues)


EXPLAINERS: Mapping[str, Explainer] = {
    "torch-oom": explain_device,
    "torch-oom-async": explain_device,
    "torch-limit": explain_device,
    "torch-size-overflow": explain_device,
    "xpu-block-limit": explain_device,
    "cuda-oom": explain_bare,
    "library-alloc": _library_status,
    "library-status": _library_status,
    "nccl-oom": explain_nccl,
    "mps-oom": explain_mps,
    "library-oom": explain_library,
    "pool-limit": explain_library,
    "llama-oom": explain_llama,
    "jax-oom": explain_xla,
    "tf-oom": explain_xla,
    "bfc-oom": explain_xla,
    "from-device": explain_xla,
    "handle-failed": explain_xla,
    "vllm-budget": explain_budget,
    "vllm-length": explain_length,
    "vllm-startup": explain_startup,
    "vllm-profiling": explain_profiling,
    "vllm-sampler": explain_sampler,
    "sglang-budget": explain_sglang,
    "tgi-budget": explain_tgi,
    "cpu-allocator": explain_host,
    "host-memory-error": explain_host,
    "host-mmap": explain_host,
    "tf-host-oom": explain_host,
    "oom-killer": explain_killed,
    "killed": explain_killed,
    "worker-killed": explain_killed,
    "shm-bus": explain_shared,
    "shm-full": explain_shared,
    "pinned-memory": explain_pinned,
    "allocator-setting": explain_option,
    "checkpoint-mismatch": explain_checkpoint,
    **dict.fromkeys(SYMPTOMS, explain_symptom),
}

WEAKER: Mapping[str, tuple[str, ...]] = {
    "cuda-oom": (
        "torch-oom",
        "torch-oom-async",
        "torch-limit",
        "vllm-sampler",
        "llama-oom",
        "from-device",
        "jax-oom",
        "library-oom",
        "pool-limit",
        "nccl-oom",
        "pinned-memory",
        "cuda-init-oom",
    ),
    "killed": ("oom-killer", "worker-killed", "shm-bus", "torch-oom", "cpu-allocator"),
    "host-memory-error": ("cpu-allocator", "host-mmap"),
    "worker-exit": ("shm-bus", "shm-full", "worker-killed", "oom-killer", "worker-crash"),
    "nccl-unhandled": ("nccl-oom", "shm-full"),
    "bfc-oom": ("tf-oom", "jax-oom"),
    "from-device": ("tf-oom",),
    "library-alloc": ("from-device", "handle-failed", "device-assert", "illegal-access"),
    "library-status": ("from-device", "handle-failed", "library-alloc", "device-assert", "illegal-access"),
    "nan": ("torch-oom", "cuda-oom"),
    "offloaded": ("offload-refused", "torch-oom"),
    "recursion": ("torch-oom",),
}
"""Kinds that say nothing new where one of the others is in the same input."""
