"""Batches ahead of their use: in order, with the loader's errors, and with a thread that ends."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from memfit.core.errors import UsageError
from memfit.techniques.prefetch import InputPrefetch


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "memfit-prefetch"]


def test_batches_pass_in_order_and_the_thread_ends() -> None:
    loader = [{"x": torch.full((2,), float(n)), "names": ["a"]} for n in range(7)]
    batches = InputPrefetch(loader, "cpu", depth=3)
    assert len(batches) == 7
    for _ in range(2):
        got = list(batches)
        assert all(a is b for a, b in zip(got, loader, strict=True)), "on the CPU as they are"
        assert _threads() == []


def test_it_is_only_so_far_ahead() -> None:
    taken: list[int] = []
    full = threading.Event()

    def loader() -> Iterator[int]:
        for number in range(100):
            taken.append(number)
            if number == 3:  # one is used, two lie in the queue, one waits at its door
                full.set()
            yield number

    iterator = iter(InputPrefetch(loader(), "cpu", depth=2))
    assert next(iterator) == 0
    assert full.wait(60)
    assert len(taken) <= 4
    iterator.close()  # type: ignore[attr-defined]
    assert _threads() == []


def test_the_loaders_error_comes_where_its_batch_would() -> None:
    def loader() -> Iterator[int]:
        yield 1
        raise ValueError("a broken file")

    got = []
    with pytest.raises(ValueError, match="a broken file") as caught:
        for batch in InputPrefetch(loader(), "cpu"):
            got.append(batch)
    assert got == [1] and any("loader" in entry.name for entry in caught.traceback)
    assert _threads() == []


def test_leaving_early_ends_the_thread() -> None:
    def first(batches: Any) -> Any:
        for batch in batches:
            return batch

    assert first(InputPrefetch(range(10**9), "cpu")) == 0
    gc.collect()
    assert _threads() == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, "cpu"), "an iterable of batches, not a int"),
        (([], "gpu:0"), "no device 'gpu:0'"),
        (([], torch.device("cuda", 0)), "is not there"),
    ],
)
def test_what_cannot_be(arguments: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match=message):
        InputPrefetch(*arguments)
    with pytest.raises(UsageError, match="depth"):
        InputPrefetch([], "cpu", depth=0)
