"""What the made-up GPUs themselves counted, asked in the process that uses them."""

from __future__ import annotations

import ctypes
import functools
import json
from collections.abc import Callable
from typing import Any

_MOST_DEVICES = 64
_Farewell = ctypes.CFUNCTYPE(None, ctypes.c_int)
_farewells: list[Any] = []  # what C calls must stay


@functools.cache
def _library() -> Any:
    """This process's made-up GPU, or None where it is not loaded."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "memfit_device_stats"):
        return None
    library.memfit_device_stats.restype = ctypes.c_char_p
    library.memfit_unknown_calls.restype = ctypes.c_char_p
    library.memfit_last_upload.restype = ctypes.c_void_p
    library.memfit_used_devices.restype = ctypes.c_uint64
    library.memfit_estimates.restype = ctypes.c_char_p
    library.memfit_estimate_bytes.restype = ctypes.c_size_t
    library.memfit_traffic.restype = ctypes.c_char_p
    return library


def before_exit(tell: Callable[[int], None]) -> None:
    """Calls ``tell(exit code)`` before this process, and no fork of it, ends by C's ``exit()`` or
    ``_exit()``."""
    library = _library()
    if library is not None:
        _farewells.append(_Farewell(tell))
        library.memfit_before_exit(_farewells[-1])


def used_devices() -> tuple[int, ...]:
    """Numbers of the devices on which this process has a context."""
    library = _library()
    bits = 0 if library is None else library.memfit_used_devices()
    if bits == 1:  # nearly always, and this is asked often
        return (0,)
    return tuple(device for device in range(_MOST_DEVICES) if bits >> device & 1)


def device_account(device: int) -> dict[str, int]:
    """A device's account: used and highest bytes (without the context), context and total."""
    library = _library()
    return {} if library is None else dict(json.loads(library.memfit_device_stats(device)))


def unknown_calls() -> list[str]:
    """Names of the library calls that the made-up GPU accepted without modelling them."""
    library = _library()
    return [] if library is None else list(json.loads(library.memfit_unknown_calls()))


def estimates() -> dict[str, int]:
    """Sizes that came from a rule and not from the real library, with the largest bytes of each."""
    library = _library()
    names = [] if library is None else json.loads(library.memfit_estimates())
    return {name: library.memfit_estimate_bytes(name.encode()) for name in names}


def last_upload(address: int, size_bytes: int) -> bytes | None:
    """What this thread's last copy from the host put at ``address``, if that was it; up to 4096 bytes."""
    library = _library()
    if library is None:
        return None
    found = library.memfit_last_upload(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes))
    return ctypes.string_at(found, size_bytes) if found else None


def last_reduction() -> int:
    """How this thread's last NCCL reduction combines the ranks: 0 sum, 1 product, 2 most, 3 least, 4 mean."""
    library = _library()
    return 0 if library is None else int(library.memfit_last_reduction())


def traffic() -> dict[str, tuple[int, int, int]]:
    """What this process gave to NCCL's collectives so far, by kind.

    Of each kind: calls, bytes of this rank's own (of an all-gather its part, of the others the whole tensor),
    and bytes that it sends to other ranks where they stand in a ring.
    """
    library = _library()
    found = {} if library is None else json.loads(library.memfit_traffic())
    return {kind: (calls, own, sent) for kind, (calls, own, sent) in found.items()}
