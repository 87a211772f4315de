"""Pruning: zeros that stay, modules that are smaller, layouts that pay, and what it does to accuracy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memfit import CannotRunHere, Pruning, UsageError, prune_structured, to_sparse, undo
from memfit.techniques.pruning_sparse import csr_bytes, is_two_four


def _mlp(width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)
    )


def test_zeros_are_the_smallest_and_stay_while_moments_push() -> None:
    model = _mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(8, 16)
    model(x).square().sum().backward()
    optimizer.step()  # moments that would move the zeros
    before = model[2].weight.detach().clone()
    Pruning(share=0.75).apply(model, optimizer)
    mask = model[2].weight != 0
    assert int((~mask).sum()) == 3 * mask.numel() // 4
    assert before[~mask].abs().max() <= before[mask].abs().min()
    assert (model[4].weight != 0).all()  # the output layer
    for _ in range(3):
        model(x).square().sum().backward()
        optimizer.step()
    assert not model[2].weight[~mask].any() and not torch.equal(model[2].weight[mask], before[mask])
    kept = model[2].weight.detach()[mask].clone()
    undo(model)
    assert torch.equal(model[2].weight[~mask], before[~mask]) and torch.equal(model[2].weight[mask], kept)


def test_two_of_four() -> None:
    model = _mlp()
    Pruning(pattern="2:4").apply(model)
    groups = model[2].weight.reshape(-1, 4)
    assert ((groups != 0).sum(1) == 2).all() and is_two_four(model[2].weight)
    with pytest.raises(UsageError, match="sparse tensor cores"):
        to_sparse(model, layout="2:4")
    with pytest.raises(UsageError, match="multiple of 4"):
        Pruning(pattern="2:4", layers=("0",)).apply(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4)))


def test_csr_is_taken_where_it_is_smaller_and_computes_the_same() -> None:
    model = _mlp()
    Pruning(share=0.9, layers=("2",)).apply(model)
    x = torch.randn(5, 16)
    expected = model(x)
    rows = {row.name: row for row in to_sparse(model)}
    assert rows["2"].converted and rows["2"].sparse_bytes == csr_bytes(model[2].weight.to_dense())
    assert rows["2"].sparse_bytes < rows["2"].dense_bytes / 3
    assert not rows["0"].converted and "not smaller" in rows["0"].reason
    torch.testing.assert_close(model(x), expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_structured_pruning_makes_every_module_smaller_and_fine_tuning_brings_accuracy_back() -> None:
    pytest.importorskip("torch_pruning")
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    torch.manual_seed(0)
    order = torch.randperm(len(x))
    train, test = order[:1400], order[1400:]
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))

    def fit(steps: int) -> float:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[train]), y[train]).backward()
            optimizer.step()
        return float((model(x[test]).argmax(1) == y[test]).float().mean())

    before = fit(60)
    pruned = prune_structured(model, x[:2], share=0.5)
    assert model[0].out_features == model[2].out_features == model[2].in_features == 64
    assert model[4].out_features == 10
    parameters = 64 * 64 + 64 + 64 * 64 + 64 + 64 * 10 + 10
    assert pruned.parameters_after == parameters and pruned.bytes_after == 4 * parameters
    assert pruned.share_left < 0.4
    assert before > 0.93 and fit(40) > before - 0.02


def test_structured_pruning_says_what_it_cannot_do() -> None:
    model = _mlp()
    with pytest.raises(UsageError, match="between 0 and 1"):
        prune_structured(model, torch.randn(2, 16), share=1.0)
    with pytest.raises(UsageError, match="no module 'x'"):
        prune_structured(model, torch.randn(2, 16), keep=("x",))
    Pruning().apply(model)
    with pytest.raises(UsageError, match="pruning is applied"):
        prune_structured(model, torch.randn(2, 16))


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "torch_pruning", None)
    with pytest.raises(CannotRunHere, match="memfit\\[prune\\]"):
        prune_structured(_mlp(), torch.randn(2, 16))
