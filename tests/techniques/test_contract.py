"""What every technique promises, for every technique and many kinds of models."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
import itertools
import pickle
from collections.abc import Iterable

import pytest
import torch
from technique_models import CASES, Case, MLPBlock, Trained, assert_bitwise, assert_close, train
from torch import nn

from memfit.capture import capture_step
from memfit.capture.graph import StepGraph
from memfit.core.errors import UsageError
from memfit.core.exactness import weakest
from memfit.core.workload import Workload
from memfit.techniques import (
    TECHNIQUES,
    ActivationOffload,
    AllocatorSettings,
    AttentionBackend,
    ChannelsLast,
    ChunkedCrossEntropy,
    CompiledPartition,
    GradientCheckpointing,
    LoRA,
    LowMemoryOptimizer,
    MemoryCompression,
    MicroBatching,
    MixedPrecisionTraining,
    OffloadedOptimizerState,
    OptimizerImplementation,
    OptimizerInBackward,
    ParameterOffload,
    PartialQuantization,
    Pruning,
    QLoRA,
    Rematerialization,
    Technique,
    VocabularyPadding,
    applied_techniques,
    technique_from_settings,
    undo,
    undo_all,
)

VARIANTS: dict[str, Technique] = {
    "full": GradientCheckpointing(),
    "every second": GradientCheckpointing(checkpoint_frequency=2),
    "save linear": GradientCheckpointing(save=("linear",)),
    "save one linear": GradientCheckpointing(save=("linear:1",)),
    "save attention": GradientCheckpointing(save=("attention",)),
    "save random": GradientCheckpointing(save=("random",)),
    "save first random": GradientCheckpointing(save=("random:0", "linear:1")),
    "save convolution": GradientCheckpointing(save=("convolution", "normalization:1")),
    "save pointwise": GradientCheckpointing(save=("pointwise",)),
    "dropped": Rematerialization(),
    "chunked": ChunkedCrossEntropy(chunks=3),
    "fused": OptimizerImplementation(implementation="fused"),
    "foreach": OptimizerImplementation(implementation="foreach"),
    "micro": MicroBatching(micro_batches=2),
    "bf16": MixedPrecisionTraining(precision="bf16"),
    "fp16": MixedPrecisionTraining(precision="fp16", max_grad_norm=1e9),
    "bf16 weights": MixedPrecisionTraining(precision="bf16", weights="bf16", rounding="stochastic"),
    "8-bit state": LowMemoryOptimizer(kind="adamw8bit"),
    "adafactor": LowMemoryOptimizer(kind="adafactor"),
    "in backward": OptimizerInBackward(),
    "offloaded state": OffloadedOptimizerState(to="disk"),
    "lora": LoRA(rank=2),
    "qlora": QLoRA(rank=2, targets=("*.up", "up")),
    "allocator": AllocatorSettings(),
    "packed": MemoryCompression(compression_algorithm="exponent-split", min_elements=64),
    "packed to 8 bits": MemoryCompression(compression_algorithm="int8", min_elements=64),
    "spilled": ActivationOffload(to="disk", min_elements=64),
    "parameters on disk": ParameterOffload(to="disk"),
    "math attention": AttentionBackend(backend="math", pad_heads_to=16),
    "channels last": ChannelsLast(),
    "padded vocabulary": VocabularyPadding(multiple=64),
    "pruned": Pruning(),
    "quantized": PartialQuantization(),
    "compiled": CompiledPartition(peak=0.8, backend="aot_eager"),
}
KINDS = ("full", "save linear", "chunked", "fused", "micro")
LATER = ("bf16", "fp16", "bf16 weights", "8-bit state", "adafactor", "in backward", "offloaded state", "lora")
"""Kinds that are tried on fewer models, and in pairs on one."""
SAVED = ("packed", "packed to 8 bits", "spilled", "parameters on disk")
"""Kinds that keep saved tensors or parameters elsewhere or otherwise: on two models, and in some pairs."""


@pytest.fixture(scope="module")
def plain() -> dict[str, Trained]:
    return {name: train(case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def plain_once() -> dict[str, Trained]:
    """One step of each."""
    return {name: train(case, steps=1) for name, case in CASES.items()}


OWN_CASES: dict[type[Technique], tuple[str, ...]] = {
    AttentionBackend: ("gpt", "hf-llama"),
    ChannelsLast: ("cnn",),
    VocabularyPadding: ("gpt", "hf-llama"),
    Pruning: ("gpt", "cnn"),
    PartialQuantization: ("gpt",),
    CompiledPartition: ("mlp",),
}
"""Models that techniques for some kinds of layers are tried on."""


def _fits(case: Case, technique: Technique) -> bool:
    if type(technique) in OWN_CASES:
        return case.name in OWN_CASES[type(technique)]
    if isinstance(technique, QLoRA):
        return case.name == "gpt"
    if technique in [VARIANTS[saved] for saved in SAVED]:
        return case.name in ("gpt", "cnn", "recurrent")
    if technique in [VARIANTS[later] for later in LATER]:
        return case.name in ("gpt", "cnn", "frozen", "hf-llama")
    return case.language or not isinstance(technique, ChunkedCrossEntropy)


def _as_graded(plain: Trained, changed: Trained, techniques: Iterable[Technique], case: str) -> None:
    """The steps are as near to the plain ones as the grades say. Micro-batching itself cuts nothing."""
    techniques = [t for t in techniques if not isinstance(t, MicroBatching)]
    if any(isinstance(t, OptimizerInBackward) for t in techniques):  # no gradient is left to compare
        plain, changed = (dataclasses.replace(trained, gradients={}) for trained in (plain, changed))
    if any(isinstance(t, VocabularyPadding) for t in techniques):
        changed = dataclasses.replace(changed, gradients=_without_padding(plain, changed))
    grade = weakest(t.exactness(CASES[case].model()) for t in techniques)
    if grade == "exact":
        assert_bitwise(plain, changed)
    elif grade == "reordered":
        assert_close(plain, changed, 1e-4)
    elif grade == "approximate":
        _close_losses(plain, changed)
    assert all(bool(loss.isfinite()) for loss in changed.losses)
    assert not all(torch.equal(loss, changed.losses[0]) for loss in changed.losses[1:])


def _without_padding(plain: Trained, changed: Trained) -> dict[str, torch.Tensor]:
    """Gradients of the true rows; those of the padding are zero."""
    pairs = {name: (len(plain.gradients[name]), gradient) for name, gradient in changed.gradients.items()}
    assert not any(gradient[rows:].any() for rows, gradient in pairs.values())
    return {name: gradient[:rows] for name, (rows, gradient) in pairs.items()}


def _pairs() -> list[tuple[str, str]]:
    return [(c, v) for c, v in itertools.product(CASES, VARIANTS) if _fits(CASES[c], VARIANTS[v])]


def own_techniques() -> set[str]:
    """Those of memfit: other tests of the same process may have added theirs to the table."""
    return {name for name, kind in TECHNIQUES.items() if kind.__module__.startswith("memfit.")}


def test_the_variants_cover_the_table() -> None:
    assert {variant.name for variant in VARIANTS.values()} == own_techniques()


@pytest.mark.parametrize(("case", "variant"), _pairs())
def test_three_steps_are_as_the_exactness_says(case: str, variant: str, plain: dict[str, Trained]) -> None:
    technique = dataclasses.replace(VARIANTS[variant])
    _as_graded(plain[case], train(CASES[case], technique.apply), [technique], case)


@pytest.mark.parametrize(("case", "variant"), _pairs())
def test_undo_restores_to_the_bit(case: str, variant: str, plain_once: dict[str, Trained]) -> None:
    def there_and_back(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        before = _picture(model)
        flags = copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups])
        technique = VARIANTS[variant]
        assert technique.apply(model, optimizer) == (model, optimizer)
        assert list(model.state_dict()) == list(before[0]) or isinstance(
            technique, LoRA | PartialQuantization
        )
        assert undo(model) is technique
        assert _picture(model) == before
        assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == flags

    assert_bitwise(plain_once[case], train(CASES[case], there_and_back, steps=1))


def _picture(model: nn.Module) -> tuple[list[str], list[tuple[int, type, list[str]]]]:
    modules = [(id(m), type(m), sorted(key for key in vars(m) if key != "training")) for m in model.modules()]
    return list(model.state_dict()), modules


@pytest.mark.parametrize("variant", VARIANTS)
def test_settings_survive_json(variant: str) -> None:
    settings = VARIANTS[variant].to_settings()
    assert settings["technique"] == VARIANTS[variant].name
    assert technique_from_settings(settings) == VARIANTS[variant]


@pytest.mark.parametrize("variant", (*KINDS, *LATER, *SAVED))
def test_a_second_time_is_refused_and_changes_nothing(variant: str) -> None:
    model = CASES["gpt"].model()
    optimizer = torch.optim.AdamW(model.parameters())
    VARIANTS[variant].apply(model, optimizer)
    before = _picture(model)
    with pytest.raises(UsageError, match="undo"):
        VARIANTS[variant].apply(model, optimizer)
    assert _picture(model) == before
    assert len(applied_techniques(model)) == 1


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(KINDS, 2)))
@pytest.mark.parametrize("case", ["hf-llama"])
def test_two_together(case: str, first: str, second: str, plain: dict[str, Trained]) -> None:
    """On a model of transformers; all pairs on a model that has everything: ``test_pairs``."""
    pair = VARIANTS[first], VARIANTS[second]
    if pair[0].name == pair[1].name:
        pytest.skip("one technique, twice")

    def both(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for technique in pair:
            technique.apply(model, optimizer)

    _as_graded(plain[case], train(CASES[case], both), pair, case)


def _close_losses(plain: Trained, changed: Trained) -> None:
    """Within 2 %: 16-bit products, 8-bit states and other dropout masks move a few steps less."""
    for a, b in zip(plain.losses, changed.losses, strict=False):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)


def test_undo_takes_the_last_one_first() -> None:
    model = CASES["gpt"].model()
    before = _picture(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for variant in KINDS:
        if variant != "save linear":
            VARIANTS[variant].apply(model, optimizer)
    assert [t.name for t in undo_all(model)] == [
        VARIANTS[v].name for v in reversed(KINDS) if v != "save linear"
    ]
    assert _picture(model) == before
    with pytest.raises(UsageError, match="nothing to undo"):
        undo(model)


@pytest.mark.parametrize("variant", ["full", "save linear", "dropped", "chunked", "packed", "spilled"])
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_a_changed_model_can_be_copied(variant: str, way: str, plain: dict[str, Trained]) -> None:
    """The copy works on its own parameters, with the technique on."""
    model = VARIANTS[variant].apply(CASES["gpt"].model())
    copied = _copy(model, way)
    assert [sorted(vars(m)) for m in copied.modules()] == [sorted(vars(m)) for m in model.modules()]
    del model
    assert_close(plain["gpt"], train(CASES["gpt"], model=copied), 1e-4)


@pytest.mark.parametrize("variant", ["full", "save linear", "chunked"])
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_a_model_can_be_copied_after_undo(variant: str, way: str, plain: dict[str, Trained]) -> None:
    model = VARIANTS[variant].apply(CASES["gpt"].model())
    undo(model)
    assert_bitwise(plain["gpt"], train(CASES["gpt"], model=_copy(model, way)))


def _copy(model: nn.Module, way: str) -> nn.Module:
    if way == "deepcopy":
        return copy.deepcopy(model)
    if way == "pickle":
        return pickle.loads(pickle.dumps(model))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("variant", ["full", "save linear", "dropped", "chunked", "packed"])
def test_a_dropped_model_is_freed_at_once(variant: str) -> None:
    import weakref

    model = VARIANTS[variant].apply(CASES["gpt"].model())
    alive = weakref.ref(model.embed.weight)
    del model
    assert alive() is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("case", "variant"),
    [("gpt", "full"), ("gpt", "save linear"), ("gpt", "chunked"), ("cnn", "full"), ("hf-llama", "full")],
)
def test_compiled(case: str, variant: str) -> None:
    """Compiled whole, in one graph. Dropout's masks differ between eager and compiled code: both are
    compiled."""
    model = CASES[case].model()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.1  # without one, PyTorch reads a counter's value, which breaks any graph
    changed = VARIANTS[variant].apply(copy.deepcopy(model))
    runs = []
    for each in (model, changed):
        torch._dynamo.reset()
        compiled = torch.compile(each, backend="aot_eager", fullgraph=True)
        runs.append(train(CASES[case], steps=1, model=compiled))
    assert_close(*runs, 1e-4)
    for name, buffer in runs[0].buffers.items():
        assert torch.equal(buffer, runs[1].buffers[name]), name
    undo(changed)
    assert applied_techniques(changed) == ()


@pytest.mark.parametrize(
    "variant",
    ["full", "save linear", "save attention", "save random", "dropped", "chunked", "packed to 8 bits"],
)
@pytest.mark.parametrize("case", ["gpt", "hf-gpt2", "encoder-decoder"])
def test_on_meta_tensors(case: str, variant: str) -> None:
    """Where no dry run is to be had, plans are tried on tensors without values, and without autocast."""
    if not _fits(CASES[case], VARIANTS[variant]):
        pytest.skip("not a language model")
    model = VARIANTS[variant].apply(CASES[case].model().to("meta"))
    CASES[case].loss(
        model, {name: value.to("meta") for name, value in CASES[case].batch().items()}
    ).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("variant", ["bf16", "fp16"])
def test_low_precision_compiles_whole(variant: str) -> None:
    """In one graph, and to what PyTorch's own autocast gives, compiled."""
    technique = dataclasses.replace(VARIANTS[variant])
    dtype = torch.bfloat16 if variant == "bf16" else torch.float16
    model = nn.Sequential(nn.Linear(8, 16), MLPBlock(16))
    plain, x = copy.deepcopy(model), torch.randn(4, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    technique.apply(model, optimizer)
    torch._dynamo.reset()
    ours = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    with torch.autocast("cpu", dtype):
        theirs = torch.compile(plain, backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(ours, theirs.float())
    technique.scale_loss(ours.square().mean()).backward()
    optimizer.step()


@pytest.mark.parametrize("variant", VARIANTS)
def test_estimates_are_for_the_step(variant: str) -> None:
    """Peaks stay above zero; what a technique leaves at rest is what the optimizer or the weights give up."""
    graph, model = _captured_gpt(), CASES["gpt"].model()
    if isinstance(VARIANTS[variant], GradientCheckpointing | ChunkedCrossEntropy | LoRA | LowMemoryOptimizer):
        named = getattr(VARIANTS[variant], "blocks", None) or getattr(VARIANTS[variant], "layer", None)
        with pytest.raises(UsageError, match="needs the model") if not named else contextlib.nullcontext():
            VARIANTS[variant].estimate(graph)
    saving = VARIANTS[variant].estimate(graph, model)
    assert saving.peak_bytes < graph.peak_bytes
    assert saving.resting_bytes < graph.resting_bytes
    assert saving.extra_flops <= graph.flops


@functools.cache
def _captured_gpt() -> StepGraph:
    case = CASES["gpt"]
    return capture_step(Workload(name="gpt", model=case.model, batch=case.batch, loss=case.loss))
