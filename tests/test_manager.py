"""GPUMemoryManager: the forms that users have been promised, limits, settings, and what errors say."""

from __future__ import annotations

from typing import Any

import psutil
import pytest
import torch

from memfit import BaseAllocator, GPUMemoryManager
from memfit.allocators import ALLOCATORS, Block, OutOfMemory
from memfit.core.errors import UsageError

MIB = 1 << 20


class MyAllocator(BaseAllocator):
    """What a user writes: blocks one after the other, all free again when none is out."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.total_bytes = config.total_bytes
        self.next_byte = self.out = self.made = 0

    def allocate(self, size: int) -> Block:  # type: ignore[override]
        if self.next_byte + size > self.total_bytes:
            raise OutOfMemory(
                requested_bytes=size,
                reserved_bytes=self.total_bytes,
                limit_bytes=self.total_bytes,
                allocated_bytes=self.next_byte,
            )
        start = self.next_byte
        self.next_byte += size
        self.out += 1
        self.made += 1
        return Block(
            block_id=self.made,
            address=start,
            size_bytes=size,
            requested_bytes=size,
            stream=0,
            region=0,
            offset_bytes=start,
        )

    def deallocate(self, block: Block) -> None:
        self.out -= 1
        if not self.out:
            self.next_byte = 0

    def stats(self) -> dict[str, Any]:
        return {"allocated_bytes": {"all": [self.next_byte, self.next_byte, 0, 0]}}


@pytest.fixture
def manager() -> Any:
    with GPUMemoryManager(total_memory="64MiB", device="cpu", allocation_policy=MyAllocator) as made:
        yield made


def test_as_promised() -> None:
    manager = GPUMemoryManager()
    h = manager.allocate(size="1GB")
    assert h.size_bytes == 10**9
    manager.deallocate(h)
    manager.close()


def test_a_policy_of_ones_own_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALLOCATORS, "mine", MyAllocator)  # type: ignore[arg-type]
    with GPUMemoryManager(total_memory="1MiB", allocation_policy="mine", device="cpu") as manager:
        assert manager.allocate("1KiB").tensor().shape == (1024,)
        assert manager.statistics().policy == "mine"


@pytest.mark.parametrize("name", ALLOCATORS)
def test_every_policy_of_the_table(name: str) -> None:
    with GPUMemoryManager(total_memory="64MiB", allocation_policy=name, device="cpu") as manager:
        handles = [manager.allocate(100_000) for _ in range(20)]
        for index, handle in enumerate(handles):
            handle.tensor().fill_(index)
        assert [int(handle.tensor()[99_999]) for handle in handles] == list(range(20))


def test_allocate_and_deallocate(manager: GPUMemoryManager) -> None:
    handle = manager.allocate(size=4096)
    tensor = handle.tensor(torch.float32, (32, 32)).fill_(1.0)
    assert tensor.sum().item() == 1024.0
    manager.deallocate(handle)
    for again in (lambda: manager.deallocate(handle), handle.tensor):
        with pytest.raises(UsageError, match=r"test_manager\.py:\d+ test_allocate_and_deallocate"):
            again()


def test_the_limit_says_who_holds_what(manager: GPUMemoryManager) -> None:
    kept = manager.allocate("48MiB")
    with pytest.raises(OutOfMemory) as caught:
        manager.allocate("32MiB")
    text = str(caught.value)
    assert "32.00 MiB asked for; of a limit of 64.00 MiB, 16.00 MiB is free" in text
    assert "48.00 MiB in 1 block from" in text
    assert "test_manager.py" in text
    assert manager.holders()[0].requested_bytes == kept.size_bytes


def test_available_memory_is_the_limit() -> None:
    config = {"total_memory": "64MiB", "available_memory": "8MiB", "allocation_policy": MyAllocator}
    with GPUMemoryManager(config, device="cpu") as manager:
        assert (manager.total_bytes, manager.limit_bytes) == (64 * MIB, 8 * MIB)
        with pytest.raises(OutOfMemory, match="of a limit of 8.00 MiB"):
            manager.allocate("9MiB")


def test_a_keyword_comes_before_the_configuration() -> None:
    config = {"total_memory": "64MiB", "allocation_policy": "no such"}
    with GPUMemoryManager(config, total_memory="32MiB", allocation_policy=MyAllocator) as manager:
        assert manager.limit_bytes == 32 * MIB


def test_the_machine_is_measured_where_nothing_is_said() -> None:
    with GPUMemoryManager(device="cpu", allocation_policy=MyAllocator) as manager:
        assert manager.total_bytes == psutil.virtual_memory().total
        assert 0 < manager.limit_bytes <= manager.total_bytes


def test_dynamic_strategy() -> None:
    with GPUMemoryManager(
        total_memory="64MiB", allocation_strategy="dynamic", chunk_size="64MiB", device="cpu"
    ) as manager:
        kept = manager.allocate("1MiB")
        for size in range(1000, 3000):
            manager.deallocate(manager.allocate(size))
        assert manager.statistics().policy == "DynamicAllocation"
        assert kept.alive


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"config": {"totl_memory": "1GB"}}, "unknown key 'totl_memory'.*did you mean total_memory"),
        ({"total_memory": "1MiB", "available_memory": "2MiB"}, "available_memory '2MiB' is more than"),
        ({"available_memory": 1 << 60}, "is more than the"),
        ({"allocation_strategy": "magic"}, "there are static and dynamic"),
        ({"allocation_strategy": "dynamic", "allocation_policy": "caching"}, "chooses its policy itself"),
        ({"allocation_policy": "chaching"}, "did you mean caching"),
        ({"total_memory": "1Gb"}, "total_memory '1Gb'"),
        ({"device": "warp"}, "device 'warp'"),
        ({"total_memory": "1MiB", "pool_size": "2MiB"}, "more than max_size"),
    ],
)
def test_what_cannot_be_meant(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        GPUMemoryManager(**{"device": "cpu", **settings})


def test_pool_trim_and_defragment(manager: GPUMemoryManager) -> None:
    handle = manager.allocate("1MiB")
    assert manager.defragment().moved_blocks == 0
    manager.deallocate(handle)
    assert manager.trim() == 64 * MIB
    assert repr(manager).startswith("<GPUMemoryManager on cpu, MyAllocator, 0 B of 0 B")


def test_closed_at_the_end_of_with() -> None:
    with GPUMemoryManager(total_memory="1MiB", device="cpu", allocation_policy=MyAllocator) as manager:
        tensor = manager.allocate(10).tensor().fill_(3)
    assert tensor.tolist() == [3] * 10
    with pytest.raises(UsageError, match="closed"):
        manager.allocate(1)
