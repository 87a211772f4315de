"""Partial quantization: sensitive layers are found by measuring, safe ones become smaller, undo is exact."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from memfit import PartialQuantization, UsageError, undo
from memfit.techniques.partial_quantization_choice import fake_quantized, nf4_round_trip


class Model(nn.Module):
    """Layer ``b`` has one weight that dwarfs the rest of its row, which have no code of their own then."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(64, 64) for _ in range(3))
        self.head = nn.Linear(64, 4)
        with torch.no_grad():
            for layer in (self.a, self.b, self.c):
                layer.weight *= 8
                layer.bias.zero_()
            self.b.weight[:, 0] = 2e3
            self.a.weight[0], self.a.bias[0] = 0.0, 0.0  # its input is zero: the weight does nothing

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))
        return self.head(torch.tanh(self.c(torch.tanh(self.b(x)))))


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def _batches(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    x = torch.randn(64, 64)
    with torch.no_grad():
        y = model(x).argmax(1)
    model.head.weight.data *= 20  # sure of itself: the loss is small, and any change is seen
    return [(x, y)]


def test_only_safe_layers_are_chosen_and_the_model_is_left_alone() -> None:
    model = Model()
    batches = _batches(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    chosen, rows = PartialQuantization(kind="int8").choose(model, batches, _loss, tolerance=0.05)
    assert [row.layer for row in rows][-1] == "b" and not rows[-1].chosen
    assert set(chosen.layers) == {"a", "c"} == {row.layer for row in rows if row.chosen}
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    plain = float(_loss(model, batches[0]).detach())
    chosen.apply(model)
    assert float(_loss(model, batches[0]).detach()) <= plain * 1.05 + 1e-6
    undo(model)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    with pytest.raises(UsageError, match="no layer is safe"):
        PartialQuantization(kind="int8", layers=("b",)).choose(model, batches, _loss, tolerance=1e-9)


@pytest.mark.parametrize("backend", ["memfit", "torchao"])
def test_int8_layers_are_a_quarter_and_compute_what_was_measured(backend: str) -> None:
    if backend == "torchao":
        pytest.importorskip("torchao")
    model = Model()
    x = torch.randn(3, 64)
    expected = nn.functional.linear(x, fake_quantized(model.a.weight.detach(), "int8"), model.a.bias.detach())
    PartialQuantization(layers=("a",), backend=backend).apply(model)
    result = model.a(x).detach()
    assert float((result - expected).norm() / expected.norm()) < 1e-2
    undo(model)
    assert type(model.a) is nn.Linear


def test_gradients_pass_through_int8_layers_to_what_still_trains() -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    technique = PartialQuantization(layers=("c",))
    before = technique.apply(model, optimizer)[0].a.weight.detach().clone()
    assert model.c.codes.nbytes == 64 * 64 and technique.weight_bytes(64, 64) == 64 * 64 + 4 * 64
    _loss(model, (torch.randn(4, 64), torch.arange(4))).backward()
    optimizer.step()
    assert not torch.equal(model.a.weight, before)
    names = [name for name, _ in model.named_parameters()]
    assert "c.weight" not in names and "c.bias" in names
    undo(model)
    assert model.c.weight.requires_grad and any(
        p is model.c.weight for p in optimizer.param_groups[0]["params"]
    )


def test_nf4_rounds_as_bitsandbytes_does() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    torch.manual_seed(0)
    weight = torch.randn(64, 128)
    packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    torch.testing.assert_close(
        functional.dequantize_4bit(packed, state), nf4_round_trip(weight), rtol=1e-5, atol=1e-5
    )
