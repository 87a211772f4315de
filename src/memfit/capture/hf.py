"""Workloads from `transformers`: any model type by its default configuration, or a local one by name.

Weights are never downloaded, nor loaded: memory and time do not depend on them, and gradients of a random
model prove as much.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from memfit.capture.hf_small import small_overrides
from memfit.capture.spec import (
    NUMERICS,
    OPTIMIZERS,
    Numerics,
    choice,
    literal,
    parse_spec,
    positive_int,
    suggestion,
)
from memfit.core.errors import CannotRunHere, UsageError
from memfit.core.workload import Workload

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SMALL_BATCH, SMALL_SEQUENCE = 2, 32
DEFAULT_BATCH, DEFAULT_SEQUENCE, DEFAULT_IMAGE = 8, 1024, 224
_IGNORED_LABEL = -100
_OWN_KEYS = ("batch", "seq", "size", "dtype", "optimizer", "task", "attn_implementation")


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a model is trained on: its class, its batch, and over how many labels its loss is a mean."""

    auto_class: str
    mapping: str
    batch: Callable[[HubWorkload, PretrainedConfig, int, int], dict[str, torch.Tensor]]
    loss_weight: Callable[[Mapping[str, torch.Tensor]], float] | None = None


@dataclass(frozen=True, kw_only=True)
class HubWorkload:
    """The settings of one ``hf:`` text; its methods are the factories of the workload."""

    name: str
    batch_size: int = DEFAULT_BATCH
    sequence: int | None = None
    image_size: int | None = None
    dtype: str = "fp32"
    optimizer: str = "adamw"
    task_name: str | None = None
    attention: str | None = None
    config_settings: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def config(self) -> PretrainedConfig:
        """The model's configuration at full size. Raises UsageError for an unknown model or setting."""
        config = _find_config(self.name, self.config_settings)
        if self.image_size is not None and hasattr(config, "image_size"):
            config.image_size = self.image_size
        return _prepared(config)

    @cached_property
    def task(self) -> Task:
        """The task that ``task=`` names, or the first of `TASKS` that the model type has a class for."""
        if self.task_name is not None:
            task = choice(self.task_name, TASKS, "task")
            if self.config.model_type not in _task_models(task):
                raise UsageError(
                    f"transformers has no {task.auto_class} for model type {self.config.model_type!r}"
                )
            return task
        for task in TASKS.values():
            if self.config.model_type in _task_models(task):
                return task
        raise UsageError(
            f"model type {self.config.model_type!r} has none of the tasks {', '.join(TASKS)}: "
            "write a Python file with a function that returns a memfit.Workload, and give file.py:function"
        )

    @property
    def numerics(self) -> Numerics:
        return choice(self.dtype, NUMERICS, "dtype")

    def model(self, size: str = "full") -> torch.nn.Module:
        """The model with random weights, on the current default device."""
        transformers = _transformers()
        options: dict[str, Any] = {"dtype": self.numerics.weights}
        if self.attention is not None:
            options["attn_implementation"] = self.attention
        config = self._sized_config(size)
        if config.architectures is None:  # of several classes for a task the first is the plain one
            names = _task_models(self.task)[config.model_type]
            config.architectures = [names] if isinstance(names, str) else list(names[:1])
        auto_class = getattr(transformers, self.task.auto_class)
        model: torch.nn.Module = auto_class.from_config(config, **options)
        return model

    def make_batch(self, size: str = "full") -> dict[str, torch.Tensor]:
        """Random inputs and labels of the task, on the current default device."""
        config = self._sized_config(size)
        if size == "small":
            return self.task.batch(self, config, SMALL_BATCH, SMALL_SEQUENCE)
        return self.task.batch(self, config, self.batch_size, self._sequence())

    def loss(self, model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The model's own loss."""
        loss: torch.Tensor = model(**batch).loss
        return loss

    def workload(self, spec: str) -> Workload:
        """The workload; every setting is checked here, before anything is built."""
        self._sequence()
        return Workload(
            name=_title(self),
            model=self.model,
            batch=self.make_batch,
            loss=self.loss,
            optimizer=choice(self.optimizer, OPTIMIZERS, "optimizer"),
            precision=self.numerics.precision,
            loss_weight=self.task.loss_weight,
            spec=spec,
        )

    def _sized_config(self, size: str) -> PretrainedConfig:
        if size == "full":
            return self.config
        overrides = small_overrides(self.config)
        return _prepared(type(self.config).from_dict({**self.config.to_dict(), **overrides}))

    def _sequence(self) -> int:
        limit = getattr(self.config, "max_position_embeddings", None)
        if self.sequence is None:
            return min(DEFAULT_SEQUENCE, limit or 512)
        if limit is not None and self.sequence > limit:
            raise UsageError(
                f"seq={self.sequence} is more than the {limit} positions of {self.name}: "
                f"use less, or add max_position_embeddings={self.sequence}"
            )
        return self.sequence


def load_hub_workload(text: str) -> Workload:
    """The workload of an ``hf:NAME,key=value,…`` text.

    Keys: ``batch`` (8), ``seq`` (the model's positions, at most 1024), ``size`` (of images), ``dtype`` (fp32,
    bf16 weights, bf16-autocast, fp16-autocast), ``optimizer``, ``task``, ``attn_implementation``, and any
    attribute of the configuration.
    """
    spec = parse_spec(text)
    settings = dict(spec.settings)
    own = {key: settings.pop(key) for key in _OWN_KEYS if key in settings}
    return HubWorkload(
        name=spec.name,
        batch_size=positive_int(own, "batch", DEFAULT_BATCH),
        sequence=positive_int(own, "seq", 0) or None,
        image_size=positive_int(own, "size", 0) or None,
        dtype=own.get("dtype", "fp32"),
        optimizer=own.get("optimizer", "adamw"),
        task_name=own.get("task"),
        attention=own.get("attn_implementation"),
        config_settings={key: literal(value) for key, value in settings.items()},
    ).workload(text)


def _transformers() -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import transformers
    except ImportError:
        raise CannotRunHere("hf: workloads need transformers: pip install 'memfit[models]'") from None
    transformers.logging.set_verbosity_error()
    return transformers


def _find_config(name: str, settings: Mapping[str, Any]) -> PretrainedConfig:
    transformers = _transformers()
    known = transformers.CONFIG_MAPPING
    if name in known:
        kind = known[name]
        config: PretrainedConfig = kind(**_checked(kind(), settings, name))
        return config
    try:
        plain = transformers.AutoConfig.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError, KeyError):
        raise UsageError(
            f"model {name!r} is no model type of transformers, no local folder, and not in the local cache"
            f"{suggestion(name, known)} (nothing is downloaded)"
        ) from None
    changed: PretrainedConfig = type(plain).from_dict({**plain.to_dict(), **_checked(plain, settings, name)})
    return changed


