"""The form for notebooks: ranks that this process starts and leads, and one of them that is killed."""

from __future__ import annotations

import os
import signal

import psutil
import pytest
import torch

import memfit
from memfit.core.errors import ToolFailure, UsageError
from memfit.distributed import OutOfDistributedMemory


def test_a_notebook_has_ranks_of_its_own() -> None:
    with memfit.DistributedMemory(num_gpus=2, limit=["3MB", "1MB"]) as memory:
        block = memory.allocate(shape=(1000, 50), dtype=torch.float32, split="by_free")
        values = torch.randn(1000, 50)
        memory.write(block, values)
        assert block.rows == (750, 250)
        assert torch.equal(memory.read(block), values)
        scale = 2.0
        memory.run(lambda shard: shard.mul_(scale), block)
        assert torch.equal(memory.read(block), values * 2)
        assert [len(piece) for piece in memory.run(torch.Tensor.tolist, block)] == [750, 250]
        with pytest.raises(OutOfDistributedMemory, match="rank 1 needs .* free"):
            memory.allocate("2MB")
        assert memory.synchronize().allocated_bytes == block.size_bytes == 200_000
        with pytest.raises(UsageError, match=r"use run\(function, block\)"):
            memory.local(block)
        memory.deallocate(block)
        with pytest.raises(UsageError, match="deallocated already"):
            memory.deallocate(block)
        pids = memory.worker_pids
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(ToolFailure, match=r"worker of rank 1 \(pid \d+\) was killed by SIGKILL"):
            memory.statistics()
        assert not any(psutil.pid_exists(pid) for pid in pids)
        with pytest.raises(ToolFailure, match="have ended"):
            memory.statistics()
    with pytest.raises(UsageError, match="closed"):
        memory.statistics()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"num_gpus": 0}, "num_gpus must be"),
        ({"num_gpus": 2, "limit": ["1MB"]}, "1 entries for 2 ranks"),
        ({"num_gpus": 2, "limit": "1Gb"}, "may mean bits"),
    ],
)
def test_what_cannot_be_meant_starts_nothing(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        memfit.DistributedMemory(**arguments)  # type: ignore[arg-type]
