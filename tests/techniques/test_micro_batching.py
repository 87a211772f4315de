"""Pieces of a batch whose weighted gradients are those of the whole."""

from __future__ import annotations

from collections import UserDict, namedtuple
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from technique_models import CASES, CNN, train
from torch import Tensor, nn

from memfit.core.errors import UsageError
from memfit.techniques import MicroBatching, micro_batches_of, undo
from memfit.techniques.micro_batching import weighted

Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    ("samples", "count", "sizes"), [(8, 4, [2] * 4), (7, 3, [2, 2, 3]), (2, 4, [1, 1]), (5, 1, [5])]
)
def test_sizes_and_weights(samples: int, count: int, sizes: list[int]) -> None:
    x = torch.arange(samples)
    pieces = list(MicroBatching(micro_batches=count).split(x))
    assert [len(piece) for piece, _ in pieces] == sizes
    assert torch.equal(torch.cat([piece for piece, _ in pieces]), x)
    assert [weight for _, weight in pieces] == pytest.approx([size / samples for size in sizes])


@pytest.mark.parametrize(
    "batch",
    [
        {"x": torch.arange(4), "flag": True, "nested": [torch.zeros(4, 2), {"y": (torch.ones(4), None)}]},
        (torch.arange(4), "text"),
        Pair(torch.arange(4), torch.tensor(2.0)),
        UserDict(x=torch.arange(4)),
    ],
)
def test_any_nesting_keeps_its_types(batch: Any) -> None:
    (first, _), (second, _) = MicroBatching(micro_batches=2).split(batch)
    assert type(first) is type(second) is type(batch)

    def leaves(value: Any) -> list[Any]:
        if isinstance(value, (dict, UserDict)):
            value = list(value.values())
        return (
            [leaf for inner in value for leaf in leaves(inner)]
            if isinstance(value, (list, tuple))
            else [value]
        )

    for whole, a, b in zip(leaves(batch), leaves(first), leaves(second), strict=True):
        if isinstance(whole, Tensor) and whole.dim():
            assert torch.equal(torch.cat([a, b]), whole)
        else:
            assert a is whole and b is whole


@pytest.mark.parametrize("batch", [{"x": torch.zeros(4), "y": torch.zeros(3)}, {"x": 1}, torch.zeros(0, 3)])
def test_a_batch_without_one_sample_dimension_is_refused(batch: Any) -> None:
    with pytest.raises(UsageError, match="dimension 0 must be the samples"):
        list(MicroBatching().split(batch))


def test_unequal_token_counts_are_weighted() -> None:
    """A mean over tokens: short texts must not count as much as long ones."""
    target = torch.randint(0, 10, (4, 6))
    target[0, 1:], target[1, 2:] = -100, -100
    x = torch.randn(4, 6, 8)

    def gradient(pieces: list[tuple[Any, float]]) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(8, 10).double()
        for (a, t), weight in pieces:
            (weight * F.cross_entropy(model(a.double()).flatten(0, 1), t.flatten())).backward()
        return model.weight.grad

    micro = MicroBatching(micro_batches=2)
    whole = gradient([((x, target), 1.0)])
    tokens = gradient(
        list(micro.split((x, target), loss_weight=lambda piece: float((piece[1] != -100).sum())))
    )
    samples = gradient(list(micro.split((x, target))))
    torch.testing.assert_close(tokens, whole, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(samples, whole, rtol=1e-3)


def test_a_piece_without_a_counted_token_does_not_poison_the_rest() -> None:
    """Its mean loss is 0 / 0: not a number, whatever it is multiplied with."""
    target = torch.tensor([[1, 2], [-100, -100], [3, -100]])
    x = torch.randn(3, 2, 8)
    tokens = lambda piece: float((piece[1] != -100).sum())  # noqa: E731

    def gradient(pieces: list[tuple[Any, float]]) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(8, 10)
        for (a, t), weight in pieces:
            (weight * F.cross_entropy(model(a).flatten(0, 1), t.flatten())).backward()
        return model.weight.grad

    cut = list(MicroBatching(micro_batches=3).split((x, target), loss_weight=tokens))
    assert [weight for _, weight in cut] == pytest.approx([2 / 3, 1 / 3])
    torch.testing.assert_close(gradient(cut), gradient([((x, target), 1.0)]))
    separate = [(x[:1], target[:1]), (x[1:], target[1:])]
    torch.testing.assert_close(gradient(list(weighted(separate, tokens))), gradient([((x, target), 1.0)]))
    ignored = torch.full((2, 2), -100)
    assert [w for _, w in MicroBatching().split((x[:2], ignored), loss_weight=tokens)] == [0.5, 0.5]
    for bad in (-1.0, float("nan")):
        with pytest.raises(UsageError, match="counts samples or tokens"):
            list(weighted(separate, lambda piece, bad=bad: bad))


@pytest.mark.parametrize("case", ["mlp", "hf-bert"])
def test_gradients_add_up(case: str) -> None:
    model, batch = CASES[case].model().eval().double(), CASES[case].batch()
    batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}

    def gradients(pieces: list[tuple[Any, float]]) -> list[Tensor]:
        model.zero_grad()
        for piece, weight in pieces:
            (weight * CASES[case].loss(model, piece)).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = gradients([(batch, 1.0)])
    cut = gradients(list(MicroBatching(micro_batches=3).split(batch)))
    for a, b in zip(plain, cut, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-9)


def test_the_grade_says_what_batch_norm_does() -> None:
    micro = MicroBatching(micro_batches=4)
    assert micro.exactness(CASES["gpt"].model()) == "reordered"
    assert micro.exactness(CNN()) == "approximate"
    assert micro.exactness(CNN().eval()) == "reordered"
    assert MicroBatching(micro_batches=1).exactness(CNN()) == "exact"


def test_the_number_is_noted_for_the_model() -> None:
    model = CASES["mlp"].model()
    assert micro_batches_of(model) == 1
    MicroBatching(micro_batches=4).apply(model)
    assert micro_batches_of(model) == 4
    undo(model)
    assert micro_batches_of(model) == 1
    train(CASES["mlp"], steps=1, model=model)


@pytest.mark.parametrize("bad", [0, -1, 1.5, "2", True])
def test_bad_numbers_are_named(bad: Any) -> None:
    with pytest.raises(UsageError, match="micro_batches must be a whole number of at least 1"):
        MicroBatching(micro_batches=bad)
