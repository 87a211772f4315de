"""The environment of a process that runs on the made-up GPU."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

from memfit.core.devices import GPU
from memfit.dryrun.build import Stub, build_stub

Addresses = Literal["bump", "firstfit"]
Events = Literal["instant", "manual"]

MOST_GPUS = 64
"""The made-up machine has at most so many; the library's own limit."""

NCCL_COMMUNICATOR_BYTES = 600_000_000
"""What NCCL takes on each GPU for a communicator of several ranks: an estimate, the middle of the 0.5 to
0.7 GB that are seen on machines with NVLink. Channels, protocols and the version change it."""


def gpu_settings(
    gpu: GPU,
    *,
    addresses: Addresses = "bump",
    events: Events = "instant",
    cudnn_workspace_bytes: int = 0,
    count: int = 1,
) -> dict[str, str]:
    """The MEMFIT_* variables that describe the device; the library reads them at its first call.

    A forked child of a process that has not touched CUDA may still set them: that is how one process with
    torch loaded serves many GPUs.
    """
    major, minor = gpu.compute_capability
    return {
        "MEMFIT_GPU_NAME": gpu.name,
        "MEMFIT_GPU_CC": f"{major}{minor}",
        "MEMFIT_GPU_SM_COUNT": str(gpu.sm_count),
        "MEMFIT_GPU_L2_BYTES": str(gpu.l2_bytes),
        "MEMFIT_GPU_TOTAL_BYTES": str(gpu.runtime_total_bytes),
        "MEMFIT_GPU_NVML_TOTAL_BYTES": str(gpu.nvml_total_bytes),
        "MEMFIT_GPU_CONTEXT_BYTES": str(gpu.context_bytes),
        "MEMFIT_GPU_COUNT": str(count),
        "MEMFIT_GPU_PEERS": str(int(reaches_peers(gpu))),
        "MEMFIT_NCCL_COMMUNICATOR_BYTES": str(NCCL_COMMUNICATOR_BYTES),
        "MEMFIT_ADDRESSES": addresses,
        "MEMFIT_EVENTS": events,
        "MEMFIT_CUDNN_WORKSPACE_BYTES": str(cudnn_workspace_bytes),
    }


def reaches_peers(gpu: GPU) -> bool:
    """Whether such GPUs read each other's memory: NVIDIA's driver allows it to all but the GeForce cards
    since the RTX 30 series."""
    return not ("GeForce" in gpu.name and gpu.compute_capability >= (8, 6))


def preloaded(stub: Stub, existing: str | None) -> str:
    """LD_PRELOAD with the made-up GPU in front of what is there already."""
    ours = [str(stub.cuda), str(stub.nvml)]
    others = [part for part in (existing or "").replace(":", " ").split() if part not in ours]
    return " ".join(ours + others)


def compiler_caches(stub: Stub) -> dict[str, str]:
    """Where compilers that run inside the child find the driver, and where they keep what they made.

    What is tuned on a GPU that runs nothing must never be found by a real run later, so their caches are not
    the user's.
    """
    root = stub.cuda.parent.parent
    return {
        "TRITON_LIBCUDA_PATH": str(stub.cuda.parent),
        "TRITON_CACHE_DIR": str(root / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(root / "inductor"),
        "PYTORCH_KERNEL_CACHE_PATH": str(root / "kernels"),
    }


def gpu_environment(
    gpu: GPU,
    *,
    base: Mapping[str, str] | None = None,
    stub: Stub | None = None,
    addresses: Addresses = "bump",
    events: Events = "instant",
    cudnn_workspace_bytes: int = 0,
    count: int = 1,
) -> dict[str, str]:
    """`base` (default: this process's environment) with everything that puts a child on the made-up `gpu`.

    A CUDA_VISIBLE_DEVICES that hides every GPU is kept; one that picks among this machine's becomes a list of
    all ``count`` that are made up. PYTORCH_ALLOC_CONF passes through untouched. Raises CannotRunHere when
    the library cannot be built.
    """
    env = dict(os.environ if base is None else base)
    chosen = build_stub() if stub is None else stub
    env["LD_PRELOAD"] = preloaded(chosen, env.get("LD_PRELOAD"))
    env.update(compiler_caches(chosen))
    if env.get("CUDA_VISIBLE_DEVICES", "").strip() not in ("", "-1"):
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(count)))
    env.update(
        gpu_settings(
            gpu, addresses=addresses, events=events, cudnn_workspace_bytes=cudnn_workspace_bytes, count=count
        )
    )
    return env
