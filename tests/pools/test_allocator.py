"""MemoryAllocator: tensors by the name of a policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memfit.allocators import ALLOCATORS
from memfit.core.errors import UsageError
from memfit.pools import MemoryAllocator, OutOfPoolMemory

from .policies import NaiveFirstFit


@pytest.mark.parametrize("name", ALLOCATORS)
def test_every_policy_by_name(name: str) -> None:
    with MemoryAllocator(name, capacity="64MiB", device="cpu") as allocator:
        tensors = [allocator.allocate((rows, 10)).fill_(float(rows)) for rows in range(1, 60)]
        for tensor in tensors[::2]:
            allocator.deallocate(tensor)
        tensors[::2] = [allocator.allocate((rows, 10)).fill_(float(rows)) for rows in range(1, 60, 2)]
        assert [tensor.mean().item() for tensor in tensors] == [float(rows) for rows in range(1, 60)]
        assert allocator.statistics().policy == name


@pytest.fixture
def allocator() -> Any:
    with MemoryAllocator(NaiveFirstFit, capacity="1MiB", device="cpu", pool_size="64KiB") as made:
        yield made


@pytest.mark.parametrize(
    ("size", "dtype", "shape", "kind"),
    [
        ((3, 4), None, (3, 4), torch.float32),
        ([5], torch.int64, (5,), torch.int64),
        ((), torch.bfloat16, (), torch.bfloat16),
        ("1KiB", None, (1024,), torch.uint8),
        (4096, torch.float32, (1024,), torch.float32),
    ],
)
def test_shapes_and_sizes(allocator: MemoryAllocator, size: Any, dtype: Any, shape: Any, kind: Any) -> None:
    tensor = allocator.allocate(size, dtype=dtype)
    assert (tuple(tensor.shape), tensor.dtype) == (shape, kind)


def test_a_freed_tensor_is_left_empty(allocator: MemoryAllocator) -> None:
    tensor = allocator.allocate((10, 10)).fill_(1.0)
    row = tensor[3]
    allocator.deallocate(tensor)
    assert tensor.numel() == 0
    assert row.tolist() == [1.0] * 10
    assert allocator.statistics().blocks == 1
    del row
    statistics = allocator.statistics()
    assert (statistics.blocks, statistics.automatic_frees) == (0, 0)


def test_what_was_not_allocated_here(allocator: MemoryAllocator) -> None:
    tensor = allocator.allocate((10,))
    allocator.deallocate(tensor)
    for wrong in (tensor, torch.ones(3)):
        with pytest.raises(UsageError, match="not allocated here, or was freed already"):
            allocator.deallocate(wrong)


def test_a_number_of_bytes_that_is_no_number_of_elements(allocator: MemoryAllocator) -> None:
    with pytest.raises(UsageError, match="no whole number of torch.float32 elements"):
        allocator.allocate(1025, dtype=torch.float32)


def test_the_capacity(allocator: MemoryAllocator) -> None:
    kept = allocator.allocate("900KiB")
    with pytest.raises(OutOfPoolMemory, match="MemoryAllocator"):
        allocator.allocate("200KiB")
    assert allocator.holders()[0].requested_bytes == 900 * 1024
    del kept
    assert allocator.allocate("1MiB").numel() == 1 << 20


def test_modules_live_in_it(allocator: MemoryAllocator) -> None:
    layer = torch.nn.Linear(20, 20)
    for parameter in layer.parameters():
        moved = allocator.allocate(tuple(parameter.shape))
        parameter.data = moved.copy_(parameter.data)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    before = [parameter.clone() for parameter in layer.parameters()]
    layer(torch.ones(2, 20)).sum().backward()
    optimizer.step()
    assert all(not torch.equal(old, new) for old, new in zip(before, layer.parameters(), strict=True))
    assert allocator.statistics().blocks == 2
