"""Tuning: the choice follows the measurements, the budget is kept, and nothing is left behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.core.errors import UsageError
from memfit.techniques import applied_techniques
from memfit.techniques.tuning_result import TunedSettings, TuningMeasurement, faster

MODEL_SECONDS, SAMPLE_SECONDS, LOAD_SECONDS = 0.5, 0.01, 0.2


class _Machine:
    """A clock that only goes on by what steps cost here: kernels, samples, a slow loader, the optimizer."""

    def __init__(self, slow_down: float = 0.0) -> None:
        self.now, self.slow_down, self.sizes = 0.0, slow_down, []
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        self.optimizer.register_step_post_hook(self._stepped)

    def __call__(self) -> float:
        return self.now

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        self._pass(MODEL_SECONDS + SAMPLE_SECONDS * -(-len(batch) // 8) * 8)  # whole groups of eight
        if len(batch) > 64:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return model(batch).square().mean()

    def loader(self, size: int, workers: int) -> Iterator[Tensor]:
        for number in range(2):  # ends, and is begun again
            self.sizes.append(size)
            self._pass(LOAD_SECONDS / (1 + min(workers, 2)))
            yield torch.randn(size, 8, generator=torch.Generator().manual_seed(number))

    def _pass(self, seconds: float) -> None:
        self.now += seconds * (1 + self.slow_down * self.now)

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        group = optimizer.param_groups[0]
        self._pass(0.1 if group.get("fused") else 0.2 if group.get("foreach") else 0.4)


def _tuned(machine: _Machine, **settings: Any) -> memfit.TuningResult:
    given = {"batch_size": 12, "seconds": 1e6, "clock": machine, **settings}
    return memfit.tune(machine.model, machine.optimizer, machine.loss, machine.loader, **given)


@pytest.mark.parametrize("slow_down", [0.0, 0.0005])
def test_the_fastest_settings_are_found_on_a_machine_that_is_known(slow_down: float) -> None:
    machine = _Machine(slow_down)
    found = _tuned(machine, batch_sizes=(16, 24, 32, 96), workers=(1, 2, 4))
    assert found.best == TunedSettings(batch_size=32, micro_batches=1, implementation="fused", workers=2)
    times = {row.settings: row.seconds_per_sample for row in found.measurements}
    if not slow_down:
        assert times[found.plain] == pytest.approx((0.2 + 0.5 + 0.16 + 0.4) / 12)
        assert found.speedup == pytest.approx(
            (0.2 + 0.5 + 0.16 + 0.4) / 12 * 32 / (0.2 / 3 + 0.5 + 0.32 + 0.1)
        )
    (failed,) = [row for row in found.measurements if row.failed]
    assert failed.settings.batch_size == 96 and failed.failed == "out of memory"
    assert "A batch of 32 in place of 12 is another training." in str(found)


def test_nothing_is_left_behind_and_the_choice_can_be_applied(tmp_path: Path) -> None:
    machine = _Machine()
    before = {k: v.clone() for k, v in machine.model.state_dict().items()}
    random, modes = torch.get_rng_state(), [m.training for m in machine.model.modules()]
    found = _tuned(machine, batch_sizes=(96,))
    assert all(torch.equal(v, before[k]) for k, v in machine.model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state()) and modes == [
        m.training for m in machine.model.modules()
    ]
    assert not machine.optimizer.state and not applied_techniques(machine.model)
    assert machine.optimizer.param_groups[0]["fused"] is None
    found.apply(machine.model, machine.optimizer)
    assert [t.name for t in applied_techniques(machine.model)] == ["optimizer_implementation"]
    record = json.loads(found.save(tmp_path / "tuned.json").read_text())
    assert record["best"] == {"batch_size": 12, "micro_batches": 1, "implementation": "fused", "workers": 0}
    assert record["schema_version"] == 1 and record["speedup"] == found.speedup > 1


def test_the_budget_of_seconds_is_kept() -> None:
    reached = []
    for seconds in (20.0, 60.0):
        found = _tuned(_Machine(), seconds=seconds, workers=(4,))
        assert found.seconds <= seconds and found.left_out
        assert "not reached within the seconds given" in str(found)
        assert not set(found.left_out) & {row.settings for row in found.measurements}
        reached.append(len(found.measurements))
    assert 1 < reached[0] < reached[1]
    alone = _tuned(_Machine(), seconds=0.1)
    assert alone.best == alone.plain and alone.speedup == 1.0 and len(alone.measurements) == 1


def test_a_machine_that_grows_faster_is_no_gain_of_the_settings() -> None:
    """Each step is quicker than the one before, whatever is set: the last comparison, in turns, tells."""
    machine = _Machine()
    machine._pass = lambda seconds: setattr(machine, "now", machine.now + 1 / (1 + machine.now))  # type: ignore
    found = _tuned(machine, batch_sizes=(), micro_batches=(2,), least_gain=0.1)
    assert found.speedup < 1.3
    first = next(row for row in found.measurements if row.settings == found.plain)
    best = next(row for row in found.measurements if row.settings == found.best)
    assert first.step_seconds[0] > 1.5 * best.step_seconds[-1]


def test_the_same_measurements_give_the_same_choice() -> None:
    rows = [
        TuningMeasurement(settings=TunedSettings(batch_size=10, micro_batches=n), step_seconds=(s, s, 9.0))
        for n, s in ((1, 1.0), (2, 0.98), (3, 0.9), (4, 0.9))
    ]
    assert faster(rows[0], rows[1:2], 0.03) is rows[0]  # two per cent are noise
    assert faster(rows[0], rows[1:], 0.03) is rows[2]  # the earlier of two that are equal
    assert faster(rows[0], [replace(rows[1], step_seconds=(), failed="no")], 0.03) is rows[0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"batch_size": 0}, "batch_size must be whole numbers of at least 1, not 0"),
        ({"workers": (-1,)}, "workers must be whole numbers of at least 0, not -1"),
        ({"implementations": ("quick",)}, "implementation must be one of fused, foreach, for-loop"),
        ({"seconds": 0}, "seconds must be above 0"),
        ({"least_gain": 1}, "least_gain must be at least 0 and below 1"),
        ({"batch_size": 96}, "the plain step cannot run: out of memory"),
    ],
)
def test_bad_settings_are_told(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        _tuned(_Machine(), **settings)


def test_what_an_optimizer_does_not_have_is_a_row_with_its_reason() -> None:
    machine = _Machine()
    machine.optimizer = torch.optim.Adafactor(machine.model.parameters())
    found = _tuned(machine, micro_batches=())
    reasons = {row.settings.implementation: row.failed for row in found.measurements}
    assert "Adafactor has no fused implementation" in str(reasons["fused"]) and not reasons["foreach"]
