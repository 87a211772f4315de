"""A step that runs out of memory runs again in less, with the result of the step that did not."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from technique_models import CASES, Case
from torch import Tensor, nn

from memfit import guard, training_step
from memfit.core.devices import find_gpu
from memfit.core.errors import UsageError
from memfit.dryrun.worker import Worker
from memfit.techniques import GradientCheckpointing, MixedPrecisionTraining, OptimizerInBackward
from memfit.techniques.adaptive_settings import GuardSetting

TEXTS = {
    torch.OutOfMemoryError: "CUDA out of memory. Tried to allocate 2.00 GiB",
    RuntimeError: "[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: 9 bytes",
}


class Shortage:
    """Memory for ``samples`` at once in a block (twice as many where blocks are recomputed), or for ``tries``
    fewer failures."""

    def __init__(self, model: nn.Module, block: nn.Module, samples: int, kind: type = RuntimeError) -> None:
        self.samples, self.kind, self.failures, self.after_backward = samples, kind, 0, False
        self._block = weakref.ref(block)
        block.register_forward_hook(self._check)
        self._model = weakref.ref(model)

    def _check(self, module: nn.Module, args: Any, output: Any) -> None:
        roomy = "forward" in vars(module)
        samples = next(a.shape[0] for a in args if isinstance(a, Tensor))
        if samples > self.samples * (2 if roomy else 1):
            self.failures += 1
            raise self.kind(TEXTS[self.kind])


def _case_run(
    case: Case, kind: Any = None, samples: int = 2, steps: int = 3, **settings: Any
) -> tuple[Any, ...]:
    """Trains under a guard (``kind``: with a shortage): model, losses, guard."""
    model = case.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = training_step(model, optimizer, case.loss, max_grad_norm=settings.pop("clip", None))
    if kind is not None:
        blocks = [m for m in model.modules() if type(m).__name__ in ("GPTBlock", "ResidualBlock", "MLPBlock")]
        Shortage(model, blocks[-1], samples, kind)
        step = guard(step, model=model, optimizer=optimizer, **settings)
    torch.manual_seed(5)
    losses = [step(case.batch()) for _ in range(steps)]
    return model, losses, step, torch.get_rng_state()


@pytest.mark.parametrize("kind", list(TEXTS))
def test_micro_batches_give_the_gradients_of_the_whole(kind: type) -> None:
    case = CASES["mlp"]
    plain, losses, _, _ = _case_run(case, clip=0.5)
    model, ours, step, _ = _case_run(case, kind, clip=0.5)
    torch.testing.assert_close(torch.stack(ours), torch.stack(losses), rtol=1e-5, atol=1e-6)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)
    assert [event.what for event in step.log] == ["out of memory", "again", "out of memory", "down"]
    assert step.setting == GuardSetting(micro_batches=2), "remembered: later steps did not fail again"
    assert "can't allocate memory" in str(step.log[0]) or "CUDA out of memory" in str(step.log[0])


@pytest.mark.parametrize("case", ["gpt", "cnn"])
def test_a_recomputed_step_is_the_same_to_the_bit(case: str) -> None:
    """Dropout draws the same masks in the step's second run, batch norm counts it once."""
    plain, losses, _, random = _case_run(CASES[case])
    model, ours, step, ours_random = _case_run(CASES[case], RuntimeError, ladder=("checkpoint",))
    assert step.log[-1].setting.checkpoint == 2 or step.log[-1].setting.checkpoint == 1
    assert all(torch.equal(a, b) for a, b in zip(ours, losses, strict=True))
    assert torch.equal(random, ours_random)
    for (name, a), b in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_a_step_that_fails_in_the_middle_of_the_optimizer_is_undone() -> None:
    """Half of the parameters were stepped, the others not, and one moment was changed."""

    class HalfDone(torch.optim.AdamW):
        failures = 2

        def step(self, closure: Any = None) -> Any:
            if HalfDone.failures and self.state:
                HalfDone.failures -= 1
                for number, parameter in enumerate(self.param_groups[0]["params"]):
                    if number % 2:
                        parameter.data.add_(1)
                        self.state[parameter]["exp_avg"].mul_(7)
                raise torch.OutOfMemoryError(TEXTS[torch.OutOfMemoryError])
            return super().step(closure)

    results = []
    for kind in (torch.optim.AdamW, HalfDone):
        model = CASES["mlp"].model()
        optimizer = kind(model.parameters(), lr=1e-2)
        step = guard(training_step(model, optimizer, CASES["mlp"].loss), ladder=("empty_cache", "offload"))
        for _ in range(3):
            step(CASES["mlp"].batch())
        results.append([*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())])
    assert [event.what for event in step.log] == ["out of memory", "again", "out of memory", "down"]
    assert step.setting.offload
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_step_under_loss_scaling_runs_again() -> None:
    case, models = CASES["mlp"], []
    for short in (False, True):
        model = case.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        mp = MixedPrecisionTraining(precision="fp16")
        mp.apply(model, optimizer)
        step = training_step(model, optimizer, case.loss, max_grad_norm=1.0)
        if short:
            fails = iter([True])

            def flaky(batch: Any, step: Any = step, fails: Iterator[bool] = fails) -> Tensor:
                loss = step(batch)
                if next(fails, False):
                    raise torch.OutOfMemoryError("CUDA out of memory")  # after the optimizer has stepped
                return loss

            step = guard(flaky, model=model, optimizer=optimizer)
        for _ in range(3):
            step(case.batch())
        models.append(model)
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))


