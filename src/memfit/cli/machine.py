"""What this machine can do, looked at from outside: no torch is imported here, and no real GPU is touched."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from memfit import __version__
from memfit.core.devices import GPU, find_gpu
from memfit.core.errors import CannotRunHere
from memfit.core.units import format_bytes, format_seconds

State = Literal["ok", "missing", "note"]

TRIAL_GPU = "rtx3060-12gb"
TRIAL_SECONDS = 180.0
TRIAL = (
    "import torch; x = torch.ones(2**20, device='cuda'); "
    "print(torch.cuda.get_device_name(), torch.cuda.max_memory_allocated(), sep='|')"
)
EXTRAS: Mapping[str, tuple[str, str]] = {
    "transformers": ("models", "workloads named hf:…"),
    "torchvision": ("vision", "workloads named tv:…"),
}
"""Distribution → the extra that brings it, and what it is for."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: what.
        state: there, missing, or only worth knowing.
        detail: what was found.
        remedy: how to get it, as a command where there is one.
    """

    name: str
    state: State
    detail: str
    remedy: str | None = None


@dataclass(frozen=True, kw_only=True)
class Machine:
    """All checks, and what follows: which engine will run.

    Attributes:
        engine: ``"dryrun"``, ``"portable"``, or ``None`` where neither can run.
        reason: why it is this one.
    """

    checks: tuple[Check, ...]
    engine: Literal["dryrun", "portable"] | None
    reason: str

    def to_json(self) -> dict[str, Any]:
        """One object with ``schema_version``."""
        return {
            "schema_version": 1,
            "engine": self.engine,
            "reason": self.reason,
            "checks": [asdict(c) for c in self.checks],
        }


def look_at_machine(*, trial: bool = True) -> Machine:
    """Look at everything that decides what memfit can do here.

    Args:
        trial: also start a process on the made-up GPU and allocate a tensor there (a few seconds).
    """
    torch = _torch()
    compiler, stub = _compiler(), _stub()
    checks = [_python(), torch, compiler, stub]
    if trial and stub.state == "ok":
        checks.append(_trial(find_gpu(TRIAL_GPU)))
    checks += [_real_gpu(), *(_extra(name, *row) for name, row in EXTRAS.items())]
    problems = [check for check in checks[1:5] if check.state == "missing"]
    checks.append(_vectors(ask_torch=trial and torch.state == "ok"))
    if not problems:
        return Machine(
            checks=tuple(checks), engine="dryrun", reason="PyTorch's real allocator runs on a made-up GPU"
        )
    if torch.state == "missing":
        return Machine(checks=tuple(checks), engine=None, reason="neither engine works without torch")
    reason = f"no dry run here: {problems[0].detail}"
    return Machine(checks=tuple(checks), engine="portable", reason=reason)


def _python() -> Check:
    where = (
        f"Python {platform.python_version()} on {platform.system()} {platform.machine()}, {sys.executable}"
    )
    return Check(name="memfit", state="ok", detail=f"{__version__}, {where}")


def _torch() -> Check:
    from memfit.dryrun.build import torch_build

    try:
        build = torch_build()
    except CannotRunHere:
        return Check(name="torch", state="missing", detail="not installed", remedy=_pip("memfit[torch]"))
    kind = f"CUDA {build.cuda} build" if build.cuda else "CPU build"
    return Check(name="torch", state="ok", detail=f"{build.version}, a {kind}, in {build.site}")


def _compiler() -> Check:
    from memfit.dryrun.build import find_compiler

    try:
        command = find_compiler()
    except CannotRunHere as error:
        problem = str(error).split(", and ")[0]
        return Check(name="C compiler", state="missing", detail=problem, remedy=_install_compiler())
    return Check(name="C compiler", state="ok", detail=" ".join(command))


def _install_compiler() -> str:
    """The command of this system's package manager."""
    commands = {
        "apt-get": "apt-get install gcc libc6-dev",
        "dnf": "dnf install gcc glibc-devel",
        "apk": "apk add gcc musl-dev",
        "pacman": "pacman -S gcc",
        "zypper": "zypper install gcc glibc-devel",
    }
    found = next((command for tool, command in commands.items() if shutil.which(tool)), None)
    return found or "install gcc or clang with the C library's headers, or set CC"


def _stub() -> Check:
    """Build the made-up GPU, or find it built."""
    from memfit.dryrun.build import build_stub

    begun = time.perf_counter()
    try:
        stub = build_stub()
    except CannotRunHere as error:
        detail = str(error).partition(". ")[0]
        return Check(name="made-up GPU", state="missing", detail=detail)
    took = time.perf_counter() - begun
    detail = f"{stub.cuda.parent}" + (f", built in {format_seconds(took)}" if took > 0.2 else "")
    return Check(name="made-up GPU", state="ok", detail=detail, remedy=stub.note)


def _trial(gpu: GPU) -> Check:
    """One tensor on the made-up GPU, in a process of its own."""
    from memfit.dryrun.environment import gpu_environment

    begun = time.perf_counter()
    command = [sys.executable, "-c", TRIAL]
    try:
        done = subprocess.run(
            command,
            env=gpu_environment(gpu),
            capture_output=True,
            text=True,
            timeout=TRIAL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Check(
            name="dry run", state="missing", detail=f"a first tensor took more than {TRIAL_SECONDS:.0f} s"
        )
    if done.returncode or done.stdout.strip() != f"{gpu.name}|{4 * 2**20}":
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        return Check(
            name="dry run",
            state="missing",
            detail=f"a first tensor failed: {last}",
            remedy="report this, please",
        )
    took = format_seconds(time.perf_counter() - begun)
    return Check(
        name="dry run", state="ok", detail=f"a first tensor on a made-up {gpu.name} took {took} in all"
    )


def _real_gpu() -> Check:
    try:
        import pynvml
    except ImportError:
        return Check(
            name="real GPU",
            state="note",
            detail="not looked for: nvidia-ml-py is missing",
            remedy=_pip("nvidia-ml-py"),
        )
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Check(name="real GPU", state="note", detail=f"none ({error}); the made-up one needs none")
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        found = [
            f"{_text(pynvml.nvmlDeviceGetName(h))}, {format_bytes(pynvml.nvmlDeviceGetMemoryInfo(h).total)}"
            for h in handles
        ]
    finally:
        pynvml.nvmlShutdown()
    return Check(
        name="real GPU", state="ok" if found else "note", detail="; ".join(found) or "a driver, but no GPU"
    )


def _vectors(*, ask_torch: bool) -> Check:
    from memfit.cli.vector_instructions import vector_instructions

    return Check(name="vector instructions", state="ok", detail=vector_instructions(ask_torch=ask_torch))


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _extra(name: str, extra: str, purpose: str) -> Check:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        detail = f"not installed; needed for {purpose}"
        return Check(name=name, state="missing", detail=detail, remedy=_pip(f"memfit[{extra}]"))
    return Check(name=name, state="ok", detail=f"{version}, for {purpose}")


def _pip(what: str) -> str:
    tool = (
        "uv pip install"
        if importlib.util.find_spec("pip") is None and shutil.which("uv")
        else f"{sys.executable} -m pip install"
    )
    return f"{tool} '{what}'"
