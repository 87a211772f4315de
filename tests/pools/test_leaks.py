"""collect(): tensors that tracebacks, closures and cycles hold, by name, place and size."""

from __future__ import annotations

import functools
import gc
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from memfit.pools import Collection, KeptTensor, collect

ELEMENTS = 31_337
SIZE_BYTES = 4 * ELEMENTS
"""A size that nothing else in the process has."""


@pytest.fixture(autouse=True)
def no_collection_by_itself() -> Iterator[None]:
    gc.collect()
    gc.disable()
    gc.freeze()  # what other tests of this process have loaded need not be looked through
    yield
    gc.unfreeze()
    gc.enable()


def ours(found: tuple[KeptTensor, ...]) -> list[KeptTensor]:
    return [kept for kept in found if kept.size_bytes == SIZE_BYTES]


def fails(activation: torch.Tensor) -> None:
    layers = {"saved": [activation + 1]}
    raise ValueError(f"no {len(layers)}")


def line_of(function: Callable[..., Any], text: str) -> int:
    import inspect

    lines, start = inspect.getsourcelines(function)
    return start + next(index for index, line in enumerate(lines) if text in line)


def failure() -> ValueError:
    try:
        fails(torch.ones(ELEMENTS))
    except ValueError as error:
        return error
    raise AssertionError


class TestTracebacks:
    def test_a_stored_exception(self) -> None:
        stored = failure()
        kept = ours(collect().kept)
        assert {found.variable for found in kept} == {"activation", "layers['saved'][0]"}
        found = kept[0]
        assert (found.keeper, found.holder) == ("traceback", "ValueError('no 1')")
        assert found.site is not None
        assert (found.site.line, found.site.function) == (line_of(fails, "raise"), "fails")
        assert found.site.file == __file__
        assert (found.shape, found.dtype, found.device) == ((ELEMENTS,), "float32", "cpu")
        traceback.clear_frames(stored.__traceback__)
        assert not ours(collect().kept)

    def test_inside_of_the_except_block(self) -> None:
        try:
            fails(torch.ones(ELEMENTS))
        except ValueError:
            assert ours(collect().kept)
        assert not ours(collect().kept)

    def test_what_the_prompt_remembers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        error = failure()
        monkeypatch.setattr(sys, "last_traceback", error.__traceback__, raising=False)
        monkeypatch.setattr(sys, "last_value", None, raising=False)
        monkeypatch.setattr(sys, "last_exc", None, raising=False)
        error.__traceback__ = None
        del error
        assert {found.keeper for found in ours(collect().kept)} == {"traceback"}
        assert "sys.last_traceback" in ours(collect().kept)[0].holder

    def test_looking_keeps_nothing(self) -> None:
        stored = failure()
        trace = stored.__traceback__
        assert trace is not None
        assert trace.tb_next is not None
        gone = weakref.ref(trace.tb_next.tb_frame.f_locals["activation"])
        collect()
        del trace
        traceback.clear_frames(stored.__traceback__)
        del stored
        gc.collect()
        assert gone() is None

    def test_running_functions_hold_nothing_by_mistake(self) -> None:
        local = torch.ones(ELEMENTS)
        assert not ours(collect().kept)
        del local


class TestClosures:
    def test_a_function_that_took_a_variable_along(self) -> None:
        def make() -> Callable[[], float]:
            batch = {"input": torch.ones(ELEMENTS)}
            return lambda: float(batch["input"].sum())

        hook = make()
        (found,) = ours(collect().kept)
        assert (found.keeper, found.variable) == ("closure", "batch['input']")
        assert "make.<locals>.<lambda>" in found.holder
        assert found.site is not None
        assert found.site.line == line_of(make, "lambda")
        del hook
        assert not ours(collect().kept)

    def test_what_is_too_deep_for_one_is_found_for_another(self) -> None:
        inner = [[[[torch.ones(ELEMENTS)]]]]
        outer = [inner]

        def far() -> int:
            return len(outer)

        def near() -> int:
            return len(inner)

        assert [kept.holder.split(".")[-1] for kept in ours(collect().kept)] == ["near"]
        assert far() == near()

    def test_a_partial_of_it(self) -> None:
        def make() -> Any:
            weights = torch.ones(ELEMENTS)

            def scaled(factor: float) -> torch.Tensor:
                return weights * factor

            return functools.partial(scaled, 2.0)

        partial = make()
        assert [found.variable for found in ours(collect().kept)] == ["weights"]
        del partial


class Node:
    """Holds itself."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.myself = self


class TestCycles:
    def test_a_cycle_is_freed_and_its_holder_named(self) -> None:
        node = Node(torch.ones(ELEMENTS))
        gone = weakref.ref(node.weight)
        del node
        assert gone() is not None
        result = collect()
        (found,) = ours(result.freed)
        assert (found.keeper, found.variable) == ("cycle", "weight")
        assert found.holder.endswith("test_leaks.Node")
        assert found.site is not None
        assert found.site.file == __file__
        assert gone() is None
        assert result.freed_bytes >= SIZE_BYTES
        assert not ours(collect().freed)

    def test_a_list_that_holds_itself(self) -> None:
        cycle: list[Any] = [torch.ones(ELEMENTS)]
        cycle.append(cycle)
        del cycle
        assert [found.variable for found in ours(collect().freed)] == ["[0]"]

    def test_the_collector_is_left_as_it_was(self) -> None:
        garbage = len(gc.garbage)
        collect()
        assert gc.get_debug() == 0
        assert len(gc.garbage) == garbage
        assert not gc.isenabled()


def test_a_storage_counts_once_and_small_ones_can_be_left_out() -> None:
    whole = torch.ones(ELEMENTS)
    functions = [lambda part=part: part for part in (1, 2)]

    def make(part: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: part

    functions.extend(make(part) for part in (whole[:10], whole[10:]))  # type: ignore[misc]
    result = collect()
    assert len(ours(result.kept)) == 2
    assert not ours(collect(least_bytes=SIZE_BYTES + 1).kept)
    alone = Collection(kept=tuple(ours(result.kept)), freed=(), collected_objects=0)
    assert alone.kept_bytes == SIZE_BYTES


def test_it_prints_well() -> None:
    def make() -> Callable[[], torch.Tensor]:
        batch = torch.ones(ELEMENTS)
        return lambda: batch

    hook = make()
    text = str(Collection(kept=tuple(ours(collect().kept)), freed=(), collected_objects=3))
    head, line = text.splitlines()
    assert head == "3 objects collected, 0 B in tensors of cycles; 122.41 KiB kept by tracebacks and closures"
    assert line.startswith("  kept   122.41 KiB (float32[31337] on cpu) by closure: batch of function ")
    assert "test_leaks.py:" in line
    del hook


class Hostile:
    """An object that must not be asked anything."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        raise RuntimeError("asked")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("asked")


def test_objects_are_not_asked_anything() -> None:
    def make() -> Callable[[], Any]:
        hostile = Hostile()
        return lambda: hostile

    hook = make()
    collect()
    del hook
