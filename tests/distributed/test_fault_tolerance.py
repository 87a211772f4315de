"""Ranks are killed, hang, find a full disk or a corrupt checkpoint: training goes on, bit for bit."""

from __future__ import annotations

import functools
import json
import pickle
from pathlib import Path

import pytest
import torch

from distributed import train_ranks
from distributed.ranks import expect, until_done
from memfit.core.errors import InputError, UsageError
from memfit.distributed import DataOrder, FaultTolerance
from memfit.distributed.checkpoint_folder import newest_first, read_checkpoint
from memfit.distributed.events import read_events
from memfit.distributed.tensor_files import saved_names

STEPS = 12


def losses(out: Path, rank: int) -> dict[int, str]:
    """The last loss of each step of a rank, as the exact hexadecimal text; each step has one value only."""
    found: dict[int, str] = {}
    for line in (out / f"losses-{rank}.txt").read_text().splitlines():
        step, loss = line.split()
        assert found.setdefault(int(step), loss) == loss, f"step {step} was computed again with another loss"
    return found


def train(out: Path, **settings: object) -> list[str]:
    """One rank's part; what each rank runs."""
    return train_ranks.main(train_ranks.Config(out=str(out), **settings))  # type: ignore[arg-type]


def kinds(out: Path) -> list[str]:
    return [event["kind"] for event in read_events(out / "checkpoints")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[int, str]]]:
    """The losses of two ranks that nothing happened to, with each strategy."""
    found = {}
    for strategy in ("ddp", "fsdp2"):
        out = tmp_path_factory.mktemp(strategy)
        expect(functools.partial(train, out, strategy=strategy, steps=STEPS))
        found[strategy] = [losses(out, rank) for rank in range(2)]
        assert list(found[strategy][0]) == list(range(STEPS))
    return found


@pytest.mark.parametrize(
    ("strategy", "fault", "victim", "at"),
    [
        ("ddp", "kill", 1, 6),  # between saves
        ("ddp", "kill_in_reduce", 1, 10),
        ("ddp", "kill", 0, 8),  # the save of step 8 has just begun; rank 0 leads it
        ("fsdp2", "kill", 1, 4),  # in the first save: there may be no checkpoint at all
    ],
)
def test_a_killed_rank_changes_nothing(
    tmp_path: Path,
    undisturbed: dict[str, list[dict[int, str]]],
    strategy: str,
    fault: str,
    victim: int,
    at: int,
) -> None:
    run = functools.partial(
        train, tmp_path, strategy=strategy, steps=STEPS, faults=[(fault, at)], victim=victim
    )
    first, second = until_done(run, ranks=[2, 2])
    assert first.codes[victim] == -9
    assert [losses(tmp_path, rank) for rank in range(2)] == undisturbed[strategy]
    resumed = next((e for e in read_events(tmp_path / "checkpoints") if e["kind"] == "resumed"), None)
    assert (
        0 if resumed is None else resumed["step"]
    ) >= at - 2 * 4  # at most the interval whose save was cut off
    assert [path.name for path in newest_first(tmp_path / "checkpoints")] == [
        "step-0000000012",
        "step-0000000008",
    ]
    assert not list((tmp_path / "checkpoints").glob("*.partial"))


def test_a_rank_that_hangs_is_ended_and_named(
    tmp_path: Path, undisturbed: dict[str, list[dict[int, str]]]
) -> None:
    run = functools.partial(train, tmp_path, steps=STEPS, faults=[("hang", 9)], hang_timeout=2.5)
    attempts = until_done(run, ranks=[2, 2, 2])
    assert 1 in attempts[0].codes
    assert [losses(tmp_path, rank) for rank in range(2)] == undisturbed["ddp"]
    told = [event["text"] for event in read_events(tmp_path / "checkpoints") if event["kind"] == "hung"]
    assert any("rank 1" in text and "hung at train_ranks.py" in text for text in told) or any(
        "rank 0" in text and "waited for other ranks" in text for text in told
    )


def test_a_full_disk_is_told_and_training_goes_on(
    tmp_path: Path, undisturbed: dict[str, list[dict[int, str]]]
) -> None:
    events = expect(functools.partial(train, tmp_path, steps=STEPS, full_disk=(7, 11)))
    assert all(seen == ["saved", "not_saved", "saved"] for seen in events)
    assert [losses(tmp_path, rank) for rank in range(2)] == undisturbed["ddp"]
    text = next(e["text"] for e in read_events(tmp_path / "checkpoints") if e["kind"] == "not_saved")
    assert "step 8 could not be written" in text and "the last good one is of step 4" in text
    assert "File too large" in text
    assert [path.name[-2:] for path in newest_first(tmp_path / "checkpoints")] == ["12", "04"]


