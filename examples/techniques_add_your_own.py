"""A technique of your own: settings, change, way back, estimate; and as a rung of a ladder."""

from __future__ import annotations

import fnmatch
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

import memfit
from memfit.core.errors import UsageError
from memfit.core.exactness import Exactness
from memfit.techniques import TECHNIQUES, Saving, Technique
from memfit.techniques.base import Undo, refuse_second
from memfit.techniques.saving import saving_of


# --8<-- [start:technique]
@dataclass(frozen=True, kw_only=True)
class FrozenLayers(Technique):
    """Parameters whose names fit do not train: they need no gradient and no optimizer state."""

    name: ClassVar[str] = "frozen_layers"

    layers: Sequence[str] = ("*",)

    def __post_init__(self) -> None:
        if isinstance(self.layers, str):
            raise UsageError(f"{self.name}: layers must be a list of names, not {self.layers!r}")
        object.__setattr__(self, "layers", tuple(self.layers))

    def exactness(self, model: nn.Module) -> Exactness:
        return "changes training"

    def change(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Undo:
        refuse_second(model, FrozenLayers)
        chosen = [p for name, p in model.named_parameters() if self._fits(name) and p.requires_grad]
        if not chosen:
            raise UsageError(f"{self.name}: no parameter that trains fits {', '.join(self.layers)}")
        frozen = [weakref.ref(parameter) for parameter in chosen]
        for parameter in chosen:
            parameter.requires_grad_(False)

        def undo() -> None:
            for reference in frozen:
                if (parameter := reference()) is not None:
                    parameter.requires_grad_(True)

        return undo

    def estimate(self, graph: Any, model: nn.Module | None = None) -> Saving:
        gone = {
            storage.id
            for storage in graph.storages
            if storage.category in ("gradient", "optimizer_state") and self._fits(storage.name)
        }
        return saving_of(graph, (s for s in graph.storages if s.id not in gone), note="they do not train")

    def _fits(self, name: str) -> bool:
        return any(fnmatch.fnmatch(name, pattern) for pattern in self.layers)


TECHNIQUES[FrozenLayers.name] = FrozenLayers  # type: ignore[index]  # one row in the table
# --8<-- [end:technique]


def workload() -> memfit.Workload:
    """A workload in the same file: whoever loads it knows the technique too."""
    return memfit.Workload(
        name="frozen",
        model=lambda: nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.Linear(512, 8)),
        batch=lambda: torch.randn(16, 64),
        loss=lambda model, batch: model(batch).square().mean(),
    )


def main() -> None:
    # --8<-- [start:use]
    made = workload()
    model = made.model()
    technique = FrozenLayers(layers=("0.*", "2.*"))
    saving = technique.estimate(memfit.capture_step(made))
    technique.apply(model)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["3.weight", "3.bias"]
    memfit.undo(model)
    assert all(parameter.requires_grad for parameter in model.parameters())

    climbed = memfit.ladder(f"{__file__}:workload", techniques=[technique], engine="portable", quality=False)
    plain, frozen = climbed.rungs
    assert plain.peak_requested_bytes is not None and frozen.peak_requested_bytes is not None
    print(f"estimated {saving.peak_bytes:,} B, by the ladder "
          f"{plain.peak_requested_bytes - frozen.peak_requested_bytes:,} B less")  # fmt: skip
    # --8<-- [end:use]
    assert frozen.peak_requested_bytes < plain.peak_requested_bytes


if __name__ == "__main__":
    main()
