"""Every technique with every other one, in both orders: together as near to the plain step as their grades
say, or refused in one line that changes nothing. The pairs come from the table of techniques."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from technique_models import GPT, Case, Trained, assert_bitwise, assert_close, train
from test_contract import VARIANTS, own_techniques
from torch import Tensor, nn

from memfit.analysis.ladder_order import in_order_of_application
from memfit.core.errors import UsageError
from memfit.core.exactness import weakest
from memfit.techniques import (
    MixedPrecisionTraining,
    OptimizerInBackward,
    Technique,
    VocabularyPadding,
    applied_techniques,
    offloaded_optimizer_state,
    undo,
    undo_all,
)

MORE = ("fp16", "bf16 weights", "adafactor", "packed to 8 bits")
"""Variants that pairs can depend on, beside the first of each technique."""
NAMES = [
    name
    for number, name in enumerate(VARIANTS)
    if name in MORE or VARIANTS[name].name not in [v.name for v in list(VARIANTS.values())[:number]]
]
SLOW = ("compiled",)
"""They compile in each run: those pairs are tested with the slow tests."""
EACH = [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in NAMES]
REFUSED: dict[tuple[str, str], tuple[str, ...]] = {
    ("micro", "never"): ("in backward",),
    ("in backward", "never"): ("fp16", "bf16 weights", "offloaded state"),
    ("offloaded state", "never"): ("bf16 weights", "8-bit state", "adafactor"),
    ("fused", "after"): ("8-bit state", "adafactor"),
    ("lora", "after"): (
        "bf16",
        "fp16",
        "bf16 weights",
        "8-bit state",
        "adafactor",
        "in backward",
        "offloaded state",
        "parameters on disk",
    ),
    ("packed", "never"): ("spilled",),
    ("packed to 8 bits", "never"): ("spilled",),
    ("padded vocabulary", "never"): ("chunked",),
    ("math attention", "after"): ("full",),
    ("parameters on disk", "after"): (
        "in backward",
        "full",
        "dropped",
        "packed",
        "packed to 8 bits",
        "spilled",
        "math attention",
    ),
    ("qlora", "never"): ("lora",),
    ("pruned", "after"): ("qlora",),
    ("quantized", "never"): ("lora", "qlora"),
}
"""What cannot be: ``never`` in either order, ``after`` when the first is applied on top of the others."""
LORA_LIKE = ("qlora",)
"""Refuses what LoRA refuses."""


@pytest.fixture(autouse=True)
def _as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offloaded state steps the CPU's parameters by copies, as it does those of a device."""
    monkeypatch.setattr(offloaded_optimizer_state, "is_elsewhere", lambda parameter: True)


class Everything(GPT):
    """Has what every technique looks for: blocks, attention, a tied vocabulary, a convolution."""

    def __init__(self) -> None:
        super().__init__(vocabulary=40, width=16, layers=2)
        self.mix = nn.Conv2d(1, 2, 3, padding=1)
        nn.init.normal_(self.embed.weight, std=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.mix(x.unsqueeze(1)).mean(1)
        for block in self.h:
            x = block(x, scale=0.5)
        return self.head(x)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return Everything()


def _batch() -> dict[str, Tensor]:
    return {"ids": torch.arange(20).view(2, 10) * 7 % 40}


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["ids"].flatten() * 3 % 40)


PLAIN = _model()
CASE = Case("everything", _model, _batch, _loss, 2, True)


def _expected(first: str, second: str) -> str | None:
    """``never``, ``order``, or None where the second goes on top of the first."""
    for (name, when), others in REFUSED.items():
        pairs = {(name, other) for other in others}
        if when == "never" and ((first, second) in pairs or (second, first) in pairs):
            return "never"
        if when == "after" and (second, first) in pairs:
            return "order"
    if second in LORA_LIKE and _expected(first, "lora") == "order":
        return "order"
    return "order" if second == "quantized" else None


@pytest.fixture(scope="module")
def alone() -> dict[str, Trained]:
    """Two steps plain, and with each technique that changes the training."""
    runs = {"plain": train(CASE, steps=2)}
    for name in NAMES:
        if VARIANTS[name].exactness(PLAIN) == "changes training":
            runs[name] = train(CASE, dataclasses.replace(VARIANTS[name]).apply, steps=2)
    return runs


def test_the_pairs_cover_the_table() -> None:
    assert {VARIANTS[name].name for name in NAMES} == own_techniques()


