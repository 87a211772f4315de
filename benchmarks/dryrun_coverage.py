"""Which models, operations and features run under the dry run, on GPUs of each compute capability.

    python benchmarks/dryrun_coverage.py [--only TEXT ...] [--capability 80 ...] [--table docs/coverage.md]

Every case (`coverage/`, and the operations of the tests) is a script of its own under the whole dry run: the
made-up GPU, the probe, the write guard, the result. Most run in a fork of a process that has its libraries
loaded; some as a command. Green is exit code 0 with a result; where a library itself has to refuse a GPU, its
refusal is. Anything else is a failure, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "dryrun"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "dryrun_cases"))

from case import EVERY, ONE, REFERENCE
from coverage_cases import CASES as OPERATIONS
from coverage_cases import PREAMBLE
from preloaded import Preloaded
from run_case import CASES
from table import Row, write_table

from memfit.core.devices import find_gpu
from memfit.core.errors import MemfitError
from memfit.dryrun.command import parse_command
from memfit.dryrun.confidence import with_confidence
from memfit.dryrun.launcher import RunSettings
from memfit.dryrun.result import DryRunResult
from memfit.dryrun.script import ScriptRun

HERE = Path(__file__).resolve().parent
GPUS = {
    "75": "t4-16gb",
    "80": "a100-80gb",
    "86": "rtx3090-24gb",
    "89": "rtx4090-24gb",
    "90": "h100-80gb",
    "100": "b200-180gb",
    "103": "268GiB,sm103",
    "120": "rtx5090-32gb",
}
LIBRARIES = ("transformers", "transformers.models.llama.modeling_llama")
MORE_LIBRARIES = ("torchvision", "peft", "accelerate", "bitsandbytes", "lightning")
# Here the probe knows the values, so these two would not see what they look for.
ZEROS = {"nonzero", "values are zeros"}
SINCE = {"fp8 product": "89", "attention flash": "80", "attention cuDNN": "80"}
TIMEOUT_SECONDS = 240.0


@dataclass(frozen=True)
class Job:
    """One case on one GPU."""

    name: str
    capability: str
    words: tuple[str, ...]
    forked: bool
    since: str
    environment: dict[str, str] = field(default_factory=dict)


def jobs(folder: Path) -> Iterator[Job]:
    """All of the table."""
    for number, (name, code) in enumerate(OPERATIONS.items()):
        if name in ZEROS:
            continue
        path = folder / f"operation{number}.py"
        path.write_text(PREAMBLE + code + "\n", encoding="utf-8")
        since = SINCE.get(name, "75")
        for capability in ONE if since == "75" else EVERY:
            yield Job(f"operation: {name}", capability, (str(path),), True, since)
    path = folder / "operations.py"
    path.write_text(_in_one_script(), encoding="utf-8")
    for capability in EVERY:
        yield Job("all operations, one after the other", capability, (str(path),), True, "75")
    script = str(HERE / "dryrun_cases" / "run_case.py")
    for name, case in CASES.items():
        words = [word.replace("{}", script) for word in case.words or (script,)]
        for capability in case.on:
            forked = case.words is None
            yield Job(
                name, capability, (*words, name), forked, case.since, {**_COMPILING, **case.environment}
            )


def _in_one_script() -> str:
    """The operations that every GPU has, as one program."""
    codes = {name: code for name, code in OPERATIONS.items() if name not in ZEROS | set(SINCE)}
    return (
        f"{PREAMBLE}\nfor name, code in {codes!r}.items():\n    print(name, flush=True)\n"
        "    exec(code, dict(globals()))\n"
        "    torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark = True, False\n"
    )


_COMPILING = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def run_all(wanted: Sequence[Job], most_at_once: int, kept: Path | None) -> list[Row]:
    """Runs the jobs by capability, so that the libraries are loaded once for each; shows what is done."""
    groups = [[job for job in wanted if job.capability == one] for one in EVERY]
    chunks = [part for group in groups for part in _parts(group)]
    progress = _Progress(len(wanted), kept)
    with ThreadPoolExecutor(most_at_once) as pool:
        parts = pool.map(lambda chunk: _run_chunk(chunk, progress), sorted(chunks, key=len, reverse=True))
        return [row for part in parts for row in part]


def _parts(group: list[Job]) -> list[list[Job]]:
    half = len(group) // 2
    return [group[:half], group[half:]] if len(group) > 100 else [group] if group else []


def read_rows(path: Path | None) -> list[Row]:
    """The rows that an earlier run kept there."""
    if path is None or not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [Row(**{**line, "not_modelled": tuple(line["not_modelled"])}) for line in lines]


class _Progress:
    def __init__(self, total: int, kept: Path | None) -> None:
        self._total, self._done, self._lock, self._kept = total, 0, threading.Lock(), kept

    def show(self, row: Row) -> None:
        with self._lock:
            self._done += 1
            mark = {"ok": "ok  ", "refused": "said", "failed": "FAIL"}[row.outcome]
            detail = "" if row.outcome == "ok" else f"  {row.line}"
            text = f"[{self._done:3}/{self._total}] {mark} sm_{row.capability:4} {row.name}"
            print(f"{text} ({row.seconds:.1f} s){detail}", flush=True)
            if self._kept:
                with self._kept.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(row)) + "\n")


def _run_chunk(chunk: list[Job], progress: _Progress) -> list[Row]:
    gpu = GPUS[chunk[0].capability]
    names = LIBRARIES + (MORE_LIBRARIES if chunk[0].capability == REFERENCE else ())
    modules = [f"?{name}" for name in names] if any(job.name in CASES for job in chunk) else []
    process = Preloaded(gpu, modules)
    rows = []
    try:
        for job in chunk:
            begun = time.monotonic()
            row = _run_one(process, job, gpu)
            rows.append(replace(row, seconds=time.monotonic() - begun))
            progress.show(rows[-1])
    finally:
        process.close()
    return rows


def _run_one(process: Preloaded, job: Job, gpu: str) -> Row:
    try:
        with tempfile.TemporaryDirectory(prefix="coverage-") as folder:
            if job.forked:
                outcome = process.run_words(
                    list(job.words),
                    folder=Path(folder),
                    gpu=gpu,
                    steps="all",
                    timeout_seconds=TIMEOUT_SECONDS,
                    environment=job.environment,
                )
                result = outcome.result
            else:
                result = _run_command(job, gpu)
    except MemfitError as problem:
        return Row(name=job.name, capability=job.capability, outcome="failed", line=str(problem))
    return _row(job, with_confidence(result))


def _run_command(job: Job, gpu: str) -> DryRunResult:
    command = parse_command(job.words)
    command = replace(command, environment={**command.environment, **job.environment})
    settings = RunSettings(steps="all", output="none", timeout_seconds=TIMEOUT_SECONDS)
    return ScriptRun(command, find_gpu(gpu), settings).run(0, repeats=0)


def _row(job: Job, result: DryRunResult) -> Row:
    error = result.error
    line = "" if error is None else f"{error.type}: {error.message}".split("\n")[0][:200]
    refusing = int(job.capability) < int(job.since)
    if result.exit_code == 0 and result.ended in ("end", "exit"):
        outcome = "failed" if refusing else "ok"
        line = "ran, where the library refuses" if refusing else ""
    else:
        outcome = "refused" if refusing and error is not None else "failed"
        line = line or f"ended by {result.ended}, exit code {result.exit_code}"
    return Row(
        name=job.name,
        capability=job.capability,
        outcome=outcome,
        line=line,
        peak_bytes=result.peak_reserved_bytes,
        value_reads=len(result.value_reads),
        not_modelled=result.not_modelled,
        confidence=result.confidence,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="cases whose name has one of these texts")
    parser.add_argument("--capability", nargs="+", choices=EVERY, default=EVERY)
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    parser.add_argument("--table", type=Path, help="write the table to this page")
    parser.add_argument("--rows", type=Path, help="keep what came out here, and do not run it again")
    options = parser.parse_args()
    before = read_rows(options.rows)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="coverage-") as folder:
        chosen = [
            job
            for job in jobs(Path(folder))
            if job.capability in options.capability
            and not any((job.name, job.capability) == (row.name, row.capability) for row in before)
            and (not options.only or any(text.lower() in job.name.lower() for text in options.only))
        ]
        rows = before + run_all(chosen, options.jobs, options.rows)
    failed = [row for row in rows if row.outcome == "failed"]
    names = {row.name for row in rows}
    print(f"{len(rows)} runs of {len(names)} cases, {len(failed)} failed, {time.monotonic() - begun:.0f} s")
    for row in failed:
        print(f"  sm_{row.capability} {row.name}: {row.line}")
    if options.table:
        write_table(options.table, rows, seconds=sum(row.seconds for row in rows), reference=REFERENCE)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
