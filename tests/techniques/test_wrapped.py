"""Every technique in and around DistributedDataParallel and ``torch.compile``: as alone, or a refusal."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from technique_models import MLPBlock
from test_contract import VARIANTS
from test_pairs import EACH, MORE, NAMES, Everything, _batch, _loss
from torch import Tensor, nn

from memfit.core.errors import UsageError
from memfit.techniques import applied_techniques, mixed_precision_of, undo

WRAP_LATER = (
    "bf16 weights",
    "in backward",
    "lora",
    "qlora",
    "channels last",
    "padded vocabulary",
    "quantized",
)
"""What changes parameters, or steps them, cannot go into a model that DistributedDataParallel has seen."""
NEVER_WRAPPED = ("in backward",)
"""Its refusal comes with the step: `test_habits`."""
RESTS_OR_ROUNDS = ("chunked", "bf16", "fp16", "bf16 weights", "packed to 8 bits")
"""Under a compiler these rest, or round elsewhere: the same within the tolerance of their grade."""


def _steps(
    name: str, wrap: Callable[[Any], Any], order: str, model: nn.Module | None = None, **settings: Any
) -> list[Tensor]:
    """Losses and parameters of two steps, wrapped before or after the technique is applied."""
    torch.manual_seed(0)
    model = Everything() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    technique = dataclasses.replace(VARIANTS[name], **settings)
    if order == "before":
        technique.apply(model, optimizer)
        wrapped = wrap(model)
    else:
        wrapped = wrap(model)
        technique.apply(wrapped, optimizer)
    torch.manual_seed(1)
    losses = []
    for _ in range(2):
        loss, mixed = _loss(wrapped, _batch()), mixed_precision_of(wrapped)
        (loss if mixed is None else mixed.scale_loss(loss)).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    found = [*losses, *(p.detach().clone() for p in model.parameters())]
    assert undo(wrapped) is technique and applied_techniques(model) == ()
    return found


def _as_it_is(model: nn.Module) -> nn.Module:
    return model


@pytest.mark.parametrize("name", [each for each in EACH if each.values[0] not in NEVER_WRAPPED])
def test_distributed_data_parallel(name: str, one_process_group: None) -> None:
    alone = _steps(name, _as_it_is, "before")
    inside = _steps(name, nn.parallel.DistributedDataParallel, "before")
    assert all(torch.equal(a, b) for a, b in zip(alone, inside, strict=True))
    if name not in WRAP_LATER:
        around = _steps(name, nn.parallel.DistributedDataParallel, "after")
        assert all(torch.equal(a, b) for a, b in zip(alone, around, strict=True))


@pytest.mark.parametrize("name", WRAP_LATER)
def test_what_cannot_go_into_a_wrapped_model_says_so(name: str, one_process_group: None) -> None:
    model = Everything()
    wrapped = nn.parallel.DistributedDataParallel(model)
    with pytest.raises(UsageError, match="DistributedDataParallel"):
        VARIANTS[name].apply(wrapped, torch.optim.AdamW(wrapped.parameters()))
    assert applied_techniques(wrapped) == ()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("name", NAMES)
def test_compiled_without_generated_code(name: str, order: str) -> None:
    """``aot_eager``: captured and differentiated as for a compiler, run by PyTorch's own kernels."""
    torch._dynamo.reset()
    alone = _steps(name, _as_it_is, "before")
    compiled = _steps(name, lambda model: torch.compile(model, backend="aot_eager"), order)
    for a, b in zip(alone, compiled, strict=True):
        if name in RESTS_OR_ROUNDS:
            torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)
        else:
            assert torch.equal(a, b)


class Small(nn.Module):
    """What techniques look for, but attention, in few kernels to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.mix = nn.Conv2d(1, 1, 3, padding=1)
        self.h = nn.ModuleList(MLPBlock(16) for _ in range(2))
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.mix(x.unsqueeze(1)).squeeze(1)
        for block in self.h:
            x = block(x)
        return self.head(x)


class SmallAttention(nn.Module):
    """One attention, for the technique that chooses its kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(40, 16), nn.Linear(16, 40)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).unsqueeze(1)
        return self.head(nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).squeeze(1))


@pytest.fixture(scope="module")
def inductor_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One for the module: what a technique leaves as it is, is compiled once."""
    return str(tmp_path_factory.mktemp("inductor"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # inductor's own, about this machine and its types
@pytest.mark.parametrize("name", ["save linear", *(name for name in NAMES if name not in MORE)])
def test_compiled_by_inductor_and_its_log(
    name: str, inductor_cache: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real generated code, two steps: as without a compiler; its log has no graph break and no
    recompilation."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", inductor_cache)
    made = SmallAttention if name == "math attention" else Small
    torch.manual_seed(0)
    model = made()
    alone = _steps(name, _as_it_is, "before", copy.deepcopy(model))
    torch._dynamo.reset()
    torch._logging.set_logs(graph_breaks=True, recompiles=True)
    try:
        with caplog.at_level(logging.DEBUG, logger="torch"):
            caplog.clear()
            compiled = _steps(name, torch.compile, "before", model)
    finally:
        torch._logging.set_logs()
        torch._dynamo.reset()
    said = [record.getMessage() for record in caplog.records if record.name.startswith("torch")]
    assert [line for line in said if "Graph break" in line or "Recompiling" in line] == []
    for a, b in zip(alone, compiled, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)
