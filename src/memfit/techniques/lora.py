"""LoRA and QLoRA: small adapters train in place of the weights, which are frozen (and, for QLoRA, 4 bit).

By peft's layers, put into the model in place. What is trained is another thing than without, so the grade is
``changes training``; undo gives the model back to the bit, `LoRA.merge` keeps what the adapters learnt.
Sources: Hu et al., "LoRA" (2021); Dettmers et al., "QLoRA" (2023).
"""

from __future__ import annotations

import fnmatch
import importlib.util
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from memfit.core.errors import CannotRunHere, UsageError
from memfit.core.exactness import Exactness
from memfit.techniques.base import (
    Technique,
    Undo,
    applied_techniques,
    bare_model,
    refuse_second,
    undo,
    whole_number,
)

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from memfit.capture.graph import StepGraph, Storage
    from memfit.techniques.saving import Saving

ADAPTER = "default"
"""The name under which peft keeps the adapters."""


@dataclass(frozen=True, kw_only=True)
class LoRA(Technique):
    """Freezes a model and trains low-rank adapters at its linear layers.

    ``state_dict`` then has peft's names (``layer.base_layer.weight``, ``layer.lora_A.default.weight``);
    ``peft.get_peft_model_state_dict`` gives the adapters alone. With an optimizer, its first group takes the
    adapters and its other groups are empty until undo. Apply it before DistributedDataParallel.

    Args:
        rank: of the adapters.
        alpha: their output is scaled by ``alpha / rank``.
        targets: patterns over module names (``"*.q_proj"``, or the last name alone); none: every linear
            layer but the output layer and those that share their weight.
        train: patterns over names of parameters that go on training, such as a new head's.
        dropout: before the adapters.

    Examples:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
        >>> model = LoRA(rank=4, targets=["0"], train=["2.*"]).apply(model)
        >>> [name for name, p in model.named_parameters() if p.requires_grad][:2]
        ['0.lora_A.default.weight', '0.lora_B.default.weight']
    """

    name: ClassVar[str] = "lora"
    extra: ClassVar[Mapping[str, str]] = {"peft": "models"}

    rank: int = 8
    alpha: float = 16.0
    targets: Sequence[str] = ()
    train: Sequence[str] = ()
    dropout: float = 0.0

    def __post_init__(self) -> None:
        whole_number(self.rank, key="rank", technique=self.name)
        for key in ("targets", "train"):
            value = getattr(self, key)
            if isinstance(value, str) or not all(isinstance(pattern, str) for pattern in value):
                raise UsageError(f"{self.name}: {key} must be a list of names, not {value!r}")
            object.__setattr__(self, key, tuple(value))
        if not 0 <= self.dropout < 1:
            raise UsageError(f"{self.name}: dropout must be at least 0 and below 1, not {self.dropout!r}")

    def exactness(self, model: nn.Module) -> Exactness:
        return "changes training"

    def target_layers(self, model: nn.Module) -> dict[str, nn.Module]:
        """The layers that get adapters, by name.

        Raises:
            UsageError: no layer fits, or a pattern fits none.
        """
        linears = {name: module for name, module in model.named_modules() if self._fits(module)}
        if not self.targets:
            chosen = {name: m for name, m in linears.items() if name not in _left_alone(model)}
        else:
            chosen = {}
            for pattern in self.targets:
                found = {
                    name: module
                    for name, module in linears.items()
                    if fnmatch.fnmatch(name, pattern) or name.rpartition(".")[2] == pattern
                }
                if not found:
                    raise UsageError(
                        f"{self.name}: target {pattern!r} fits no linear layer; there are "
                        f"{', '.join(sorted({name.rpartition('.')[2] for name in linears})) or 'none'}"
                    )
                chosen |= found
        if not chosen:
            raise UsageError(f"{self.name}: this {type(model).__name__} has no linear layer to adapt")
        return chosen

    def adapter_parameters(self, model: nn.Module) -> int:
        """How many numbers the adapters have."""
        return sum(self.rank * sum(_features(layer)) for layer in self.target_layers(model).values())

    def estimate(self, graph: StepGraph, model: nn.Module | None = None) -> Saving:
        """Gradients and state of frozen weights are gone, those of the adapters come. Needs the model."""
        from memfit.techniques.saving import saving_of

        if model is None:
            raise UsageError(f"{self.name}: estimate(graph, model) needs the model to find its layers")
        frozen = {n for n, _ in model.named_parameters() if not _any_fits(n, self.train)}
        adapters = 4 * self.adapter_parameters(model)
        states = _bytes_of(graph, "optimizer_state") / max(_bytes_of(graph, "parameter"), 1)
        saving = saving_of(
            graph, self._storages(graph, model, frozen), extra_resting_bytes=int(adapters * (2 + states))
        )
        note = "the adapters' own activations are not counted; something else is trained than without"
        return replace(saving, resting_bytes=saving.resting_bytes + adapters, note=note)

    def change(self, model: nn.Module, optimizer: Optimizer | None) -> Undo:
        refuse_second(model, LoRA)
        self._check_extras()
        _refuse_unfit(self, model)
        root = bare_model(model)
        layers = self.target_layers(root)
        for name, layer in layers.items():
            if "forward" in vars(layer):
                raise UsageError(
                    f"{self.name}: a technique has replaced the forward of {name!r}; apply {self.name} "
                    "first, or leave that layer out of the targets"
                )
        trains = {name: parameter.requires_grad for name, parameter in root.named_parameters()}
        put_back = self._prepare(root, layers)
        _inject(self, root, list(layers))
        for name, parameter in root.named_parameters():
            if ".lora_" not in name and _any_fits(name, self.train):
                parameter.requires_grad_(True)
        optimizer_back = _hand_over(optimizer, root) if optimizer is not None else None
        reference = weakref.ref(root)

        def undo() -> None:
            changed = reference()
            assert changed is not None, "a record outlived its model"
            _take_out(changed, layers)
            put_back()
            for name, parameter in changed.named_parameters():
                parameter.requires_grad_(trains[name])
                parameter.grad = None
            if optimizer_back is not None:
                optimizer_back()

        return undo

    def merge(self, model: nn.Module) -> nn.Module:
        """Adds what the adapters learnt to the weights, and takes the adapters off.

        Raises:
            UsageError: this technique is not the last that was applied to ``model``.
        """
        import torch

        applied = applied_techniques(model)
        if not applied or applied[-1] is not self:
            raise UsageError(
                f"{self.name}: merge what was applied last; applied are {list(applied) or 'none'}"
            )
        root = bare_model(model)
        adapted = [name for name, module in root.named_modules() if hasattr(module, "lora_A")]
        merged = {name: _merged_weight(root.get_submodule(name)) for name in adapted}
        undo(model)
        with torch.no_grad():
            for name, weight in merged.items():
                layer: Any = root.get_submodule(name)
                layer.weight.copy_(weight)
        return model

    def _fits(self, module: nn.Module) -> bool:
        from torch import nn

        return type(module) is nn.Linear or type(module).__name__ == "Conv1D"

    def _prepare(self, root: nn.Module, layers: Mapping[str, nn.Module]) -> Undo:
        """What happens to the layers before adapters are put on them."""
        return lambda: None

    def _storages(self, graph: StepGraph, model: nn.Module, frozen: set[str]) -> Iterator[Storage]:
        for storage in graph.storages:
            if storage.category not in ("gradient", "optimizer_state") or storage.name not in frozen:
                yield storage

    def _check_extras(self) -> None:
        for package, extra in self.extra.items():
            if importlib.util.find_spec(package) is None:
                raise CannotRunHere(
                    f"{self.name} needs {package}, which is not installed: pip install 'memfit[{extra}]'"
                )


