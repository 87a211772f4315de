"""Weights held in bf16 only, with what keeps small updates from vanishing.

A bf16 number has 8 significant bits, so an update smaller than 0.2–0.4 % of a weight rounds away. Four ways:

    split        the 16 low bits of the fp32 weight are kept apart: exactly fp32 weights, in 2 + 2 bytes
    kahan        what rounding took is kept in bf16 and added next time: about 16 bits, in 2 + 2 bytes
    stochastic   rounded up or down at random, in proportion: right on average, 2 bytes
    nearest      as a plain cast: small updates are lost, 2 bytes

The optimizer's own step runs in fp32, one parameter at a time, so any optimizer that treats parameters by
themselves works, by its own code. Sources: Kahan summation and stochastic rounding as in Zamirai et al.,
"Revisiting BFloat16 Training" (2020); the split as in Split-SGD (Kalamkar et al., "A Study of BFLOAT16 for
Deep Learning Training", 2019).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memfit.core.errors import UsageError
from memfit.techniques.base import Undo
from memfit.techniques.optimizer_step import (
    Closure,
    Inner,
    evaluated,
    parameters_of,
    refuse_whole_step_optimizers,
    replace_step,
    step_each,
    step_one,
)

Rounding = Literal["split", "kahan", "stochastic", "nearest"]
ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)
Moments = Literal["bf16", "fp32"]
MOMENTS: tuple[Moments, ...] = get_args(Moments)

EXTRA_BYTES: Mapping[str, int] = {"split": 2, "kahan": 2, "stochastic": 0, "nearest": 0}
"""Bytes for each weight beside its own two."""
PIECE = 1 << 22
"""Elements of a large parameter that are stepped at once: 16 MiB in fp32."""
ELEMENTWISE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad)
STATE_KEY = "memfit_bf16_weights"
"""Where an optimizer's ``state_dict`` has what is kept beside the weights."""


def split_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """An fp32 tensor as (bf16, int16): the nearest bf16 and the rest; `join_bits` gives back every bit."""
    bits = weight.contiguous().view(torch.int32)
    high = (bits + 0x8000) >> 16
    low = (bits - (high << 16)).to(torch.int16)
    return high.to(torch.int16).view(torch.bfloat16), low


def join_bits(weight: Tensor, low: Tensor) -> Tensor:
    """The fp32 tensor that `split_bits` took apart."""
    high = weight.contiguous().view(torch.int16).to(torch.int32) << 16
    return (high + low.to(torch.int32)).view(torch.float32)


def round_stochastically(weight: Tensor, generator: torch.Generator) -> Tensor:
    """An fp32 tensor in bf16, rounded up with the probability of the part that is cut off."""
    noise = torch.randint(
        0, 1 << 16, weight.shape, dtype=torch.int32, device=weight.device, generator=generator
    )
    bits = (weight.contiguous().view(torch.int32) + noise) >> 16
    return torch.where(weight.isfinite(), bits.to(torch.int16).view(torch.bfloat16), weight.bfloat16())


@dataclass(eq=False)
class _Weight:
    """One parameter in bf16: what is kept beside it, and what undo needs.

    ``rest`` is there for split and kahan. ``start`` holds, on the host, the low bits of before the first step
    (for good where nothing steps the parameter) and ``state`` the optimizer's state of before.
    """

    parameter: Tensor
    rest: Tensor | None = None
    start: Tensor | None = None
    state: dict[str, Any] | None = None
    version: int | None = None

    def forget_rest_of_another(self) -> None:
        """What was kept belongs to another weight where this one was set from outside."""
        if self.rest is not None and self.version not in (None, self.parameter._version):
            self.rest.zero_()

    def value(self, rounding: Rounding) -> Tensor:
        """The weight in fp32, all that is known of it."""
        self.forget_rest_of_another()
        return _joined(self.parameter.detach(), self.rest, rounding)


