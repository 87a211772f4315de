"""What a checkpoint is of: model, optimizer, and all else that training depends on; read and set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from memfit.core.errors import UsageError
from memfit.distributed.data_order import DataOrder
from memfit.distributed.randomness import random_state, seed_for_new_rank, set_random_state
from memfit.distributed.state_json import decode, encode, join_state, split_state


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """The objects that training depends on.

    Attributes:
        model: plain, or wrapped by DDP or FSDP2; parameters are saved under its own names in each case.
        optimizers: of the model's parameters.
        shared: what is the same on all ranks: scheduler, scaler, the user's own; each has ``state_dict``.
        data: a `DataOrder`, or anything with ``state_dict`` that each rank has for itself; None.
        generators: the user's own random generators, by name.
    """

    model: torch.nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...]
    shared: Mapping[str, Any] = field(default_factory=dict)
    data: Any = None
    generators: Mapping[str, torch.Generator] = field(default_factory=dict)

    def sharded(self) -> tuple[Any, dict[str, torch.Tensor]]:
        """Model and optimizer: the skeleton and the tensors (of which a rank may have shards)."""
        model, optimizer = get_state_dict(self.model, self.optimizers)
        return split_state({"model": model, "optimizer": optimizer})

    def set_sharded(self, skeleton: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        """Sets model and optimizer."""
        state = join_state(skeleton, tensors)
        set_state_dict(
            self.model,
            self.optimizers,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def of_all(self) -> dict[str, Any]:
        """What is the same on all ranks, as JSON."""
        state = {name: encode(thing.state_dict()) for name, thing in self.shared.items()}
        order = encode(self.data.state_dict()) if isinstance(self.data, DataOrder) else None
        return {"shared": state, "order": order}

    def set_of_all(self, state: Mapping[str, Any], step: int) -> None:
        """Sets what is the same on all ranks. Raises UsageError where the run is not the one that was
        saved."""
        missing = set(self.shared) ^ set(state["shared"])
        if missing:
            raise UsageError(
                f"the checkpoint and protect(...) differ in {', '.join(sorted(missing))}: give protect() "
                "what it was given before, or choose another checkpoint folder"
            )
        for name, thing in self.shared.items():
            thing.load_state_dict(decode(state["shared"][name]))
        if isinstance(self.data, DataOrder):
            if state["order"] is not None:
                self.data.load_state_dict(decode(state["order"]))
            self.data.next_step = step

    def of_rank(self) -> dict[str, Any]:
        """What each rank has for itself, as JSON: generators, and the position of its own loader."""
        loader = self.data is not None and not isinstance(self.data, DataOrder)
        return {
            "random": random_state(self.generators),
            "data": encode(self.data.state_dict()) if loader else None,
        }

    def set_of_rank(self, state: Mapping[str, Any]) -> None:
        """Sets what this rank had for itself."""
        if state["data"] is not None and self.data is not None:
            self.data.load_state_dict(decode(state["data"]))
        set_random_state(state["random"], self.generators)

    def begin_new_rank(self, seed: int) -> None:
        """For a rank that the checkpoint does not know."""
        seed_for_new_rank(seed)
