"""`memfit monitor --source` on what nvidia-smi printed: unknown is said with its reason, never 0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import memfit
from memfit.cli import main

MIB = 1 << 20
CASE = Path(__file__).parents[1] / "data" / "cases" / "37-nvidia-smi-mig-permissions"
TABLE = """\
| NVIDIA-SMI 580.95.05              Driver Version: 580.95.05      CUDA Version: 13.0     |
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |
|=========================================+========================+======================|
|   0  NVIDIA GB10                    On  |   0000000F:01:00.0 Off |                  N/A |
| N/A   48C    P0             12W /  N/A  | Not Supported          |      3%      Default |
|                                         |                        |                  N/A |
+-----------------------------------------+------------------------+----------------------+
| Processes:                                                                              |
|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |
|    0   N/A  N/A            9321      C   python                                10240MiB |
+-----------------------------------------------------------------------------------------+
"""


def seen(file: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["monitor", "-1", "--json", "--no-keep", "--source", str(file)]) == 0
    return json.loads(capsys.readouterr().out)


def test_what_may_not_be_seen_is_unknown_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("query.csv", "free_only.csv"):
        (device,) = seen(CASE / name, capsys)["devices"]
        assert [device[key] for key in ("total_bytes", "used_bytes", "free_bytes")] == [None, None, None]
        assert "Insufficient Permissions" in device["unknown"]["free_bytes"]
    (device,) = seen(CASE / "full.xml", capsys)["devices"]
    assert (device["total_bytes"], device["used_bytes"], device["free_bytes"]) == (4864 * MIB, 0, 4860 * MIB)
    assert "MIG" in device["unknown"]["busy_ratio"]


def test_unified_memory_and_values_that_are_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "smi.txt"
    file.write_text(TABLE)
    state = seen(file, capsys)
    (device,), (process,) = state["devices"], state["processes"]
    assert device["total_bytes"] is None and device["unknown"]["used_bytes"] == "Not Supported"
    assert device["busy_ratio"] == 0.03
    assert (process["pid"], process["used_bytes"]) == (9321, 10240 * MIB)
    file.write_text(
        "index, name, memory.total [MiB], memory.used [MiB]\n0, NVIDIA GeForce RTX 4090, 24564 MiB, [N/A]"
    )
    (device,) = seen(file, capsys)["devices"]
    assert (device["total_bytes"], device["used_bytes"]) == (24564 * MIB, None)
    assert device["unknown"] == {"used_bytes": "N/A", "free_bytes": "N/A"}
    explained = memfit.explain(file)
    assert explained.verdict == "unknown" and "not full" not in explained.findings[0].summary