@pytest.mark.parametrize(
    "error", [ValueError("CUDA out of memory"), RuntimeError("mat1 and mat2 shapes"), KeyboardInterrupt()]
)
def test_other_errors_pass_at_once(error: BaseException) -> None:
    model, calls = nn.Linear(2, 2), []

    def step(batch: Tensor) -> None:
        calls.append(model(batch))
        raise error

    guarded = guard(step)
    with pytest.raises(type(error)) as caught:
        guarded(torch.zeros(2, 2))
    assert caught.value is error and len(calls) == 1 and not guarded.log


def test_at_the_foot_of_the_ladder_the_error_itself_comes_with_what_was_tried() -> None:
    model = nn.Linear(2, 2)
    calls: list[int] = []

    def step(batch: Tensor) -> None:
        calls.append(1)
        model(batch).sum().backward()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB")

    guarded = guard(step)
    with pytest.raises(torch.OutOfMemoryError, match="20 MiB") as caught:
        guarded(torch.zeros(4, 2))
    note = "".join(caught.value.__notes__)
    assert "foot of the ladder" in note and "step has no parameter micro_batches" in note
    assert "no repeated blocks" in note and len(calls) == 3
    assert model.weight.grad is None, "as before the step"


def test_what_the_error_holds_is_free_when_the_step_runs_again() -> None:
    model, held = nn.Linear(2, 2), []

    def step(batch: Tensor) -> None:
        assert all(reference() is None for reference in held)
        big = torch.zeros(1000)
        held.append(weakref.ref(big))
        if len(held) == 1:
            inner(big)

    def inner(big: Tensor) -> None:
        local = big.clone()
        held.append(weakref.ref(local))
        try:
            raise ValueError("first")
        except ValueError:
            raise torch.OutOfMemoryError("CUDA out of memory") from None

    gc.disable()
    try:
        guard(step, model=model)(torch.zeros(1, 2))
    finally:
        gc.enable()
    assert len(held) == 3


def test_small_batches_run_whole_and_it_climbs_when_there_is_room_again() -> None:
    case = CASES["mlp"]
    model = case.model()
    optimizer = torch.optim.AdamW(model.parameters())
    shortage = Shortage(model, model[1], 2)
    step = guard(training_step(model, optimizer, case.loss), climb_after=3)
    batch = lambda n: {"x": torch.randn(n, 8), "y": torch.arange(n) % 10}  # noqa: E731
    step(batch(8))
    assert step.setting.micro_batches == 4
    step(batch(2))
    assert step.setting == GuardSetting(), "small batches need nothing"
    step(batch(12))
    assert step.setting.micro_batches == 8
    failures, saved = shortage.failures, step.state_dict()
    for _ in range(2):
        step(batch(8))
    assert step.setting.micro_batches == 4 and shortage.failures == failures
    shortage.samples = 100
    for _ in range(12):
        step(batch(8))
    assert step.setting == GuardSetting() and shortage.failures == failures
    assert [event.what for event in step.log][-1] == "up"
    other = guard(training_step(model, optimizer, case.loss))
    other.load_state_dict(saved)
    other(batch(8))
    assert other.setting.micro_batches == 4, "a restarted job remembers"


def test_the_ladder_goes_in_its_order_and_leaves_no_trace() -> None:
    case = CASES["gpt"]
    model = case.model()
    optimizer = torch.optim.AdamW(model.parameters())
    Shortage(model, model.h[0], 0)
    step = guard(training_step(model, optimizer, case.loss))
    with pytest.raises(RuntimeError, match="can't allocate"):
        step(case.batch())
    settings = [str(event.setting) for event in step.log if event.what == "down"]
    assert settings == [
        "2 micro-batches",
        "4 micro-batches",
        "4 micro-batches, every second block recomputed",
        "4 micro-batches, every block recomputed",
        "4 micro-batches, every block recomputed, activations on the host",
    ]
    step.close()
    assert not any("forward" in vars(module) for module in model.modules())
    assert "step" not in vars(optimizer)


def test_what_it_cannot_guard_is_refused() -> None:
    with pytest.raises(UsageError, match="0 models"):
        guard(lambda batch: batch)
    model = CASES["mlp"].model()
    optimizer = torch.optim.AdamW(model.parameters())
    OptimizerInBackward().apply(model, optimizer)
    with pytest.raises(UsageError, match="optimizer_in_backward"):
        guard(lambda batch: model(batch))
    with pytest.raises(UsageError, match="no rung is called 'pray'"):
        guard(lambda batch: batch, model=nn.Linear(1, 1), ladder=["pray"])
    checkpointed = GradientCheckpointing().apply(CASES["gpt"].model())
    assert "checkpoint" in guard(lambda batch: checkpointed(batch)).closed


@pytest.mark.dryrun
def test_on_a_small_gpu_pytorchs_own_allocator_says_when() -> None:
    """A made-up GPU of 8 GB: the errors are those of PyTorch's allocator, the sizes real."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        with (
            Worker(find_gpu("rtx-3070"), preload=("torch",)) as worker,
            worker.session("dry_run_targets:Deep") as session,
        ):
            found = session.call("batch_size")
            guarded = session.call("guarded", samples=65536, steps=3)
    assert found["peak_bytes"] <= found["limit_bytes"] < found["next_bytes"] and found["state"] == 0
    activations = 2 * 12 * 2048 * 4  # before and after each GELU, for a sample
    assert found["batch_size"] * activations < found["limit_bytes"] < 2 * found["batch_size"] * activations
    assert guarded["whats"] == ["out of memory", "again", "out of memory", "down", "out of memory", "down"]
    assert guarded["settings"] == ["4 micro-batches"] * 3 and "CUDA out of memory" in guarded["reason"]
    assert guarded["peak_bytes"] <= guarded["total_bytes"]
