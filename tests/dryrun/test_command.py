"""What people type after ``--``."""

from __future__ import annotations

from pathlib import Path

import pytest

from memfit.core.errors import InputError, MemfitError, UsageError
from memfit.dryrun.command import parse_command


@pytest.fixture(autouse=True)
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "run.sh").write_text("")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "kind", "target", "arguments"),
    [
        ("train.py", "file", "train.py", ()),
        ("train.py --lr 1 -m x", "file", "train.py", ("--lr", "1", "-m", "x")),
        ("python train.py -x", "file", "train.py", ("-x",)),
        ("/usr/bin/python3.11 -u -W ignore train.py", "file", "train.py", ()),
        ("python -m pkg.train --lr 1", "module", "pkg.train", ("--lr", "1")),
        ("-m pkg.train", "module", "pkg.train", ()),
        ("torchrun train.py --lr 1", "file", "train.py", ("--lr", "1")),
        ("torchrun --standalone --nproc-per-node=1 --master_port 5 train.py", "file", "train.py", ()),
        ("torchrun --nproc_per_node gpu --nnodes 1:1 -m pkg.train x", "module", "pkg.train", ("x",)),
        ("python -m torch.distributed.run --nproc_per_node=1 train.py", "file", "train.py", ()),
        ("accelerate launch --mixed_precision bf16 train.py --lr 1", "file", "train.py", ("--lr", "1")),
    ],
)
def test_programs_are_understood(words: str, kind: str, target: str, arguments: tuple[str, ...]) -> None:
    command = parse_command(words.split())
    assert (command.kind, command.target, command.arguments) == (kind, target, arguments)


@pytest.mark.parametrize(
    ("words", "gpus", "count"),
    [
        ("torchrun train.py", 4, 1),
        ("torchrun --nproc-per-node 4 --nnodes=2 train.py", 1, 8),
        ("torchrun --nproc_per_node gpu train.py", 4, 4),
        ("accelerate launch --multi_gpu --num_processes 8 --num_machines 2 train.py", 1, 8),
    ],
)
def test_launchers_say_how_many_processes_there_are(words: str, gpus: int, count: int) -> None:
    processes = parse_command(words.split()).processes
    assert processes is not None and processes.count(gpus) == count


def test_torchrun_sets_the_variables_of_one_rank() -> None:
    environment = parse_command(["torchrun", "train.py"]).environment
    assert (environment["RANK"], environment["WORLD_SIZE"], environment["LOCAL_RANK"]) == ("0", "1", "0")
    assert int(environment["MASTER_PORT"]) > 0 and environment["MASTER_ADDR"]


def test_accelerate_passes_its_precision_on() -> None:
    words = ["accelerate", "launch", "--mixed_precision", "bf16", "train.py"]
    assert parse_command(words).environment == {"ACCELERATE_MIXED_PRECISION": "bf16"}


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        ("", UsageError, "nothing to run"),
        ("missing.py", InputError, "cannot read the script missing.py: No such file"),
        ("run.sh", UsageError, "not a Python script"),
        ("python", UsageError, "needs a script"),
        ("python -c pass", UsageError, "put the program into a file"),
        ("-m", UsageError, "needs the name of a module"),
        ("torchrun --nproc-per-node x train.py", UsageError, "not a number of processes"),
        ("torchrun --standalone", UsageError, "needs a script"),
        ("accelerate launch --num_processes 3 --num_machines 2 train.py", UsageError, "do not spread evenly"),
        ("accelerate config", UsageError, "only `accelerate launch`"),
    ],
)
def test_what_cannot_be_run_is_said_in_one_line(words: str, error: type[MemfitError], message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        parse_command(words.split())
    assert "\n" not in str(raised.value)
