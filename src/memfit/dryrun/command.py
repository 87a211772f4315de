"""Reading what the user wants to run: ``train.py --lr 1``, ``python -m pkg``, ``torchrun train.py`` …"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from memfit.core.errors import InputError, UsageError
from memfit.dryrun.accelerate_settings import environment_of, uses_fsdp, with_configuration

_PYTHON = re.compile(r"python(\d+(\.\d+)*)?$")
_PYTHON_FLAGS = frozenset({"-u", "-O", "-OO", "-B", "-E", "-s", "-S", "-I", "-q", "-v", "-b", "-d", "-i"})
_PYTHON_FLAGS_WITH_VALUE = frozenset({"-W", "-X"})

# Options of the launchers that take no value; every other one does (as one word with "=", or as the next
# word).
_TORCHRUN_SWITCHES = frozenset(
    {"standalone", "no-python", "run-path", "module", "m", "h", "help", "virtual-local-rank"}
)
_ACCELERATE_SWITCHES = frozenset(
    "cpu multi_gpu tpu use_xpu quiet debug module m no_python use_deepspeed use_fsdp use_megatron_lm "
    "use_parallelism_config use_mps_device dynamo_use_fullgraph dynamo_use_dynamic same_network "
    "fp8_use_autocast_during_eval tpu_use_cluster tpu_use_sudo enable_cpu_affinity help h no_tpu_cluster mpi "
    "dynamo_use_regional_compilation fp8_override_linear_precision use_cpu".split()
)


@dataclass(frozen=True, kw_only=True)
class Processes:
    """How many processes a launcher starts: on each of so many machines ``per_node`` (None: one per GPU)."""

    nodes: int = 1
    per_node: int | None = 1

    def count(self, gpus: int) -> int:
        """In all, on machines with ``gpus`` each."""
        return self.nodes * (self.per_node or gpus)


@dataclass(frozen=True, kw_only=True)
class ScriptCommand:
    """A Python program to run: a file or a module, with its arguments, the variables that its launcher would
    set, and how many processes that would start (None: it has no launcher)."""

    kind: Literal["file", "module"]
    target: str
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    processes: Processes | None = None

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "target": self.target, "arguments": list(self.arguments)}


def parse_command(words: Sequence[str]) -> ScriptCommand:
    """What to run, from the words after ``--``.

    Raises:
        UsageError: nothing to run, or options of a launcher that cannot be.
        InputError: the script is not there, or cannot be read.
    """
    if not words:
        raise UsageError(
            "nothing to run: put the script after the options, as in: "
            "memfit dryrun --gpu a100-80gb -- train.py"
        )
    program, rest = words[0], list(words[1:])
    name = os.path.basename(program)
    if _PYTHON.match(name):
        return _python(rest)
    if program == "-m":
        return _module(rest)
    if name == "torchrun":
        return _torchrun(rest)
    if name == "accelerate":
        return _accelerate(rest)
    return _file(program, rest)


def _python(words: list[str]) -> ScriptCommand:
    while words:
        word = words[0]
        if word == "-m":
            return _module(words[1:])
        if word in ("-c", "-"):
            raise UsageError(f"python {word} cannot be dry-run: put the program into a file")
        if word in _PYTHON_FLAGS_WITH_VALUE:
            words = words[2:]
        elif word in _PYTHON_FLAGS or word[:2] in _PYTHON_FLAGS_WITH_VALUE:
            words = words[1:]
        elif word.startswith("-"):
            raise UsageError(f"option {word} of python is not known to memfit dryrun; leave it out")
        else:
            return _file(word, words[1:])
    raise UsageError("python needs a script to run")


def _module(words: list[str]) -> ScriptCommand:
    if not words:
        raise UsageError("-m needs the name of a module")
    if words[0] in ("torch.distributed.run", "torch.distributed.launch"):
        return _torchrun(words[1:])
    if words[0] == "accelerate.commands.launch":
        return _accelerate(["launch", *words[1:]])
    return ScriptCommand(kind="module", target=words[0], arguments=tuple(words[1:]))


def _file(path: str, arguments: Sequence[str]) -> ScriptCommand:
    script = Path(path)
    if script.is_dir():
        script = script / "__main__.py"
    try:
        with script.open("rb"):
            pass
    except OSError as error:
        raise InputError(f"cannot read the script {path}: {error.strerror}") from error
    if script.suffix in (".sh", ".bash") or _is_binary(script):
        raise UsageError(f"{path} is not a Python script; name the Python file that it starts")
    return ScriptCommand(kind="file", target=path, arguments=tuple(arguments))


def _is_binary(script: Path) -> bool:
    with script.open("rb") as file:
        return b"\0" in file.read(1024) and script.suffix not in (".pyc", ".zip", ".pyz")


def _torchrun(words: list[str]) -> ScriptCommand:
    options, rest = _launcher_options(words, _TORCHRUN_SWITCHES, "torchrun")
    nodes = _number("torchrun --nnodes", options.get("nnodes", "1").split(":")[-1])
    per_node = options.get("nproc-per-node", "1")
    processes = Processes(
        nodes=nodes,
        per_node=None if per_node in ("auto", "gpu") else _number("torchrun --nproc-per-node", per_node),
    )
    command = _launched(rest, module=options.keys() & {"m", "module"}, launcher="torchrun")
    return replace(command, processes=processes)


def _accelerate(words: list[str]) -> ScriptCommand:
    if words[:1] != ["launch"]:
        raise UsageError("only `accelerate launch` can be dry-run")
    options, rest = _launcher_options(
        words[1:], frozenset(name.replace("_", "-") for name in _ACCELERATE_SWITCHES), "accelerate"
    )
    told = with_configuration(options)
    total = _number("accelerate --num-processes", told.get("num-processes", "1"))
    machines = _number("accelerate --num-machines", told.get("num-machines", "1"))
    if total % machines:
        raise UsageError(f"accelerate: {total} processes do not spread evenly over {machines} machines")
    command = _launched(rest, module=options.keys() & {"m", "module"}, launcher="accelerate launch")
    # Plain `accelerate launch` of one process sets no rank variables; with FSDP it launches as torchrun does.
    own = command.environment if uses_fsdp(told) else {}
    processes = Processes(nodes=machines, per_node=total // machines)
    return replace(command, environment={**own, **environment_of(told)}, processes=processes)


def _launcher_options(
    words: list[str], switches: frozenset[str], launcher: str
) -> tuple[dict[str, str], list[str]]:
    """The launcher's own options (names with dashes) and the words from the script on."""
    options: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].startswith("-"):
        name, equals, value = rest.pop(0).lstrip("-").partition("=")
        name = name.replace("_", "-")
        if equals:
            options[name] = value
        elif name in switches:
            options[name] = ""
        elif rest:
            options[name] = rest.pop(0)
        else:
            raise UsageError(f"option --{name} of {launcher} has no value, and no script follows it")
    return options, rest


def _number(option: str, text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"{option} {text}: not a number of processes")
    return int(text)


def _launched(words: list[str], *, module: set[str], launcher: str) -> ScriptCommand:
    if not words:
        raise UsageError(f"{launcher} needs a script to run")
    command = _module(words) if module else _file(words[0], words[1:])
    return ScriptCommand(
        kind=command.kind, target=command.target, arguments=command.arguments, environment=_single_rank()
    )


def _single_rank() -> dict[str, str]:
    """What torchrun sets for the only process of a job."""
    ones = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"), "1")
    zeros = dict.fromkeys(
        ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "TORCHELASTIC_RESTART_COUNT"), "0"
    )
    names = {"ROLE_NAME": "default", "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_RUN_ID": "none"}
    return {
        **ones,
        **zeros,
        **names,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "OMP_NUM_THREADS": "1",
    }


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
