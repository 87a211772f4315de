"""Measuring a GPU, in a process of its own: its context, workspaces of convolutions, two small steps.

    python -m memfit.dryrun.calibration_steps FILE

writes the readings (see `memfit.dryrun.calibration`) as JSON. It runs on a real GPU, and on the made-up one
as well, where workspaces are nothing.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from memfit.core.errors import CannotRunHere
from memfit.core.files import write_atomically
from memfit.dryrun.calibration import StepReading, WorkspaceReading

BATCH = 16
_SHAPES = ((64, 64, 56, 3), (128, 128, 28, 3), (64, 256, 28, 1), (3, 64, 112, 7), (256, 256, 14, 3))
"""Input and output channels, height and width, window; stride 1 and the same size after it."""
_DTYPES = (torch.float32, torch.float16)
_LAYOUTS = {"NCHW": torch.contiguous_format, "NHWC": torch.channels_last}


def measure() -> dict[str, object]:
    """Every reading of this process's first GPU, by the names of `memfit.dryrun.calibration.Calibration`."""
    torch.cuda.init()
    torch.empty(1, device="cuda")
    bare = context_bytes()
    steps = [read_step(name, make) for name, make in STEPS.items()]
    workspaces = list(read_workspaces())
    return {
        "name": torch.cuda.get_device_name(0),
        "driver": _driver(),
        "cuda": torch.version.cuda or "",
        "torch": torch.__version__,
        "cudnn": str(torch.backends.cudnn.version()),
        "bare_context_bytes": bare,
        "loaded_context_bytes": context_bytes(),
        "workspaces": [asdict(one) for one in workspaces],
        "steps": [asdict(one) for one in steps],
    }


def context_bytes() -> int:
    """What this process holds on the device beside PyTorch's segments; where NVML does not tell processes
    apart, all that is in use by anybody."""
    torch.cuda.synchronize()
    held = _held_by_this_process()
    if held is None:
        free, total = torch.cuda.mem_get_info(0)
        held = total - free
    return max(0, held - torch.cuda.memory_reserved(0))


def _held_by_this_process() -> int | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda._get_nvml_device_index(0))
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except (ImportError, RuntimeError, OSError):
        return None
    except pynvml.NVMLError:
        return None
    mine = [one.usedGpuMemory for one in processes if one.pid == os.getpid()]
    return int(mine[0]) if mine and mine[0] else None  # in a container the process has another number


def _driver() -> str:
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except ImportError:
        return "unknown"
    except pynvml.NVMLError:
        return "unknown"


# ------------------------------------------------------------------------ two small steps


def _convolutions() -> tuple[torch.nn.Module, torch.Tensor]:
    layers: list[torch.nn.Module] = []
    for before, after in itertools.pairwise((3, 32, 64, 128)):
        layers += [
            torch.nn.Conv2d(before, after, 3, padding=1),
            torch.nn.BatchNorm2d(after),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
        ]
    model = torch.nn.Sequential(
        *layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(128, 10)
    )
    return model.cuda(), torch.randn(BATCH, 3, 64, 64, device="cuda")


def _transformer() -> tuple[torch.nn.Module, torch.Tensor]:
    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, norm_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return model.cuda(), torch.randn(BATCH, 128, 256, device="cuda")


STEPS: dict[str, Callable[[], tuple[torch.nn.Module, torch.Tensor]]] = {
    "convolutions": _convolutions,
    "transformer": _transformer,
}


def read_step(name: str, make: Callable[[], tuple[torch.nn.Module, torch.Tensor]]) -> StepReading:
    """The peaks of two training steps of a new model."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model, data = make()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(data).float().square().mean().backward()
        optimizer.step()
    torch.cuda.synchronize()
    return StepReading(
        name=name,
        peak_allocated_bytes=torch.cuda.max_memory_allocated(),
        peak_reserved_bytes=torch.cuda.max_memory_reserved(),
    )


# ---------------------------------------------------------------------------- workspaces


def read_workspaces(batch: int = BATCH) -> Iterator[WorkspaceReading]:
    """One reading for each shape, dtype, layout and family of `_SHAPES` …, in about a second on a GPU."""
    for shape, dtype, layout in itertools.product(_SHAPES, _DTYPES, _LAYOUTS):
        yield from read_convolution(batch, shape, dtype, layout)


def read_convolution(
    batch: int, shape: tuple[int, int, int, int], dtype: torch.dtype, layout: str
) -> Iterator[WorkspaceReading]:
    """The three families' workspaces of one convolution: the largest block that came and went in the call."""
    inputs, outputs, side, window = shape

    def tensor(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device="cuda", dtype=dtype).to(memory_format=_LAYOUTS[layout])

    x, w = tensor(batch, inputs, side, side), tensor(outputs, inputs, window, window)
    y = tensor(batch, outputs, side, side)
    padding = [window // 2] * 2

    def backward(mask: list[bool]) -> object:
        fixed = ([1, 1], padding, [1, 1], False, [0, 0], 1)
        return torch.ops.aten.convolution_backward(y, x, w, None, *fixed, mask)

    calls: dict[str, Callable[[], object]] = {
        "forward": lambda: torch.nn.functional.conv2d(x, w, padding=padding),
        "backward data": lambda: backward([True, False, False]),
        "backward filter": lambda: backward([False, True, False]),
    }
    name = str(dtype).removeprefix("torch.")
    words = f"{name} {layout} {batch}x{inputs}x{side}x{side} to {outputs}, window {window}"
    rule = _rule_bytes(layout, dtype, *(t.numel() * t.element_size() for t in (x, w, y)))
    for family, call in calls.items():
        yield WorkspaceReading(
            configuration=words, family=family, measured_bytes=_scratch_bytes(call), rule_bytes=rule
        )


def _rule_bytes(layout: str, dtype: torch.dtype, x: int, w: int, y: int) -> int:
    """As ``native/workspaces.c`` has it, for GPUs whose tensor cores take the dtype."""
    least = (8, 0) if dtype is torch.float32 else (7, 0)
    return x + w + y if layout == "NCHW" and torch.cuda.get_device_capability(0) >= least else 0


def _scratch_bytes(call: Callable[[], object]) -> int:
    """The largest allocation of a call that was freed before it came back, by the allocator's own history."""
    call()  # plans are chosen, kernels are loaded
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history(max_entries=10_000, stacks="python", context=None)
    result = call()
    events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    torch.cuda.memory._record_memory_history(enabled=None)
    del result
    living: dict[int, int] = {}
    largest = 0
    for event in events:
        if event["action"] == "alloc":
            living[event["addr"]] = event["size"]
        elif event["action"] == "free_completed" and event["addr"] in living:
            largest = max(largest, living.pop(event["addr"]))
    return largest


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.stderr.write(f"PyTorch {torch.__version__} finds no GPU\n")
        sys.exit(CannotRunHere.exit_code)
    write_atomically(Path(sys.argv[1]), json.dumps(measure()))
