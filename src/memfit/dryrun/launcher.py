"""Starting one process of a dry run and bringing it to its end: the parent's side, without torch.

The script runs in a session of its own. Whatever happens (it crashes, hangs, is interrupted, starts processes
of its own), nothing of it is left when `Launch.run` returns.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from memfit.core.devices import GPU
from memfit.core.errors import CannotRunHere, ToolFailure, UsageError
from memfit.dryrun.build import build_stub
from memfit.dryrun.command import ScriptCommand
from memfit.dryrun.confidence import KEPT
from memfit.dryrun.environment import MOST_GPUS, compiler_caches, gpu_environment
from memfit.dryrun.mail import MAIL_VARIABLE
from memfit.dryrun.result import DryRunResult
from memfit.dryrun.world import World

RUN_VARIABLE = "MEMFIT_RUN"
"""Marks every process of a run, so that those which left its session are found at the end."""

GRACE_SECONDS = 10.0
"""For writing the result after an interruption."""

_ORDERS = {"interrupted": b"i", "timeout": b"t"}
_OFFLINE: Mapping[str, str] = {
    "WANDB_MODE": "disabled",
    "WANDB_DISABLED": "true",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "COMET_MODE": "disabled",
    "COMET_START_ONLINE": "0",
    "MLFLOW_TRACKING_URI": "file:mlruns",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "CLEARML_LOG_MODEL": "0",
    "DVCLIVE_TEST": "true",
    "SWANLAB_MODE": "disabled",
    "TRACKIO_DISABLED": "1",
}
"""Loggers that send and hubs that upload are off. MLflow writes into a folder, which the write guard
redirects."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """How a script is run.

    Args:
        gpus: how many GPUs the script's machine has.
        world, rank: the job of several processes that the script's is one of; the others are absent.
        mail: folder for messages between ranks that are run side by side (see `memfit.dryrun.mail`).
        steps: stop after so many optimizer steps; ``"all"``: run to the script's own end.
        trace, snapshot: files to write memfit's trace and PyTorch's snapshot to.
        allow_writes: let the script write its files and reach its loggers and hubs.
        timeout_seconds: end the run after so long, with what is known by then.
        output: where the script's standard output goes; ``"stderr"`` keeps stdout free for the result;
            ``"none"``: neither its output nor its errors are shown.
        real_host_values: compute large tensors of the host at once, instead of when their values are needed.
        answers: by place, other answers to give than the expected ones (see `memfit.dryrun.questions`).
    """

    gpus: int = 1
    world: World | None = None
    rank: int = 0
    mail: Path | None = None
    steps: int | Literal["all"] = 3
    trace: Path | None = None
    snapshot: Path | None = None
    allow_writes: bool = False
    timeout_seconds: float | None = None
    output: Literal["stdout", "stderr", "none"] = "stdout"
    real_host_values: bool = False
    answers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 <= self.gpus <= MOST_GPUS:
            raise UsageError(f"gpus {self.gpus}: ask for 1 to {MOST_GPUS}")
        if self.steps != "all" and self.steps < 1:
            raise UsageError(f"steps {self.steps}: ask for 1 or more, or for all")
        if self.timeout_seconds is not None and self.timeout_seconds <= 0:
            raise UsageError(f"timeout {self.timeout_seconds}: ask for more than 0 seconds")


@dataclass(frozen=True)
class Folders:
    """Where a run keeps its files."""

    private: Path  # the specification, the result, temporary files of the script
    scratch: Path  # what the script wrote elsewhere; kept if there is anything


@contextlib.contextmanager
def launch_folders() -> Iterator[Folders]:
    """Folders for one run; the private one goes at the end, the scratch folder if the script left nothing."""
    private = Path(tempfile.mkdtemp(prefix="memfit-run-"))
    scratch = Path(tempfile.mkdtemp(prefix="memfit-scratch-"))
    (private / "tmp").mkdir()
    try:
        yield Folders(private, scratch)
    finally:
        shutil.rmtree(private, ignore_errors=True)
        if not _has_files(scratch):
            shutil.rmtree(scratch, ignore_errors=True)


def _has_files(folder: Path) -> bool:
    return any(names for _, _, names in os.walk(folder))


class Launch:
    """One process, from its start to its result.

    Args:
        interrupted: set where the process is to end early; None: when this one is interrupted.
    """

    def __init__(
        self,
        command: ScriptCommand,
        gpu: GPU,
        settings: RunSettings,
        folders: Folders,
        interrupted: threading.Event | None = None,
    ) -> None:
        self._interrupted = interrupted
        self._command = command
        self._gpu = gpu
        self._settings = settings
        self._folders = folders
        self._result = folders.private / "result.json"
        self._run = uuid.uuid4().hex

    def run(self) -> DryRunResult:
        """Start it, wait for it, see to it that nothing of it is left, and read its result."""
        environment = self._environment()
        for folder in compiler_caches(build_stub()).values():
            with contextlib.suppress(OSError):  # compilers warn, and do without
                os.makedirs(folder, mode=0o700, exist_ok=True)
        begun = time.monotonic()
        reading, writing = os.pipe()
        try:
            process = self._start(environment, reading)
            try:
                code = self._wait(process, writing)
            finally:
                _end_everything(process, self._run)
        finally:
            os.close(writing)
        return self._read_result(code, time.monotonic() - begun)

    def _start(self, environment: Mapping[str, str], control: int) -> subprocess.Popen[bytes]:
        specification = self._write_specification(control)
        output = {"stdout": None, "stderr": _standard_error(), "none": subprocess.DEVNULL}[
            self._settings.output
        ]
        try:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "memfit.dryrun.child", str(specification)],
                env=dict(environment),
                stdin=subprocess.DEVNULL if self._settings.output == "none" else None,
                stdout=output,
                stderr=subprocess.DEVNULL if self._settings.output == "none" else None,
                pass_fds=[control],
                start_new_session=True,
            )
        finally:
            os.close(control)

    def _write_specification(self, control: int) -> Path:
        path = self._folders.private / "run.json"
        path.write_text(json.dumps(self._specification(control)), encoding="utf-8")
        return path

    def _wait(self, process: subprocess.Popen[bytes], control: int) -> int:
        """Wait for the end; an interruption or the time limit asks the process to end with what it knows."""
        told = self._interrupted
        with interruptions() if told is None else contextlib.nullcontext(told) as interrupted:
            limit = self._settings.timeout_seconds
            deadline = None if limit is None else time.monotonic() + limit
            while True:
                try:
                    return process.wait(timeout=_SLICE_SECONDS)
                except subprocess.TimeoutExpired:
                    pass
                if interrupted.is_set():
                    return _ask_to_end(process, control, "interrupted")
                if deadline is not None and time.monotonic() > deadline:
                    return _ask_to_end(process, control, "timeout")

    def _environment(self) -> dict[str, str]:
        world = self._settings.world
        count = self._settings.gpus if world is None else world.per_node
        environment = gpu_environment(self._gpu, base=os.environ, count=count)
        environment.update(self._command.environment)
        if world is not None:
            environment.update(world.environment(self._settings.rank))
        if self._settings.mail is not None:
            environment[MAIL_VARIABLE] = str(self._settings.mail)
        _check_allocator(environment)
        environment[RUN_VARIABLE] = self._run
        environment["PYTHONUNBUFFERED"] = os.environ.get("PYTHONUNBUFFERED", "")
        sources = str(Path(__file__).resolve().parents[2])
        environment.setdefault("PYTHONPATH", "")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [environment["PYTHONPATH"], sources]))
        if not self._settings.allow_writes:
            temporary = str(self._folders.private / "tmp")
            environment |= {
                "TMPDIR": temporary,
                "MEMFIT_WRITES_NOTES": str(self._folders.private / "kept.txt"),
                "MPLCONFIGDIR": os.path.join(temporary, "matplotlib"),
                **_OFFLINE,
            }
        return environment

    def _specification(self, control: int) -> dict[str, Any]:
        settings = self._settings
        exempt = [
            "/dev",
            "/proc",
            "/sys",
            str(self._folders.private),
            *compiler_caches(build_stub()).values(),
            *([] if settings.mail is None else [str(settings.mail)]),
        ]
        return {
            "command": self._command.to_json(),
            "gpu": {name: getattr(self._gpu, name) for name in _GPU_FIGURES},
            "all_gpus_of": settings.gpus if settings.world is None else 0,
            "steps": None if settings.steps == "all" else settings.steps,
            "result": str(self._result),
            "trace": None if settings.trace is None else str(settings.trace),
            "snapshot": None if settings.snapshot is None else str(settings.snapshot),
            "writes": None
            if settings.allow_writes
            else {"scratch": str(self._folders.scratch), "exempt": exempt},
            "control": control,
            "answers": dict(settings.answers),
            "real_host_values": settings.real_host_values,
        }

    def _read_result(self, code: int, wall_seconds: float) -> DryRunResult:
        if not self._result.exists():
            raise ToolFailure(_how_it_died(code))
        result = DryRunResult.from_json(json.loads(self._result.read_text(encoding="utf-8")))
        kept = self._folders.private / "kept.txt"
        if kept.exists():
            count = len(set(kept.read_text(encoding="utf-8", errors="replace").splitlines()))
            note = f"{KEPT} {count} files that programs of the script removed or moved are still there"
            result = replace(result, not_modelled=(*result.not_modelled, note))
        used = str(self._folders.scratch) if _has_files(self._folders.scratch) else None
        return replace(result, wall_seconds=wall_seconds, scratch_folder=used)


_SLICE_SECONDS = 0.05
_GPU_FIGURES = ("key", "context_bytes", "nvml_total_bytes", "runtime_total_bytes")


def _ask_to_end(process: subprocess.Popen[bytes], control: int, why: str) -> int:
    with contextlib.suppress(OSError):
        os.write(control, _ORDERS[why])
    try:
        return process.wait(timeout=GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise ToolFailure(
            f"the script did not end within {GRACE_SECONDS:g} s of being told to ({why}), and was killed; "
            "nothing is known of its memory"
        ) from None


def _check_allocator(environment: Mapping[str, str]) -> None:
    """Raises CannotRunHere where the script's allocator would not be PyTorch's, whose account is read."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if re.search(r"backend\s*:\s*cudaMallocAsync", environment.get(name, "")):
            raise CannotRunHere(
                f"{name}={environment[name]}: cudaMallocAsync is the driver's allocator, which keeps no "
                "account of what it does; leave the backend out to learn of PyTorch's own"
            )


@contextlib.contextmanager
def interruptions() -> Iterator[threading.Event]:
    """Set when this process is told to end (Ctrl-C, SIGTERM); a second time ends it the hard way."""
    told = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield told
        return

    def tell(number: int, _frame: Any) -> None:
        if told.is_set():
            raise KeyboardInterrupt
        told.set()

    before = {number: signal.signal(number, tell) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_everything(process: subprocess.Popen[bytes], run: str) -> None:
    """End the script's process, its session, and processes of the run that left the session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    import psutil

    for other in psutil.process_iter(["environ"]):
        if (other.info["environ"] or {}).get(RUN_VARIABLE) == run:
            with contextlib.suppress(psutil.Error):
                other.kill()


def _standard_error() -> int:
    """File descriptor of standard error, also where `sys.stderr` has none (in a notebook)."""
    return 2


def _how_it_died(code: int) -> str:
    if code < 0:
        name = signal.Signals(-code).name
        hint = " (the machine may have run out of memory)" if -code == signal.SIGKILL else ""
        return f"the script was killed by {name}{hint}; nothing is known of its memory"
    return (
        f"the script's process ended with code {code} and left no result; it may have replaced itself by "
        "another program"
    )
