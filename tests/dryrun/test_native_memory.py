"""The device's addresses and account, against a naive model and without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memfit.core.devices import find_gpu
from memfit.dryrun.environment import gpu_environment

pytestmark = pytest.mark.dryrun

SCRIPT = Path(__file__).with_name("memory_operations.py")


def run(mode: str, operations: int, **settings: str) -> dict[str, Any]:
    env = {**gpu_environment(find_gpu("rtx3060-12gb")), **settings}
    env["MEMFIT_GPU_CONTEXT_BYTES"] = "0"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), mode, str(operations)],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("addresses", ["bump", "firstfit"])
def test_random_operations_agree_with_a_naive_model(addresses: str) -> None:
    total = 4 << 30
    told = run("random", 3000, MEMFIT_ADDRESSES=addresses, MEMFIT_GPU_TOTAL_BYTES=str(total))
    assert told["failed"] > 0, "the device was full at times"
    assert told["used_bytes"] <= told["peak_bytes"] <= total


@pytest.mark.parametrize("addresses", ["bump", "firstfit"])
def test_many_segments_are_held_at_once(addresses: str) -> None:
    """A walk through a list would take minutes for this: 60,000 live ranges."""
    told = run("many", 60_000, MEMFIT_ADDRESSES=addresses, MEMFIT_GPU_TOTAL_BYTES=str(1 << 40))
    assert told["mallocs"] == told["frees"] == 120_000
    assert told["used_bytes"] == 0


def test_mapping_charges_physical_memory_until_it_is_released_and_unmapped() -> None:
    told = run("mapping", 0, MEMFIT_GPU_TOTAL_BYTES=str(1 << 30))
    assert told["account"] == [20 << 20, 20 << 20, 20 << 20, 0]
    assert told["beyond"] == 2, "out of memory"
    assert (told["maps"], told["unmaps"], told["used_bytes"]) == (1, 1, 0)
