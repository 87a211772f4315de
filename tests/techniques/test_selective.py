"""Which operations are skipped in the recompute, and what happens when that cannot be right."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from technique_models import GPTBlock, MLPBlock
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.core.errors import UsageError
from memfit.techniques import GradientCheckpointing


class _Count(TorchDispatchMode):
    """Counts the operations that really run."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def _backward_ran(block: nn.Module, x: Tensor, save: tuple[str, ...] | None) -> Counter[str]:
    model = nn.Sequential(block, nn.Identity())
    if save is not None:
        GradientCheckpointing(blocks={"0": save}).apply(model)
    loss = model(x).sum()
    with _Count() as count:
        loss.backward()
    return count.ran


@pytest.mark.parametrize(
    ("save", "products"),
    [
        ((), 4),
        (("linear",), 0),
        (("linear:0",), 3),
        (("linear:0", "linear:2"), 2),
        (("linear:9",), 4),
        (("attention",), 4),
        (("linear", "attention", "random"), 0),
    ],
)
def test_saved_products_do_not_run_again(save: tuple[str, ...], products: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 32)
    block = GPTBlock()
    assert _backward_ran(block, x, save)["addmm"] == products


def test_attention_fused_and_unfused() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 32)
    fused = GPTBlock().eval()
    kernel = "_scaled_dot_product_flash_attention_for_cpu"
    assert _backward_ran(fused, x, ())[kernel] == 1
    assert _backward_ran(GPTBlock().eval(), x, ("attention",))[kernel] == 0

    class Unfused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.o = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            q = self.q(x)
            return self.o(F.dropout((q @ x.mT).softmax(-1), 0.1) @ x)

    plain = _backward_ran(Unfused(), x, ())["bmm"]
    assert _backward_ran(Unfused(), x, ("attention",))["bmm"] == plain - 1


def test_a_linear_layer_on_a_transposed_input_counts_as_linear() -> None:
    """PyTorch runs it as a batched product with the weight repeated."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.b(torch.tanh(self.a(x.transpose(1, 2)).transpose(1, 2))))

    x = torch.randn(3, 6, 8)
    products = [
        sum(_backward_ran(Block(), x, save)[op] for op in ("bmm", "addmm", "mm"))
        for save in ((), ("linear",))
    ]
    assert products[0] - products[1] == 2


@pytest.mark.parametrize(
    "save", [("linear",), ("linear:0",), ("pointwise",), ("convolution", "normalization")]
)
def test_an_output_changed_in_place_inside_the_block_is_right(save: tuple[str, ...]) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            self.conv, self.norm = nn.Conv1d(3, 3, 1), nn.GroupNorm(1, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            z = y.sigmoid()
            y.add_(1)
            y[:, 0] *= 2
            w = self.norm(self.conv(y)).mul_(2)
            return self.b(w + z).add_(1).sin_()

    def run(on: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, x = nn.Sequential(Block(), Block()), torch.randn(2, 3, 8)
        if on:
            GradientCheckpointing(save=save).apply(model)
        model(x).square().sum().backward()
        return [p.grad for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True), strict=True))


def test_an_output_changed_in_place_after_the_block_is_refused() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.a(x)
            return y, self.b(torch.tanh(y))

    model = nn.ModuleList([Block()])
    GradientCheckpointing(blocks={"0": ["linear:0"]}).apply(model)
    y, z = model[0](torch.randn(2, 8))
    y.detach().mul_(2)
    with pytest.raises(UsageError, match=r"addmm.* in block '0' was changed in place after"):
        z.sum().backward()


def test_a_forward_that_takes_another_way_in_the_recompute_is_refused() -> None:
    class Block(nn.Module):
        way = True

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            first, second = (self.a, self.b) if Block.way else (self.b, self.a)
            return torch.tanh(second(torch.tanh(first(x))))

    model = GradientCheckpointing(blocks={"0": ["linear"]}).apply(nn.Sequential(Block()))
    y = model(torch.randn(2, 8))
    Block.way = False
    with pytest.raises(
        UsageError, match=r"block '0' did not run the same operations again: operation 0 .*addmm"
    ):
        y.sum().backward()


def test_what_was_not_needed_is_gone_after_the_recompute() -> None:
    """The last product's output is not asked for: its recompute stops before. It must not live on with the
    graph."""
    import weakref

    from memfit.techniques import selective

    kept: list[Any] = []
    original = selective._sharing_versions

    def spy(tensors: list[Tensor]) -> list[Tensor]:
        made = original(tensors)
        kept.extend(weakref.ref(tensor) for tensor in made)
        return made

    selective._sharing_versions = spy  # type: ignore[assignment]
    try:
        model = GradientCheckpointing(blocks={"0": ["linear"]}).apply(nn.Sequential(MLPBlock(8)))
        loss = model(torch.randn(2, 8)).sum()
        assert any(reference() is not None for reference in kept)
        loss.backward(retain_graph=True)
        assert all(reference() is None for reference in kept)
    finally:
        selective._sharing_versions = original
