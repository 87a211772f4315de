"""Real memory by hand: a manager with a limit, a pool of tensors, and a step that is served from a plan.

    python examples/memory_pool.py

Runs on the CPU; `device="cuda"` is all that changes on a GPU.
"""

from __future__ import annotations

import torch

from memfit import GPUMemoryManager, MemfitError, MemoryPool


def manager_with_a_limit() -> None:
    """Blocks by size, tensors in them, and an error that says who holds the memory."""
    with GPUMemoryManager(total_memory="64MiB", device="cpu") as manager:
        handle = manager.allocate(size="48MiB")
        weights = handle.tensor(torch.float32, (1024, 1024)).fill_(1.0)
        print(f"{handle!r}: a tensor of shape {tuple(weights.shape)} in it")
        try:
            manager.allocate("32MiB")
        except MemfitError as error:
            print(error)
        del weights
        manager.deallocate(handle)
        manager.deallocate(manager.allocate("32MiB"))
        print(manager.statistics())


def pool_of_tensors() -> None:
    """Tensors whose memory comes back by itself when nothing can reach it any more."""
    pool = MemoryPool("8MiB", chunk_size="4MiB", device="cpu")
    weight = pool.empty((512, 512)).fill_(0.01).requires_grad_()
    for _ in range(3):
        batch = pool.empty((64, 512)).normal_()
        loss = (batch @ weight).square().mean()
        loss.backward()
    del batch, loss
    statistics = pool.statistics()
    print(f"{statistics.automatic_frees} blocks came back by themselves, {statistics.blocks} is in use")
    handles = [pool.allocate("512KiB") for _ in range(6)]
    for handle in handles[::2]:
        pool.deallocate(handle)
    print(pool.defragment())
    print(f"{pool.trim()} bytes given back to the device")


def step(pool: MemoryPool) -> float:
    """A step that allocates the same every time."""
    hidden = pool.empty((256, 256)).fill_(2.0)
    for _ in range(4):
        gate = pool.empty((256, 128)).fill_(0.5)
        hidden = pool.empty((256, 256)).copy_(hidden * gate.mean())
    return float(hidden[0, 0])


def repeated_step() -> None:
    """Record a step once, pack it, and serve the steps that follow from fixed places."""
    pool = MemoryPool("2MiB", device="cpu")
    with pool.record_step() as recording:
        step(pool)
    plan = recording.plan()
    print(f"{len(plan.blocks)} blocks packed into {plan.total_bytes} bytes")
    with pool.serve(plan) as served:
        for _ in range(3):
            served.begin_step()
            step(pool)
    print(f"{served.served} served from the plan, {served.refused} by the pool's policy")


if __name__ == "__main__":
    manager_with_a_limit()
    pool_of_tensors()
    repeated_step()
