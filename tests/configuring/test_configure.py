"""Every key of a configuration has an effect: on the process, on a model, and on a script that knows nothing
of it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

import memfit
from memfit.configuring.effects import checkpointing
from memfit.core.errors import MemfitError
from memfit.techniques import applied_techniques, undo_all

MIB = 2**20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def made():
    """Makes configured models of flags alone, and takes everything back at the end."""
    everything = []

    def make(*flags: str, model: nn.Module | None = None) -> memfit.Configured:
        model = Net() if model is None else model
        optimizer = torch.optim.AdamW(model.parameters())
        everything.append(memfit.configure(model, optimizer, flags=flags, environment={}))
        return everything[-1]

    yield make
    for configured in everything:
        configured.close()
        undo_all(configured.model)


def saved_bytes(model: nn.Module, x: torch.Tensor) -> int:
    """What one forward pass saves for the backward, parameters aside."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x).sum().backward()
    return sum(saved.values())


def test_nothing_is_done_by_default(made):
    configured = made()
    assert configured.done == [] and applied_techniques(configured.model) == ()
    assert str(configured) == "nothing is enabled"
    model, optimizer = configured
    assert isinstance(model, Net) and isinstance(optimizer, torch.optim.AdamW)


def test_the_limit_and_the_strategy_are_the_managers(made):
    configured = made(
        "memory.gpu_memory.total_memory=64MiB",
        "memory.gpu_memory.available_memory=2MiB",
        "memory.gpu_memory.allocation_strategy=dynamic",
    )
    assert configured.manager.limit_bytes == 2 * MIB and configured.manager.total_bytes == 64 * MIB
    assert "dynamic" in configured.done[0]
    with pytest.raises(MemfitError):
        configured.manager.allocate("3MiB")


def test_a_pool_is_taken_before_it_is_asked_for(made):
    configured = made(
        "memory.memory_pool.enabled=on",
        "memory.memory_pool.pool_size=4MiB",
        "memory.memory_pool.chunk_size=2MiB",
    )
    assert configured.manager.statistics().reserved_bytes == 4 * MIB
    held = []
    while configured.manager.statistics().reserved_bytes == 4 * MIB:
        held.append(configured.manager.allocate("256KiB"))
    assert configured.manager.statistics().reserved_bytes == 6 * MIB


def test_profiling_runs_until_the_end_and_is_saved(made, tmp_path):
    configured = made(
        "memory.memory_profiling.enabled=yes",
        "memory.memory_profiling.profiling_frequency=3",
        f"memory.memory_profiling.save_profiles={tmp_path / 'profiles'}",
    )
    assert configured.profiler.is_profiling and configured.profiler.profiling_frequency == 3
    configured.model(torch.ones(4, 32)).sum().backward()
    configured.optimizer.step()
    configured.close()
    assert not configured.profiler.is_profiling
    assert (tmp_path / "profiles" / "profile.json").exists()


@pytest.mark.parametrize(
    ("frequency", "savings", "checkpointed"),
    [("4", None, 2), ("1", None, 8), (None, "0.5", 4), ("4", "0.5", 4), ("2", "0.25", 4), ("4", "0.75", 6)],
)
def test_the_saving_is_the_target_and_the_frequency_the_start(made, frequency, savings, checkpointed):
    path = "optimization.gradient_checkpointing"
    flags = [f"{path}.enabled=true"]
    flags += [f"{path}.checkpoint_frequency={frequency}"] if frequency else []
    flags += [f"{path}.memory_savings={savings}"] if savings else []
    torch.manual_seed(0)
    plain, x = Net(), torch.randn(64, 32)
    before = saved_bytes(plain, x)
    configured = made(*flags, model=plain)
    after = saved_bytes(configured.model, x)
    each = (before - after) / checkpointed
    assert before - after > checkpointed / 8 * 0.7 * before
    assert each == pytest.approx(64 * 128 * 4 * 1, rel=0.5)
    if savings:
        assert checkpointed / 8 >= float(savings)


def test_a_frequency_that_saves_enough_is_kept():
    assert checkpointing(4, 0.25).checkpoint_frequency == 4
    assert checkpointing(4, 0.3).memory_savings == 0.3
    assert checkpointing(None, None).checkpoint_frequency == 1


@pytest.mark.parametrize(("precision", "scaled"), [("fp16", True), ("bf16", False)])
def test_precision_lowers_what_is_computed_in(made, precision, scaled):
    path = "optimization.mixed_precision"
    flags = [f"{path}.enabled=true", f"{path}.precision={precision}"]
    configured = made(*flags, *([f"{path}.loss_scaling=2048"] if scaled else []))
    seen = []
    configured.model.blocks[0].up.register_forward_hook(
        lambda module, inputs, output: seen.append(output.dtype)
    )
    with configured.mixed_precision.autocast():
        loss = configured.model(torch.ones(4, 32)).float().mean()
    configured.mixed_precision.scale_loss(loss).backward()
    configured.optimizer.step()
    assert seen == [{"fp16": torch.float16, "bf16": torch.bfloat16}[precision]]
    assert configured.mixed_precision.scale == (2048.0 if scaled else 1.0)


def test_doubts_are_python_warnings():
    with pytest.warns(UserWarning, match="neither checkpoint_frequency"):
        memfit.configure(flags=["optimization.gradient_checkpointing.enabled=true"], environment={}).close()


SCRIPT = """
    import sys
    import torch
    from torch import nn
    sys.path.insert(0, {tests!r})
    from test_configure import Net, saved_bytes

    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    wrapped = nn.Sequential(model)
    print("saved", saved_bytes(wrapped, torch.randn(64, 32)))
    loss = wrapped(torch.randn(64, 32)).float().mean()
    loss.backward()
    optimizer.step()
    print("step done", all(torch.isfinite(p).all() for p in model.parameters()))
    sys.exit({code})
"""


def run(folder: Path, *options: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(textwrap.dedent(SCRIPT.format(tests=str(Path(__file__).parent), code=code)))
    words = [sys.executable, "-m", "memfit", "run", *options, "--", str(script)]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)


def saved(output: str) -> int:
    return int(output.partition("saved ")[2].split()[0])


def test_a_script_is_configured_without_a_change(tmp_path):
    (tmp_path / "c.yaml").write_text(
        "optimization:\n"
        "  gradient_checkpointing: {enabled: true, checkpoint_frequency: 1}\n"
        "  mixed_precision: {enabled: true, precision: fp16}\n"
    )
    plain = run(tmp_path)
    configured = run(tmp_path, "--config", str(tmp_path / "c.yaml"), code=3)
    assert plain.returncode == 0 and configured.returncode == 1, configured.stderr
    assert saved(configured.stdout) < 0.3 * saved(plain.stdout)
    assert "step done True" in plain.stdout and "step done True" in configured.stdout
    assert "memfit: gradient checkpointing: every block" in configured.stderr
    assert "on Net" in configured.stderr and "losses scaled" in configured.stderr
    assert "memfit: " not in plain.stderr


def test_mistakes_are_told_before_the_script_starts(tmp_path):
    (tmp_path / "c.yaml").write_text("memory:\n  gpu_memory: {total: 8GB}\n")
    ended = run(tmp_path, "--config", str(tmp_path / "c.yaml"))
    assert ended.returncode == 5 and ended.stdout == ""
    assert "c.yaml:2: memory.gpu_memory.total: no such key; there are total_memory" in ended.stderr
    assert "Traceback" not in ended.stderr
