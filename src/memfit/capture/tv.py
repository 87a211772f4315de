"""Workloads from `torchvision`, ``tv:resnet50,batch=32,size=224``: classification with random weights."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

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

SMALL_BATCH, SMALL_SIZE = 2, 64
# Networks whose last features vanish at 64 pixels.
_SMALLEST = {"inception_v3": 224}
_AUXILIARY_WEIGHT = 0.3
_OWN_KEYS = ("batch", "size", "dtype", "optimizer", "num_classes")


@dataclass(frozen=True, kw_only=True)
class VisionWorkload:
    """The settings of one ``tv:`` text; its methods are the factories of the workload."""

    name: str
    batch_size: int = 32
    image_size: int = 224
    classes: int = 1000
    dtype: str = "fp32"
    optimizer: str = "adamw"
    builder_settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def numerics(self) -> Numerics:
        return choice(self.dtype, NUMERICS, "dtype")

    def model(self, size: str = "full") -> torch.nn.Module:
        """The network with random weights, on the current default device."""
        models = _models()
        options = dict(self.builder_settings)
        if self.name.startswith("vit_"):
            options["image_size"] = self._pixels(size)
        network: torch.nn.Module = models.get_model(
            self.name, weights=None, num_classes=self.classes, **options
        )
        return network.to(self.numerics.weights)

    def make_batch(self, size: str = "full") -> tuple[torch.Tensor, torch.Tensor]:
        """Random images and labels, on the current default device."""
        batch, pixels = (SMALL_BATCH if size == "small" else self.batch_size), self._pixels(size)
        images = torch.randn(batch, 3, pixels, pixels, dtype=self.numerics.weights)
        return images, torch.randint(self.classes, (batch,))

    def loss(self, model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Cross entropy; auxiliary heads (GoogLeNet, Inception) count 0.3 each."""
        outputs = model(batch[0])
        if isinstance(outputs, torch.Tensor):
            return torch.nn.functional.cross_entropy(outputs, batch[1])
        main, *others = [
            torch.nn.functional.cross_entropy(output, batch[1]) for output in outputs if output is not None
        ]
        return main + _AUXILIARY_WEIGHT * torch.stack(others).sum() if others else main

    def workload(self, spec: str) -> Workload:
        """The workload; every setting is checked here, before anything is built."""
        return Workload(
            name=f"{self.name} (batch {self.batch_size}, {self.image_size} px, {self.dtype}, "
            f"{self.optimizer})",
            model=self.model,
            batch=self.make_batch,
            loss=self.loss,
            optimizer=choice(self.optimizer, OPTIMIZERS, "optimizer"),
            precision=self.numerics.precision,
            spec=spec,
        )

    def _pixels(self, size: str) -> int:
        return (
            min(self.image_size, _SMALLEST.get(self.name, SMALL_SIZE)) if size == "small" else self.image_size
        )


def load_vision_workload(text: str) -> Workload:
    """The workload of a ``tv:NAME,key=value,…`` text.

    Keys: ``batch`` (32), ``size`` in pixels (224), ``dtype``, ``optimizer``, ``num_classes`` (1000), and any
        parameter of the
    network's class.
    """
    spec = parse_spec(text)
    models = _models()
    names = models.list_models(module=models)
    if spec.name not in names:
        raise UsageError(
            f"torchvision has no classification network {spec.name!r}{suggestion(spec.name, names)}"
        )
    settings = dict(spec.settings)
    own = {key: settings.pop(key) for key in _OWN_KEYS if key in settings}
    _check_builder_settings(models, spec.name, settings)
    return VisionWorkload(
        name=spec.name,
        batch_size=positive_int(own, "batch", 32),
        image_size=positive_int(own, "size", 299 if spec.name == "inception_v3" else 224),
        classes=positive_int(own, "num_classes", 1000),
        dtype=own.get("dtype", "fp32"),
        optimizer=own.get("optimizer", "adamw"),
        builder_settings={key: literal(value) for key, value in settings.items()},
    ).workload(text)


def _check_builder_settings(models: Any, name: str, settings: Mapping[str, str]) -> None:
    """What the network's class takes is found by reading its module: builders pass ``**kwargs`` on."""
    module = inspect.getmodule(models.get_model_builder(name))
    known: set[str] = set()
    for _, network in inspect.getmembers(module, inspect.isclass):
        if issubclass(network, torch.nn.Module) and network.__module__ == getattr(module, "__name__", ""):
            known |= {
                key
                for key, p in inspect.signature(network.__init__).parameters.items()
                if p.default is not p.empty
            }
    for key in settings:
        if key not in known:
            words = [*_OWN_KEYS, *sorted(known.difference(_OWN_KEYS))]
            raise UsageError(f"{key!r} is no setting of {name}{suggestion(key, words)}")


def _models() -> Any:
    try:
        from torchvision import models
    except ImportError:
        raise CannotRunHere("tv: workloads need torchvision: pip install 'memfit[vision]'") from None
    return models
