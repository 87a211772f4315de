"""`memfit launch` with real ranks that are killed and run out of memory; and how ends are read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from distributed import train_ranks
from memfit.cli import main
from memfit.distributed import launching
from memfit.distributed.rank_records import RankRecord
from memfit.distributed.watchdog import read_hangs
from memfit.monitor.runs import read_records


@pytest.mark.slow
def test_a_job_survives_a_kill_and_goes_on_with_fewer_ranks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 is killed in step 6; restarted, it is out of memory in step 9; the restarts are used up, and one
    rank does the rest."""
    config = tmp_path / "config.json"
    faults = [("kill", 6), ("out_of_memory", 9)]
    config.write_text(json.dumps({"out": str(tmp_path), "faults": faults, "steps": 11}))
    options = ["--nproc", "2", "--min-nproc", "1", "--restarts", "1", "--records", str(tmp_path / "records")]
    code = main(["launch", "--json", *options, "--", str(train_ranks.__file__), str(config)])
    result = json.loads(capfd.readouterr().out)
    assert (code, result["ended"], result["exit_code"]) == (0, "done", 0)
    assert (result["attempts"], result["world_size"]) == (3, 1)
    killed, short = result["failures"]
    assert (killed["rank"], killed["attempt"], killed["outcome"], killed["exit_code"]) == (1, 0, "killed", -9)
    assert (short["rank"], short["attempt"], short["outcome"]) == (1, 1, "out_of_memory")
    assert short["account"]["requested_bytes"] == 2 << 30 and short["place"].endswith("in happen") is False
    assert Path(short["place"].rpartition(":")[0]).name == "train_ranks.py"
    assert sorted(one["outcome"] for one in result["ranks"]) == [
        "done", "killed", "out_of_memory", "stopped", "stopped"
    ]  # fmt: skip
    kinds = [event["kind"] for event in result["events"]]
    assert "resumed" in kinds and "fewer_ranks" in kinds
    steps = [int(line.split()[0]) for line in (tmp_path / "losses-0.txt").read_text().splitlines()]
    assert sorted(set(steps)) == list(range(11))
    watched = read_records(tmp_path / "records")
    assert len(watched) == 5 and {record.about["rank"] for record in watched} == {0, 1}


def a_record(**settings: object) -> RankRecord:
    base = RankRecord(rank=0, local_rank=0, world_size=2, attempt=0, pid=1, host="h")
    return replace(base, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("code", "outcome"),
    [(-9, "killed"), (-15, "stopped"), (75, "out_of_memory"), (1, "hung"), (None, "stopped")],
)
def test_the_agent_knows_how_a_process_ended_that_could_not_tell(code: int | None, outcome: str) -> None:
    exits = [{} if code is None else {0: code}]
    assert launching._completed(a_record(), exits).outcome == outcome
    told = a_record(outcome="failed", exit_code=1)
    assert launching._completed(told, exits) == told


def test_a_rank_whose_peer_is_gone_is_not_the_cause() -> None:
    lost = a_record(outcome="failed", error="RuntimeError: Connection closed by peer [127.0.0.1]")
    killed = a_record(rank=1, outcome="killed")
    assert [r.outcome for r in launching._explained([lost, killed])] == ["stopped", "killed"]
    assert launching._explained([lost])[0].outcome == "failed"
    elsewhere = launching._explained([lost, lost], nodes=2)
    assert [(r.outcome, r.error) for r in elsewhere] == [
        ("failed", launching.LOST_ELSEWHERE), ("stopped", lost.error)
    ]  # fmt: skip


def thread(*frames: str) -> str:
    """A thread's stack as faulthandler writes it; each frame is ``"FILE LINE NAME"``."""
    lines = [f'  File "{f}", line {n} in {name}' for f, n, name in (frame.split() for frame in frames)]
    return "\n".join(["Thread 0x1 (most recent call first):", *lines, "", ""])


def test_where_ranks_hung(tmp_path: Path) -> None:
    helper = "Timeout (0:00:01)!\n" + thread("/lib/python3.11/threading.py 1 wait")
    waits = thread("/x/site-packages/torch/autograd/graph.py 1 run", "/home/me/train.py 9 step")
    (tmp_path / "rank-00000.txt").write_text(helper + waits)
    (tmp_path / "rank-00001.txt").write_text(helper + thread("/home/me/train.py 7 load"))
    (tmp_path / "rank-00002.txt").write_text("")
    assert read_hangs(tmp_path) == {
        0: "waited for other ranks at train.py:9 in step",
        1: "hung at train.py:7 in load",
    }


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--nproc", "1", "--min-nproc", "2", "x.py"], "is more than --nproc 1"),
        (["--nnodes", "2", "x.py"], "--rdzv-endpoint"),
        (["--nproc", "0", "x.py"], "nproc"),
    ],
)
def test_options_that_cannot_be_meant(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", *words]) == 2
    assert text in capsys.readouterr().err


def test_a_missing_script_is_told_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--nproc", "2", "--", "missing.py"]) == 5
    assert "missing.py" in capsys.readouterr().err
