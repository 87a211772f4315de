"""`memfit dashboard` from start to Ctrl-C, and the findings that it asks for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from dashboard.conftest import MIB, a_trace
from memfit.cli.live_findings import LiveFindings, statistics_of
from memfit.monitor.samples import ProcessSample, Sample
from monitor.fakes import GIB, a_gpu, a_rank


def test_serves_a_trace_with_its_findings_until_ctrl_c(tmp_path: Path) -> None:
    """A trace that leaks 3 MiB a step; the rules of memfit diagnose say so."""
    path = tmp_path / "leak.memfit-trace"
    a_trace(30, leak_bytes=3 * MIB).save(path)
    code = "import sys; from memfit.cli import main; sys.exit(main(['dashboard', *sys.argv[1:]]))"
    env = {**os.environ, "MEMFIT_RUNS": str(tmp_path / "runs")}
    words = [sys.executable, "-c", code, "--source", str(path)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    url = process.stdout.readline().removeprefix("Dashboard: ").strip()
    state: dict[str, object] = {}
    while not state or "Looking" in str(state["findings_note"]):
        with urllib.request.urlopen(f"{url}api/state", timeout=10) as answer:
            state = json.load(answer)
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")
    found = state["findings"]
    assert isinstance(found, list) and "LEAK_MONOTONIC" in {finding["rule"] for finding in found}


def test_findings_of_what_is_live() -> None:
    """One rank far above the others, its cache flushed, and a GPU with 20 GiB that are not PyTorch's."""
    find = LiveFindings()
    sample = Sample(
        time_seconds=1,
        devices=(a_gpu(0, used_bytes=60 * GIB), a_gpu(1), a_gpu(2)),
        processes=(ProcessSample(device="GPU-0", pid=9, name="other", used_bytes=20 * GIB),),
        allocators=(
            a_rank(0, reserved_bytes=38 * GIB, step_peak_bytes=36 * GIB, alloc_retries=4),
            a_rank(1, step_peak_bytes=20 * GIB),
            a_rank(2, step_peak_bytes=20 * GIB),
        ),
    )
    rules = {finding["rule"] for finding in find(sample)}
    assert {"RANK_IMBALANCE", "ALLOC_RETRIES", "NON_TORCH_MEMORY"} <= rules
    assert list(find(Sample(time_seconds=2))) == []
    assert statistics_of(a_rank(0, ooms=None)).keys() >= {"allocated_bytes.all.current", "num_alloc_retries"}
    assert "num_ooms" not in statistics_of(a_rank(0, ooms=None))