def _checked(config: PretrainedConfig, settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The settings under the configuration's own names. Raises UsageError for one that it does not have."""
    aliases: Mapping[str, str] = type(config).attribute_map
    known = {*config.to_dict(), *aliases, "num_labels"} - {"transformers_version", "architectures"}
    for key in settings:
        if key not in known:
            raise UsageError(
                f"{key!r} is no setting of {name}{suggestion(key, [*_OWN_KEYS, *sorted(known)])}"
            )
    return {aliases.get(key, key): value for key, value in settings.items()}


def _prepared(config: PretrainedConfig) -> PretrainedConfig:
    """Training settings: no key-value cache; a first token where the decoder reads the shifted labels."""
    if hasattr(config, "use_cache"):
        config.use_cache = False
    if (
        getattr(config, "is_encoder_decoder", False)
        and getattr(config, "decoder_start_token_id", None) is None
    ):
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    return config


def _task_models(task: Task) -> Mapping[str, Any]:
    from transformers.models.auto import modeling_auto

    mapping: Mapping[str, Any] = getattr(modeling_auto, task.mapping)
    return mapping


def _title(hub: HubWorkload) -> str:
    shape = f"batch {hub.batch_size}"
    if TASKS["image-classification"] is not hub.task:
        shape += f", sequence {hub._sequence()}"
    return f"{hub.name} ({shape}, {hub.dtype}, {hub.optimizer})"


def _token_batch(
    hub: HubWorkload, config: PretrainedConfig, batch: int, sequence: int
) -> dict[str, torch.Tensor]:
    tokens = torch.randint(_text_config(config).vocab_size, (batch, sequence))
    return {"input_ids": tokens, "labels": tokens}


def _class_batch(
    hub: HubWorkload, config: PretrainedConfig, batch: int, sequence: int
) -> dict[str, torch.Tensor]:
    tokens = torch.randint(_text_config(config).vocab_size, (batch, sequence))
    return {"input_ids": tokens, "labels": torch.randint(config.num_labels or 2, (batch,))}


def _image_batch(
    hub: HubWorkload, config: PretrainedConfig, batch: int, sequence: int
) -> dict[str, torch.Tensor]:
    size = getattr(config, "image_size", None) or hub.image_size or DEFAULT_IMAGE
    height, width = (size, size) if isinstance(size, int) else size
    pixels = torch.randn(batch, getattr(config, "num_channels", 3), height, width, dtype=hub.numerics.weights)
    return {"pixel_values": pixels, "labels": torch.randint(config.num_labels or 2, (batch,))}


def _text_config(config: PretrainedConfig) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _labels(batch: Mapping[str, torch.Tensor]) -> float:
    return float((batch["labels"] != _IGNORED_LABEL).sum())


def _shifted_labels(batch: Mapping[str, torch.Tensor]) -> float:
    return float((batch["labels"][..., 1:] != _IGNORED_LABEL).sum())


TASKS: Mapping[str, Task] = {
    "seq2seq-lm": Task(
        auto_class="AutoModelForSeq2SeqLM",
        mapping="MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
        batch=_token_batch,
        loss_weight=_labels,
    ),
    "image-classification": Task(
        auto_class="AutoModelForImageClassification",
        mapping="MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
        batch=_image_batch,
    ),
    "masked-lm": Task(
        auto_class="AutoModelForMaskedLM",
        mapping="MODEL_FOR_MASKED_LM_MAPPING_NAMES",
        batch=_token_batch,
        loss_weight=_labels,
    ),
    "causal-lm": Task(
        auto_class="AutoModelForCausalLM",
        mapping="MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
        batch=_token_batch,
        loss_weight=_shifted_labels,
    ),
    "sequence-classification": Task(
        auto_class="AutoModelForSequenceClassification",
        mapping="MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
        batch=_class_batch,
    ),
}
