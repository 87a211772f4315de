"""Cutting the compiler's graph: replayed by hand, solved against all cuts there are, and run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from technique_models import CASES, assert_bitwise, assert_close, train
from torch import Tensor, nn

from memfit.capture.graph import Op
from memfit.core.errors import CannotRunHere, UsageError
from memfit.techniques import CompiledPartition, compiled_forward, undo
from memfit.techniques.joint_partition import observed_partitions
from memfit.techniques.joint_replay import BEFORE, JointStep, replay
from memfit.techniques.joint_solver import choose, least

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(autouse=True)
def _new_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def chain(sizes: list[int], *, fixed: frozenset[int] = frozenset()) -> JointStep:
    """x → op 0 → op 1 … ; then the derivative of each, last first, reads its result and makes the next one's
    gradient of the same size. Storage 0 is the batch, n + 1 what op n makes."""
    count = len(sizes)
    ops = [Op(index=n, name="aten.mm.default", inputs=(n,), outputs=(n + 1,)) for n in range(count)]
    for place, n in enumerate(reversed(range(count))):
        before = (count + place,) if place else ()
        ops.append(
            Op(
                index=count + place,
                name="aten.mm.default",
                phase="backward",
                inputs=(n + 1, *before),
                outputs=(count + 1 + place,),
            )
        )
    return JointStep(
        ops=tuple(ops),
        sizes_bytes=(0, *sizes, *reversed(sizes)),
        born=(BEFORE, *range(count), *range(count, 2 * count)),
        gradients=frozenset({2 * count}),
        fixed=fixed,
    )


def test_a_cut_is_replayed_as_it_would_run() -> None:
    step = chain([10, 20, 30])
    whole = replay(step, step.needed)
    assert whole.again == ()
    assert whole.live_bytes.tolist() == [10, 30, 60, 90, 80, 40]
    lean = replay(step, {1})
    assert lean.again == (1, 2)
    assert lean.order == (0, 1, 2, 1, 2, 3, 4, 5)
    assert lean.kept_bytes == 10
    assert lean.live_bytes.tolist() == [10, 30, 60, 30, 60, 90, 80, 40]


def test_what_cannot_run_again_is_kept() -> None:
    step = chain([10, 20, 30], fixed=frozenset({1}))
    assert step.drawn_again(frozenset({1})) == {2}
    assert step.drawn_again(frozenset({2})) == frozenset()
    with pytest.raises(ValueError, match="cannot be run again"):
        replay(step, {1, 3})
    assert least(step, [1.0] * 6).kept >= {2}


def test_the_cut_is_the_best_of_all_cuts() -> None:
    """Every subset of what can be kept is replayed."""
    mib = 1 << 20
    step = chain([size * mib for size in (4, 1, 8, 2, 16, 1, 4)])
    seconds = [1.0, 5.0, 2.0, 9.0, 3.0, 4.0, 1.0] + [1.0] * 7
    runs = [
        replay(step, kept)
        for count in range(8)
        for kept in itertools.combinations(sorted(step.needed), count)
    ]
    cuts = [(run.peak_bytes, sum(seconds[n] for n in run.again)) for run in runs]
    for peak_bytes in (48 * mib, 45 * mib, 42 * mib, 38 * mib):
        best = min(cost for peak, cost in cuts if peak <= peak_bytes)
        found = choose(step, seconds, peak_bytes)
        assert found is not None
        assert found.replay.peak_bytes <= peak_bytes
        assert found.seconds == best
    assert choose(step, seconds, 20 * mib) is None
    assert least(step, seconds).replay.peak_bytes <= 34 * mib


@pytest.mark.parametrize("setting", [{"peak": 0.7}, pytest.param({"budget": 0.5}, marks=pytest.mark.slow)])
def test_a_cut_model_trains_to_the_bit(setting: dict[str, float]) -> None:
    """With dropout in three places, one of them within attention: drawn once, kept, and never drawn again."""
    with observed_partitions() as seen:
        changed = train(CASES["gpt"], CompiledPartition(backend="aot_eager", **setting).apply, steps=2)
    assert_bitwise(train(CASES["gpt"], steps=2), changed)
    (cut,) = seen.graphs
    assert cut.replay.again
    assert cut.replay.kept_bytes < replay(cut.step, cut.step.needed).kept_bytes
    if "peak" in setting:
        assert cut.reached
        assert cut.replay.peak_bytes <= setting["peak"] * cut.plain_peak_bytes


class Branching(nn.Module):
    """Asks a value in the middle, which no graph can hold; has running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 32), nn.Linear(32, 1)
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.norm(torch.tanh(self.one(x))))
        return self.two(y) if y.sum() > -1e9 else self.two(-y)


