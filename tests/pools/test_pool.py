"""MemoryPool as its users see it: blocks, tensors in them, growth, and what is said when there is no room."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from memfit.allocators import Block
from memfit.core.errors import CannotRunHere, ToolFailure, UsageError
from memfit.pools import MemoryPool, OutOfPoolMemory

from .policies import NaiveFirstFit

MIB = 1 << 20
Maker = Callable[..., MemoryPool]


def here() -> str:
    return __file__.rsplit("/", 1)[1]


class TestBlocks:
    def test_tensors_of_a_handle_share_its_memory(self, make_pool: Maker, policy: Any) -> None:
        pool = make_pool(allocation_policy=policy)
        handle = pool.allocate("4KiB")
        floats = handle.tensor(torch.float32, (32, 32))
        floats.fill_(1.5)
        assert handle.tensor(torch.float32).sum().item() == 1.5 * 1024
        assert handle.tensor(torch.bfloat16, 8).shape == (8,)
        assert handle.tensor().shape == (4096,)
        assert floats.data_ptr() == handle.address
        assert floats.data_ptr() % 64 == 0

    def test_blocks_do_not_overlap(self, make_pool: Maker, policy: Any) -> None:
        pool = make_pool(allocation_policy=policy)
        handles = [pool.allocate(size) for size in (1, 63, 64, 65, 1000, 4096, 100_000)]
        spans = sorted((handle.address, handle.address + handle.size_bytes) for handle in handles)
        assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))

    def test_freed_memory_is_used_again(self, make_pool: Maker, small_policy: Any) -> None:
        pool = make_pool("4MiB", max_size="4MiB", allocation_policy=small_policy)
        for _ in range(20):
            pool.deallocate(pool.allocate("1MiB"))
        statistics = pool.statistics()
        assert (statistics.allocations, statistics.frees, statistics.allocated_bytes) == (20, 20, 0)
        assert statistics.reserved_bytes <= 4 * MIB

    def test_the_buffer_is_writable_bytes(self, make_pool: Maker) -> None:
        handle = make_pool().allocate(10)
        handle.buffer[:4] = b"abcd"
        assert len(handle.buffer) == 10
        assert bytes(handle.buffer[:4]) == b"abcd"
        assert handle.tensor()[:4].tolist() == list(b"abcd")
        assert np.frombuffer(handle.buffer, np.uint8)[0] == ord("a")

    def test_an_empty_block(self, make_pool: Maker) -> None:
        pool = make_pool()
        handle = pool.allocate(0)
        assert handle.tensor().shape == (0,)
        pool.deallocate(handle)
        assert pool.empty((0, 3)).shape == (0, 3)

    def test_tensors_train(self, make_pool: Maker) -> None:
        pool = make_pool()
        weight = pool.empty((4, 4)).fill_(2.0).requires_grad_()
        (weight * weight).sum().backward()
        assert weight.grad is not None
        assert torch.equal(weight.grad, torch.full((4, 4), 4.0))

    @pytest.mark.parametrize("size", ["1", "8Gb", "-1", -1, 1.5, None, "lots"])
    def test_what_is_no_size(self, make_pool: Maker, size: Any) -> None:
        with pytest.raises(UsageError, match="size"):
            make_pool().allocate(size)

    @pytest.mark.parametrize("shape", [(-1,), (2, -3), -5])
    def test_what_is_no_shape(self, make_pool: Maker, shape: Any) -> None:
        with pytest.raises(UsageError, match="not a shape"):
            make_pool().empty(shape)

    def test_a_tensor_larger_than_its_block(self, make_pool: Maker) -> None:
        handle = make_pool().allocate(100)
        with pytest.raises(UsageError, match=rf"104 B; this block has 100 B.*{here()}"):
            handle.tensor(torch.float32, 26)


class TestFreeing:
    def test_double_free_names_both_places(self, make_pool: Maker) -> None:
        pool = make_pool()
        handle = pool.allocate(100)
        pool.deallocate(handle)
        with pytest.raises(
            UsageError, match=rf"double free.*allocated at .*{here()}.*deallocated at .*{here()}"
        ):
            pool.deallocate(handle)

    @pytest.mark.parametrize("use", [lambda h: h.tensor(), lambda h: h.buffer, lambda h: h.address])
    def test_use_after_free(self, make_pool: Maker, use: Callable[[Any], Any]) -> None:
        pool = make_pool()
        handle = pool.allocate(100)
        pool.deallocate(handle)
        assert not handle.alive
        with pytest.raises(UsageError, match=rf"use after free.*{here()}"):
            use(handle)

    def test_a_handle_of_another_pool(self, make_pool: Maker) -> None:
        handle = make_pool(name="mine").allocate(100)
        with pytest.raises(UsageError, match="is of <mine"):
            make_pool().deallocate(handle)

    def test_a_tensor_outlives_its_handle_and_keeps_the_block(self, make_pool: Maker) -> None:
        pool = make_pool()
        handle = pool.allocate(4000)
        row = handle.tensor(torch.float32, (10, 100)).fill_(7.0)[3]
        pool.deallocate(handle)
        statistics = pool.statistics()
        assert statistics.waiting_bytes == statistics.allocated_bytes > 0
        others = [pool.empty(1000).fill_(0.0) for _ in range(50)]
        assert row.tolist() == [7.0] * 100
        del row, others
        assert pool.statistics().allocated_bytes == 0

    def test_a_saved_tensor_keeps_its_block_for_backward(self, make_pool: Maker) -> None:
        pool = make_pool("64KiB", max_size="64KiB")
        weight = torch.ones(1000, requires_grad=True)
        loss = (weight * pool.empty(1000).fill_(3.0)).sum()
        for _ in range(30):
            pool.empty(1000).fill_(9.0)
        loss.backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [3.0] * 1000
        del loss
        assert pool.statistics().allocated_bytes == 0

    def test_blocks_that_nobody_can_reach_come_back(self, make_pool: Maker, policy: Any) -> None:
        pool = make_pool(allocation_policy=policy)
        pool.allocate(1000)
        pool.empty(1000)
        statistics = pool.statistics()
        assert (statistics.automatic_frees, statistics.allocated_bytes) == (2, 0)

    def test_cycles_are_collected_when_there_is_no_room(self, make_pool: Maker) -> None:
        pool = make_pool("1MiB", max_size="1MiB")
        gc.disable()
        try:
            cycle: list[Any] = [pool.allocate("1MiB")]
            cycle.append(cycle)
            del cycle
            gc.enable()
            assert pool.allocate("1MiB").alive
        finally:
            gc.enable()

    def test_a_handle_as_context(self, make_pool: Maker) -> None:
        pool = make_pool()
        with pool.allocate(100) as handle:
            assert handle.alive
        assert not handle.alive
        assert pool.statistics().allocated_bytes == 0

    @pytest.mark.parametrize("copying", [copy.copy, copy.deepcopy, pickle.dumps])
    def test_handles_have_no_copies(self, make_pool: Maker, copying: Callable[[Any], Any]) -> None:
        handle = make_pool().allocate(100)
        with pytest.raises(UsageError, match="copied or pickled"):
            copying(handle)

    def test_tensors_outlive_a_closed_pool(self, make_pool: Maker) -> None:
        pool = make_pool()
        handle = pool.allocate(100)
        tensor = handle.tensor().fill_(5)
        pool.close()
        assert tensor.tolist() == [5] * 100
        assert not handle.alive
        for use in (handle.tensor, lambda: pool.allocate(1), lambda: pool.deallocate(handle)):
            with pytest.raises(UsageError, match="closed"):
                use()
        assert pool.statistics().reserved_bytes == 0

    def test_tensors_outlive_a_forgotten_pool(self) -> None:
        pool = MemoryPool("1MiB", device="cpu", allocation_policy=NaiveFirstFit)
        tensor = pool.empty(1000).fill_(5.0)
        del pool
        gc.collect()
        assert tensor.sum().item() == 5000.0


class TestRoom:
    def test_growth_up_to_the_limit(self, make_pool: Maker, small_policy: Any) -> None:
        pool = make_pool("1MiB", chunk_size="1MiB", max_size="8MiB", allocation_policy=small_policy)
        handles = [pool.allocate("512KiB") for _ in range(6)]
        assert pool.statistics().reserved_bytes >= 3 * MIB
        with pytest.raises(OutOfPoolMemory):
            handles.extend(pool.allocate("512KiB") for _ in range(12))
        assert pool.statistics().reserved_bytes <= 8 * MIB

    def test_no_room_says_what_is_free_and_who_holds_the_rest(self, make_pool: Maker) -> None:
        pool = make_pool("4MiB", max_size="4MiB")
        kept = pool.allocate("3MiB"), pool.allocate("512KiB")
        tensor = kept[1].tensor()
        pool.deallocate(kept[1])
        with pytest.raises(OutOfPoolMemory) as caught:
            pool.allocate("1MiB")
        error = caught.value
        assert (error.requested_bytes, error.free_bytes, error.largest_free_bytes) == (
            MIB,
            MIB // 2,
            MIB // 2,
        )
        text = str(error)
        assert (
            "1.00 MiB asked for; of a limit of 4.00 MiB, 512.00 KiB is free (largest piece 512.00 KiB)"
            in text
        )
        assert f"{here()}" in text
        assert "1 deallocated, kept by tensors" in text
        assert sum(holder.requested_bytes for holder in error.holders) == 3 * MIB + MIB // 2
        assert pool.statistics().failures == 1
        del tensor

    def test_a_device_that_has_no_more(self, make_pool: Maker) -> None:
        pool = make_pool(0)
        with pytest.raises(OutOfPoolMemory, match="the device has no more"):
            pool.allocate(1 << 60)

    def test_empty_chunks_make_way_for_a_larger_one(self, make_pool: Maker, small_policy: Any) -> None:
        pool = make_pool("8MiB", chunk_size="1MiB", max_size="8MiB", allocation_policy=small_policy)
        assert pool.allocate("4MiB").tensor().shape == (4 * MIB,)
        assert pool.statistics().reserved_bytes <= 8 * MIB

    def test_blocks_move_to_make_room(self, make_pool: Maker) -> None:
        pool = make_pool("4MiB", max_size="4MiB")
        handles = [pool.allocate("1MiB") for _ in range(4)]
        for value, handle in enumerate(handles):
            handle.tensor().fill_(value)
        pool.deallocate(handles[0])
        pool.deallocate(handles[2])
        large = pool.allocate("2MiB")
        large.tensor().fill_(99)
        assert [set(handles[index].tensor().tolist()) for index in (1, 3)] == [{1}, {3}]

    def test_grow_and_trim(self, make_pool: Maker) -> None:
        pool = make_pool("1MiB", chunk_size="1MiB", max_size="8MiB")
        pool.grow("3MiB")
        assert pool.statistics().reserved_bytes == 4 * MIB
        handle = pool.allocate(100)
        assert pool.trim(keep="2MiB") == 2 * MIB
        assert pool.trim() == MIB
        assert pool.trim() == 0
        pool.deallocate(handle)
        assert pool.trim() == MIB
        with pytest.raises(OutOfPoolMemory):
            pool.grow("9MiB")
        assert pool.statistics().reserved_bytes == 0

    def test_sizes_that_exclude_each_other(self, make_pool: Maker) -> None:
        with pytest.raises(UsageError, match="pool_size '2MiB' is more than max_size '1MiB'"):
            make_pool("2MiB", max_size="1MiB")
        with pytest.raises(UsageError, match="chunk_size"):
            make_pool("2MiB", chunk_size=0)

    def test_unknown_names(self) -> None:
        with pytest.raises(UsageError, match="unknown allocation policy 'cachingg': did you mean caching"):
            MemoryPool("1MiB", allocation_policy="cachingg", device="cpu")
        with pytest.raises(UsageError, match="neither a name nor a subclass"):
            MemoryPool("1MiB", allocation_policy=int, device="cpu")  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="not a device"):
            MemoryPool("1MiB", device="warp")
        with pytest.raises(UsageError, match="cpu and cuda only"):
            MemoryPool("1MiB", device="meta")

    @pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
    def test_no_cuda_here(self) -> None:
        with pytest.raises(CannotRunHere, match="no CUDA device"):
            MemoryPool("1MiB", device="cuda")


class TestDefragmentation:
    def test_contents_move_along(self, make_pool: Maker, small_policy: Any) -> None:
        pool = make_pool("4MiB", max_size="8MiB", chunk_size="4MiB", allocation_policy=small_policy)
        handles = [pool.allocate(50_000 + 1000 * index) for index in range(40)]
        for index, handle in enumerate(handles):
            handle.tensor().fill_(index)
        for handle in handles[::2]:
            pool.deallocate(handle)
        before = pool.statistics()
        result = pool.defragment()
        after = pool.statistics()
        assert after.blocks == before.blocks == 20
        assert result.largest_free_after_bytes >= result.largest_free_before_bytes
        for index, handle in list(enumerate(handles))[1::2]:
            assert set(handle.tensor().tolist()) == {index}
        more = [pool.allocate(50_000) for _ in range(10)]
        for handle in more:
            handle.tensor().fill_(0xFF)
        for index, handle in list(enumerate(handles))[1::2]:
            assert set(handle.tensor().tolist()) == {index}

    def test_all_that_is_free_is_one_piece(self, make_pool: Maker) -> None:
        pool = make_pool("4MiB")
        handles = [pool.allocate(MIB // 8) for _ in range(32)]
        for handle in handles[::2]:
            pool.deallocate(handle)
        assert pool.statistics().fragmentation > 0.9
        result = pool.defragment()
        assert (result.pinned_blocks, result.largest_free_after_bytes) == (0, 2 * MIB)
        assert pool.statistics().fragmentation == 0.0
        assert "moved 16 blocks (2.00 MiB)" in str(result)

    def test_what_a_tensor_looks_into_stays(self, make_pool: Maker) -> None:
        pool = make_pool("4MiB")
        handles = [pool.allocate("1MiB") for _ in range(4)]
        for value, handle in enumerate(handles):
            handle.tensor().fill_(value)
        seen = handles[2].tensor()
        where = seen.data_ptr()
        pool.deallocate(handles[0])
        pool.deallocate(handles[1])
        result = pool.defragment()
        assert (result.moved_blocks, result.pinned_blocks) == (1, 1)
        assert handles[2].address == where == handles[2].tensor().data_ptr()
        assert set(seen.tolist()) == {2}
        assert set(handles[3].tensor().tolist()) == {3}
        assert handles[3].address < where

    def test_chunks_are_emptied_into_others(self, make_pool: Maker) -> None:
        pool = make_pool("4MiB", chunk_size="1MiB")
        handles = [pool.allocate("512KiB") for _ in range(8)]
        for value, handle in enumerate(handles):
            handle.tensor().fill_(value)
        for handle in handles[::2]:
            pool.deallocate(handle)
        pool.defragment()
        assert pool.trim() == 2 * MIB
        assert [set(handle.tensor().tolist()) for handle in handles[1::2]] == [{1}, {3}, {5}, {7}]


class TestFigures:
    def test_statistics_print_well(self, make_pool: Maker) -> None:
        pool = make_pool("4MiB", max_size="8MiB", name="weights")
        handles = [pool.allocate("1MiB"), pool.allocate(100)]
        assert str(pool.statistics()).splitlines() == [
            "weights on cpu, NaiveFirstFit",
            "  limit         8.00 MiB",
            "  reserved      4.00 MiB in 1 chunk",
            "  allocated     1.00 MiB in 2 blocks",
            "  asked for     1.00 MiB (0.0% padding)",
            "  largest free  3.00 MiB (0.0% fragmented)",
            "  peaks         4.00 MiB reserved, 1.00 MiB allocated, 1.00 MiB asked for",
            "  traffic       2 allocations, 0 frees (0 automatic)",
            "  events        0 failures, 1 chunk added, 0 dropped, 0 blocks moved",
        ]
        assert repr(pool) == "<weights on cpu, NaiveFirstFit, 1.00 MiB of 4.00 MiB allocated>"
        assert repr(handles[1]).startswith("<MemoryHandle 100 B on cpu from ")

    def test_holders_by_line(self, make_pool: Maker) -> None:
        pool = make_pool()
        handles = [pool.allocate(1000) for _ in range(3)]
        (holder,) = pool.holders()
        assert (holder.blocks, holder.requested_bytes) == (3, 3000)
        assert here() in str(holder)
        del handles


def test_the_caching_allocator_takes_segments_by_its_own_rules(make_pool: Maker) -> None:
    pool = make_pool(0, allocation_policy="caching", max_size="64MiB")
    small, large = pool.allocate(1000), pool.allocate("3MiB")
    assert pool.statistics().reserved_bytes == 22 * MIB
    large.tensor().fill_(3)
    small.tensor().fill_(1)
    assert set(large.tensor().tolist()) == {3}
    pool.deallocate(large)
    assert pool.trim() == 20 * MIB
    with pytest.raises(OutOfPoolMemory):
        pool.allocate("63MiB")


class FakeStream:
    """A stream whose events are done when told."""

    done = False

    def record_event(self) -> FakeStream:
        return self

    def query(self) -> bool:
        return self.done


def test_a_block_waits_for_the_streams_it_was_recorded_on(make_pool: Maker) -> None:
    pool, stream = make_pool(), FakeStream()
    handle = pool.allocate(1000)
    handle.record_stream(stream)
    pool.deallocate(handle)
    assert pool.statistics().blocks == 1
    stream.done = True
    assert pool.statistics().blocks == 0


class Overlapping(NaiveFirstFit):
    """Wrong: always the same place."""

    def allocate(self, size: int) -> Block:  # type: ignore[override]
        self.out.clear()
        return super().allocate(size)

    def deallocate(self, block: Block) -> None:
        self.out = [found for found in self.out if found is not block]


class Outside(NaiveFirstFit):
    """Wrong: believes to have twice the memory."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.total_bytes *= 2


