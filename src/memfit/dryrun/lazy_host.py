"""Large tensors of the host whose values are computed only when somebody looks at them.

A script that builds 8 billion parameters on the CPU and then moves them to the GPU needs 32 GB for values
that the made-up GPU does not hold anyway. So initialising, converting and moving a large float tensor of the
host is put off: its memory is reserved and never touched. An operation that needs the values gets them, as
they would have been: what was put off is then carried out, with the random numbers that it would have drawn.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from memfit.dryrun.recipes import Copied, Draw, Geometry, Recipe, Step, advanced, carry_out
from memfit.dryrun.shadow import FLOATS, MISSING, MOST_FLOATS, address_of
from memfit.dryrun.writes import SCRATCH_VARIABLE

LARGE_BYTES = 1 << 20
_MOST_STEPS = 24
_MOST_AT_FORK_BYTES = 1 << 30
_LARGE_FILE_BYTES = 1 << 26
_MMAP_THRESHOLD = -3  # of mallopt: larger blocks are mappings of their own, untouched until written

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_graph_task = torch._C._current_graph_task_id

aten = torch.ops.aten


@dataclass(eq=False)
class _Untouched:
    """A storage that holds nothing yet."""

    recipe: Recipe
    size_bytes: int
    storage: weakref.ref[torch.UntypedStorage]


class LazyHost:
    """The tensors of this process's host memory that are not computed yet."""

    def __init__(self) -> None:
        self._untouched: dict[int, _Untouched] = {}
        self._base: bytes | None = None  # the generator's state when the first number was put off
        self._skipped = 0
        self._busy = False
        self._mapped: list[tuple[int, int]] = []
        self.count = 0
        self.size_bytes = 0

    def install(self) -> None:
        """Stand before what reads host memory without an operation."""
        with contextlib.suppress(AttributeError):  # another C library
            ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, LARGE_BYTES)
        for name in ("numpy", "tolist", "__array__", "__dlpack__", "share_memory_", "__reduce_ex__"):
            self._compute_before(name)
        for module in (torch, torch.random):
            _before(module, "get_rng_state", self.draw_skipped)
            for name in ("manual_seed", "set_rng_state", "seed"):
                _before(module, name, self._forget_skipped)
        torch.load = _mapped_load(torch.load)
        self._note_mapped_files()
        os.register_at_fork(before=self._before_fork)

    def is_mapped(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is in a file that was mapped into memory for this process alone."""
        address = tensor.data_ptr()
        return any(begin <= address < end for begin, end in self._mapped)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of ``func`` where it can be put off; else `MISSING`, and what it reads is computed."""
        if self._busy:
            return MISSING
        rule = _RULES.get(func)
        if rule is not None and _graph_task() == -1:
            out = rule(self, func, args, kwargs)
            if out is not MISSING:
                return out
        if self._untouched and func not in _NEEDS_NO_VALUES:
            for value in args:
                self._compute_inside(value)
            for value in kwargs.values():
                self._compute_inside(value)
        if self._skipped and _draws(func) and not _on_device(args, kwargs):
            self.draw_skipped()
        return MISSING

    def holds(self, tensor: Any) -> _Untouched | None:
        """What is put off of the storage of ``tensor``, if anything."""
        if type(tensor) not in _PLAIN or tensor.device.type != "cpu" or not self._untouched:
            return None
        return self._untouched.get(address_of(tensor))

    def put_off(self, tensor: torch.Tensor, step: Step) -> bool:
        """Whether ``step`` on ``tensor`` can wait; it then does."""
        entry = self.holds(tensor)
        whole = covers_storage(tensor)
        if entry is not None and len(entry.recipe) < _MOST_STEPS:
            starts_anew = whole and step.func in _STARTS
            entry.recipe = (step,) if starts_anew else (*entry.recipe, step)
            return True
        if entry is not None or not whole or step.func not in _STARTS:
            return False
        storage = tensor.untyped_storage()
        self._untouched[storage.data_ptr()] = _Untouched(
            (step,), storage.nbytes(), weakref.ref(storage, self._gone(storage.data_ptr()))
        )
        self.count += 1
        self.size_bytes += storage.nbytes()
        return True

    def copied(self, tensor: torch.Tensor) -> Copied:
        """What a copy of ``tensor`` as it is now would hold."""
        entry = self.holds(tensor)
        assert entry is not None
        return Copied(entry.recipe, entry.size_bytes, Geometry.of(tensor))

    def draw(self, count: int) -> Draw:
        """Put off drawing ``count`` numbers from the script's generator."""
        if self._base is None:
            self._base = _state()
        drawn = Draw(self._base, self._skipped)
        self._skipped += count
        return drawn

    def draw_skipped(self) -> None:
        """Let the script's generator stand where it would."""
        base, count, self._base, self._skipped = self._base, self._skipped, None, 0
        if base is not None and count and base == _state():
            torch.default_generator.set_state(advanced(base, count))

    def compute(self, tensor: Any) -> None:
        """Compute what was put off of the storage of ``tensor``."""
        entry = self.holds(tensor)
        if entry is None:
            return
        del self._untouched[address_of(tensor)]
        self.count -= 1
        self.size_bytes -= entry.size_bytes
        before, self._busy = self._busy, True
        try:
            carry_out(entry.recipe, tensor.untyped_storage())
        finally:
            self._busy = before

    @property
    def is_drawing_late(self) -> bool:
        """Whether numbers were put off that the script's generator has yet to draw."""
        return self._skipped > 0

    def _note_mapped_files(self) -> None:
        original = torch.UntypedStorage.from_file

        def from_file(filename: Any, shared: bool = False, nbytes: int = 0) -> Any:
            storage = original(filename, shared, nbytes)
            if not shared:
                self._mapped.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
            return storage

        torch.UntypedStorage.from_file = staticmethod(from_file)  # type: ignore[method-assign]

    def _compute_inside(self, value: Any) -> None:
        if type(value) in _PLAIN:
            self.compute(value)
        elif isinstance(value, tuple | list):
            for part in value:
                self._compute_inside(part)

    def _gone(self, key: int) -> Callable[[object], None]:
        untouched = self._untouched

        def gone(_: object) -> None:
            untouched.pop(key, None)

        return gone

    def _forget_skipped(self) -> None:
        self._base, self._skipped = None, 0

    def _before_fork(self) -> None:
        """A fork sees the values, unless they are too many to be anything but a model on its way."""
        self.draw_skipped()
        entries = list(self._untouched.values())
        if sum(entry.size_bytes for entry in entries) > _MOST_AT_FORK_BYTES:
            return
        for entry in entries:
            storage = entry.storage()
            if storage is not None:
                self.compute(torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage))

    def _compute_before(self, name: str) -> None:
        original = getattr(torch.Tensor, name)

        @functools.wraps(original)
        def computed(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.compute(tensor)
            return original(tensor, *args, **kwargs)

        setattr(torch.Tensor, name, computed)


def covers_storage(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` has every byte of its storage, once."""
    if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        return False
    expected = 1
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent > 1 and stride != expected:
            return False
        expected *= extent
    return True


def _before(module: Any, name: str, action: Callable[[], None]) -> None:
    original = getattr(module, name)

    @functools.wraps(original)
    def after_action(*args: Any, **kwargs: Any) -> Any:
        action()
        return original(*args, **kwargs)

    setattr(module, name, after_action)


def _mapped_load(load: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.load` that maps large files into memory, where it may, instead of reading them."""
    import zipfile

    @functools.wraps(load)
    def mapped(f: Any, *args: Any, **kwargs: Any) -> Any:
        if "mmap" not in kwargs and isinstance(f, str | os.PathLike):
            with contextlib.suppress(OSError):
                large = os.path.getsize(f) >= _LARGE_FILE_BYTES
                if large and _stays_as_it_is(f) and zipfile.is_zipfile(f):
                    kwargs["mmap"] = True
        return load(f, *args, **kwargs)

    return mapped


def _stays_as_it_is(file: str | os.PathLike[str]) -> bool:
    """Whether the script cannot write to the file: it is the user's, and guarded. A file that shrinks while
    it is mapped would end the process."""
    scratch = os.environ.get(SCRATCH_VARIABLE)
    return bool(scratch) and not os.path.lexists(f"{scratch}{os.path.realpath(file)}")


def _state() -> bytes:
    return bytes(torch.default_generator.get_state().numpy().tobytes())


@functools.lru_cache(maxsize=4096)
def _draws(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


def _on_device(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the operation draws from a device's generator, or from one of the script's own."""
    if kwargs.get("generator") is not None:
        return kwargs["generator"] is not torch.default_generator
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"]).type != "cpu"
    return any(isinstance(value, torch.Tensor) and value.device.type != "cpu" for value in args)


# ------------------------------------------------------------------ what can be put off ----


def _is_large(tensor: Any) -> bool:
    return (
        type(tensor) in _PLAIN
        and tensor.device.type == "cpu"
        and tensor.dtype in FLOATS
        and tensor.layout is torch.strided
        and tensor.numel() * tensor.element_size() >= LARGE_BYTES
    )


def _scalars(values: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The values as Python numbers; None where one is more than that."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.dim() or value.device.type != "cpu":
                return None
            value = value.item()
        found.append(value)
    return tuple(found)


def _in_place(host: LazyHost, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``zero_``, ``fill_``, ``mul_`` … by numbers."""
    target = args[0]
    if not _is_large(target) and host.holds(target) is None:
        return MISSING
    rest = _scalars(args[1:])
    if rest is None:
        return MISSING
    step = Step(func, Geometry.of(target), rest, tuple(kwargs.items()))
    return target if host.put_off(target, step) else MISSING


def _random(host: LazyHost, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``normal_``, ``uniform_``: the numbers are skipped, to be drawn when somebody looks."""
    target = args[0]
    small = type(target) is torch.nn.Parameter and host.is_drawing_late and target.dtype in FLOATS
    if not (_is_large(target) or small) or kwargs.get("generator") is not None:
        return MISSING
    if not target.is_contiguous() or target.device.type != "cpu" or target.numel() < 16:
        return MISSING
    if host.holds(target) is None and not covers_storage(target):
        return MISSING
    entry = host.holds(target)
    if entry is not None and len(entry.recipe) >= _MOST_STEPS:
        return MISSING
    draw = host.draw(_numbers(func, target))
    host.put_off(target, Step(func, Geometry.of(target), args[1:], draw=draw))
    return target


def _numbers(func: Any, target: torch.Tensor) -> int:
    """How many 32-bit numbers the CPU kernel draws: one each, two for doubles; `normal_` fills sixteen at a
    time, and the last sixteen again where they do not end evenly."""
    count = target.numel()
    if func is aten.normal_.default and count % 16:
        count += 16
    return count * (2 if target.dtype is torch.float64 else 1)


def _make(host: LazyHost, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``zeros``, ``randn`` …: made without content, then filled by what is put off."""
    fill, tail = _FACTORIES[func]
    options = dict(kwargs)
    like = args[0] if isinstance(args[0], torch.Tensor) else None
    if _on_device(args, options) or options.get("layout") not in (None, torch.strided):
        return MISSING
    if like is None and options.get("dtype") is None and tail and not isinstance(args[1], float):
        return MISSING  # the type is that of the number
    default = torch.get_default_dtype() if like is None else like.dtype
    extent = _size(args[0] if like is None else like.shape)
    if extent * (options.get("dtype") or default).itemsize < LARGE_BYTES:
        return MISSING
    make = aten.empty.memory_format if like is None else aten.empty_like.default
    out = make(args[0], **options)
    if not _is_large(out):
        return MISSING
    done = _RULES[fill](host, fill, (out, *args[1 : 1 + tail]), {})
    return MISSING if done is MISSING else out


def _size(shape: Any) -> int:
    count = 1
    for extent in shape:
        count *= int(extent)
    return count


def _convert(host: LazyHost, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``.to(…)`` and ``clone`` of a tensor that is not computed yet."""
    source = args[0]
    if host.holds(source) is None or source.numel() <= MOST_FLOATS:
        return MISSING
    dtype = kwargs.get("dtype") or source.dtype
    device = torch.device(kwargs.get("device") or "cpu")
    form = kwargs.get("memory_format") or torch.preserve_format
    if device.type != "cpu":
        arrived = aten.empty_like.default(source, dtype=dtype, device=device, memory_format=form)
        return arrived.copy_(_sent(source, dtype), kwargs.get("non_blocking", False))
    made = aten.empty_like.default(source, dtype=dtype, pin_memory=False, memory_format=form)
    if dtype not in FLOATS or kwargs.get("pin_memory"):
        return MISSING
    step = Step(aten.copy_.default, Geometry.of(made), source=host.copied(source))
    return made if host.put_off(made, step) else MISSING


def _sent(source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is sent to the device instead of ``source``: of the type that arrives, so that the host converts
    nothing; contiguous where PyTorch would have converted, so that the device takes the same temporaries."""
    form = torch.preserve_format if dtype is source.dtype else torch.contiguous_format
    return torch.empty_like(source, dtype=dtype, memory_format=form)


def _copy(host: LazyHost, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``target.copy_(source)``, where either is not computed yet."""
    target, source = args[0], args[1]
    if host.holds(source) is None:
        return _copy_file(host, target, source)
    if source.numel() <= MOST_FLOATS:  # their values may be followed on the device
        return MISSING
    if target.device.type != "cpu":
        return func(target, _sent(source, target.dtype), *args[2:], **kwargs)
    if not _is_large(target) and host.holds(target) is None:
        return MISSING
    step = Step(aten.copy_.default, Geometry.of(target), source=host.copied(source))
    return target if host.put_off(target, step) else MISSING


def _copy_file(host: LazyHost, target: Any, source: Any) -> Any:
    """Weights from a file that is mapped into memory: read when somebody looks."""
    if _is_large(source) and host.is_mapped(source) and _is_large(target):
        step = Step(aten.copy_.default, Geometry.of(target), source=source.detach())
        return target if host.put_off(target, step) else MISSING
    entry = host.holds(target)
    if entry is not None and type(source) in _PLAIN and covers_storage(target):
        entry.recipe = ()  # what it would have held does not matter any more
    return MISSING


_Rule = Callable[[LazyHost, Any, tuple[Any, ...], dict[str, Any]], Any]


def _overloads(*packets: Any) -> Iterator[Any]:
    for packet in packets:
        for name in packet.overloads():
            yield getattr(packet, name)


_STARTS = frozenset(
    {
        aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.normal_.default,
        aten.uniform_.default, aten.copy_.default,
    }
)  # fmt: skip
"""Operations after which the old content does not matter."""

_FACTORIES: Mapping[Any, tuple[Any, int]] = {
    **dict.fromkeys((aten.zeros.default, aten.zeros_like.default), (aten.zero_.default, 0)),
    **dict.fromkeys((aten.full.default, aten.full_like.default), (aten.fill_.Scalar, 1)),
    **dict.fromkeys((aten.randn.default, aten.randn_like.default), (aten.normal_.default, 0)),
    **dict.fromkeys((aten.rand.default, aten.rand_like.default), (aten.uniform_.default, 0)),
}
"""What makes a tensor: the operation that fills it, and how many of the arguments are that one's."""

_RULES: Mapping[Any, _Rule] = {
    **dict.fromkeys((aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor), _in_place),
    **dict.fromkeys((aten.mul_.Tensor, aten.mul_.Scalar, aten.add_.Tensor, aten.add_.Scalar), _in_place),
    **dict.fromkeys((aten.div_.Tensor, aten.div_.Scalar, aten.sub_.Tensor, aten.clamp_.default), _in_place),
    aten.erfinv_.default: _in_place,
    **dict.fromkeys((aten.normal_.default, aten.uniform_.default), _random),
    **dict.fromkeys(_FACTORIES, _make),
    **dict.fromkeys((aten._to_copy.default, aten.clone.default), _convert),
    aten.copy_.default: _copy,
}
"""The operations that can be put off."""

_NEEDS_NO_VALUES = frozenset(
    _overloads(
        aten.empty_like, aten.zeros_like, aten.ones_like, aten.rand_like, aten.randn_like, aten.full_like,
        aten.new_empty, aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty_strided, aten.set_,
        aten.resize_, aten.is_same_size,
    )
)  # fmt: skip
"""Operations that look at the shape of a tensor, and not at its values."""
