"""One rank of a job whose others are absent: its peaks are PyTorch's own, its shards what arithmetic says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from preloaded import Preloaded

import memfit
from memfit.core.errors import UsageError
from memfit.dryrun.accounts import GroupShape, RankAccount, imbalance
from memfit.dryrun.command import parse_command
from memfit.dryrun.ranks import combine, differing_ranks
from memfit.dryrun.result import DryRunResult
from memfit.dryrun.script import job_of
from memfit.dryrun.world import World

SCRIPTS = Path(__file__).parents[1] / "scripts"
NAMES = ("requested_bytes", "allocated_bytes", "reserved_bytes")
PARAMETERS = 4 * (2 * 4 * 1024 * 1024 + 5 * 1024)
UP_BYTES = 4 * 4 * 4 * 1024 * 1024


def run(preloaded: Preloaded, folder: Path, kind: str, *, size: int, rank: int) -> tuple[DryRunResult, Any]:
    settings = {"world": World.of(size), "rank": rank, "steps": "all", "gpu": "h100-80gb"}
    outcome = preloaded.run("parallel.py", kind, folder=folder, **settings)
    assert outcome.result.exit_code == 0, outcome.stderr
    return outcome.result, json.loads(outcome.stdout.splitlines()[-1])


@pytest.mark.dryrun
@pytest.mark.parametrize("kind", ["ddp", "zero", "fsdp", "kept", "hsdp", "flat", "tensor"])
def test_the_peaks_of_a_rank_are_pytorchs_own(preloaded: Preloaded, tmp_path: Path, kind: str) -> None:
    result, told = run(preloaded, tmp_path, kind, size=16, rank=5)
    assert [getattr(result, f"peak_{name}") for name in NAMES] == [told[name] for name in NAMES]
    assert (result.rank, result.world_size, result.steps_done) == (5, 16, 2)
    (account,) = result.devices
    assert account.index == 5
    shares = {"ddp": 1, "zero": 1, "fsdp": 16, "kept": 16, "hsdp": 8}
    if kind in shares:
        assert result.peak_by_category["parameter"] == 4 * PARAMETERS // shares[kind]
    if kind == "zero":  # its state is spread over the ranks by whole parameters
        assert 0 < result.peak_by_category["optimizer_state"] < 8 * PARAMETERS / 8
    communicators = (result.device_total_bytes - result.context_bytes - result.peak_reserved_bytes) / 6e8
    assert communicators == pytest.approx(2 if kind == "hsdp" else 1, abs=0.1)
    assert any(note.startswith("NCCL: 0.6 GB for each communicator") for note in result.not_modelled)


@pytest.mark.dryrun
def test_objects_and_numbers_of_the_others_are_this_ranks(preloaded: Preloaded, tmp_path: Path) -> None:
    result, told = run(preloaded, tmp_path, "objects", size=64, rank=11)
    assert told["everybody"] == [{"rank": 11}] * 64
    assert (told["own"], told["part"], told["ranks"]) == ([11], [11], [11, 64, 1])
    assert (told["sum"], told["max"], told["received"]) == (192, 3, [11, 11, 11])
    assert result.value_reads == ()
    assert any("objects that other ranks would have sent" in note for note in result.not_modelled)


@pytest.mark.dryrun
def test_a_rank_of_a_thousand(preloaded: Preloaded, tmp_path: Path) -> None:
    result, told = run(preloaded, tmp_path, "hsdp", size=1024, rank=1023)
    assert told["requested_bytes"] == result.peak_requested_bytes
    shapes = {(group.name, len(group.ranks)) for group in result.groups}
    assert {("default_pg", 1024), ("replicate", 128), ("shard", 8)} <= shapes


@pytest.mark.dryrun
def test_torchrun_with_several_processes_runs_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "uneven.py"
    script.write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "rank = dist.get_rank()\n"
        "torch.cuda.set_device(rank)\n"
        "x = torch.empty((1 + rank) << 20, dtype=torch.uint8, device='cuda')\n"
    )
    monkeypatch.chdir(tmp_path)
    result = memfit.dry_run(
        f"torchrun --nproc-per-node 2 {script}", gpu="a100-80gb", output="stderr", trace="run.memfit-trace"
    )
    assert [(r.rank, r.device, r.peak_requested_bytes >> 20) for r in result.ranks] == [(0, 0, 1), (1, 1, 2)]
    assert (result.rank, result.peak_requested_bytes, result.world_size) == (1, 2 << 20, 2)
    assert {file.name for file in tmp_path.glob("*.memfit-trace")} == {
        "run.memfit-trace", "run.rank0.memfit-trace"
    }  # fmt: skip


@pytest.mark.dryrun
def test_the_stages_of_a_pipeline_hear_of_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = [str(SCRIPTS / "pipeline.py")]
    last = memfit.dry_run(script, gpu="a100-80gb", world_size=2, rank=1, steps=2, repeats=0, output="stderr")
    assert (last.ended, last.steps_done, last.error) == ("steps", 2, None)
    assert last.peak_by_category["optimizer_state"] == 8 * 2 * (1024 * 1024 + 1024)
    assert [group.ranks for group in last.groups if group.sends] == [(0, 1)]


@pytest.mark.dryrun
def test_a_stage_that_knows_all_shapes_asks_nobody(preloaded: Preloaded, tmp_path: Path) -> None:
    settings = {"world": World.of(2), "rank": 0, "steps": "all", "gpu": "a100-80gb"}
    outcome = preloaded.run("pipeline.py", "known", folder=tmp_path, **settings)
    assert (outcome.result.exit_code, outcome.result.steps_done) == (0, 2), outcome.stderr
    assert outcome.result.peak_by_category["optimizer_state"] == 8 * (1024 * 1024 + 1024)


# ----------------------------------------------------------------- which ranks, and how many


def test_torchruns_variables() -> None:
    told = World.of(64).environment(11)
    wanted = {"RANK": "11", "LOCAL_RANK": "3", "WORLD_SIZE": "64", "LOCAL_WORLD_SIZE": "8", "GROUP_RANK": "1"}
    assert wanted.items() <= told.items()


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"world_size": 8, "rank": 8}, "a job of 8 has the ranks 0 to 7"),
        ({"world_size": 0}, "ask for 1 to"),
        ({"world_size": 12, "nproc_per_node": 8}, "not a multiple of 8"),
        ({"rank": 1}, "say how many ranks"),
        ({"world_size": 8, "gpus": 4}, "leave --gpus out"),
    ],
)
def test_numbers_that_cannot_be_are_refused(numbers: dict[str, int], message: str) -> None:
    asked = dict.fromkeys(("gpus", "world_size", "rank", "nproc_per_node")) | numbers
    with pytest.raises(UsageError, match=message):
        job_of(parse_command([str(SCRIPTS / "parallel.py")]), **asked)


def test_ranks_that_differ_are_the_ends_of_groups_and_the_stages_of_pipelines() -> None:
    world = World.of(64)
    data = GroupShape(name="data", ranks=tuple(range(0, 64, 4)))
    stages = GroupShape(name="stages", ranks=(0, 1, 2, 3), sends=True)
    assert differing_ranks([data, stages], world) == [0, 1, 2, 3, 60, 63]
    assert differing_ranks([], World.of(8)) == list(range(8))


def result_of(rank: int, reserved: int) -> DryRunResult:
    sizes = dict.fromkeys(("peak_requested", "peak_allocated", "context"), 0)
    sizes |= {"peak_reserved": reserved, "device_total": reserved, "nvml_total": 100, "runtime_total": 100}
    named = {f"{name}_bytes": size for name, size in sizes.items()}
    return DryRunResult(gpu="x", torch="x", event_count=0, wall_seconds=0.0, rank=rank, **named)


def test_ranks_together_are_the_fullest_and_each_stands_for_those_like_it() -> None:
    world = World.of(16)
    stages = GroupShape(name="stages", ranks=(0, 1), sends=True)
    parts = {0: result_of(0, 40), 1: result_of(1, 60), 15: result_of(15, 60)}
    whole = combine(parts, [stages], world, seconds=1.0)
    assert (whole.rank, whole.peak_reserved_bytes, whole.fits) == (1, 60, True)
    like = {account.rank: account.like for account in whole.ranks}
    assert like[0] == (2, 4, 6, 8, 10, 12, 14) and like[1] == (3, 5, 7, 9, 11, 13) and like[15] == ()
    assert whole.imbalance == pytest.approx(60 / 50 - 1)
    assert DryRunResult.from_json(whole.to_json()) == whole
    assert not combine({0: result_of(0, 40), 1: result_of(1, 101)}, [], World.of(2), seconds=1.0).fits


def test_imbalance_of_nothing_is_not_a_number() -> None:
    sizes = dict.fromkeys(("requested", "allocated", "reserved"), 0)
    account = RankAccount(
        rank=0, fits=True, ended="end", exit_code=0, device_total_bytes=0,
        **{f"peak_{name}_bytes": size for name, size in sizes.items()},
    )  # fmt: skip
    assert imbalance([account]) is None
