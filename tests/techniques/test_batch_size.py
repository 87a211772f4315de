"""The batch size that is found lasts: whole steps, evaluation, a margin, and nothing is left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from technique_models import CASES
from torch import Tensor, nn

from memfit import find_batch_size
from memfit.core.errors import UsageError
from memfit.techniques import MixedPrecisionTraining

MiB = 2**20


def _square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def test_the_peak_is_that_of_a_full_step_with_the_optimizers_state() -> None:
    """Worked out by hand: the second step's backward pass holds weights and momentum beside what follows the
    samples."""
    model = nn.Linear(256, 512, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    weights = 4 * 256 * 512
    found = find_batch_size(
        model,
        optimizer,
        _square,
        lambda size: torch.zeros(size, 256),
        limit="8MiB",
        margin=0.25,
        multiple_of=8,
        start=8,
    )
    allowed = 6 * MiB
    a_sample = 4 * (256 + 5 * 512)  # the batch; the output, its square, and three gradients on the way back
    assert found.batch_size == (allowed - 2 * weights) // a_sample // 8 * 8
    assert found.peak_bytes == pytest.approx(2 * weights + found.batch_size * a_sample, abs=64)
    larger = [tried for tried in found.tried if tried.batch_size > found.batch_size]
    assert larger and not any(tried.fits for tried in larger)
    assert f"batch size {found.batch_size}" in str(found)


def test_an_evaluation_that_needs_more_than_the_step_counts() -> None:
    model = nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def heavy(model: nn.Module, batch: Tensor) -> Tensor:
        assert not model.training and not torch.is_grad_enabled()
        return batch.repeat(1, 100).sum() + model(batch).sum()

    sizes = [
        find_batch_size(
            model, optimizer, _square, lambda n: torch.zeros(n, 16), evaluate=evaluate, limit=MiB
        ).batch_size
        for evaluate in (None, heavy)
    ]
    assert sizes[0] > 10 * sizes[1] > 0


def test_everything_is_as_it_was() -> None:
    case = CASES["cnn"]
    model = case.model()
    model.layer1.eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    case.loss(model, case.batch()).backward()
    optimizer.step()
    before = [t.clone() for t in (*model.state_dict().values(), *(p.grad for p in model.parameters()))]
    state = [v.clone() for s in optimizer.state.values() for v in s.values()]
    modes, random = [m.training for m in model.modules()], torch.get_rng_state()
    make: Any = lambda n: {"x": torch.randn(n, 3, 8, 8), "y": torch.zeros(n, dtype=torch.long)}  # noqa: E731
    assert find_batch_size(model, optimizer, case.loss, make, limit="2MiB").batch_size > 4
    with pytest.raises(ZeroDivisionError):
        find_batch_size(model, optimizer, case.loss, lambda n: make(n) if n < 3 else 1 / 0, limit="2MiB")
    after = (*model.state_dict().values(), *(p.grad for p in model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(
        torch.equal(a, b)
        for a, b in zip(state, (v for s in optimizer.state.values() for v in s.values()), strict=True)
    )
    assert modes == [m.training for m in model.modules()] and torch.equal(random, torch.get_rng_state())


def test_memory_that_runs_out_is_an_answer_and_other_errors_are_errors() -> None:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def batch(size: int) -> Tensor:
        if size > 11:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
        return torch.zeros(size, 8)

    found = find_batch_size(model, optimizer, _square, batch, limit="1GiB")
    assert found.batch_size == 11
    assert [t.peak_bytes is None for t in found.tried] == [t.batch_size > 11 for t in found.tried]
    none = find_batch_size(model, optimizer, _square, lambda n: torch.zeros(n, 8), limit=100)
    assert none.batch_size == 0 and "no batch size fits" in str(none)
    capped = find_batch_size(model, optimizer, _square, lambda n: torch.zeros(n, 8), limit="1GiB", most=6)
    assert capped.batch_size == 6
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        find_batch_size(model, optimizer, _square, lambda n: torch.zeros(n, 9), limit="1GiB")


def test_it_runs_what_is_applied() -> None:
    """Under loss scaling the steps go through it, and its scale is not moved by the search's gradients."""
    model = CASES["mlp"].model()
    optimizer = torch.optim.AdamW(model.parameters())
    mp = MixedPrecisionTraining(precision="fp16")
    mp.apply(model, optimizer)
    make = lambda n: {"x": torch.randn(n, 8), "y": torch.zeros(n, dtype=torch.long)}  # noqa: E731
    assert find_batch_size(model, optimizer, CASES["mlp"].loss, make, limit="300KiB").batch_size > 1
    assert not optimizer.state and mp.state_dict()["updates"] == 0


@pytest.mark.parametrize(
    "bad", [{"margin": 1.0}, {"start": 0}, {"start": 3, "multiple_of": 2}, {"most": 1.5}]
)
def test_impossible_wishes_are_named(bad: dict[str, Any]) -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(UsageError, match=next(iter(bad))):
        find_batch_size(model, torch.optim.SGD(model.parameters()), _square, torch.zeros, limit=1000, **bad)
