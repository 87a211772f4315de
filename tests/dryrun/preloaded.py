"""Dry runs of scripts, each in a fork of one process that has torch loaded.

What differs from a real launch is only how the process comes to be; all that runs in it is the product's.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memfit.core.devices import find_gpu
from memfit.dryrun.command import parse_command
from memfit.dryrun.environment import gpu_environment
from memfit.dryrun.launcher import Launch, RunSettings, launch_folders
from memfit.dryrun.result import DryRunResult

SCRIPTS = Path(__file__).parents[1] / "scripts"
_MESSAGE_BYTES = 1 << 20


@dataclass(frozen=True)
class Outcome:
    """What a run left: its result, what it printed, the files of its scratch folder by their real path."""

    result: DryRunResult
    stdout: str
    stderr: str
    written: Mapping[str, bytes]


class _Forked:
    """Looks like a `subprocess.Popen` to the launcher."""

    def __init__(self, channel: socket.socket, pid: int) -> None:
        self.pid = pid
        self._channel = channel
        self._code: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self._code is None:
            self._channel.settimeout(timeout)
            try:
                self._code = int(self._channel.recv(64))
            except TimeoutError:
                raise subprocess.TimeoutExpired("fork", timeout or 0) from None
        return self._code

    def kill(self) -> None:
        os.kill(self.pid, 9)


class _ForkedLaunch(Launch):
    channel: socket.socket
    folder: Path
    output: Path
    alone: bool

    def _start(self, environment: Mapping[str, str], control: int) -> Any:
        specification = self._write_specification(control)
        job = {"spec": str(specification), "environment": dict(environment), "folder": str(self.folder)}
        outputs = [
            os.open(self.output / name, os.O_CREAT | os.O_WRONLY | os.O_APPEND) for name in ("out", "err")
        ]
        socket.send_fds(
            self.channel,
            [json.dumps({**job, "control": control, "alone": self.alone}).encode()],
            [control, *outputs],
        )
        for descriptor in (control, *outputs):
            os.close(descriptor)
        self.channel.settimeout(120)
        return _Forked(self.channel, int(self.channel.recv(64)))


class Preloaded:
    """The process with torch loaded, until `close`."""

    def __init__(self, gpu: str = "a100-80gb", modules: Sequence[str] = ()) -> None:
        """With other ``modules`` loaded as well, which may look at what ``gpu`` can do."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = (
            "import sys; sys.path.insert(0, sys.argv[1]); import preloaded; "
            "preloaded.serve(int(sys.argv[2]), sys.argv[3:])"
        )
        self._channel = ours
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, str(Path(__file__).parent), str(theirs.fileno()), *modules],
            env=gpu_environment(find_gpu(gpu)),
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def run(
        self, script: str | Path, *arguments: str, folder: Path, gpu: str = "a100-80gb", **settings: Any
    ) -> Outcome:
        """Dry-run a script of `SCRIPTS` (or another) in ``folder``; ``settings`` as in `RunSettings`."""
        return self.run_words([str(SCRIPTS / script), *arguments], folder=folder, gpu=gpu, **settings)

    def run_alone(self, script: str | Path, *arguments: str, folder: Path, **settings: Any) -> Outcome:
        """The same with PyTorch's own history recorded, and nothing of the operations watched."""
        return self.run(script, *arguments, folder=folder, alone=True, **settings)

    def run_words(
        self,
        words: list[str],
        *,
        folder: Path,
        gpu: str = "a100-80gb",
        alone: bool = False,
        environment: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> Outcome:
        """Dry-run what the words after ``--`` name; scripts of `SCRIPTS` are found by their names."""
        words = [str(SCRIPTS / word) if (SCRIPTS / word).is_file() else word for word in words]
        output = folder / ".output"
        output.mkdir(exist_ok=True)
        for name in ("out", "err"):
            (output / name).unlink(missing_ok=True)
        with launch_folders() as folders:
            command = parse_command(words)
            command = replace(command, environment={**command.environment, **(environment or {})})
            launch = _ForkedLaunch(command, find_gpu(gpu), RunSettings(**settings), folders)
            launch.channel, launch.folder, launch.output, launch.alone = self._channel, folder, output, alone
            result = launch.run()
            written = {
                str(path)[len(str(folders.scratch)) :]: path.read_bytes()
                for path in folders.scratch.rglob("*")
                if path.is_file()
            }
            for path in sorted(folders.scratch.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        texts = [(output / name).read_text(errors="replace") for name in ("out", "err")]
        return Outcome(result, texts[0], texts[1], written)

    def close(self) -> None:
        self._channel.close()
        self._process.wait(timeout=10)


def serve(descriptor: int, modules: Sequence[str] = ()) -> None:
    """The process with torch loaded: forks for each job, and tells the exit code of each fork."""
    from memfit.dryrun.preloading import Preload

    # torch._dynamo is what the first optimizer imports.
    Preload().load(["torch", "torch._dynamo", *modules])
    from memfit.dryrun import child, collect, entry, substitutes  # noqa: F401

    channel = socket.socket(fileno=descriptor)
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, _MESSAGE_BYTES, 3)
        if not message:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            channel.close()
            _become(json.loads(message), descriptors)
        for number in descriptors:
            os.close(number)
        channel.send(str(pid).encode())
        _, status = os.waitpid(pid, 0)
        channel.send(str(os.waitstatus_to_exitcode(status)).encode())


def _become(job: dict[str, Any], descriptors: list[int]) -> None:
    from memfit.dryrun import child, probe

    os.setsid()
    os.dup2(descriptors[1], 1)
    os.dup2(descriptors[2], 2)
    os.dup2(descriptors[0], job["control"])  # last: its number may be that of one of the others here
    os.environ.clear()
    os.environ.update(job["environment"])
    tempfile.tempdir = None  # asked for before, for another environment
    os.chdir(job["folder"])
    if job["alone"]:
        probe.intercept = lambda handler: None
    sys.argv = ["memfit.dryrun.child", job["spec"]]
    child.main()
