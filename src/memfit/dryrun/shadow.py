"""True values for small tensors of the made-up GPU, and plausible ones for the rest.

No kernel runs on the made-up GPU, so what it holds is not real; but values steer Python: a mask whose
``all()`` is true makes a model take another attention kernel. So each small integer or boolean storage has a
CPU shadow with its true bytes, which follows the operations, and reads of a shadowed value give the true one.
Every other read gets a finite, positive answer and is noted. Allocations on the device are what they would be
without shadows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from memfit.dryrun.questions import Kind, Question, op_text

LARGEST_BYTES = 1 << 20
MOST_FLOATS = 64
"""Floats are followed in tiny tensors only: learning rates, loss scales, counters of fused optimizers, widths
and drop rates of the layers of a model that is built on the device."""
MOST_FILLED = 4096
"""A copy to the host of at most so many unknown floats reads as ones; a larger one stays zeros."""

WHOLE = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
MISSING: Any = object()

_PLAIN = (torch.Tensor, torch.nn.Parameter)  # subclasses unpack into these before they get here
_CPU = torch.device("cpu")
_graph_task = torch._C._current_graph_task_id
_WORK_BYTES = 4 * LARGEST_BYTES
_ALIASING = ("aten::set_", "aten::resize_")  # change what storage a tensor has, not what is in it
_OVERWRITING = (
    "aten::copy_",
    "aten::fill_",
    "aten::zero_",
    "aten::random_",
    "aten::bernoulli_",
    "aten::uniform_",
)


class Asks(Protocol):
    """What answers for values that are not known: `memfit.dryrun.questions.Questions`."""

    def ask(self, op: str, kind: Kind) -> Question: ...


Origins = frozenset[Question]
"""The questions whose answers a shadow was made from; none where it is certain."""
CERTAIN: Origins = frozenset()
Special = Callable[["TrueValues", Any, tuple[Any, ...], dict[str, Any]], Any]
"""``special(values, func, args, kwargs)``: the result of an operation, or `MISSING` where it is not special
after all."""


@dataclass(frozen=True)
class _Plan:
    """What an operation's schema says, looked up once."""

    writes: tuple[tuple[int, str], ...]  # positions and names of the arguments that it changes
    overwrites: bool  # the changed argument's old content does not matter
    random: bool
    data_dependent: bool
    skipped: bool

    @classmethod
    def of(cls, func: Any) -> _Plan:
        schema = getattr(func, "_schema", None)
        if schema is None:  # a higher-order operator: its inner operations come by one by one
            return cls((), False, False, False, True)
        writes = tuple(
            (i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write
        )
        out_variant = any(schema.arguments[i].kwarg_only for i, _ in writes)
        return cls(
            writes=writes,
            overwrites=out_variant or schema.name in _OVERWRITING,
            random=torch.Tag.nondeterministic_seeded in func.tags,
            data_dependent=torch.Tag.data_dependent_output in func.tags,
            skipped=schema.name in _ALIASING,
        )

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for position, name in self.writes:
            found += device_tensors(args[position] if position < len(args) else kwargs.get(name))
        return found


class TrueValues:
    """The shadows of one process, and what they say when the script reads.

    Args:
        questions: asked for each value that is not known, by a read or by what an operation decides.
        special: operations that are not simply repeated on the shadows (see `assumptions`).
    """

    def __init__(self, questions: Asks, special: Mapping[Any, Special]) -> None:
        self._questions = questions
        self._special = special
        self._known: dict[int, torch.UntypedStorage] = {}  # by the address of the storage, while it lives
        self._uniform: dict[int, Any] = {}  # storages that hold one value throughout, of any size
        self._origins: dict[int, Origins] = {}  # of the storages whose values rest on an answer
        self._sizes: dict[int, Question] = {}  # masks whose count was asked for: always answered alike
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._plans: dict[Any, _Plan] = {}
        self._random_state: torch.Tensor | None = None

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``func`` on the device and let the shadows follow; its result, true where it is a host
        value."""
        special = self._special.get(func)
        if special is not None:
            answer = special(self, func, args, kwargs)
            if answer is not MISSING:
                return answer
        plan = self._plans.get(func) or self._plans.setdefault(func, _Plan.of(func))
        out = func(*args, **kwargs)
        if not plan.skipped and self._matters(plan, args, kwargs, out):
            self.follow(func, args, kwargs, out)
        return out

    def ask(self, func: Any, kind: Kind) -> Question:
        """The question that the running line asks by ``func``."""
        return self._questions.ask(op_text(func), kind)

    def ask_size(self, func: Any, mask: torch.Tensor) -> Question:
        """How many elements of ``mask`` count: the same question as long as it lives unchanged."""
        key = address_of(mask)
        question = self._sizes.get(key)
        if question is None:
            question = self.ask(func, "size")
            self._sizes[key] = question
            self._watch(key, mask.untyped_storage())
        return question

    def origins(self, *values: Any) -> Origins:
        """The questions that the shadows of the tensors in ``values`` rest on."""
        if not self._origins:
            return CERTAIN
        found: set[Question] = set()
        for value in tree_flatten(values)[0]:
            if type(value) in _PLAIN and value.is_cuda:
                found |= self._origins.get(address_of(value), CERTAIN)
        return frozenset(found)

    def shadow(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A CPU tensor of the same shape with the true values, or None where they are not known."""
        key = address_of(tensor)
        storage = self._known.get(key)
        if storage is not None:
            view = torch.empty(0, dtype=tensor.dtype, device=_CPU)  # whatever the script's default device is
            return view.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
        if key not in self._uniform or tensor.numel() * tensor.element_size() > _WORK_BYTES:
            return None
        return torch.full((), self._uniform[key], dtype=tensor.dtype, device=_CPU).expand(tensor.shape)

    @property
    def has_uniform(self) -> bool:
        """Whether any large tensor is known to hold one value throughout."""
        return bool(self._uniform)

    def uniform(self, tensor: torch.Tensor) -> Any:
        """The one value that ``tensor`` holds throughout, or `MISSING`."""
        return self._uniform.get(address_of(tensor), MISSING)

    def learn(self, tensor: torch.Tensor, value: torch.Tensor, origins: Origins = CERTAIN) -> None:
        """From now on ``tensor`` holds ``value``, which rests on the answers to ``origins``."""
        storage = tensor.untyped_storage()
        if not 0 < storage.nbytes() <= LARGEST_BYTES:
            return
        key = storage.data_ptr()
        if key not in self._known:
            self._uniform.pop(key, None)
            self._known[key] = torch.UntypedStorage(storage.nbytes())
            self._watch(key, storage)
        shadow = self.shadow(tensor)
        assert shadow is not None
        shadow.copy_(value)
        self._rest_on(key, origins, whole=tensor.numel() * tensor.element_size() == storage.nbytes())

    def learn_uniform(self, tensor: torch.Tensor, value: Any, origins: Origins = CERTAIN) -> None:
        """From now on ``tensor``, of any size, holds ``value`` throughout."""
        storage = tensor.untyped_storage()
        if storage.nbytes() <= LARGEST_BYTES:
            self.learn(tensor, torch.full((), value, dtype=tensor.dtype, device=_CPU), origins)
        else:
            self._uniform[storage.data_ptr()] = value
            self._watch(storage.data_ptr(), storage)
            self._rest_on(storage.data_ptr(), origins, whole=True)

    def forget(self, tensor: torch.Tensor) -> None:
        """``tensor`` was overwritten with something that is not known."""
        key = address_of(tensor)
        for table in (self._known, self._uniform, self._origins, self._sizes):
            table.pop(key, None)

    def keeps(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is of a kind that has a shadow when its value is known."""
        dtype = tensor.dtype
        if tensor.layout is not torch.strided or tensor.is_nested:
            return False
        if dtype in WHOLE:
            return tensor.numel() * tensor.element_size() <= LARGEST_BYTES
        # No gradients: see `address_of`.
        return dtype in FLOATS and tensor.numel() <= MOST_FLOATS and _graph_task() == -1

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Repeat on the shadows what ``func`` did on the device; where that cannot be, forget what it
        changed."""
        plan = self._plans.get(func) or self._plans.setdefault(func, _Plan.of(func))
        written = plan.written(args, kwargs)
        if plan.overwrites:
            for tensor in written:
                self._begin(tensor)
        true = self.on_cpu(func, args, kwargs)
        results = list(tensors(out))
        if true is MISSING:
            self._lose(func, plan, args, written, results)
            return
        origins = self.origins(args, kwargs)
        for tensor in written:
            self._sizes.pop(address_of(tensor), None)
            self._rest_on(address_of(tensor), origins, whole=False)
        self._adopt(results, list(tensors(true)), origins)

    def on_cpu(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of the same operation on true values; `MISSING` where one is not known, or the CPU
        cannot do it."""
        flat, spec = tree_flatten((args, kwargs))
        swapped, work_bytes = [], 0
        for value in flat:
            if type(value) in _PLAIN and value.is_cuda:
                work_bytes += value.numel() * value.element_size()
                value = self.shadow(value) if work_bytes <= _WORK_BYTES else None
                if value is None:
                    return MISSING
            elif isinstance(value, torch.device):
                value = _CPU
            elif isinstance(value, torch.Generator):
                value = None
            swapped.append(value)
        args, kwargs = tree_unflatten(swapped, spec)
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        plan = self._plans.get(func) or self._plans.setdefault(func, _Plan.of(func))
        try:
            return self._random(func, args, kwargs) if plan.random else func(*args, **kwargs)
        except (RuntimeError, NotImplementedError, IndexError, TypeError, ValueError):
            return MISSING  # no such CPU kernel, or values that only a device would take

    def _matters(self, plan: _Plan, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> bool:
        """Whether a shadow may change by this operation, or the host read something. Nearly always not: be
        quick."""
        if type(out) is torch.Tensor:
            if out.is_cuda:
                if self.keeps(out):
                    return True
            elif out.device.type == "cpu" and touches_device(args, kwargs):
                return True
        elif type(out) in (tuple, list):
            for part in out:
                if (
                    type(part) is torch.Tensor
                    and (self.keeps(part) or not part.is_cuda)
                    and touches_device(args, kwargs)
                ):
                    return True
        return bool(plan.writes) and any(
            address_of(tensor) in self._watched for tensor in plan.written(args, kwargs)
        )

    def _begin(self, tensor: torch.Tensor) -> None:
        """A shadow for a tensor that is overwritten as a whole."""
        if not self.keeps(tensor) or address_of(tensor) != tensor.data_ptr():
            return
        if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size():
            self.learn(tensor, torch.zeros((), dtype=tensor.dtype, device=_CPU))

    def _adopt(self, results: list[torch.Tensor], true: list[torch.Tensor], origins: Origins) -> None:
        for result, value in zip(results, true, strict=False):
            if not result.is_cuda:
                if result is not value:
                    result.copy_(value)
                tell(origins, described(result))
            elif address_of(result) not in self._known and self.keeps(result):
                self.learn(result, value, origins)

    def _rest_on(self, key: int, origins: Origins, *, whole: bool) -> None:
        """What is at ``key`` now rests on ``origins``, and unless all of it is new on what it did before."""
        if origins:
            self._origins[key] = origins if whole else origins | self._origins.get(key, CERTAIN)
        elif whole and self._origins:
            self._origins.pop(key, None)

    def _lose(
        self,
        func: Any,
        plan: _Plan,
        args: tuple[Any, ...],
        written: list[torch.Tensor],
        results: list[torch.Tensor],
    ) -> None:
        for tensor in written:
            self.forget(tensor)
        host = [result for result in results if not result.is_cuda and result.device.type == "cpu"]
        if not host or _saves_storage(plan, host[0]):
            return
        if plan.random:  # attention returns its seed and offset on the host: no device value is in them
            return
        question = self.ask(func, "copy")
        for result in host:
            _fill(result, question)
        question.told(described(host[0]))

    def _random(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Random values of the device come from a generator of our own: the script's CPU generator must not
        move."""
        before = torch.get_rng_state()
        if self._random_state is None:
            self._random_state = torch.Generator().manual_seed(0).get_state()
        torch.set_rng_state(self._random_state)
        try:
            return func(*args, **kwargs)
        finally:
            self._random_state = torch.get_rng_state()
            torch.set_rng_state(before)

    def _watch(self, key: int, storage: torch.UntypedStorage) -> None:
        tables: tuple[dict[int, Any], ...] = (
            self._known,
            self._uniform,
            self._origins,
            self._sizes,
            self._watched,
        )

        def died(_: object) -> None:
            for table in tables:
                table.pop(key, None)

        self._watched[key] = weakref.ref(storage, died)


def address_of(tensor: torch.Tensor) -> int:
    """The address of the tensor's storage.

    Not by ``untyped_storage()``: that makes a Python object which counts as a user of the storage, and
    autograd adds gradients up in place only in a storage that has one user. So it is asked for known, small
    tensors only.
    """
    if tensor.layout is not torch.strided or tensor.is_nested:
        return 0
    return tensor.data_ptr() - int(tensor.storage_offset()) * tensor.element_size()


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """The plain tensors in ``value``, which may be a tensor or a list or tuple (of them, or of lists)."""
    if type(value) in _PLAIN:
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors(part)


def device_tensors(value: Any) -> list[torch.Tensor]:
    """The tensors of the made-up GPU in ``value``."""
    return [tensor for tensor in tensors(value) if tensor.is_cuda]


def touches_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an argument is on the made-up GPU."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            if value.is_cuda:
                return True
        elif isinstance(value, tuple | list) and any(
            isinstance(x, torch.Tensor) and x.is_cuda for x in value
        ):
            return True
    return False


def _saves_storage(plan: _Plan, host: torch.Tensor) -> bool:
    """Whether this is torch.save copying a storage as raw bytes: not a value that could steer the script."""
    return bool(plan.writes) and host.dtype is torch.uint8 and host.dim() == 1


def tell(origins: Origins, answer: str) -> None:
    """The script has read ``answer``, which rests on ``origins``."""
    for question in origins:
        question.told(answer)


def _fill(host: torch.Tensor, question: Question) -> None:
    """Ones for few numbers, else zeros as they came; the other answer is the other way round."""
    ones = host.numel() <= MOST_FILLED and host.dtype not in (torch.bool, torch.uint8)
    if ones == question.is_expected and host.numel() <= MOST_FILLED:
        host.fill_(1)


def described(host: torch.Tensor) -> str:
    """What a tensor on the host says, in a word or two."""
    if host.numel() == 1:
        return repr(host.item())
    if host.numel() > MOST_FILLED:
        return "zeros"
    if host.numel() and bool((host == host.flatten()[0]).all()):
        return {0.0: "zeros", 1.0: "ones"}.get(float(host.flatten()[0]), "values")
    return "values"
