"""What is known of how a job is set up: from the files of trainers and launchers, one value for the rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from memfit.core.errors import InputError

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
EIGHT_BIT = ("8bit", "8-bit", "int8")
STATEFUL_OPTIMIZERS = ("adam", "lamb", "adagrad", "rmsprop", "lion", "adafactor", "sgdm", "momentum", "muon")


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """How a job is set up, as far as is known; ``None`` is "not said".

    A file with a section ``job:`` may give any of these by name.

    Attributes:
        optimizer: its name, in small letters (``"adamw_torch"``, ``"adamw_bnb_8bit"``).
        optimizer_foreach: whether it works on many tensors at a time; PyTorch's default on CUDA is that it
            does.
        set_to_none: ``zero_grad(set_to_none=...)``; PyTorch's default is True.
        gradient_checkpointing, use_cache: of the model.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        strategy: ``"ddp"``, ``"fsdp"``, ``"deepspeed"``, ``"data_parallel"``.
        zero_stage: of DeepSpeed.
        bucket_view: DDP's ``gradient_as_bucket_view``.
        fsdp_wrap: the policy by which FSDP wraps, ``"none"`` where it wraps the whole model.
        fsdp_units: how many units it wrapped.
        world_size, accumulation_steps, total_steps, eval_accumulation_steps: counts.
        evaluates: whether the job evaluates, too.
        batch, sequence, vocabulary, layers, hidden: of one device's micro-batch and of the model.
        parameters, trainable_parameters: counts of elements.
        alloc_conf: the allocator's settings that the environment asks for.
        alloc_variables: the same, by the variable that asks.
        torch: version.
        cuda_ipc, custom_all_reduce, pluggable_allocator, cuda_graphs: what the job uses.
        process_groups: NCCL communicators that it made.
        context_bytes: what the CUDA context takes on this GPU.
    """

    optimizer: str | None = None
    optimizer_foreach: bool | None = None
    set_to_none: bool | None = None
    gradient_checkpointing: bool | None = None
    use_cache: bool | None = None
    precision: str | None = None
    strategy: str | None = None
    zero_stage: int | None = None
    bucket_view: bool | None = None
    fsdp_wrap: str | None = None
    fsdp_units: int | None = None
    world_size: int | None = None
    accumulation_steps: int | None = None
    total_steps: int | None = None
    eval_accumulation_steps: int | None = None
    evaluates: bool | None = None
    batch: int | None = None
    sequence: int | None = None
    vocabulary: int | None = None
    layers: int | None = None
    hidden: int | None = None
    parameters: int | None = None
    trainable_parameters: int | None = None
    alloc_conf: str | None = None
    alloc_variables: Mapping[str, str] | None = None
    torch: str | None = None
    cuda_ipc: bool | None = None
    custom_all_reduce: bool | None = None
    pluggable_allocator: bool | None = None
    cuda_graphs: bool | None = None
    process_groups: int | None = None
    context_bytes: int | None = None

    def merged(self, other: Configuration) -> Configuration:
        """This one, with what the other says in front."""
        said = {field.name: getattr(other, field.name) for field in fields(other)}
        return replace(self, **{name: value for name, value in said.items() if value is not None})

    @property
    def said(self) -> dict[str, Any]:
        """All that is known."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def asks_for_eight_bit(self) -> bool:
        """Whether the optimizer keeps its state in 8 bits."""
        return self.optimizer is not None and any(mark in self.optimizer for mark in EIGHT_BIT)

    @property
    def optimizer_has_state(self) -> bool:
        """Whether the optimizer is known to keep state for every parameter."""
        return self.optimizer is not None and any(name in self.optimizer for name in STATEFUL_OPTIMIZERS)

    @property
    def asks_for_expandable(self) -> bool:
        """Whether the environment asks for expandable segments."""
        return "expandable_segments:True" in (self.alloc_conf or "").replace(" ", "")


def configuration_of(value: Mapping[str, Any], *, name: str) -> Configuration | None:
    """What a trainer's or launcher's file says; ``None`` where it is of no kind that is known.

    Args:
        value: the file's content.
        name: of the file, for messages.

    Raises:
        InputError: a section ``job`` with unknown keys.
    """
    for looks_like, read in _KINDS:
        if looks_like(value):
            return read(value, name)
    return None


def environment_configuration(environment: Mapping[str, str]) -> Configuration:
    """What a process's environment says of the allocator."""
    found = {name: environment[name] for name in ALLOCATOR_VARIABLES if environment.get(name)}
    world = environment.get("WORLD_SIZE", "")
    return Configuration(
        alloc_conf=next(iter(found.values()), None),
        alloc_variables=found or None,
        world_size=int(world) if world.isdigit() else None,
    )


