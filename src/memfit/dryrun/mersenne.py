"""Skipping random numbers of PyTorch's CPU generator without drawing them.

The generator is a Mersenne Twister (MT19937), whose next state is linear over GF(2) in the present one. So
the state after ``n`` numbers is a polynomial in the step, of degree below 19,937, applied to the present one:
``x**n`` modulo the characteristic polynomial (Haramoto, Matsumoto, L'Ecuyer 2008, "A fast jump ahead
algorithm for linear recurrences in a polynomial space").
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]

_SIZE, _MIDDLE, _DEGREE = 624, 397, 19937
_UPPER, _LOWER, _MATRIX = 0x80000000, 0x7FFFFFFF, 0x9908B0DF
_LEFT, _NEXT, _WORDS = slice(8, 12), slice(16, 24), slice(24, 24 + 8 * _SIZE)
"""Where the bytes of a generator's state are: numbers left in the block plus one, the next one, the block."""


def skip(state: bytes, count: int) -> bytes:
    """The state of the generator after ``count`` more 32-bit numbers.

    Args:
        state: ``torch.Generator.get_state()`` as bytes.
    """
    done = bytearray(state)
    left = int.from_bytes(state[_LEFT], "little")
    position = int.from_bytes(state[_NEXT], "little")
    if count < left:
        left, position = left - count, position + count
    else:
        blocks, rest = divmod(count - left, _SIZE)  # left - 1 are in this block
        words = np.frombuffer(state[_WORDS], np.uint64).astype(np.uint32)
        done[_WORDS] = _after(words, _SIZE * (blocks + 1)).astype(np.uint64).tobytes()
        left, position = _SIZE - rest, rest + 1
    done[_LEFT] = left.to_bytes(4, "little")
    done[_NEXT] = position.to_bytes(8, "little")
    return bytes(done)


def _after(words: Words, steps: int) -> Words:
    """The block ``steps`` numbers later."""
    if steps <= 64 * _SIZE:
        return _continued(words, steps)[-_SIZE:]
    # One step less, then one as usual: of the first word the recurrence knows the highest bit only.
    row = np.unpackbits(
        np.frombuffer(_power(steps - 1).to_bytes(_DEGREE // 8 + 1, "little"), np.uint8), bitorder="little"
    )
    windows = np.lib.stride_tricks.sliding_window_view(_continued(words, _DEGREE), _SIZE)
    before = np.bitwise_xor.reduce(windows[np.flatnonzero(row[:_DEGREE])], axis=0)
    return _continued(before, 1)[-_SIZE:]


def _continued(words: Words, count: int) -> Words:
    """``words`` with ``count`` more behind them."""
    out = np.empty(_SIZE + count, np.uint32)
    out[:_SIZE] = words
    step = _SIZE - _MIDDLE
    for begin in range(0, count, step):
        end = min(begin + step, count)
        mixed = (out[begin:end] & _UPPER) | (out[begin + 1 : end + 1] & _LOWER)
        odd = np.where(mixed & 1, np.uint32(_MATRIX), np.uint32(0))
        out[_SIZE + begin : _SIZE + end] = out[_MIDDLE + begin : _MIDDLE + end] ^ (mixed >> 1) ^ odd
    return out


@lru_cache(maxsize=32)
def _power(exponent: int) -> int:
    """``x**exponent`` modulo the characteristic polynomial; bit i is the coefficient of x**i."""
    result = 1
    for digit in bin(exponent)[2:]:
        result = _reduced(_squared(result) << int(digit))
    return result


def _squared(polynomial: int) -> int:
    data = np.frombuffer(polynomial.to_bytes(_DEGREE // 8 + 1, "little"), np.uint8)
    bits = np.zeros(16 * len(data), np.uint8)
    bits[::2] = np.unpackbits(data, bitorder="little")
    return int.from_bytes(np.packbits(bits, bitorder="little").tobytes(), "little")


def _reduced(polynomial: int) -> int:
    """The remainder, eight coefficients at a time."""
    table = _multiples()
    for shift in range((polynomial.bit_length() - _DEGREE) // 8 * 8, -1, -8):
        top = polynomial >> (_DEGREE + shift)
        if top:
            polynomial ^= table[top] << shift
    return polynomial


@lru_cache(maxsize=1)
def _multiples() -> tuple[int, ...]:
    """For each byte the multiple of the characteristic polynomial that has it above the degree."""
    modulus = _characteristic()
    found = []
    for byte in range(256):
        multiple = 0
        for bit in reversed(range(8)):
            if (byte ^ (multiple >> _DEGREE)) >> bit & 1:
                multiple ^= modulus << bit
        found.append(multiple)
    return tuple(found)


def _characteristic() -> int:
    """The characteristic polynomial, from two times its degree of output bits (Berlekamp and Massey)."""
    seed = np.random.default_rng(1).integers(1, 1 << 32, _SIZE, dtype=np.uint32)
    current, previous, window, length, gap = 1, 1, 0, 0, 1
    for number, bit in enumerate((_continued(seed, 2 * _DEGREE)[_SIZE:] & 1).tolist()):
        window = window << 1 | bit
        if (current & window).bit_count() & 1:
            changed = current ^ previous << gap
            if 2 * length <= number:
                length, previous, gap = number + 1 - length, current, 0
            current = changed
        gap += 1
        window &= (1 << _DEGREE + 1) - 1
    assert length == _DEGREE
    return int(bin(current)[2:].rjust(length + 1, "0")[::-1], 2)
