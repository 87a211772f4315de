"""Tensors that several processes see: no copy, and no trace when one is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from memfit.core.errors import UsageError
from memfit.techniques.shared_tensors import SharedTensors

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks at /dev/shm and /proc, and forks"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
]
FORK = multiprocessing.get_context("fork")


def _names() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if "memfit" in path.name}


def _work(shared: SharedTensors, commands: Any, answers: Any) -> None:
    """Adds one to the slot that it is told, and says so; keeps the memory until it is killed."""
    for slot in iter(commands.get, None):
        shared["batches"][slot] += 1
        answers.put((slot, float(shared["weights"].sum())))


def test_a_worker_reads_and_writes_the_same_memory_and_leaves_nothing_when_killed() -> None:
    before = _names()
    shared = SharedTensors({"weights": torch.arange(1000.0), "batches": torch.zeros(4, 512, 512)})
    commands, answers = FORK.Queue(), FORK.Queue()
    worker = FORK.Process(target=_work, args=(shared, commands, answers), daemon=True)
    worker.start()
    commands.put(2)
    assert answers.get(timeout=60) == (2, 499500.0)
    assert [float(batch.mean()) for batch in shared["batches"]] == [0.0, 0.0, 1.0, 0.0]
    shared["weights"].zero_()
    commands.put(0)
    assert answers.get(timeout=60) == (0, 0.0)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    worker.join(60)
    assert worker.exitcode == -signal.SIGKILL
    assert _names() == before and not list(Path("/dev/shm").glob("*memfit*"))
    assert float(shared["batches"][2].mean()) == 1.0, "what the worker wrote is there"
    mapped = Path("/proc/self/maps")
    assert "memfit-shared" in mapped.read_text()
    shared.close()
    del shared
    assert "memfit-shared" not in mapped.read_text()
    commands.close(), answers.close()


def _send(connection: Any) -> None:
    received = connection.recv()
    received["x"].mul_(2)
    connection.send(len(received))
    connection.recv()
    os._exit(0)


def test_sent_through_a_pipe_it_is_a_descriptor_not_a_copy() -> None:
    shared = SharedTensors.empty({"x": ((3, 2), torch.bfloat16), "none": ((0,), torch.int64)})
    shared["x"].fill_(1.5)
    ours, theirs = FORK.Pipe()
    worker = FORK.Process(target=_send, args=(theirs,), daemon=True)
    worker.start()
    ours.send(shared)
    assert ours.recv() == 2
    assert torch.equal(shared["x"], torch.full((3, 2), 3.0, dtype=torch.bfloat16))
    ours.send("done")
    worker.join(60)
    assert shared["none"].shape == (0,) and list(shared) == ["x", "none"]
    with shared:
        pass
    shared.close()
    assert len(shared) == 0


def test_what_cannot_be_shared_is_named() -> None:
    with pytest.raises(UsageError, match="'a' must be a dense tensor"):
        SharedTensors({"a": torch.eye(2).to_sparse()})
    with pytest.raises(UsageError, match="a mapping of names"):
        SharedTensors([torch.zeros(1)])  # type: ignore[arg-type]
    tensors = {"view": torch.arange(12).view(3, 4).T, "flag": torch.tensor(True)}
    assert all(torch.equal(SharedTensors(tensors)[name], value) for name, value in tensors.items())
