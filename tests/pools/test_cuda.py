"""Pools of CUDA memory: on the made-up GPU, which has addresses and an allocator but no values, and on a
real one, values too."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from memfit.core.devices import find_gpu

SCRIPT = """
import gc, json
import torch
from memfit import GPUMemoryManager, MemoryPool
from memfit.core.errors import UsageError

said = {}
before = torch.cuda.memory_reserved()
pool = MemoryPool("64MiB", chunk_size="32MiB", device="cuda")
said["taken"] = torch.cuda.memory_reserved() - before
handle = pool.allocate("1MiB")
tensor = handle.tensor(torch.bfloat16, (512, 1024))
said["device"], said["address"] = str(tensor.device), tensor.data_ptr() == handle.address
said["aligned"] = handle.address % 512
pool.deallocate(handle)
said["waiting"] = pool.statistics().waiting_bytes
del tensor
said["left"] = pool.statistics().allocated_bytes
said["trimmed"] = pool.trim()
gc.collect()
said["reserved"] = torch.cuda.memory_reserved() - before
other = torch.cuda.Stream()
try:
    with torch.cuda.stream(other):
        pool.allocate(100)
except UsageError as error:
    said["stream"] = str(error)
manager = GPUMemoryManager()
said["limit"], said["free"] = manager.limit_bytes, torch.cuda.mem_get_info()[0]
said["manager_device"] = str(manager.device)
handle = manager.allocate("100MiB")
handle.record_stream(other)
manager.deallocate(handle)
torch.cuda.synchronize()
said["blocks"] = manager.statistics().blocks
print(json.dumps(said))
"""


@pytest.mark.dryrun
def test_a_pool_on_the_made_up_gpu() -> None:
    from memfit.dryrun.environment import gpu_environment

    environment = gpu_environment(find_gpu("rtx3060-12gb"), base=os.environ)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["taken"] == 64 << 20
    assert (said["device"], said["address"], said["aligned"]) == ("cuda:0", True, 0)
    assert (said["waiting"], said["left"]) == (1 << 20, 0)
    assert (said["trimmed"], said["reserved"]) == (64 << 20, 0)
    assert "this pool serves" in said["stream"]
    assert said["limit"] == said["free"]
    assert (said["manager_device"], said["blocks"]) == ("cuda:0", 0)


@pytest.mark.gpu
def test_values_on_a_real_gpu() -> None:
    from memfit.pools import MemoryPool

    pool = MemoryPool("64MiB", device="cuda")
    handles = [pool.allocate("1MiB") for _ in range(20)]
    for value, handle in enumerate(handles):
        handle.tensor().fill_(value)
    for handle in handles[::2]:
        pool.deallocate(handle)
    assert pool.defragment().moved_blocks > 0
    for value, handle in list(enumerate(handles))[1::2]:
        assert torch.equal(handle.tensor(), torch.full((1 << 20,), value, dtype=torch.uint8, device="cuda"))