class BFloat16Weights:
    """Puts a model's fp32 parameters into bf16, and steps them so that small updates stay.

    Args:
        model: its fp32 parameters change their type in place.
        optimizers: those that step them.
        keep: parameters that stay fp32.
        rounding: see the module.
        moments: the type of the optimizer's state tensors; bf16 ones are rounded stochastically.
        seed: of the rounding's own random generators; the training's are not touched.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        keep: Iterable[Tensor],
        rounding: Rounding,
        moments: Moments,
        seed: int = 0,
    ) -> None:
        self._rounding, self._moments, self._seed = rounding, moments, seed
        self._generators: dict[torch.device, torch.Generator] = {}
        kept = {id(parameter) for parameter in keep}
        chosen = [p for p in model.parameters() if p.dtype == torch.float32 and id(p) not in kept]
        for optimizer in optimizers:
            refuse_whole_step_optimizers(optimizer, "mixed_precision with weights='bf16'")
        with_gradient = next((p for p in chosen if p.grad is not None), None)
        if with_gradient is not None:
            raise UsageError(
                f"mixed_precision: a parameter of shape {tuple(with_gradient.shape)} has an fp32 gradient; "
                "call optimizer.zero_grad(set_to_none=True) before its weights become bf16"
            )
        self._weights = {id(p): _Weight(p) for p in chosen}

    def apply(self, optimizers: Sequence[Optimizer]) -> Undo:
        """Changes weights, state and steps; gives back what takes that back."""
        owners = {id(p): o for o in optimizers for _, p in parameters_of(o)}
        for key, weight in self._weights.items():
            self._lower(weight, owners.get(key))
        steps = [replace_step(optimizer, self._step) for optimizer in optimizers]
        hooks = [hook for optimizer in optimizers for hook in self._state_hooks(optimizer)]
        references = {key: weakref.ref(optimizer) for key, optimizer in owners.items()}

        def undo() -> None:
            for take_back in (*steps, *(hook.remove for hook in hooks)):
                take_back()
            self._raise({key: o for key, reference in references.items() if (o := reference()) is not None})

        return undo

    def nbytes(self) -> int:
        """Bytes kept beside the weights on their devices."""
        return sum(w.rest.nbytes for w in self._weights.values() if w.rest is not None)

    @torch.no_grad()
    def _lower(self, weight: _Weight, owner: Optimizer | None) -> None:
        parameter = weight.parameter
        lowered, low = split_bits(parameter.detach())
        if self._rounding == "split" and owner is not None:
            weight.rest = low
        else:
            weight.start = low.cpu()
            weight.rest = torch.zeros_like(lowered) if self._rounding == "kahan" and owner else None
        if owner is not None and owner.state.get(parameter):
            weight.state = {key: _to_host(value) for key, value in owner.state[parameter].items()}
            owner.state[parameter] = self._lowered_state(owner.state[parameter])
        parameter.data = lowered
        weight.version = parameter._version

    @torch.no_grad()
    def _raise(self, owners: Mapping[int, Optimizer]) -> None:
        """Back to fp32: to the bit before the first step, and ever after with ``split``."""
        for key, weight in self._weights.items():
            parameter, owner = weight.parameter, owners.get(key)
            if weight.start is not None:
                value = join_bits(parameter.detach(), weight.start.to(parameter.device))
            else:
                value = weight.value(self._rounding)
            parameter.grad = None
            parameter.data = value
            if owner is not None and parameter in owner.state:
                owner.state[parameter] = {
                    name: _raised(held, parameter)
                    for name, held in (weight.state or owner.state[parameter]).items()
                }

    # -- steps ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _step(self, optimizer: Optimizer, inner: Inner, closure: Closure) -> Any:
        loss = evaluated(closure)
        step_each(optimizer, lambda group, parameter: self._step_one(optimizer, group, parameter))
        return loss

    def _step_one(self, optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> None:
        weight = self._weights.get(id(parameter))
        if weight is None:
            step_one(optimizer, group, parameter)
            return
        weight.forget_rest_of_another()
        before = dict(optimizer.state[parameter])
        pieces = _pieces(optimizer, parameter)
        for piece in pieces:
            self._step_piece(optimizer, group, weight, piece, before, last=piece == pieces[-1])
        weight.version = parameter._version
        weight.start = weight.state = None

    def _step_piece(
        self,
        optimizer: Optimizer,
        group: dict[str, Any],
        weight: _Weight,
        piece: slice | None,
        state: Mapping[str, Any],
        last: bool,
    ) -> None:
        """Steps a slice of a parameter (``None``: all of it) in fp32, and writes it back in 16 bits."""
        parameter = weight.parameter
        assert parameter.grad is not None
        held, rest = _slice(parameter.detach(), piece), None
        if weight.rest is not None:
            rest = _slice(weight.rest, piece)
        full = nn.Parameter(_joined(held, rest, self._rounding))
        full.grad = _slice(parameter.grad, piece).float()
        own = {name: _own(value, parameter, piece) for name, value in state.items()}
        stepped = step_one(optimizer, group, full, own)
        kept = optimizer.state[parameter]
        for name, value in self._lowered_state(stepped).items():
            if piece is not None and _is_moment(value):
                if name not in kept:
                    kept[name] = torch.empty_like(parameter, dtype=value.dtype)
                _slice(kept[name], piece).copy_(value)
            elif piece is None or last:
                kept[name] = value
        self._write(held, rest, full.detach())

    def _write(self, held: Tensor, rest: Tensor | None, value: Tensor) -> None:
        if self._rounding == "split":
            lowered, low = split_bits(value)
            assert rest is not None
            rest.copy_(low)
        elif self._rounding == "stochastic":
            lowered = round_stochastically(value, self._generator(value.device))
        else:
            lowered = value.bfloat16()
            if rest is not None:
                rest.copy_(value - lowered.float())
        held.copy_(lowered)

    def _lowered_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        if self._moments == "fp32" or _is_quantized(state):
            return dict(state)
        return {
            name: round_stochastically(held, self._generator(held.device)) if _is_moment(held) else held
            for name, held in state.items()
        }

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]

    # -- checkpoints ----------------------------------------------------------------------------------------

    def _state_hooks(self, optimizer: Optimizer) -> list[Any]:
        """The optimizer's ``state_dict`` carries what is kept beside the weights; loading sets it again."""
        loaded: dict[str, Any] = {}

        def add(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
            rests = [self._rest(p) for _, p in parameters_of(optimizer)]
            generators = {str(d): g.get_state() for d, g in self._generators.items()}
            return {**state_dict, STATE_KEY: {"rests": rests, "generators": generators}}

        def take(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
            loaded.clear()
            loaded.update(state_dict.get(STATE_KEY) or {}, state=state_dict["state"])
            return {key: value for key, value in state_dict.items() if key != STATE_KEY}

        def put(optimizer: Optimizer) -> None:
            self._load(optimizer, loaded)
            loaded.clear()

        return [
            optimizer.register_state_dict_post_hook(add),
            optimizer.register_load_state_dict_pre_hook(take),
            optimizer.register_load_state_dict_post_hook(put),
        ]

    def _rest(self, parameter: Tensor) -> Tensor | None:
        weight = self._weights.get(id(parameter))
        return None if weight is None else weight.rest

    def _load(self, optimizer: Optimizer, loaded: Mapping[str, Any]) -> None:
        for name, state in loaded.get("generators", {}).items():
            self._generator(torch.device(name)).set_state(state)
        rests = loaded.get("rests")
        for number, (_, parameter) in enumerate(parameters_of(optimizer)):
            weight = self._weights.get(id(parameter))
            if weight is None:
                continue
            weight.start = weight.state = None
            if self._moments == "fp32" and parameter in optimizer.state:  # PyTorch casts to the weight's type
                for name, held in loaded["state"].get(number, {}).items():
                    if _is_moment(held):
                        optimizer.state[parameter][name] = held.to(parameter.device, torch.float32, copy=True)
            if weight.rest is not None and rests is not None and rests[number] is not None:
                weight.rest.copy_(rests[number])
                weight.version = None  # the weight itself may be loaded before or after


def _joined(held: Tensor, rest: Tensor | None, rounding: Rounding) -> Tensor:
    if rest is None:
        return held.float()
    return join_bits(held, rest) if rounding == "split" else held.float() + rest.float()


def _pieces(optimizer: Optimizer, parameter: Tensor) -> list[slice | None]:
    """Slices of a large parameter's elements, for optimizers that treat each element by itself: fp32 copies
    are then there for one slice at a time."""
    grad = parameter.grad
    whole = grad is None or grad.is_sparse or not (parameter.is_contiguous() and grad.is_contiguous())
    if whole or type(optimizer) not in ELEMENTWISE or parameter.numel() <= PIECE:
        return [None]
    return [slice(start, start + PIECE) for start in range(0, parameter.numel(), PIECE)]


def _slice(tensor: Tensor, piece: slice | None) -> Tensor:
    return tensor if piece is None else tensor.view(-1)[piece]


def _own(value: Any, parameter: Tensor, piece: slice | None) -> Any:
    """A state value for one slice: counters are copied, so that each slice counts the step once."""
    if not isinstance(value, Tensor):
        return value
    if value.shape != parameter.shape or value.dim() == 0:
        return _raised(value.clone() if piece is not None else value, parameter)
    return _raised(_slice(value, piece), parameter)


def _is_moment(value: Any) -> bool:
    """A plain tensor: those of other classes hold their own form of it (torchao's quantized ones)."""
    plain = type(value) in (Tensor, nn.Parameter)
    return plain and value.is_floating_point() and value.dim() > 0


def _is_quantized(state: Mapping[str, Any]) -> bool:
    """Whether what is in floating point are the scales and tables of moments in 8 bits (bitsandbytes)."""
    return any(isinstance(value, Tensor) and value.dtype == torch.uint8 for value in state.values())


def _raised(value: Any, like: Tensor) -> Any:
    return value.to(like.device, torch.float32) if _is_moment(value) else value


def _to_host(value: Any) -> Any:
    return value.to("cpu", copy=True) if isinstance(value, Tensor) else value