def _own(value: Mapping[str, Any], name: str) -> Configuration:
    """memfit's own sections, and the section ``job``."""
    job = value.get("job") or {}
    known = {field.name for field in fields(Configuration)}
    unknown = sorted(set(job) - known) if isinstance(job, Mapping) else ["job"]
    if unknown:
        raise InputError(f"{name}: job has no key {unknown[0]!r}; it has {', '.join(sorted(known))}")
    optimization, distributed = _section(value, "optimization"), _section(value, "distributed")
    precision = _section(optimization, "mixed_precision")
    own = Configuration(
        gradient_checkpointing=_flag(_section(optimization, "gradient_checkpointing").get("enabled")),
        precision=_text(precision.get("precision")) if precision.get("enabled") else None,
        world_size=_count(distributed.get("num_gpus")),
    )
    return own.merged(Configuration(**job))


def _transformers_arguments(value: Mapping[str, Any], name: str) -> Configuration:
    """``TrainingArguments`` as JSON."""
    fsdp = value.get("fsdp") or []
    wrap = _section(value, "fsdp_config").get("transformer_layer_cls_to_wrap")
    strategy = "deepspeed" if value.get("deepspeed") else "fsdp" if fsdp else None
    evaluates = str(value.get("eval_strategy", value.get("evaluation_strategy", "no"))).split(".")[-1].lower()
    return Configuration(
        optimizer=_text(value.get("optim")),
        gradient_checkpointing=_flag(value.get("gradient_checkpointing")),
        precision="bf16" if value.get("bf16") else "fp16" if value.get("fp16") else None,
        strategy=strategy,
        fsdp_wrap=None if not fsdp else "transformer" if wrap or "auto_wrap" in str(fsdp) else "none",
        batch=_count(value.get("per_device_train_batch_size")),
        accumulation_steps=_count(value.get("gradient_accumulation_steps")),
        total_steps=_positive(value.get("max_steps")),
        eval_accumulation_steps=_count(value.get("eval_accumulation_steps")),
        evaluates=evaluates != "no" and not value.get("prediction_loss_only", False),
        world_size=_count(value.get("world_size")),
    )


def _deepspeed(value: Mapping[str, Any], name: str) -> Configuration:
    optimizer = _section(value, "optimizer").get("type")
    bf16, fp16 = (_section(value, key).get("enabled") for key in ("bf16", "fp16"))
    return Configuration(
        strategy="deepspeed",
        zero_stage=_count(_section(value, "zero_optimization").get("stage")),
        optimizer=_text(optimizer),
        precision="bf16" if bf16 is True else "fp16" if fp16 is True else None,
        batch=_count(value.get("train_micro_batch_size_per_gpu")),
        accumulation_steps=_count(value.get("gradient_accumulation_steps")),
    )


def _accelerate(value: Mapping[str, Any], name: str) -> Configuration:
    strategy = {"MULTI_GPU": "ddp", "FSDP": "fsdp", "DEEPSPEED": "deepspeed"}.get(
        str(value.get("distributed_type", "")).upper()
    )
    fsdp = _section(value, "fsdp_config")
    policy = str(fsdp.get("fsdp_auto_wrap_policy", "")).upper()
    precision = str(value.get("mixed_precision", "no"))
    deepspeed = _section(value, "deepspeed_config")
    return Configuration(
        strategy=strategy,
        world_size=_count(value.get("num_processes")),
        precision=precision if precision in ("bf16", "fp16") else None,
        fsdp_wrap=None if strategy != "fsdp" else "none" if policy in ("", "NO_WRAP") else policy.lower(),
        gradient_checkpointing=_flag(fsdp.get("fsdp_activation_checkpointing")),
        zero_stage=_count(deepspeed.get("zero_stage")),
        accumulation_steps=_count(deepspeed.get("gradient_accumulation_steps")),
    )


def _model(value: Mapping[str, Any], name: str) -> Configuration:
    """A model's ``config.json``."""
    return Configuration(
        vocabulary=_count(value.get("vocab_size")),
        layers=_count(value.get("num_hidden_layers", value.get("n_layer"))),
        hidden=_count(value.get("hidden_size", value.get("n_embd"))),
        use_cache=_flag(value.get("use_cache")),
    )


def _has(*keys: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda value: any(key in value for key in keys)


_KINDS: tuple[
    tuple[Callable[[Mapping[str, Any]], bool], Callable[[Mapping[str, Any], str], Configuration]], ...
] = (
    (_has("job", "memory", "optimization", "distributed"), _own),
    (_has("per_device_train_batch_size", "gradient_checkpointing_kwargs"), _transformers_arguments),
    (_has("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"), _deepspeed),
    (_has("distributed_type", "compute_environment"), _accelerate),
    (_has("model_type", "architectures"), _model),
)
"""How each kind of file is told, and read."""


def _section(value: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = value.get(key)
    return found if isinstance(found, Mapping) else {}


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _positive(value: Any) -> int | None:
    return _count(value) or None


def _text(value: Any) -> str | None:
    return value.lower() if isinstance(value, str) else None