@dataclass(frozen=True, kw_only=True)
class QLoRA(LoRA):
    """LoRA over weights in 4 bit (NF4, with quantized scales): about 0.52 bytes for each weight.

    The weights of before wait in host memory for undo. `merge` adds the adapters to the weights as NF4 has
    them, for those are what they were trained on.

    Args:
        rank: of the adapters; this and the others are as for `LoRA`.

    Examples:
        >>> QLoRA(rank=4).to_settings()
        {'technique': 'qlora', 'rank': 4}
    """

    name: ClassVar[str] = "qlora"
    extra: ClassVar[Mapping[str, str]] = {"peft": "models", "bitsandbytes": "quant"}

    def _fits(self, module: nn.Module) -> bool:
        from torch import nn

        return type(module) is nn.Linear

    def _prepare(self, root: nn.Module, layers: Mapping[str, nn.Module]) -> Undo:
        reference = weakref.ref(root)
        originals = {name: _quantized_in_place(root, name, layer) for name, layer in layers.items()}

        def put_back() -> None:
            for name, weight in originals.items():
                layer: Any = layers[name]
                changed = reference()  # it may have been moved meanwhile
                assert changed is not None, "a record outlived its model"
                layer.weight.data = weight.to(next(changed.parameters()).device)

        return put_back

    def _storages(self, graph: StepGraph, model: nn.Module, frozen: set[str]) -> Iterator[Storage]:
        weights = {f"{name}.weight": layer for name, layer in self.target_layers(model).items()}
        for storage in super()._storages(graph, model, frozen):
            if storage.category == "parameter" and storage.name in weights:
                yield replace(storage, size_bytes=nf4_bytes(storage.size_bytes // 4))
            else:
                yield storage


def nf4_bytes(elements: int) -> int:
    """Bytes of an NF4 weight: half a byte each; a byte for 64, a float for 256 of those; two tables."""
    blocks = -(-elements // 64)
    return -(-elements // 2) + blocks + 4 * -(-blocks // 256) + 4 * (16 + 256 + 1)


def _inject(lora: LoRA, root: nn.Module, names: Sequence[str]) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    exactly = "|".join(re.escape(name) for name in names)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=f"^({exactly})$",
        fan_in_fan_out=any(type(root.get_submodule(n)).__name__ == "Conv1D" for n in names),
    )
    inject_adapter_in_model(config, root, adapter_name=ADAPTER)


def _take_out(root: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    for name, layer in layers.items():
        parent, _, child = name.rpartition(".")
        setattr(root.get_submodule(parent), child, layer)
    vars(root).pop("peft_config", None)


def _hand_over(optimizer: Optimizer, root: nn.Module) -> Undo:
    """The optimizer steps what trains now; its state for the rest waits on the host."""
    groups = [list(group["params"]) for group in optimizer.param_groups]
    trained = [parameter for parameter in root.parameters() if parameter.requires_grad]
    kept = {id(parameter) for parameter in trained}
    waiting = {
        parameter: {k: v.to("cpu", copy=True) if hasattr(v, "to") else v for k, v in state.items()}
        for parameter, state in optimizer.state.items()
        if id(parameter) not in kept
    }
    for parameter in waiting:
        del optimizer.state[parameter]
    for number, group in enumerate(optimizer.param_groups):
        group["params"] = trained if number == 0 else []
    reference = weakref.ref(optimizer)

    def back() -> None:
        changed = reference()
        if changed is None:
            return
        known = {id(parameter) for group in groups for parameter in group}
        for parameter in [p for p in changed.state if id(p) not in known]:
            del changed.state[parameter]
        for parameter, state in waiting.items():
            changed.state[parameter] = {
                k: v.to(parameter.device) if hasattr(v, "dim") and v.dim() else v for k, v in state.items()
            }
        for group, parameters in zip(changed.param_groups, groups, strict=True):
            group["params"] = parameters

    return back


def _quantized_in_place(root: nn.Module, name: str, layer: Any) -> Tensor:
    """Puts an NF4 layer in the place of a linear one; gives back its weight, on the host."""
    from bitsandbytes.nn.modules import Linear4bit, Params4bit

    weight: Tensor = layer.weight.data
    if weight.is_meta:
        raise CannotRunHere(
            f"qlora: the weight of {name!r} is a meta tensor, which has no values to hold in 4 bit; the dry "
            "run (engine 'dryrun') shows what it saves"
        )
    quantized = Linear4bit(
        layer.in_features,
        layer.out_features,
        bias=False,
        quant_type="nf4",
        compute_dtype=weight.dtype,
        compress_statistics=True,
        device="meta",
    )
    quantized.weight = Params4bit(
        weight.clone(), requires_grad=False, quant_type="nf4", compress_statistics=True, module=quantized
    )
    quantized.bias = layer.bias
    quantized.support_avx512bf16_for_cpu = False  # it lays out the weight anew, in place, in evaluation
    quantized = quantized.to(weight.device)
    quantized.train(layer.training)
    parent, _, child = name.rpartition(".")
    setattr(root.get_submodule(parent), child, quantized)
    host = weight.to("cpu")
    layer.weight.data = host
    return host


def _merged_weight(adapted: Any) -> Tensor:
    """The weight with its adapter added, in the layout of the layer's own weight."""
    base = adapted.get_base_layer()
    weight = base.weight.data
    if hasattr(base.weight, "quant_state"):
        from bitsandbytes.functional import dequantize_4bit

        weight = dequantize_4bit(weight, base.weight.quant_state)
    merged: Tensor = weight + adapted.get_delta_weight(ADAPTER).to(weight.dtype)
    return merged


def _refuse_unfit(lora: LoRA, model: nn.Module) -> None:
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    if isinstance(model, (DataParallel, DistributedDataParallel)):
        raise UsageError(
            f"{lora.name} makes parameters that {type(model).__name__} does not know: wrap it later"
        )
    for technique in applied_techniques(model):
        if technique.name in (
            "optimizer_in_backward",
            "offloaded_optimizer_state",
            "low_memory_optimizer",
            "parameter_offload",
        ) or (technique.name == "mixed_precision"):
            raise UsageError(
                f"{lora.name} changes which parameters train, which {technique.name} has looked at already; "
                f"apply {lora.name} first"
            )


def _left_alone(model: nn.Module) -> set[str]:
    """Names of the output layer and of layers that share their weight."""
    from memfit.techniques.chunked_cross_entropy import find_output_layer

    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None:
            owners.setdefault(id(weight), []).append(name)
    shared = {name for names in owners.values() if len(names) > 1 for name in names}
    found = find_output_layer(model)
    return shared | ({found[0]} if found is not None else set())


def _features(layer: Any) -> tuple[int, int]:
    rows, columns = layer.weight.shape
    return int(rows), int(columns)


def _bytes_of(graph: StepGraph, category: str) -> int:
    return sum(s.size_bytes for s in graph.storages if s.category == category and s.born < 0)


def _any_fits(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