class NoBlock(NaiveFirstFit):
    """Wrong: an address is not a block."""

    def allocate(self, size: int) -> Block:  # type: ignore[override]
        return 4096  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (NoBlock, "gave 4096, which is no Block"),
        (Overlapping, "lies on the block"),
        (Outside, "lies outside"),
    ],
)
def test_a_policy_that_is_wrong_is_found_out(make_pool: Maker, wrong: Any, message: str) -> None:
    pool = make_pool("1MiB", max_size="1MiB", allocation_policy=wrong)
    kept = []
    with pytest.raises(ToolFailure, match=f"the allocation policy {wrong.__name__} is wrong.*{message}"):
        kept.extend(pool.allocate("512KiB") for _ in range(4))


class TestPoison:
    def test_a_write_past_all_handles_is_found(self, make_pool: Maker) -> None:
        import ctypes

        pool = make_pool(poison=True)
        handle = pool.allocate(1000)
        address = handle.address
        pool.deallocate(handle)
        ctypes.memset(address + 10, 0, 1)
        with pytest.raises(UsageError, match=rf"byte 10 of a block was written after it was freed.*{here()}"):
            pool.allocate(1000)

    def test_ordinary_use_is_no_offence(self, make_pool: Maker, policy: Any) -> None:
        pool = make_pool("256KiB", max_size="4MiB", allocation_policy=policy, poison=True)
        handles = [pool.allocate(3000 + 100 * index) for index in range(30)]
        for handle in handles:
            handle.tensor().fill_(1)
        for handle in handles[::3]:
            pool.deallocate(handle)
        del handle
        pool.defragment()
        handles.extend(pool.allocate(5000) for _ in range(30))
        assert handles[-1].alive