@pytest.mark.parametrize(
    "first", [pytest.param(name, marks=[pytest.mark.slow] * (name in (*MORE, *SLOW))) for name in NAMES]
)
def test_every_pair(first: str, alone: dict[str, Trained]) -> None:
    seconds = NAMES if first in SLOW else [name for name in NAMES if name not in SLOW]
    assert _problems([(first, second) for second in seconds], alone) == {}


@pytest.mark.slow
@pytest.mark.parametrize("second", SLOW)
def test_every_pair_on_top(second: str, alone: dict[str, Trained]) -> None:
    assert _problems([(first, second) for first in NAMES], alone) == {}


def _problems(pairs: list[tuple[str, str]], alone: dict[str, Trained]) -> dict[tuple[str, str], str]:
    found = {pair: _problem(*pair, alone) for pair in pairs}
    return {pair: problem for pair, problem in found.items() if problem}


def _problem(first: str, second: str, alone: dict[str, Trained]) -> str:
    """What is wrong with the second on top of the first; empty where nothing is."""
    if VARIANTS[first].name == VARIANTS[second].name:
        return ""
    pair, refusals = [dataclasses.replace(VARIANTS[name]) for name in (first, second)], []

    def both(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        pair[0].apply(model, optimizer)
        before, random = _picture(model), torch.get_rng_state()
        try:
            pair[1].apply(model, optimizer)
        except UsageError as refusal:
            refusals.append(str(refusal))
            assert _picture(model) == before and applied_techniques(model) == (pair[0],), "a refusal changes"
            return
        assert undo(model) is pair[1]
        assert _picture(model) == before, "undo of the second"
        torch.set_rng_state(random)  # adapters are drawn
        pair[1].apply(model, optimizer)

    model = _model()
    plain_picture = _picture(model)
    changed = train(CASE, both, steps=2, model=model)
    values = {name: value.clone() for name, value in changed.parameters.items()}
    changed = dataclasses.replace(changed, parameters=values)
    undo_all(model)
    if _picture(model) != plain_picture:
        return "undo of both leaves something"
    expected = _expected(first, second)
    if refusals:
        (line,) = refusals
        named = any(word in line for word in (pair[0].name, pair[1].name, "AdamW8bit", "Adafactor"))
        return "" if expected and named and "\n" not in line else f"refused: {line}"
    return (
        f"not refused, and {expected} was expected"
        if expected
        else _graded(first, second, pair, changed, alone)
    )


def _graded(
    first: str, second: str, pair: list[Technique], changed: Trained, alone: dict[str, Trained]
) -> str:
    """As near as the grades say to the plain steps, or to those of the one that changes the training."""
    changing = [name for name in (first, second) if name in alone]
    if len(changing) == 2 or (changing and any(isinstance(t, MixedPrecisionTraining) for t in pair)):
        return "" if all(bool(loss.isfinite()) for loss in changed.losses) else "not finite"
    others = [t for t, name in zip(pair, (first, second), strict=True) if name not in alone]
    grade = weakest(t.exactness(PLAIN) for t in others)
    if {first, second} == {"adafactor", "padded vocabulary"}:
        grade = "approximate"  # its statistics are of whole rows and columns, zeros among them
    reference = alone[changing[0]] if changing else alone["plain"]
    if any(isinstance(t, OptimizerInBackward | VocabularyPadding) for t in pair):
        none: dict[str, Tensor] = {}
        reference, changed = (
            dataclasses.replace(t, gradients=none, parameters=none) for t in (reference, changed)
        )
    try:
        if grade == "exact":
            assert_bitwise(reference, changed)
        elif grade == "reordered":
            assert_close(reference, changed, 1e-4)
        else:
            for a, b in zip(reference.losses, changed.losses, strict=True):
                torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)
    except AssertionError as difference:
        return f"{grade}: {' '.join(str(difference).split())[:200]}"
    return ""


def _picture(model: nn.Module) -> list[object]:
    return [
        list(model.state_dict()),
        *([type(m), *sorted(key for key in vars(m) if key != "training")] for m in model.modules()),
    ]


def test_a_ladder_applies_techniques_in_the_order_that_works() -> None:
    """Where one order of two is refused, the ladder takes the other, whatever the user's order is."""
    wrong = [
        (first, second)
        for first, second in _ordered()
        if [VARIANTS[n].to_settings() for n in (second, first)]
        != list(in_order_of_application([VARIANTS[n].to_settings() for n in (first, second)]))
    ]
    assert wrong == []


def _ordered() -> Iterator[tuple[str, str]]:
    for first in NAMES:
        for second in NAMES:
            if _expected(first, second) == "order" and _expected(second, first) is None and second != "fused":
                yield first, second
