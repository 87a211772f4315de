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


def test_accelerates_configuration_is_read_as_its_launcher_reads_it(tmp_path: Path) -> None:
    config = tmp_path / "fsdp.yaml"
    config.write_text(
        "distributed_type: FSDP\nmixed_precision: bf16\nnum_machines: 2\nnum_processes: 16\nfsdp_config:\n"
        "  fsdp_version: 2\n  fsdp_transformer_layer_cls_to_wrap: GPT2Block\n"
        "  fsdp_reshard_after_forward: true\n  fsdp_cpu_ram_efficient_loading: false\n"
    )
    words = f"accelerate launch --config_file {config} --num_processes 8 train.py"
    command = parse_command(words.split())
    assert command.processes is not None and command.processes.count(1) == 8  # options come before the file
    wanted = {
        "ACCELERATE_USE_FSDP": "true", "ACCELERATE_MIXED_PRECISION": "bf16", "FSDP_VERSION": "2",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "GPT2Block", "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "false", "FSDP_SYNC_MODULE_STATES": "true", "RANK": "0",
    }  # fmt: skip
    assert (
        wanted.items() <= command.environment.items() and "FSDP_AUTO_WRAP_POLICY" not in command.environment
    )
    config.write_text("distributed_type: DEEPSPEED\n")
    with pytest.raises(UsageError, match=r"--use-deepspeed \(in .*fsdp.yaml\) cannot be dry-run"):
        parse_command(words.split())


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
        ("accelerate launch --use_deepspeed train.py", UsageError, "--use-deepspeed cannot be dry-run"),
        ("accelerate launch --config_file missing.yaml train.py", InputError, "missing.yaml: .*No such file"),
        ("accelerate launch --config_file run.sh train.py", InputError, "is a mapping, not"),
    ],
)
def test_what_cannot_be_run_is_said_in_one_line(words: str, error: type[MemfitError], message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        parse_command(words.split())
    assert "\n" not in str(raised.value)
