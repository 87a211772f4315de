"""Whole channels and neurons leave a model, in place: its modules, gradients and states are smaller after.

What depends on what (the next layer's inputs, norms, residual sums) is found by torch-pruning from one
forward pass on example inputs. Source: Fang et al., "DepGraph: Towards Any Structural Pruning" (2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from memfit.core.errors import CannotRunHere, UsageError
from memfit.techniques.base import applied_techniques, bare_model


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """What pruning left of a model: parameters as a count, their memory in bytes."""

    parameters_before: int
    parameters_after: int
    bytes_before: int
    bytes_after: int

    @property
    def share_left(self) -> float:
        """Bytes after by bytes before."""
        return self.bytes_after / self.bytes_before if self.bytes_before else 1.0


def prune_structured(
    model: nn.Module,
    inputs: Any,
    *,
    share: float = 0.5,
    keep: Sequence[str] = (),
    multiple: int = 1,
    steps: int = 1,
) -> Pruned:
    """Takes the least important channels out of ``model``, in place. Cannot be undone: keep a copy.

    Make the optimizer after it (or anew): parameters are other objects.

    Args:
        model: in any mode; its class and module names stay.
        inputs: example inputs for one forward pass: a tensor, or a tuple of them.
        share: of the channels of each layer that leave.
        keep: names of modules whose outputs keep their width, such as the classifier; the last linear layer
            is kept in any case.
        multiple: that the widths which are left are a multiple of, such as 8 for tensor cores.
        steps: in how many steps the share is reached.

    Raises:
        CannotRunHere: torch-pruning is not installed.
        UsageError: a bad share, an unknown name, or a technique is applied to the model.
    """
    try:
        import torch_pruning
    except ImportError as missing:
        raise CannotRunHere(
            "structured pruning needs torch-pruning: pip install 'memfit[prune]'"
        ) from missing
    root = bare_model(model)
    if not 0 < share < 1:
        raise UsageError(f"share must be between 0 and 1, not {share!r}")
    if applied_techniques(root):
        names = ", ".join(technique.name for technique in applied_techniques(root))
        raise UsageError(f"prune the plain model: {names} is applied; take it back with memfit.undo(model)")
    before = _size(root)
    pruner = torch_pruning.pruner.MagnitudePruner(
        root,
        example_inputs=inputs,
        importance=torch_pruning.importance.MagnitudeImportance(p=2),
        pruning_ratio=share,
        iterative_steps=steps,
        ignored_layers=_kept(root, keep),
        round_to=multiple if multiple > 1 else None,
    )
    for _ in range(steps):
        pruner.step()
    after = _size(root)
    return Pruned(
        parameters_before=before[0], parameters_after=after[0], bytes_before=before[1], bytes_after=after[1]
    )


def _kept(root: nn.Module, keep: Sequence[str]) -> list[nn.Module]:
    modules = dict(root.named_modules())
    for name in keep:
        if name not in modules:
            raise UsageError(f"keep: there is no module {name!r} in this {type(root).__name__}")
    linears = [module for module in modules.values() if isinstance(module, nn.Linear)]
    return [*(modules[name] for name in keep), *linears[-1:]]


def _size(root: nn.Module) -> tuple[int, int]:
    parameters = list(root.parameters())
    return (
        sum(parameter.numel() for parameter in parameters),
        sum(parameter.numel() * parameter.element_size() for parameter in parameters),
    )