def test_a_broken_graph_is_cut_in_pieces_and_undone() -> None:
    torch.manual_seed(0)
    model = Branching()
    x = torch.randn(16, 8)
    model(x).sum().backward()
    plain = [p.grad for p in model.parameters()], model.norm.running_mean.clone()
    model.zero_grad()
    model.norm.reset_running_stats()
    with observed_partitions() as seen:
        CompiledPartition(backend="aot_eager", peak=0.6).apply(model)(x).sum().backward()
    assert len(seen.graphs) == 2
    assert all(torch.equal(a, p.grad) for a, p in zip(plain[0], model.parameters(), strict=True))
    assert torch.equal(plain[1], model.norm.running_mean)
    assert isinstance(undo(model), CompiledPartition)
    assert "forward" not in vars(model)


def test_what_cannot_be_compiled_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        raise RuntimeError("no lowering for aten.strange\nwith a long story")

    monkeypatch.setitem(compiled_forward._COMPILERS, "aot_eager", fails)
    model = CompiledPartition(backend="aot_eager").apply(nn.Linear(2, 2))
    with pytest.raises(CannotRunHere, match="compile this Linear: RuntimeError: no lowering for") as caught:
        model(torch.zeros(1, 2))
    assert "\n" not in str(caught.value)
    with torch.no_grad():
        assert model(torch.zeros(1, 2)).shape == (1, 2)
    undo(model)
    model(torch.zeros(1, 2)).sum().backward()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"peak": 0.0}, "peak must be above 0"),
        ({"budget": 1.5}, "budget must be from 0 to 1"),
        ({"peak": 0.5, "budget": 0.5}, "one of peak and budget"),
        ({"backend": "ts"}, "backend must be one of"),
        ({"peak": 0.5, "scope": "blocks"}, "give a budget"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        CompiledPartition(**settings)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["cnn", "frozen", "hf-gpt2", "hf-llama", "hf-t5"])
def test_many_kinds_of_models_train_to_the_bit(case: str) -> None:
    changed = train(CASES[case], CompiledPartition(backend="aot_eager", peak=0.7).apply, steps=2)
    assert_bitwise(train(CASES[case], steps=2), changed)


@pytest.mark.slow
def test_blocks_that_are_alike_are_compiled_once() -> None:
    technique = CompiledPartition(backend="aot_eager", budget=0.5, scope="blocks")
    with observed_partitions() as seen:
        changed = train(CASES["gpt"], technique.apply, steps=2)
    assert len(seen.graphs) == 1
    assert_bitwise(train(CASES["gpt"], steps=2), changed)


@pytest.mark.slow
def test_other_shapes_are_cut_anew() -> None:
    model, plain = CASES["mlp"].model(), CASES["mlp"].model()
    CompiledPartition(backend="aot_eager", peak=0.7).apply(model)
    with observed_partitions() as seen:
        for batch in (4, 6, 9, 9):
            x = torch.randn(batch, 8)
            model(x).sum().backward()
            plain(x).sum().backward()
    assert 2 <= len(seen.graphs) <= 3
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.slow
def test_fused_code_draws_the_same_masks_whatever_is_run_again() -> None:
    """Fused code draws other masks than the plain model, from seeds that the backward gets: cuts agree with
    each other."""
    runs = []
    for setting in ({"budget": 1.0}, {"peak": 0.75}):
        torch._dynamo.reset()
        with observed_partitions() as seen:
            runs.append(train(CASES["gpt"], CompiledPartition(**setting).apply, steps=1))
    assert seen.graphs[-1].replay.again
    assert_close(*runs, 1e-5)
