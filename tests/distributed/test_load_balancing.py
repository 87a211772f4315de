"""Assignments against brute force: optimal where they say so, within their bound where they do not."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memfit
from memfit.core.errors import UsageError
from memfit.distributed import Balance, Device, LoadBalancing, assigning, measured_balance, measured_speeds

costs = st.lists(st.integers(0, 9).map(float), min_size=1, max_size=6)
limits = st.one_of(st.none(), st.integers(2, 12))
devices = st.lists(
    st.builds(Device, name=st.just("d"), speed=st.sampled_from([1.0, 1.5, 3.0]), memory_bytes=limits),
    min_size=1,
    max_size=3,
)


def makespan(device_of: tuple[int, ...], work: list[float], known: list[Device]) -> float:
    loads = [0.0] * len(known)
    for index, cost in zip(device_of, work, strict=True):
        loads[index] += cost
    return max(load / device.speed for load, device in zip(loads, known, strict=True))


def fits(device_of: tuple[int, ...], sizes: list[int], known: list[Device], most: int | None = None) -> bool:
    for index, device in enumerate(known):
        mine = [size for taken, size in zip(device_of, sizes, strict=True) if taken == index]
        if device.memory_bytes is not None and sum(mine) > device.memory_bytes:
            return False
        if most is not None and len(mine) > most:
            return False
    return True


@given(work=costs, known=devices, data=st.data())
@settings(max_examples=150)
def test_assignments_equal_brute_force(work: list[float], known: list[Device], data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 5), min_size=len(work), max_size=len(work)))
    most = data.draw(st.sampled_from([None, 2, 4]))
    ways = itertools.product(range(len(known)), repeat=len(work))
    best = min((makespan(way, work, known) for way in ways if fits(way, sizes, known, most)), default=None)
    balancing = LoadBalancing("memory_aware")
    if best is None:
        with pytest.raises(UsageError, match="do not fit"):
            balancing.assign(work, known, sizes_bytes=sizes, most_items=most)
        return
    found = balancing.assign(work, known, sizes_bytes=sizes, most_items=most)
    assert found.optimal and fits(found.device_of, sizes, known, most)
    assert makespan(found.device_of, work, known) == pytest.approx(best) == found.after.makespan_seconds
    assert found.lower_bound_seconds <= best + 1e-9
    assert not found.after.over_memory


@given(work=st.lists(st.integers(1, 9).map(float), min_size=3, max_size=7), data=st.data())
@settings(max_examples=100)
def test_pipeline_splits_equal_brute_force(work: list[float], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, 3))
    known = data.draw(st.lists(devices.map(lambda d: d[0]), min_size=stages, max_size=stages))
    weights = data.draw(st.lists(st.integers(0, 3), min_size=len(work), max_size=len(work)))
    activations = data.draw(st.lists(st.integers(0, 2), min_size=len(work), max_size=len(work)))
    micro_batches = data.draw(st.integers(1, 4))

    def held(stage: int, first: int, end: int) -> int:
        kept = min(micro_batches, stages - stage)
        return sum(weights[first:end]) + kept * sum(activations[first:end])

    best = None
    for cuts in itertools.combinations(range(1, len(work)), stages - 1):
        pieces = list(itertools.pairwise([0, *cuts, len(work)]))
        limits = [device.memory_bytes for device in known]
        if all(
            limit is None or held(s, *p) <= limit
            for s, (p, limit) in enumerate(zip(pieces, limits, strict=True))
        ):
            seconds = max(sum(work[a:b]) / known[s].speed for s, (a, b) in enumerate(pieces))
            best = seconds if best is None else min(best, seconds)
    balancing = LoadBalancing("memory_aware")
    arguments = {"weights_bytes": weights, "activations_bytes": activations, "micro_batches": micro_batches}
    if best is None:
        with pytest.raises(UsageError, match="stages keeps the memory"):
            balancing.split_layers(work, known, **arguments)
        return
    found = balancing.split_layers(work, known, **arguments)
    assert found.after.makespan_seconds == pytest.approx(best) and found.optimal
    assert list(found.device_of) == sorted(found.device_of) and set(found.device_of) == set(range(stages))
    for strategy in ("round_robin", "least_loaded"):
        other = LoadBalancing(strategy).split_layers(work, known, **arguments)
        assert set(other.device_of) == set(range(stages)) and list(other.device_of) == sorted(other.device_of)
        assert other.lower_bound_seconds <= best + 1e-9


@given(samples=st.integers(1, 12), known=devices, size=st.integers(0, 3))
def test_batches_equal_brute_force(samples: int, known: list[Device], size: int) -> None:
    ways = [w for w in itertools.product(range(samples + 1), repeat=len(known)) if sum(w) == samples]
    rooms = [device.memory_bytes for device in known]
    fitting = [w for w in ways if all(r is None or n * size <= r for n, r in zip(w, rooms, strict=True))]
    if not fitting:
        with pytest.raises(UsageError, match="does not fit"):
            LoadBalancing().split_batch(samples, known, bytes_per_sample=size)
        return
    best = min(max(n / d.speed for n, d in zip(way, known, strict=True)) for way in fitting)
    found = LoadBalancing().split_batch(samples, known, bytes_per_sample=size)
    assert found.after.makespan_seconds == pytest.approx(best) and found.optimal


def test_a_large_problem_stays_within_its_stated_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a small budget of nodes nothing is proven, and the gap must hold against the true best, which is
    known by construction: each device is filled exactly."""
    monkeypatch.setattr(assigning, "SEARCH_NODES", 200)
    source = random.Random(5)
    lengths = []
    for _ in range(8):
        cuts = sorted(source.sample(range(1, 4096), 14))
        lengths += [b - a for a, b in itertools.pairwise([0, *cuts, 4096])]
    source.shuffle(lengths)
    found = memfit.LoadBalancing("memory_aware").pack_samples(lengths, 8, bytes_per_token=2)
    assert found.lower_bound_seconds <= 4096 <= found.after.makespan_seconds
    assert found.after.makespan_seconds <= 4096 * (1 + found.gap) * (1 + 1e-12)
    assert found.gap < 0.02 and found.before.imbalance > 1.1
    assert sum(found.after.memory_bytes) == 2 * sum(lengths)


