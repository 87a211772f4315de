"""Runs pieces of Python on the made-up GPU, each in a fresh fork of one process that has torch loaded.

Importing torch takes seconds and a fork takes milliseconds; a fork that has not touched CUDA yet may still
choose its GPU through the environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

OUTCOME_TAIL = 4000


@dataclass(frozen=True, kw_only=True)
class Case:
    """Code to run, and what it sets in its environment before."""

    code: str
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a case ended: 0 or the exit code, negative for a signal; what it printed on both streams."""

    code: int
    output: str


def run_cases(
    cases: Mapping[str, Case], env: Mapping[str, str], *, timeout_seconds: float = 300
) -> dict[str, Outcome]:
    """Runs every case in its own fork, under `env` (which preloads the made-up GPU)."""
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.json"
        job.write_text(json.dumps({name: {"code": c.code, "env": dict(c.env)} for name, c in cases.items()}))
        done = subprocess.run(
            [sys.executable, __file__, str(job)],
            env=dict(env),
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-OUTCOME_TAIL:]
        results = json.loads((Path(folder) / "results.json").read_text())
    return {name: Outcome(**result) for name, result in results.items()}


def _run_in_child(case: Mapping[str, object]) -> None:
    code = 1
    try:
        os.environ.update(case["env"])  # type: ignore[call-overload]
        exec(compile(str(case["code"]), "<case>", "exec"), {"__name__": "__main__"})
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _fork(case: Mapping[str, object]) -> dict[str, object]:
    with tempfile.TemporaryFile() as output:
        pid = os.fork()
        if pid == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            _run_in_child(case)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        output.seek(0)
        return {"code": status, "output": output.read().decode(errors="replace")[-OUTCOME_TAIL:]}


def _main(job: Path) -> None:
    import torch  # noqa: F401
    import torch._dynamo  # noqa: F401  (the first optimizer would import it, in every fork)

    cases = json.loads(job.read_text())
    (job.parent / "results.json").write_text(json.dumps({name: _fork(case) for name, case in cases.items()}))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
