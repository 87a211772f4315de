"""Several GPUs in one process: each has its own account, and PyTorch's own numbers agree with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from preloaded import Outcome, Preloaded

from memfit.core.trace import Action, Trace

pytestmark = pytest.mark.dryrun

TOLD = """
import json
names = [f"{name}_bytes.all.peak" for name in ("requested", "allocated", "reserved")]
print(json.dumps([[torch.cuda.memory_stats(i)[n] for n in names] for i in range(torch.cuda.device_count())]))
"""
PLAIN = """
import torch
x = torch.ones(1 << 20, device="cuda:1", requires_grad=True)
torch.cuda.set_device(2)
y = (x.to("cuda") * 2).to("cuda:0")
y.sum().backward()
assert x.grad.device.index == 1 and torch.cuda.can_device_access_peer(0, 1)
free = [torch.cuda.mem_get_info(i)[0] for i in range(4)]
assert free[3] - free[1] == torch.cuda.memory_reserved(1) and torch.cuda.memory_reserved(3) == 0
"""
PARALLEL = """
import torch
model = torch.nn.DataParallel(torch.nn.Linear(1024, 1024).cuda())
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    model(torch.randn(64, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
SPREAD = """
import torch
from accelerate import dispatch_model, infer_auto_device_map, init_empty_weights
with init_empty_weights():
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(8)))
where = infer_auto_device_map(model, max_memory={i: 52 << 20 for i in range(4)})
for name, device in where.items():
    model.get_submodule(name).to_empty(device=f"cuda:{device}")
dispatch_model(model, where)(torch.randn(4, 2048))
assert set(where.values()) <= {0, 1, 2, 3} and len(set(where.values())) > 2
"""


def run(preloaded: Preloaded, folder: Path, text: str, **settings: object) -> Outcome:
    script = folder / "script.py"
    script.write_text(text)
    outcome = preloaded.run(script, folder=folder, gpus=4, **settings)
    assert outcome.result.exit_code == 0, outcome.stderr
    return outcome


@pytest.mark.parametrize("text", [PLAIN, PARALLEL, SPREAD], ids=["plain", "data_parallel", "device_map"])
def test_each_gpu_is_accounted_as_pytorch_does(preloaded: Preloaded, tmp_path: Path, text: str) -> None:
    outcome = run(preloaded, tmp_path, text + TOLD)
    result = outcome.result
    sizes = [
        [device.peak_requested_bytes, device.peak_allocated_bytes, device.peak_reserved_bytes]
        for device in result.devices
    ]
    assert sizes == json.loads(outcome.stdout.splitlines()[-1])
    fullest = max(result.devices, key=lambda device: device.device_total_bytes)
    assert result.peak_reserved_bytes == fullest.peak_reserved_bytes
    assert result.device_total_bytes == fullest.device_total_bytes
    assert all(
        sum(device.peak_by_category.values()) == device.peak_requested_bytes for device in result.devices
    )


def test_a_gpu_that_is_not_used_has_no_context(preloaded: Preloaded, tmp_path: Path) -> None:
    devices = run(preloaded, tmp_path, "import torch\nx = torch.ones(1, device='cuda:2')\n").result.devices
    assert [device.context_bytes > 0 for device in devices] == [False, False, True, False]
    assert [device.device_total_bytes > 0 for device in devices] == [False, False, True, False]


def test_traces_are_kept_apart(preloaded: Preloaded, tmp_path: Path) -> None:
    trace = tmp_path / "run.memfit-trace"
    result = run(preloaded, tmp_path, PLAIN, trace=trace).result
    fullest = max(result.devices, key=lambda device: (device.device_total_bytes, -device.index)).index
    for device in result.devices[:3]:
        own = trace if device.index == fullest else tmp_path / f"run.cuda{device.index}.memfit-trace"
        events = Trace.load(own)
        assert events.meta["device"] == device.index and len(events) == device.event_count
        assert (events.action == Action.ALLOC).any()


def test_memory_that_runs_out_on_the_second_gpu(preloaded: Preloaded, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\nx = torch.empty(1 << 30, device='cuda:1')\ny = torch.empty(1 << 33, device='cuda:1')\n"
    )
    result = preloaded.run(script, folder=tmp_path, gpus=2, gpu="8GiB,sm86").result
    assert result.oom is not None and result.ended == "out_of_memory"
    assert result.oom.reserved_bytes == result.peak_reserved_bytes == 4 << 30
    assert result.oom.line == 3
