"""The `distributed` section, and compression, of a configuration: each key has an effect that can be seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from distributed.ranks import expect
from memfit.core.errors import UsageError
from memfit.techniques import undo_all

MIB = 2**20


def net(width: int = 32, blocks: int = 4) -> nn.Module:
    torch.manual_seed(0)
    parts = [
        nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        for _ in range(blocks)
    ]
    return nn.Sequential(*parts)


def configured_by(model: nn.Module, *flags: str) -> memfit.Configured:
    optimizer = torch.optim.AdamW(model.parameters())
    return memfit.configure(model, optimizer, flags=flags, environment={})


def train(configured: memfit.Configured, steps: int) -> None:
    for step in range(steps):
        x = torch.full((4, 32), float(step + 1))
        configured.model(x).square().mean().backward()
        configured.optimizer.step()
        configured.optimizer.zero_grad()


def test_saved_activations_take_fewer_bytes():
    """Seen from outside: the storages that live after a forward pass."""
    x = torch.randn(1024, 32)

    def live_bytes(model: nn.Module) -> int:
        with memfit.MemoryProfiler(device="cpu", profiling_frequency=1) as profiler:
            loss = model(x).sum()
            live = profiler.get_memory_usage().current_bytes
        loss.backward()
        return live

    plain = live_bytes(net())
    path = "optimization.memory_compression"
    flags = [
        f"{path}.enabled=true",
        f"{path}.compression_algorithm=int8",
        f"{path}.compression_ratio=0.3",
    ]
    configured = configured_by(net(), *flags)
    smaller = live_bytes(configured.model)
    undo_all(configured.model)
    configured.close()
    assert smaller < 0.4 * plain
    assert configured.compression.report().ratio <= 0.3
    assert "int8, to 30%" in configured.done[0]


def test_checkpoints_are_written_and_taken_up(tmp_path: Path):
    path = "distributed.fault_tolerance"
    flags = [
        f"{path}.enabled=true",
        f"{path}.checkpoint_frequency=2",
        f"{path}.folder={tmp_path / 'saved'}",
        "optimization.mixed_precision.enabled=true",
        "optimization.mixed_precision.precision=bf16",
    ]
    first = configured_by(net(), *flags)
    train(first, 4)
    wanted = [parameter.clone() for parameter in first.model.parameters()]
    train(first, 1)
    first.close()
    assert sorted(folder.name[-1] for folder in (tmp_path / "saved").glob("step-*")) == ["2", "4"]
    second = configured_by(net(), *flags)
    assert "the state of step 4 is taken up" in second.done[-1] and second.fault_tolerance.step == 4
    assert all(map(torch.equal, second.model.parameters(), wanted))
    assert {int(state["step"]) for state in second.optimizer.state.values()} == {4}
    for _ in second.fault_tolerance.steps(7):  # a loop that counts by itself
        train(second, 1)
    assert second.fault_tolerance.step == 7 and second.fault_tolerance.last_saved_step == 7
    second.close()


def test_work_is_dealt_by_the_strategy():
    dealt = {}
    for strategy in ("round_robin", "memory_aware"):
        path = "distributed.load_balancing"
        configured = configured_by(net(), f"{path}.enabled=true", f"{path}.strategy={strategy}")
        dealt[strategy] = configured.balancing.assign([4.0, 1.0, 3.0, 1.0], 2).after.makespan_seconds
        configured.close()
    assert dealt == {"round_robin": 7.0, "memory_aware": 5.0}


def on_a_rank() -> dict[str, Any]:
    """Two ranks of a launcher, whose buffers drift apart."""
    from memfit.distributed import groups

    groups.join()
    model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32))
    model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})
    path = "distributed.memory_synchronization"
    flags = ["distributed.num_gpus=2", "memory.gpu_memory.available_memory=1MiB"]
    flags += [f"{path}.enabled=true", f"{path}.sync_frequency=2", f"{path}.repair=1"]
    configured = configured_by(model, *flags)
    with torch.no_grad():
        model[0].bias[0] += groups.rank()  # of two ranks none is right: the one that is named
    means = []
    for _ in range(2):
        with torch.no_grad():
            model[1].running_mean.fill_(float(groups.rank()))
        configured.optimizer.step()
        means.append(float(model[1].running_mean[0]))
    block = configured.memory.allocate(size="1MiB")
    held = configured.memory.statistics().ranks[groups.rank()].allocated_bytes
    try:
        configured.memory.allocate(size="2MiB")
    except memfit.MemfitError as problem:
        refused = str(problem)
    configured.memory.deallocate(block)
    configured.close()
    return {
        "bias": float(model[0].bias[0]),
        "means": means,
        "held": held,
        "refused": refused,
        "found": configured.synchronization.history,
    }


def test_ranks_are_brought_in_step_and_share_memory():
    for rank, result in enumerate(expect(on_a_rank, ranks=2)):
        assert result["means"] == [float(rank), 0.5]  # averaged after the second step, not the first
        (found,) = result["found"]
        assert found.step == 2 and [(one.ranks, one.source) for one in found.divergences] == [((0,), 1)]
        assert result["bias"] == 2.0
        assert result["held"] == MIB // 2 and "rank" in result["refused"]


def test_without_an_optimizer_steps_are_counted_by_hand(tmp_path: Path):
    path = "distributed"
    flags = [
        f"{path}.memory_synchronization.enabled=true",
        f"{path}.fault_tolerance.enabled=true",
        f"{path}.fault_tolerance.folder={tmp_path}",
    ]
    configured = memfit.configure(net(), flags=flags, environment={})
    assert "where synchronization.step(model) is called" in configured.done[0]
    assert "none without an optimizer" in configured.done[1]
    with pytest.raises(UsageError, match="protect"):
        configured.fault_tolerance.save()
    configured.close()


def test_all_keys_at_once(tmp_path: Path):
    """As a user would write them down, everything enabled."""
    (tmp_path / "all.yaml").write_text(
        "memory:\n"
        '  gpu_memory: {total_memory: "8GB", available_memory: "6GB", allocation_strategy: dynamic}\n'
        '  memory_pool: {enabled: true, pool_size: "4MB", chunk_size: "1MB"}\n'
        f"  memory_profiling: {{enabled: true, profiling_frequency: 100, save_profiles: {tmp_path / 'p'}}}\n"
        "optimization:\n"
        "  gradient_checkpointing: {enabled: true, checkpoint_frequency: 4, memory_savings: 0.5}\n"
        "  mixed_precision: {enabled: true, precision: bf16}\n"
        "  memory_compression: {enabled: true, compression_ratio: 0.8, compression_algorithm: zstd}\n"
        "distributed:\n"
        "  num_gpus: 4\n"
        "  memory_synchronization: {enabled: true, sync_frequency: 2}\n"
        "  load_balancing: {enabled: true, strategy: round_robin}\n"
        f"  fault_tolerance: {{enabled: true, checkpoint_frequency: 2, folder: {tmp_path / 'saved'}}}\n"
    )
    model = net()
    configured = memfit.configure(model, torch.optim.AdamW(model.parameters()), tmp_path, environment={})
    train(configured, 2)
    configured.close()
    asked = {line.rpartition("(")[2].rstrip(")") for line in configured.done}
    sections = ["memory.gpu_memory", "memory.memory_pool", "memory.memory_profiling"]
    sections += ["gradient_checkpointing", "mixed_precision", "memory_compression"]
    sections += ["memory_synchronization", "load_balancing", "fault_tolerance"]
    assert len(asked) == 9 and all(any(one.endswith(name) for one in asked) for name in sections)
    assert [found.step for found in configured.synchronization.history] == [2]
    assert (tmp_path / "p" / "profile.json").exists() and configured.fault_tolerance.last_saved_step == 2
    undo_all(model)