def test_each_strategy_does_what_it_says() -> None:
    known = [Device(name="fast", speed=2.0, memory_bytes=4), Device(name="slow", memory_bytes=100)]
    work, sizes = [4.0, 4.0, 2.0, 2.0], [3, 3, 3, 3]
    dealt = LoadBalancing("round_robin").assign(work, known, sizes_bytes=sizes)
    greedy = LoadBalancing("least_loaded").assign(work, known, sizes_bytes=sizes)
    aware = LoadBalancing("memory_aware").assign(work, known, sizes_bytes=sizes)
    assert dealt.device_of == (0, 1, 0, 1) and dealt.after == dealt.before
    assert greedy.device_of == (0, 0, 1, 1)  # by speed alone: the fast one gets both large items
    assert greedy.after.over_memory == ("fast",) and not aware.after.over_memory
    assert aware.items_of(0) in ((0,), (1,)) and aware.after.makespan_seconds == 8.0


def test_measured_times_give_balance_and_speeds() -> None:
    balance = measured_balance([1.0, 1.0, 2.0])
    assert balance.imbalance == pytest.approx(1.5) and balance.idle_share == pytest.approx(1 / 3)
    assert "rank 2" in balance.names
    fast, slow = measured_speeds([Device(name="a"), Device(name="b")], [10, 10], [1.0, 4.0])
    assert (fast.speed, slow.speed) == (10.0, 2.5)
    empty = Balance(names=(), seconds=(), memory_bytes=(), limits_bytes=())
    assert empty.imbalance == 1.0 and empty.makespan_seconds == 0.0


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: LoadBalancing("fair"), "strategy must be one of"),  # type: ignore[arg-type]
        (lambda: LoadBalancing().assign([1.0, -1.0], 2), "cost"),
        (lambda: LoadBalancing().assign([1.0], []), "no devices"),
        (lambda: LoadBalancing().assign([1.0], 1, sizes_bytes=[1, 2]), "sizes_bytes"),
        (lambda: LoadBalancing().split_layers([1.0], 2), "cannot fill 2 stages"),
        (lambda: Device(name="x", speed=0.0), "speed"),
    ],
)
def test_what_cannot_be_meant_is_refused(call: object, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        call()  # type: ignore[operator]


def test_balancing_needs_no_torch() -> None:
    code = "import sys, memfit; memfit.LoadBalancing().assign([1.0], 1); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
