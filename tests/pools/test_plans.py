"""Steps that repeat, served from fixed places; and what happens when one does not repeat exactly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from memfit.core.errors import UsageError
from memfit.pools import MemoryPool, OutOfPoolMemory, StepPlan

Maker = Callable[..., MemoryPool]


def step(pool: MemoryPool, *, extra: bool = False, without: bool = False) -> list[int]:
    """Layers forward, then backward: addresses, in the order of allocation. Checks what it wrote."""
    saved, places = [], []
    for layer in range(6):
        activation = pool.empty(1000 * (layer + 1)).fill_(float(layer))
        places.append(activation.data_ptr())
        if extra and layer == 3:
            surprise = pool.empty(12_345).fill_(-1.0)
            places.append(surprise.data_ptr())
        if not (without and layer == 2):
            temporary = pool.empty(500 + layer).fill_(-2.0)
            places.append(temporary.data_ptr())
            del temporary
        saved.append(activation)
    for layer in reversed(range(6)):
        gradient = pool.empty(1000 * (layer + 1)).fill_(9.0)
        places.append(gradient.data_ptr())
        activation = saved.pop()
        assert torch.equal(activation, torch.full_like(activation, float(layer)))
        del activation, gradient
    return places


def test_a_recorded_step_is_served_from_its_plan(make_pool: Maker) -> None:
    pool = make_pool("1MiB", max_size="4MiB")
    weights = pool.empty(1000)
    with pool.record_step() as recording:
        step(pool)
        state = pool.empty(77)
    assert len(recording.blocks) == 18
    plan = recording.plan()
    assert recording.peak_live_bytes <= plan.total_bytes <= 1.01 * recording.peak_live_bytes
    with pool.serve(plan) as served:
        rounds = []
        for _ in range(3):
            served.begin_step()
            rounds.append(step(pool))
        assert rounds[0] == rounds[1] == rounds[2]
        assert (served.served, served.refused) == (54, 0)
        assert max(rounds[0]) - min(rounds[0]) < plan.total_bytes
    assert pool.statistics().blocks == 2
    del weights, state


@pytest.mark.parametrize(
    ("deviation", "refused"),
    [({"extra": True}, 1), ({"without": True}, 0), ({"extra": True, "without": True}, 1)],
)
def test_a_step_that_deviates_falls_back(make_pool: Maker, deviation: dict[str, bool], refused: int) -> None:
    pool = make_pool("1MiB", max_size="4MiB")
    with pool.record_step() as recording:
        step(pool)
    with pool.serve(recording.plan()) as served:
        served.begin_step()
        step(pool, **deviation)
        assert served.refused == refused
        served.begin_step()
        step(pool)
        assert served.refused == refused
    assert pool.statistics().blocks == 0


def test_a_block_that_lives_on_keeps_its_place(make_pool: Maker) -> None:
    pool = make_pool("1MiB", max_size="4MiB")
    with pool.serve([(4000, 0), (4000, 0), (4000, 4032)]) as served:
        kept = pool.empty(1000).fill_(1.0)
        other = pool.empty(1000).fill_(2.0)  # planned in the same place
        third = pool.empty(1000).fill_(3.0)
        assert (served.served, served.refused) == (2, 1)
        served.begin_step()
        again = pool.empty(1000).fill_(4.0)
        assert served.refused == 2
        assert [tensor[0].item() for tensor in (kept, other, third, again)] == [1.0, 2.0, 3.0, 4.0]
        assert "2 served, 2 refused" in repr(served)


def test_the_memory_of_a_plan_stays_until_it_is_closed(make_pool: Maker) -> None:
    pool = make_pool(0, chunk_size="64KiB", max_size="1MiB")
    served = pool.serve([(100_000, 0)])
    assert pool.trim() == 0
    served.close()
    tensor = pool.empty(25_000)
    assert served.served == 0
    del tensor
    assert pool.trim() > 100_000
    assert pool.statistics().reserved_bytes == 0


def test_blocks_of_a_plan_do_not_move(make_pool: Maker) -> None:
    pool = make_pool("1MiB", max_size="4MiB")
    with pool.serve([(4096, 8192)]):
        handle = pool.allocate(4096)
        where = handle.address
        pool.defragment()
        assert handle.address == where


def test_no_room_for_a_plan(make_pool: Maker) -> None:
    pool = make_pool("1MiB", max_size="1MiB")
    held = pool.allocate(1000)
    with pytest.raises(OutOfPoolMemory):
        pool.serve([(1 << 20, 0)])
    pool.deallocate(held)
    with pool.serve([(1 << 20, 0)]) as served:
        pool.empty(1 << 18)
    assert served.served == 1


def test_plans_that_cannot_be(make_pool: Maker) -> None:
    pool = make_pool()
    with pytest.raises(UsageError, match="multiples of 64"):
        pool.serve([(100, 10)])
    with pytest.raises(UsageError, match=r"entry 1 of the plan, \(-5, 0\)"):
        StepPlan.of([(5, 0), (-5, 0)])


def test_one_recording_at_a_time(make_pool: Maker) -> None:
    pool = make_pool()
    with pool.record_step(), pytest.raises(UsageError, match="recording a step already"), pool.record_step():
        pass
    with pool.record_step() as recording:
        pass
    assert recording.plan().total_bytes == 0
