"""Gradient checkpointing where checkpointing goes wrong elsewhere: state, random numbers, frozen layers, odd
uses."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from technique_models import CASES, CNN, GPT, GPTBlock, MLPBlock, assert_bitwise, train
from torch import Tensor, nn

from memfit.core.errors import UsageError
from memfit.techniques import GradientCheckpointing, undo
from memfit.techniques.base import Technique


def _wrapped(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


@pytest.mark.parametrize(
    ("settings", "chosen"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"checkpoint_frequency": 4}, [0, 4]),
        ({"checkpoint_frequency": 9}, [0]),
        ({"memory_savings": 0.5}, [0, 1, 2]),
        ({"memory_savings": 0.01}, [0]),
        ({"memory_savings": 1.0}, [0, 1, 2, 3, 4, 5]),
        ({"blocks": {"h.5": [], "h.1": ["linear:0"]}}, [1, 5]),
    ],
)
def test_which_blocks_are_recomputed(settings: dict[str, Any], chosen: list[int]) -> None:
    model = GPT(layers=6)
    assert GradientCheckpointing(**settings).apply(model) is model
    assert _wrapped(model) == [f"h.{number}" for number in chosen]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"checkpoint_frequency": 0}, "checkpoint_frequency.*at least 1, not 0"),
        ({"checkpoint_frequency": True}, "checkpoint_frequency"),
        ({"checkpoint_frequency": 2, "memory_savings": 0.5}, "checkpoint_frequency and memory_savings"),
        ({"memory_savings": 1.5}, "memory_savings must be above 0 and at most 1, not 1.5"),
        ({"save": ("matmul",)}, "'matmul'.*linear, attention"),
        ({"save": ("linear:x",)}, "'linear:x'"),
        ({"save": "linear"}, "list of names"),
        ({"blocks": {"h.0": ["linear:-1"]}}, "'h.0'.*'linear:-1'"),
        ({"blocks": {}}, "blocks must map"),
        ({"blocks": {"h.0": []}, "save": ("linear",)}, "one of blocks and save"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        GradientCheckpointing(**settings)


def test_unknown_settings_and_techniques_are_named() -> None:
    from memfit.techniques import technique_from_settings

    with pytest.raises(UsageError, match="no setting 'every'; it has checkpoint_frequency"):
        technique_from_settings({"technique": "gradient_checkpointing", "every": 2})
    with pytest.raises(UsageError, match="'checkpointing'; there are gradient_checkpointing"):
        technique_from_settings({"technique": "checkpointing"})


@pytest.mark.parametrize(
    ("model", "technique", "words"),
    [
        (lambda: nn.LSTM(4, 4), GradientCheckpointing(), "no repeated blocks found in this LSTM"),
        (GPT, GradientCheckpointing(blocks={"h.7": []}), "no module 'h.7'; its blocks are h.0 … h.2"),
        (GPT, GradientCheckpointing(blocks={"h": []}), "'h' is a ModuleList, which is never called itself"),
        (
            GPT,
            GradientCheckpointing(blocks={"h.0": ["linear"], "h.0.up": []}),
            "'h.0.up' lies within block 'h.0'",
        ),
    ],
)
def test_models_that_do_not_fit_are_refused_unchanged(model: Any, technique: Technique, words: str) -> None:
    made = model()
    with pytest.raises(UsageError, match=words):
        technique.apply(made)
    assert _wrapped(made) == []


def test_transformers_own_checkpointing_is_refused() -> None:
    model = CASES["hf-gpt2"].model()
    model.gradient_checkpointing_enable()
    with pytest.raises(UsageError, match="gradient_checkpointing_disable"):
        GradientCheckpointing().apply(model)


def test_pytorchs_own_checkpoint_counts_batch_norm_twice_and_ours_does_not() -> None:
    """The independent witness of the fault that is avoided (pytorch/pytorch#96136)."""
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    model, x = CNN(), torch.randn(4, 3, 8, 8)
    block = model.layer1[0]
    checkpoint(block, model.stem(x), use_reentrant=False).sum().backward()
    assert int(block.bn1.num_batches_tracked) == 2
    GradientCheckpointing().apply(model)
    model(x).sum().backward()
    assert int(block.bn1.num_batches_tracked) == 3
    assert int(model.layer2[0].downsample[1].num_batches_tracked) == 1


@pytest.mark.parametrize("norm", ["frozen", "sync-like", "renorm", "instance", "ema-by-value"])
def test_other_norms(norm: str) -> None:
    """Running statistics of layers that are not plain batch norms: frozen, written by hand, used in the
    output."""

    class Renorm(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            out = (x - self.running_mean) / (self.running_var + self.eps).sqrt()
            with torch.no_grad():
                self.running_mean += 0.1 * (x.mean(0) - self.running_mean)
                self.running_var += 0.1 * (x.var(0) - self.running_var)
            return out * self.weight + self.bias

    class ByHand(nn.Module):
        """Calls the functional form on its own buffers, which leaves no version behind."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("running_mean", torch.zeros(8))
            self.register_buffer("running_var", torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return F.batch_norm(x, self.running_mean, self.running_var, training=self.training)

    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.average = torch.zeros(8)

        def forward(self, x: Tensor) -> Tensor:
            self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
            return x - self.average

    def layer() -> nn.Module:
        if norm == "frozen":
            return nn.BatchNorm1d(8).eval()
        if norm == "instance":
            shape = nn.Unflatten(1, (8, 1)), nn.InstanceNorm1d(8, track_running_stats=True, affine=True)
            return nn.Sequential(
                nn.Linear(8, 16), nn.Unflatten(1, (8, 2)), *shape[1:], nn.Flatten(), nn.Linear(16, 8)
            )
        return {"sync-like": ByHand, "renorm": lambda: Renorm(8), "ema-by-value": Average}[norm]()

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm, self.b = nn.Linear(8, 8), layer(), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.b(self.norm(self.a(x)).tanh())

    def run(on: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(Block(), Block())
        x = torch.randn(6, 8)
        if on:
            GradientCheckpointing().apply(model)
        for _ in range(3):
            model(x).square().sum().backward()
        averages = [m.average for m in model.modules() if hasattr(m, "average")]
        return [*(p.grad for p in model.parameters()), *model.buffers(), *averages]

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True), strict=True))


def test_a_buffer_that_changes_in_some_calls_only_is_refused() -> None:
    class Sometimes(MLPBlock):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.register_buffer("seen", torch.zeros(width))
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == 3:
                self.seen.add_(x.detach().mean(0))
            return super().forward(x)

    model = GradientCheckpointing().apply(nn.Sequential(Sometimes(8), Sometimes(8)))
    x = torch.randn(2, 8)
    model(x).sum().backward()
    model(x).sum().backward()
    with pytest.raises(UsageError, match="block '0' changes its buffer 'seen' in place in some calls only"):
        model(x)


def test_the_next_random_number_is_that_of_the_plain_run() -> None:
    def run(on: bool) -> Tensor:
        torch.manual_seed(0)
        model, ids = GPT(), torch.randint(0, 97, (2, 5))
        model = GradientCheckpointing().apply(model) if on else model
        model(ids).sum().backward()
        return torch.rand(3)

    assert torch.equal(run(False), run(True))


@pytest.mark.parametrize("save", [(), ("linear",), ("random",)])
def test_micro_batches_and_two_losses(save: tuple[str, ...]) -> None:
    """Several forwards before the first backward, and one model called twice (a discriminator's real and
    fake)."""

    def run(on: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, ids = GPT(), torch.randint(0, 97, (4, 5))
        if on:
            GradientCheckpointing(save=save).apply(model)
        first, second = model(ids[:2]), model(ids[2:])
        (second.square().mean() - first.mean()).backward()
        model(ids).mean().backward()
        return [p.grad for p in model.parameters()] + [torch.get_rng_state()]

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True), strict=True))


@pytest.mark.parametrize("save", [(), ("linear",), ("random:0",)])
def test_a_second_backward_through_the_same_graph(save: tuple[str, ...]) -> None:
    def run(on: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, ids = GPT(), torch.randint(0, 97, (4, 5))
        if on:
            GradientCheckpointing(save=save).apply(model)
        loss = model(ids).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return [p.grad for p in model.parameters()] + [torch.get_rng_state()]

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True), strict=True))


@pytest.mark.parametrize("save", [(), ("linear:1",), ("attention", "random")])
@pytest.mark.parametrize("cache", [True, False])
def test_autocast_is_the_same_in_the_recompute(save: tuple[str, ...], cache: bool) -> None:
    def run(on: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, ids = GPT(), torch.randint(0, 97, (4, 5))
        if on:
            GradientCheckpointing(save=save).apply(model)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            loss = model(ids).square().mean()
        loss.backward()
        return [loss, *(p.grad for p in model.parameters())]

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True), strict=True))


def test_without_gradients_nothing_is_kept_or_changed() -> None:
    model = GradientCheckpointing(save=("linear",)).apply(GPT().eval())
    ids = torch.randint(0, 97, (2, 5))
    with torch.no_grad():
        quiet = model(ids)
    with torch.inference_mode():
        quietest = model(ids)
    undo(model)
    assert torch.equal(quiet, model(ids)) and torch.equal(quietest, quiet)


def test_evaluation_with_gradients_fills_the_cache() -> None:
    """Keys and values that a caller asked for are there; in training mode transformers leaves them out, and
    so do we."""
    model = CASES["hf-llama"].model().eval()
    batch = CASES["hf-llama"].batch()
    expected = model(**batch).past_key_values
    GradientCheckpointing().apply(model)
    out = model(**batch)
    out.loss.backward()
    assert out.past_key_values.get_seq_length() == expected.get_seq_length() == 9
    assert torch.equal(out.past_key_values.layers[1].keys, expected.layers[1].keys)


def test_a_cache_with_a_prefix_is_used_in_the_recompute_too() -> None:
    def run(on: bool) -> list[Tensor]:
        model, batch = CASES["hf-llama"].model(), CASES["hf-llama"].batch()
        with torch.no_grad():
            prefix = model(input_ids=batch["input_ids"][:, :4]).past_key_values
        if on:
            GradientCheckpointing().apply(model)
        out = model(input_ids=batch["input_ids"], labels=batch["labels"], past_key_values=prefix)
        out.loss.backward()
        return [out.loss, *(p.grad for p in model.parameters())]

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True), strict=True))


def test_an_exception_in_a_block_comes_through_and_leaves_the_model_usable() -> None:
    class Failing(MLPBlock):
        fail = False

        def forward(self, x: Tensor) -> Tensor:
            if self.fail:
                raise ZeroDivisionError("the user's own")
            return super().forward(x)

    model = GradientCheckpointing(save=("linear",)).apply(nn.Sequential(Failing(8), Failing(8)))
    x = torch.randn(2, 8)
    model[1].fail = True
    with pytest.raises(ZeroDivisionError):
        model(x)
    model[1].fail = False
    model(x).sum().backward()
    assert model[0].up.weight.grad is not None


@pytest.mark.parametrize("save", [(), ("linear",)])
def test_a_generator_given_to_a_block_is_told(save: tuple[str, ...]) -> None:
    """The recompute would find it empty: the plain model trains, so the error must say what to do."""

    class Sums(nn.Linear):
        def forward(self, terms: Any) -> Tensor:
            return sum(super(Sums, self).forward(term) for term in list(terms))

    model = nn.ModuleList(Sums(4, 4) for _ in range(2))
    GradientCheckpointing(blocks={"0": list(save), "1": list(save)}).apply(model)
    x = torch.ones(2, 4)
    model[0]([x, x]).sum().backward()
    with pytest.raises(UsageError, match="block '1' is given a generator.*give it a list"):
        model[1](each for each in (x, x))


def test_nested_blocks() -> None:
    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(GPTBlock() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    def run(names: list[str]) -> list[Tensor]:
        torch.manual_seed(0)
        model, x = nn.Sequential(Stage(), Stage()), torch.randn(2, 3, 32)
        if names:
            GradientCheckpointing(blocks=dict.fromkeys(names, ())).apply(model)
        model(x).square().sum().backward()
        return [p.grad for p in model.parameters()] + [torch.get_rng_state()]

    nested = run(["0", "0.blocks.0", "0.blocks.1", "1"])
    assert all(torch.equal(a, b) for a, b in zip(run([]), nested, strict=True))


def test_one_block_called_many_times_and_named_twice() -> None:
    def run(on: bool) -> list[Tensor]:
        torch.manual_seed(0)
        block, x = GPTBlock(), torch.randn(2, 3, 32)
        model = nn.Sequential(block, block, block)
        if on:
            GradientCheckpointing(blocks={"0": [], "1": [], "2": []}).apply(model)
        model(x).square().sum().backward()
        return [p.grad for p in model.parameters()] + [torch.get_rng_state()]

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True), strict=True))


def test_hooks_of_a_block_run_once() -> None:
    model, calls = GPT(), []
    model.h[0].register_forward_pre_hook(lambda *_: calls.append("before"))
    model.h[0].register_forward_hook(lambda *_: calls.append("after"))
    GradientCheckpointing().apply(model)
    model(torch.randint(0, 97, (2, 5))).sum().backward()
    assert calls == ["before", "after"]


def test_a_forward_that_was_set_on_the_instance_before_is_kept() -> None:
    model = nn.Sequential(MLPBlock(8), MLPBlock(8))
    own = model[0].forward
    patched = model[0].forward = lambda x: own(x) * 2
    GradientCheckpointing().apply(model)
    x = torch.randn(2, 8)
    assert torch.equal(model[:1](x), own(x) * 2)
    undo(model)
    assert model[0].forward is patched


def test_undo_after_somebody_elses_replacement_says_so() -> None:
    model = GradientCheckpointing().apply(nn.Sequential(MLPBlock(8), MLPBlock(8)))
    ours = model[0].forward
    model[0].forward = lambda x: ours(x)
    with pytest.raises(UsageError, match="replaced after"):
        undo(model)


def test_the_adapters_of_a_frozen_model_get_their_gradients() -> None:
    """Case 16: nothing before the blocks and nothing after them trains."""
    changed = train(CASES["frozen"], GradientCheckpointing().apply)
    assert len(changed.gradients) == 6
    assert all(bool(gradient.abs().sum() > 0) for gradient in changed.gradients.values())


def test_a_plan_made_on_the_bare_model_fits_the_compiled_one_and_back() -> None:
    bare, compiled = GPT(), torch.compile(GPT(), backend="eager")
    GradientCheckpointing(blocks={"_orig_mod.h.1": ()}).apply(bare)
    GradientCheckpointing(blocks={"h.1": ()}).apply(compiled)
    assert _wrapped(bare) == ["h.1"]
    assert "forward" in vars(compiled._orig_mod.h[1])


def test_blocks_that_are_compiled_one_by_one() -> None:
    def run(on: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, x = nn.Sequential(*[MLPBlock(8) for _ in range(3)]), torch.randn(2, 8)
        for number in range(3):
            model[number] = torch.compile(model[number], backend="eager")
        if on:
            GradientCheckpointing(checkpoint_frequency=2).apply(model)
        model(x).square().sum().backward()
        return [p.grad for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True), strict=True))


def _live_bytes() -> int:
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel() > 1
    }
    return sum(storages.values())


@pytest.mark.parametrize(
    ("save", "per_block"),
    [
        ((), 0),
        (("linear:0",), 4 * 64 * 96),
        (("linear:3",), 4 * 64 * 32),
        (("linear",), 4 * 64 * (96 + 32 + 128 + 32)),
    ],
)
def test_what_is_kept_between_forward_and_backward(save: tuple[str, ...], per_block: int) -> None:
    """Bytes that live after the forward: each block's input (64 tokens × 32 floats) and what it saves,
    once."""
    blocks = 4
    model, x = nn.Sequential(*[GPTBlock() for _ in range(blocks)]), torch.randn(4, 16, 32)
    GradientCheckpointing(save=save).apply(model)
    model(x).sum().backward()  # the first call copies buffers to learn which ones change
    model.zero_grad(set_to_none=True)
    before = _live_bytes()
    output = model(x)
    kept = _live_bytes() - before
    assert kept == blocks * (4 * 64 * 32 + per_block + torch.get_rng_state().nbytes)
    del output


def test_random_state_travels_with_saved_random_operations() -> None:
    """PyTorch's own selective checkpointing is wrong here: the witness that this test can fail."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        nonlocal seen
        seen += op is torch.ops.aten.native_dropout.default
        first = op is torch.ops.aten.native_dropout.default and seen == 1
        return CheckpointPolicy.MUST_SAVE if first else CheckpointPolicy.PREFER_RECOMPUTE

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.native_dropout(self.a(x), 0.3, True)[0]
            return torch.native_dropout(self.b(torch.tanh(x)), 0.3, True)[0]

    def run(how: str) -> list[Tensor]:
        torch.manual_seed(0)
        model, x = nn.Sequential(Block(), Block()), torch.randn(4, 16)
        if how == "ours":
            GradientCheckpointing(save=("random:0",)).apply(model)
        if how == "torch":
            contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
            y = checkpoint(model[0], x, use_reentrant=False, context_fn=contexts)
        else:
            y = model[0](x)
        y.square().sum().backward()
        return [p.grad for p in model[0].parameters()]

    seen = 0
    plain = run("plain")
    assert not all(torch.equal(a, b) for a, b in zip(plain, run("torch"), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(plain, run("ours"), strict=True))


def test_three_steps_with_learned_state() -> None:
    plain = train(CASES["stateful"], steps=4)
    assert_bitwise(plain, train(CASES["stateful"], GradientCheckpointing(save=("linear",)).apply, steps=4))
    assert plain.attributes == [None, 4, None, None, None, None, 4] or 4 in plain.attributes