def test_a_corrupt_checkpoint_is_set_aside(
    tmp_path: Path, undisturbed: dict[str, list[dict[int, str]]]
) -> None:
    expect(functools.partial(train, tmp_path, steps=8))
    newest = newest_first(tmp_path / "checkpoints")[0]
    victim = next(newest.glob("__1_*"))
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    expect(functools.partial(train, tmp_path, steps=STEPS))
    assert [losses(tmp_path, rank) for rank in range(2)] == undisturbed["ddp"]
    told = next(e["text"] for e in read_events(tmp_path / "checkpoints") if e["kind"] == "corrupt")
    assert victim.name in told and "step 8" in told
    assert (tmp_path / "checkpoints" / f"{newest.name}.corrupt").is_dir()


def test_fewer_ranks_go_on_with_the_same_batches(tmp_path: Path) -> None:
    """Three ranks of FSDP2, then two, then one without it: the loss of the whole batch is that of one
    process."""
    alone = tmp_path / "alone"
    alone.mkdir()
    expect(functools.partial(train, alone, plain=True, steps=STEPS, strategy="fsdp2"), ranks=1)
    many = tmp_path / "many"
    many.mkdir()
    found: dict[int, float] = {}
    for ranks, end, strategy in ((3, 4, "fsdp2"), (2, 8, "fsdp2"), (1, STEPS, "ddp")):
        events = expect(functools.partial(train, many, plain=True, steps=end, strategy=strategy), ranks=ranks)
        assert ("fewer_ranks" in events[0]) == (ranks < 3)
        each = [losses(many, rank) for rank in range(ranks)]
        for step in range(end - 4, end):
            found[step] = sum(float.fromhex(one[step]) for one in each) / ranks
    expected = {step: float.fromhex(loss) for step, loss in losses(alone, 0).items()}
    assert found == pytest.approx(expected, abs=1e-6)


def one_process(folder: Path, total: int, *, seed: int = 0) -> tuple[FaultTolerance, torch.nn.Module]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ft = FaultTolerance(2, folder=folder, keep_last=1)
    ft.protect(model, optimizer, data=DataOrder(8, batch_size=4))
    for _ in ft.steps(total):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    return ft, model


def test_one_process_needs_no_launcher(tmp_path: Path) -> None:
    _, whole = one_process(tmp_path / "a", 6)
    one_process(tmp_path / "b", 4)
    ft, resumed = one_process(tmp_path / "b", 6, seed=1)
    assert torch.equal(whole.weight, resumed.weight) and torch.equal(whole.bias, resumed.bias)
    assert [path.name for path in newest_first(tmp_path / "b")] == ["step-0000000006"]
    assert ft.events[0].kind == "resumed"


def test_another_model_or_data_order_is_refused(tmp_path: Path) -> None:
    one_process(tmp_path, 2)
    model = torch.nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(UsageError, match=r"another model.*bias"):
        FaultTolerance(2, folder=tmp_path).protect(model, optimizer)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(UsageError, match="data order"):
        FaultTolerance(2, folder=tmp_path).protect(model, optimizer, data=DataOrder(8, batch_size=2))


def test_reading_a_checkpoint_runs_nothing(tmp_path: Path) -> None:
    """A forged ``.metadata`` with the right hash, which a plain unpickler would obey."""
    one_process(tmp_path, 2)
    folder = newest_first(tmp_path)[0]
    touched = tmp_path / "touched"

    class Forged:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (touched,))

    (folder / ".metadata").write_bytes(pickle.dumps(Forged()))
    with pytest.raises(InputError, match="metadata"):
        saved_names(folder)
    assert not touched.exists()


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", json.dumps({"schema_version": 99}).encode()])
def test_a_broken_marker_is_no_checkpoint(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "checkpoint.json").write_bytes(content)
    with pytest.raises(InputError, match="marker|schema_version"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "wrong", [{"checkpoint_frequency": 0}, {"keep_last": True}, {"hang_timeout_seconds": -1.0}]
)
def test_settings_that_cannot_be_meant(wrong: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        FaultTolerance(folder=tmp_path, **wrong)  # type: ignore[arg-type]


def test_the_data_order_is_the_same_for_any_number_of_ranks() -> None:
    order = DataOrder(10, batch_size=4, seed=2)
    epoch = [order.batch(step) for step in range(2)]
    assert len({*epoch[0], *epoch[1]}) == 8
    assert order.batch(2) != epoch[0] and DataOrder(10, batch_size=4, seed=2).batch(2) == order.batch(2)
    with pytest.raises(UsageError, match="batch_size"):
        DataOrder(3, batch_size=4)
