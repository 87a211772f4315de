"""Which tests are about GPU memory, and what their marks ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import pytest

from memfit.core.errors import UsageError
from memfit.core.units import parse_bytes

Figure = Literal["requested", "allocated", "reserved", "device"]
FIXTURE = "gpu_memory"
GPU_MARKS = {
    "limit_gpu_memory": 'limit_gpu_memory(size, of="allocated"): fail where the test\'s peak of GPU '
    "memory is over the "
    "size (of: requested, allocated, reserved, device)",
    "no_gpu_leak": 'no_gpu_leak(tolerance="0 B"): fail where the test leaves GPU memory allocated',
}
"""The marks, with what ``pytest --markers`` says of them."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a test's marks ask for; sizes in bytes, ``None`` where there is no such mark.

    Attributes:
        limit_bytes: what the peak may be.
        of: which peak.
        tolerance_bytes: what may be left at the end.
    """

    limit_bytes: int | None = None
    of: Figure = "allocated"
    tolerance_bytes: int | None = None


def is_gpu_test(item: pytest.Item) -> bool:
    """Whether a test is about GPU memory: by a mark, or by the fixture."""
    marked = any(item.get_closest_marker(name) is not None for name in GPU_MARKS)
    return marked or FIXTURE in getattr(item, "fixturenames", ())


def asked_of(item: pytest.Item) -> Asked:
    """What a test's marks ask for.

    Raises:
        UsageError: a size or figure that cannot be meant; the message names the test.
    """
    limit, leak = item.get_closest_marker("limit_gpu_memory"), item.get_closest_marker("no_gpu_leak")
    size: int | None = None
    of: Figure = "allocated"
    if limit is not None:
        if len(limit.args) != 1:
            raise UsageError(f'{item.nodeid}: write @pytest.mark.limit_gpu_memory("2 GB")')
        size = parse_bytes(limit.args[0], what=f"{item.nodeid}: limit_gpu_memory")
        of = limit.kwargs.get("of", of)
        if of not in get_args(Figure):
            raise UsageError(
                f"{item.nodeid}: limit_gpu_memory(of={of!r}) is one of {', '.join(get_args(Figure))}"
            )
    tolerance = None
    if leak is not None:
        given = leak.args[0] if leak.args else leak.kwargs.get("tolerance", 0)
        tolerance = parse_bytes(given, what=f"{item.nodeid}: no_gpu_leak")
    return Asked(limit_bytes=size, of=of, tolerance_bytes=tolerance)
