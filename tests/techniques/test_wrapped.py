"""Every technique in and around DistributedDataParallel and ``torch.compile``: as alone, or a refusal."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from technique_models import CASES
from test_contract import VARIANTS
from test_pairs import EACH, NAMES, Everything, _batch, _loss
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # inductor's own, about this machine and its types
@pytest.mark.parametrize("name", ["full", "save linear", "chunked", "bf16", "padded vocabulary"])
def test_compiled_by_inductor_and_its_log(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real generated code, against the plain model's; its log has no graph break and no recompilation."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    torch._logging.set_logs(graph_breaks=True, recompiles=True)
    try:
        model = CASES["mlp"].model() if name not in ("chunked", "padded vocabulary") else None
        with caplog.at_level(logging.DEBUG, logger="torch"):
            alone = _inductor(name, model, technique=False)
            caplog.clear()
            changed = _inductor(name, model, technique=True)
    finally:
        torch._logging.set_logs()
        torch._dynamo.reset()
    said = [record.getMessage() for record in caplog.records if record.name.startswith("torch")]
    assert [line for line in said if "Graph break" in line or "Recompiling" in line] == []
    torch.testing.assert_close(changed, alone, rtol=0.02, atol=0.02)


def _inductor(name: str, model: Any, technique: bool) -> Tensor:
    """The output of a compiled model in training mode without dropout."""
    torch.manual_seed(0)
    made = Everything() if model is None else model
    for module in made.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    optimizer = torch.optim.SGD(made.parameters(), lr=0.0)
    if technique:
        dataclasses.replace(VARIANTS[name]).apply(made, optimizer)
    torch._dynamo.reset()
    compiled = torch.compile(made)
    given = _batch()["ids"] if model is None else CASES["mlp"].batch()["x"]
    output: Tensor = compiled(given)
    output.square().mean().backward()
    if technique:
        undo(made)
    made.zero_grad()
    return output.detach()
