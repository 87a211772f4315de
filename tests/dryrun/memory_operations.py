"""Calls the made-up GPU's memory functions through ctypes and checks every answer against a naive model."""

from __future__ import annotations

import ctypes
import json
import random
import sys

PAGE = 2 << 20
BASE = 0x100000000000

cuda = ctypes.CDLL(None)
cuda.memfit_stats.restype = ctypes.c_char_p
cuda.memfit_range.restype = ctypes.c_long


def stats() -> dict[str, int]:
    return json.loads(cuda.memfit_stats())


def malloc(size: int) -> int | None:
    out = ctypes.c_void_p()
    status = cuda.cudaMalloc(ctypes.byref(out), ctypes.c_size_t(size))
    cuda.cudaGetLastError()
    assert (status == 0) == bool(out.value)
    return out.value


def free(at: int) -> int:
    return cuda.cudaFree(ctypes.c_void_p(at))


def pages(size: int) -> int:
    return (size + PAGE - 1) // PAGE * PAGE


class NaiveDevice:
    """Live ranges in a list; addresses by walking over it."""

    def __init__(self, total: int, first_fit: bool) -> None:
        self.total, self.first_fit = total, first_fit
        self.live: dict[int, int] = {}
        self.high = BASE

    def malloc(self, size: int) -> int | None:
        length = pages(size)
        if sum(self.live.values()) + length > self.total:
            return None
        at = self.high
        if self.first_fit:
            at = BASE
            for start in sorted(self.live):
                if at + length <= start:
                    break
                at = start + self.live[start]
        self.live[at] = length
        self.high = max(self.high, at + length)
        return at


def random_operations(count: int) -> None:
    import os

    total, first_fit = int(os.environ["MEMFIT_GPU_TOTAL_BYTES"]), os.environ["MEMFIT_ADDRESSES"] == "firstfit"
    naive, rng = NaiveDevice(total, first_fit), random.Random(5)
    base = ctypes.c_size_t()
    for _ in range(count):
        if naive.live and rng.random() < 0.45:
            at = rng.choice(list(naive.live))
            inside = at + rng.randrange(naive.live.pop(at))
            assert cuda.memfit_range(ctypes.c_size_t(inside), ctypes.byref(base)) >= 0 and base.value == at
            assert free(at) == 0
            assert free(at) == 1, "freeing twice is an invalid value"
            assert cuda.memfit_range(ctypes.c_size_t(inside), ctypes.byref(base)) == -1
        else:
            size = rng.choice([1, PAGE, PAGE + 1, 20 << 20, rng.randrange(1, 200 << 20)])
            assert malloc(size) == naive.malloc(size)
        assert stats()["used_bytes"] == sum(naive.live.values())


def many_segments(count: int) -> None:
    held = [malloc(PAGE) for _ in range(count)]
    for at in held[::2]:
        assert free(at) == 0
    held = [
        *held[1::2],
        *(malloc(PAGE) for _ in range(count // 2)),
        *(malloc(PAGE) for _ in range(count // 2)),
    ]
    assert len(set(held)) == len(held)
    for at in held:
        assert free(at) == 0


def mapping() -> dict[str, object]:
    size = ctypes.c_size_t(20 << 20)
    properties = (ctypes.c_byte * 256)()
    at, handle = ctypes.c_ulonglong(), ctypes.c_ulonglong()
    account = []
    assert cuda.cuMemAddressReserve(ctypes.byref(at), ctypes.c_size_t(1 << 40), 0, 0, 0) == 0
    assert cuda.cuMemCreate(ctypes.byref(handle), size, properties, 0) == 0
    account.append(stats()["used_bytes"])
    assert cuda.cuMemMap(at, size, ctypes.c_size_t(0), handle, 0) == 0
    account.append(stats()["used_bytes"])
    assert cuda.cuMemRelease(handle) == 0
    account.append(stats()["used_bytes"])
    beyond = cuda.cuMemCreate(ctypes.byref(handle), ctypes.c_size_t(1 << 30), properties, 0)
    assert cuda.cuMemUnmap(at, size) == 0
    account.append(stats()["used_bytes"])
    assert cuda.cuMemAddressFree(at, ctypes.c_size_t(1 << 40)) == 0
    return {"account": account, "beyond": beyond}


if __name__ == "__main__":
    more: dict[str, object] = {}
    if sys.argv[1] == "random":
        random_operations(int(sys.argv[2]))
    elif sys.argv[1] == "many":
        many_segments(int(sys.argv[2]))
    else:
        more = mapping()
    print(json.dumps({**stats(), **more}))
