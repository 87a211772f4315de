"""The portable engine: a training step on meta tensors, CUDA's operators and PyTorch's allocator imitated.

For machines where no dry run is to be had (a CPU build of torch, macOS, Windows). While `portable_gpu` is
entered, meta tensors are run by the operators that the GPU would run, each storage is allocated in a model
of the caching allocator, and ``torch.cuda``'s memory functions answer from it. So whatever measures a step
on ``cuda`` measures one on ``meta``.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.allocators.base import OutOfMemory
from memfit.allocators.caching import CachingAllocator, CachingConfig
from memfit.allocators.chunks import Chunk
from memfit.capture.cuda_shim import Shim, cuda_operators
from memfit.capture.cuda_temporaries import RESULTS, Temporaries, device_results
from memfit.capture.measure import STEPS, measure_step, out_of_memory_as_value
from memfit.capture.operators import sparse_parts, tensors_in
from memfit.capture.step import TrainingStep, build_step
from memfit.capture.tracker import StepTracker
from memfit.capture.true_values import Reads, read_place, reads_to_json
from memfit.capture.workloads import from_reference
from memfit.core.devices import GPU, find_gpu
from memfit.profiling.accumulation import accumulates

DEVICE = "meta"
_SETTINGS_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_POOLS = {"all": "all", "small": "small_pool", "large": "large_pool"}
_COLUMNS = ("current", "peak", "allocated", "freed")


class SimulatedMemory(TorchDispatchMode):
    """Allocates every meta storage that comes into being in a simulated caching allocator, and frees it when
    it dies.

    Args:
        gpu: whose memory it is.
        settings: as ``PYTORCH_ALLOC_CONF``; by default what that variable of this process says.
    """

    def __init__(self, gpu: GPU, settings: str | None = None) -> None:
        super().__init__()
        self.gpu = gpu
        self.allocator = CachingAllocator(
            CachingConfig(
                total_bytes=gpu.runtime_total_bytes - gpu.context_bytes,
                settings=_settings_of_process() if settings is None else settings,
            )
        )
        self.temporaries = Temporaries(gpu)
        self._live: dict[int, tuple[weakref.ref[Any], Chunk | None, int]] = {}  # by the storage's address
        self._dead: deque[Chunk] = deque()
        self._busy = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if _reads_to_host(func, kwargs, args):
            return torch.zeros_like(args[0], device="cpu")
        if torch.is_inference_mode_enabled():  # composed operators come whole, as autograd is passed by
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        if accumulates(func, args):
            func = torch.ops.aten.add_.Tensor
        out = func(*args, **kwargs)
        self._run_steps(func, args, kwargs, out)
        if workspace_bytes := self.temporaries.workspace_bytes(func, args, out):
            self._malloc(workspace_bytes)
        return out

    def empty_cache(self) -> None:
        """``torch.cuda.empty_cache``."""
        with self._undisturbed():
            self.allocator.empty_cache()

    def reset_peaks(self) -> None:
        """``torch.cuda.reset_peak_memory_stats``."""
        self.allocator.stats_book.reset_peaks()

    def memory_stats(self) -> dict[str, int]:
        """The counters under the names of ``torch.cuda.memory_stats``."""
        flat: dict[str, int] = {}
        for name, value in self.allocator.stats().items():
            if isinstance(value, int):
                flat[name] = value
            elif isinstance(value, list):
                flat |= {f"{name}.{column}": number for column, number in zip(_COLUMNS, value, strict=True)}
            else:
                for pool, row in value.items():
                    flat |= {
                        f"{name}.{_POOLS[pool]}.{c}": number for c, number in zip(_COLUMNS, row, strict=True)
                    }
        return flat

    def free_and_total(self) -> tuple[int, int]:
        """``torch.cuda.mem_get_info``."""
        total = self.gpu.runtime_total_bytes
        return total - self.gpu.context_bytes - self.allocator.reserved_bytes, total

    def _hold(self, tensor: torch.Tensor) -> None:
        parts = (tensor,) if tensor.layout is torch.strided else sparse_parts(tensor)
        for storage in (part.untyped_storage() for part in parts):
            key, size_bytes = storage._cdata, storage.nbytes()
            known = self._live.get(key)
            if known is not None and known[2] == size_bytes:
                continue
            chunk = self._malloc(size_bytes) if size_bytes else None
            if known is not None:  # resized in place: the old memory goes
                self._free(known[1])
            reference = weakref.ref(storage, partial(self._on_death, key)) if known is None else known[0]
            self._live[key] = (reference, chunk, size_bytes)

    def _run_steps(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Hold the results, and take and give back what the kernel needs beside them."""
        taken: list[Chunk | None] = []
        for step in self.temporaries.steps(func, args, kwargs, out):
            if step is RESULTS:
                for tensor in tensors_in(device_results(func, args, kwargs, out)):
                    if tensor.device.type == DEVICE:
                        self._hold(tensor)
            elif step >= 0:
                taken.append(self._malloc(step))
            else:
                self._free(taken[~step])
                taken[~step] = None
        for chunk in reversed(taken):
            self._free(chunk)

    def _on_death(self, key: int, _: object) -> None:
        self._free(self._live.pop(key)[1])

    def _malloc(self, size_bytes: int) -> Chunk:
        try:
            with self._undisturbed():
                return self.allocator.malloc(size_bytes)
        except OutOfMemory as failure:
            raise torch.OutOfMemoryError(self._message(failure)) from failure

    def _message(self, failure: OutOfMemory) -> str:
        free, total = self.free_and_total()
        return (
            f"CUDA out of memory. Tried to allocate {failure.requested_bytes} bytes. GPU 0 has a total "
            f"capacity of {total} bytes of which {free} bytes is free."
        )

    def _free(self, chunk: Chunk | None) -> None:
        if chunk is None:
            return
        self._dead.append(chunk)
        if not self._busy:
            with self._undisturbed():
                pass

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Storages may die at any moment; those that do while the allocator works wait for it."""
        self._busy = True
        try:
            yield
        finally:
            while self._dead:
                self.allocator.free(self._dead.popleft())
            self._busy = False


def _settings_of_process() -> str:
    return next((os.environ[name] for name in _SETTINGS_VARIABLES if os.environ.get(name)), "")


def _reads_to_host(func: Any, kwargs: Mapping[str, Any], args: Any) -> bool:
    """A copy of a meta tensor to the CPU, which PyTorch refuses since there is nothing to copy."""
    if func is not torch.ops.aten._to_copy.default or args[0].device.type != DEVICE:
        return False
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == "cpu"


class PortableGPU:
    """What `portable_gpu` yields: the memory, the reads of values, and what was not modelled exactly."""

    def __init__(self, memory: SimulatedMemory, shim: Shim, reads: Reads) -> None:
        self.memory, self.shim, self.reads = memory, shim, reads

    def not_modelled(self) -> list[str]:
        """In words, what the result may be wrong by."""
        return [*self.memory.temporaries.notes(), *self.shim.met]


@contextlib.contextmanager
def portable_gpu(gpu: GPU, *, settings: str | None = None) -> Iterator[PortableGPU]:
    """While entered, meta tensors live on an imitation of ``gpu`` and ``torch.cuda``'s memory functions
    speak of it.

    Build steps with ``device="meta"`` inside. An allocation that does not fit raises
    ``torch.OutOfMemoryError``.
    """
    reads: Reads = Reads()

    def note(op: str, answer: str) -> None:
        reads[(*read_place(), op, answer)] += 1

    memory = SimulatedMemory(gpu, settings)
    with contextlib.ExitStack() as stack:
        shim = stack.enter_context(cuda_operators(gpu.compute_capability, note_read=note))
        for name, replacement in _memory_functions(memory).items():
            stack.callback(setattr, torch.cuda, name, getattr(torch.cuda, name))
            setattr(torch.cuda, name, replacement)
        stack.enter_context(memory)
        yield PortableGPU(memory, shim, reads)


def _memory_functions(memory: SimulatedMemory) -> dict[str, Callable[..., Any]]:
    book = memory.allocator.stats_book
    return {
        "memory_stats": lambda device=None: memory.memory_stats(),
        "reset_peak_memory_stats": lambda device=None: memory.reset_peaks(),
        "empty_cache": memory.empty_cache,
        "memory_allocated": lambda device=None: memory.allocator.small.bytes + memory.allocator.large.bytes,
        "memory_reserved": lambda device=None: memory.allocator.reserved_bytes,
        "max_memory_allocated": lambda device=None: book.peak_allocated_bytes,
        "max_memory_reserved": lambda device=None: book.peak_reserved_bytes,
        "mem_get_info": lambda device=None: memory.free_and_total(),
    }


def measure_portable(
    workload: Mapping[str, Any],
    *,
    gpu_key: str,
    steps: int = STEPS,
    micro_batches: int = 1,
    empty_cache: bool = False,
    costs: bool = True,
    categories: bool = False,
    trace_path: str | None = None,
    gpu: GPU | None = None,
    apply: Callable[[TrainingStep], None] | None = None,
) -> dict[str, Any]:
    """`memfit.capture.measure.measure` on the imitated GPU: same arguments, same keys, ``engine`` is
    ``"portable"``.

    Args:
        workload: a reference of `memfit.capture.workloads.workload_reference`.
        gpu_key: as `memfit.core.devices.find_gpu` takes it.
        gpu: instead of the catalogue's GPU of that key, perhaps one with another size.
        apply: called with the built step before it runs, to put techniques on.
    """
    started = time.monotonic()
    gpu = gpu or find_gpu(gpu_key)
    with portable_gpu(gpu) as portable:
        result: dict[str, Any] = {}
        with out_of_memory_as_value(phase="init") as caught:
            step = build_step(from_reference(workload), device=DEVICE, micro_batches=micro_batches)
            if apply is not None:
                apply(step)
        if caught:
            result = {"oom": caught[0], "steps_done": 0, "step_peaks": [], "phase_peaks": {}} | _peaks(
                portable
            )
        else:
            result = measure_step(
                step,
                gpu=gpu,
                steps=steps,
                empty_cache=empty_cache,
                costs=costs,
                categories=categories,
                trace_path=trace_path,
            )
        return result | account(portable, result) | {"wall_seconds": time.monotonic() - started}


def _peaks(portable: PortableGPU) -> dict[str, int]:
    book = portable.memory.allocator.stats_book
    return {
        "peak_requested_bytes": book.peak_requested_bytes,
        "peak_allocated_bytes": book.peak_allocated_bytes,
        "peak_reserved_bytes": book.peak_reserved_bytes,
    }


def account(portable: PortableGPU, result: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a result that are not of a step: the engine, the device's account, what is not certain."""
    gpu = portable.memory.gpu
    return {
        "engine": "portable",
        "torch": torch.__version__,
        "gpu": gpu.key,
        "context_bytes": gpu.context_bytes,
        "device_total_bytes": gpu.context_bytes + int(result["peak_reserved_bytes"]),
        "nvml_total_bytes": gpu.nvml_total_bytes,
        "runtime_total_bytes": gpu.runtime_total_bytes,
        "value_reads": reads_to_json(portable.reads),
        "not_modelled": portable.not_modelled(),
    }


def capture_portable(
    workload: Mapping[str, Any], *, gpu_key: str, micro_batches: int = 1, size: str = "full"
) -> dict[str, Any]:
    """`memfit.capture.measure.capture_reference` on the imitated GPU: the `StepGraph` of one step as JSON."""
    with portable_gpu(find_gpu(gpu_key)):
        step = build_step(
            from_reference(workload),
            device=DEVICE,
            size="small" if size == "small" else "full",
            micro_batches=micro_batches,
        )
        for _ in range(STEPS - 1):
            step.run()
        return StepTracker(step).run().to_json()
