"""The largest batch and the cheapest GPU: bisecting against a rule known beforehand, and on the engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from imitation import Imitation

from memfit import cli
from memfit.capture.workloads import from_reference
from memfit.core.catalogue import CATALOGUE
from memfit.core.errors import UsageError
from memfit.planning import gpus
from memfit.planning.bench import ModelFacts, Peaks
from memfit.planning.fit import no_progress
from memfit.planning.gpus import by_price_class
from memfit.planning.oracle import open_oracle
from memfit.planning.sizes import SizeSearch, largest, lean_ways, sized

MODELS = Path(__file__).with_name("tiny_models.py")
MIB = 2**20


def search(per_sample_bytes: int, *, start: int | None, positions: int = 10**9) -> SizeSearch:
    """A search over a workload that reserves so much per sample, and half of it by the second way."""

    def ask(other: Mapping[str, Any], way: tuple[Any, ...]) -> Peaks:
        size = int(other["samples"])
        if size > positions:
            return Peaks(requested_bytes=0, allocated_bytes=0, reserved_bytes=0, failure="no more positions")
        total = size * per_sample_bytes // (2 if way else 1)
        return Peaks(requested_bytes=total, allocated_bytes=total, reserved_bytes=total)

    return SizeSearch(ask=ask, reference={}, dimension="batch", start=start, ways=[(), ({"technique": "x"},)])


@pytest.mark.parametrize("start", [1, 3, 7, 100, 5000])
@pytest.mark.parametrize("most", [1, 2, 5, 64, 999])
def test_bisecting_finds_the_largest_size_from_any_start(start: int, most: int) -> None:
    found = search(2 * MIB, start=start)
    assert found.largest(most * MIB) == most
    assert len(found.tried) < 30
    assert all(one.fits == (size <= most) for size, one in found.tried.items())


def test_where_nothing_fits_and_where_the_model_ends() -> None:
    assert search(2 * MIB, start=4).largest(MIB // 2) is None
    found = search(2 * MIB, start=4, positions=77)
    assert found.largest(10**12) == 77
    assert found.limit == "no more positions"


def test_sizes_are_written_into_texts_and_repeat_samples_of_files() -> None:
    hub = {"spec": "hf:gpt2,batch=8,seq=64,n_layer=2", "folder": "."}
    assert sized(hub, "batch", 3)["spec"] == "hf:gpt2,seq=64,n_layer=2,batch=3"
    assert sized({"spec": "tv:resnet50"}, "batch", 3)["spec"] == "tv:resnet50,batch=3"
    other = sized({"spec": f"{MODELS.name}:cnn", "folder": str(MODELS.parent)}, "batch", 35)
    images, labels = from_reference(other).batch()
    assert images.shape == (35, 3, 64, 64)
    assert images[0].equal(images[32])
    assert labels.shape == (35,)


def test_lean_ways_leave_micro_batches_out() -> None:
    facts = ModelFacts(
        blocks=("a", "b"), samples=4, micro_batching="reordered", implementations={"fused": "reordered"},
        expandable_segments="exact",
    )  # fmt: skip
    ways = lean_ways(facts, "reordered")
    assert not any(settings["technique"] == "micro_batching" for way in ways for settings in way)
    assert () in ways
    assert len(lean_ways(facts, "exact")) == 6


@pytest.mark.slow
@pytest.mark.dryrun
def test_one_sample_more_than_the_largest_batch_does_not_fit(tmp_path: Path) -> None:
    reference, budget = {"spec": f"{MODELS}:cnn", "folder": "."}, 128 * MIB
    with ExitStack() as stack:
        oracle = stack.enter_context(
            open_oracle(reference, None, CATALOGUE["rtx3060-12gb"], tmp_path, engine="dryrun")
        )
        found = SizeSearch.over(oracle, stack, reference, None, "batch", "exact", no_progress)
        size = found.largest(budget)
        assert size is not None
        assert found.start == 16
        for count in (size, size + 1):
            with oracle.with_workload(found.at(count)) as own:
                reserved = [own.final(way).figures.peak_reserved_bytes for way in found.ways[:2]]
            assert (min(reserved) <= budget) == (count == size)


def test_the_first_gpu_with_room_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    order = by_price_class()
    sizes = [round(gpu.nvml_total_bytes / 2**30) for gpu in order]
    assert sizes == sorted(sizes)
    assert len(order) == len(CATALOGUE)
    opened = []

    @contextmanager
    def imitated(*arguments: Any, **settings: Any) -> Iterator[Imitation]:
        opened.append(arguments[2].key)
        yield Imitation(blocks=3)

    monkeypatch.setattr(gpus, "open_oracle", imitated)
    few = {key: CATALOGUE[key] for key in ("rtx3090-24gb", "a10-24gb", "rtx3080-10gb")}
    small = dataclasses.replace(few["rtx3080-10gb"], runtime_total_bytes=345 * MIB)  # the context takes most
    found = gpus.cheapest("a.py:b", verify=False, catalogue={**few, "rtx3080-10gb": small})
    assert [one.gpu for one in found.tried] == ["rtx3080-10gb", "a10-24gb"]  # as much memory, fewer FLOP/s
    assert found.gpu == "a10-24gb"
    assert found.fit is not None
    assert found.fit.gpu == "a10-24gb"
    assert opened == ["rtx3080-10gb", "a10-24gb"]  # one architecture is measured once, the plan sought once


def test_questions_that_exclude_each_other_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="hf: workload"):
        largest(f"{MODELS}:cnn", "seq", gpu="a100")
    assert cli.main(["fit", "a.py:b", "--gpu", "any", "--sweep"]) == 2
    assert "ask one of them at a time" in capsys.readouterr().err
