"""Stand-ins for what the made-up GPU cannot run, so that a script goes on: each use is noted as not
modelled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from memfit.dryrun import absent_ranks
from memfit.dryrun.native_writers import after_import

NoteMissing = Callable[[str], None]
"""``note(text)``: the run met something that is not modelled."""

TUNED = "torch.compile with autotuning: the kernels that it measured and chose are arbitrary here"
MEASURED = (
    "torch.compile measured kernels to choose among them: its buffers for that are in the peak, as on a GPU "
    "whose compiler cache is empty; with a full one it takes none"
)
NCCL = "NCCL: the buffers of its communicators (0.5 to 0.7 GB each) are not counted"
NCCL_ESTIMATED = "NCCL: 0.6 GB for each communicator of several ranks, an estimate (0.5 to 0.7 GB are seen)"
GRAPHS = "CUDA graphs: what the driver takes for each is not counted (their private pools are)"
SYMMETRIC = "symmetric memory: ranks look into each other's device memory, which a made-up GPU does not have"
SPAWNED = "processes that the script started itself: only its main process is measured"


def install(note: NoteMissing) -> None:
    """Put the stand-ins in place, now or when their modules are imported."""
    _compile(note)
    _graphs(note)
    if absent_ranks.are_absent():
        absent_ranks.install(note)
    after_import(
        {
            "torch.distributed.distributed_c10d": functools.partial(_distributed, note),
            "torch._inductor.runtime.benchmarking": functools.partial(_tuning, note),
            "torch.distributed._symmetric_memory": functools.partial(_symmetric, note),
            "torch.multiprocessing.spawn": functools.partial(_spawn, note),
        }
    )


def _compile(note: NoteMissing) -> None:
    """inductor itself works; only choices by measured time have no meaning here."""
    original = torch.compile

    @functools.wraps(original)
    def compile(model: Any = None, **kwargs: Any) -> Any:
        if "autotune" in f"{kwargs.get('mode')} {kwargs.get('options')}":
            note(TUNED)
        return original(model, **kwargs)

    torch.compile = compile


def _tuning(note: NoteMissing, module: Any) -> None:
    """Kernels that take no time are measured all the same, and what was chosen is kept for later runs."""
    kinds: list[Any] = [kind for kind in vars(module).values() if isinstance(kind, type)]
    for kind in kinds:
        if "benchmark_gpu" in vars(kind):
            original = kind.benchmark_gpu

            @functools.wraps(original)
            def benchmark_gpu(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
                note(MEASURED)
                return _original(*args, **kwargs)

            kind.benchmark_gpu = benchmark_gpu


def _graphs(note: NoteMissing) -> None:
    """The private pools of CUDA graphs are PyTorch's own; what the driver takes for a graph is not known."""
    graph = torch.cuda.graphs.CUDAGraph
    end = graph.capture_end

    @functools.wraps(end)
    def capture_end(self: Any) -> Any:
        note(GRAPHS)
        return end(self)

    graph.capture_end = capture_end  # type: ignore[method-assign]


def _distributed(note: NoteMissing, module: Any) -> None:
    """A job of one rank needs no collectives, but NCCL takes memory of its own on a real GPU."""
    original = module.init_process_group

    @functools.wraps(original)
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        if backend is None or "nccl" in str(backend):
            note(NCCL_ESTIMATED if absent_ranks.are_absent() else NCCL)
        return original(backend, *args, **kwargs)

    module.init_process_group = init_process_group
    if getattr(torch, "distributed", None) is not None:
        torch.distributed.init_process_group = init_process_group


def _symmetric(note: NoteMissing, module: Any) -> None:
    """Buffers are made as on a GPU; where ranks exchange them, and before NVSHMEM is started, the script ends
    with one line."""
    original = module.set_backend

    def refuse(*_: Any, **__: Any) -> Any:
        note(SYMMETRIC)
        raise RuntimeError(f"memfit dryrun: {SYMMETRIC}; turn it off to learn of all else")

    def set_backend(name: str) -> None:
        refuse() if name == "NVSHMEM" else original(name)

    module.set_backend = functools.wraps(original)(set_backend)
    module.rendezvous = functools.wraps(module.rendezvous)(refuse)
    module._SymmetricMemory.rendezvous = staticmethod(refuse)


def _spawn(note: NoteMissing, module: Any) -> None:
    """``mp.spawn(train, nprocs=1)`` runs in this process, where it is measured."""
    original = module.start_processes

    @functools.wraps(original)
    def start_processes(
        fn: Any, args: Any = (), nprocs: int = 1, join: bool = True, *rest: Any, **kwargs: Any
    ) -> Any:
        if nprocs == 1 and join:
            fn(0, *args)
            return None
        note(SPAWNED)
        return original(fn, args, nprocs, join, *rest, **kwargs)

    module.start_processes = start_processes
