"""A compiled model whose backward runs chosen operators again: ``torch.compile`` with a cut of its graph
for a peak.

``torch.compile`` traces forward and backward as one graph and cuts it in two: what the cut keeps is memory,
what it does not keep runs again. ``budget`` is PyTorch's own knob for that (``activation_memory_budget``),
which bounds the bytes that are kept. ``peak`` is memfit's: it bounds the most bytes that are alive at once,
which is what has to fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from memfit.core.errors import UsageError
from memfit.core.exactness import Exactness
from memfit.techniques.base import Technique, Undo, bare_model, refuse_second

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from memfit.capture.graph import StepGraph
    from memfit.techniques.saving import Saving

Backend = Literal["inductor", "aot_eager", "aot_eager_decomp_partition"]
Scope = Literal["model", "blocks"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)


@dataclass(frozen=True, kw_only=True)
class CompiledPartition(Technique):
    """Compiles a model, and keeps of its forward what costs least time under a bound on memory.

    The cut is made anew for each graph that is compiled, so settings hold for any batch: where the model's
    code breaks the graph, each piece gets its own cut. Only training is compiled; without gradients the
    model runs as it is.

    Args:
        peak: the most live bytes of the graph (activations, gradients, temporaries), as a share of what
            keeping everything needs: above 0, up to 1. Where even the leanest cut needs more, it is taken.
        budget: instead, PyTorch's ``activation_memory_budget``, from 0 to 1. Its peak is not monotone.
        backend: ``"inductor"`` fuses and generates code, which rounds otherwise and draws other dropout
            masks; ``"aot_eager"`` runs the cut graph with the kernels of the plain model, to the bit;
            ``"aot_eager_decomp_partition"`` the same with inductor's finer operators.
        scope: ``"model"`` as a whole, or each of its repeated ``"blocks"`` by itself (with ``budget`` only:
            the peak is the model's).
        gpu: whose rates weigh running operators again.
        dynamic: as ``torch.compile`` takes it.

    Examples:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
        >>> model = CompiledPartition(peak=0.6, backend="aot_eager").apply(model)
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> model[0].weight.grad.shape
        torch.Size([8, 4])
    """

    name: ClassVar[str] = "compiled_partition"

    peak: float | None = None
    budget: float | None = None
    backend: Backend = "inductor"
    scope: Scope = "model"
    gpu: str = "a100-80gb"
    dynamic: bool | None = None

    def __post_init__(self) -> None:
        if self.peak is not None and self.budget is not None:
            raise UsageError(f"{self.name}: give one of peak and budget, not both")
        if self.peak is not None and not (_is_number(self.peak) and 0 < self.peak <= 1):
            raise UsageError(f"{self.name}: peak must be above 0 and at most 1, not {self.peak!r}")
        if self.budget is not None and not (_is_number(self.budget) and 0 <= self.budget <= 1):
            raise UsageError(f"{self.name}: budget must be from 0 to 1, not {self.budget!r}")
        for key, known in (("backend", BACKENDS), ("scope", get_args(Scope))):
            if getattr(self, key) not in known:
                raise UsageError(
                    f"{self.name}: {key} must be one of {', '.join(known)}, not {getattr(self, key)!r}"
                )
        if self.peak is not None and self.scope == "blocks":
            raise UsageError(f"{self.name}: the peak is the whole model's: with scope='blocks' give a budget")
        from memfit.core.devices import find_gpu

        find_gpu(self.gpu)

    @staticmethod
    def candidates() -> Iterator[Mapping[str, Any]]:
        """Settings worth trying: a few peaks, and PyTorch's usual budgets."""
        yield from ({"peak": peak} for peak in (0.8, 0.65, 0.5, 0.4))
        yield from ({"budget": budget} for budget in (1.0, 0.75, 0.5, 0.25))

    def exactness(self, model: nn.Module) -> Exactness:
        return "exact" if self.backend == "aot_eager" else "reordered"

    def estimate(self, graph: StepGraph, model: nn.Module | None = None) -> Saving:
        """By shares of what the captured step holds: the compiler's graph is known only once it compiles."""
        from memfit.techniques.saving import Saving

        if self.peak is not None:
            held = graph.peak_bytes - graph.resting_bytes
            note = "the compiler's own savings are not counted, and a lean cut may not be found"
            return Saving(peak_bytes=int((1 - self.peak) * held), note=note)
        if self.budget is None:
            return Saving(peak_bytes=0, note="the compiler's own savings are not counted")
        kept = min(graph.saved_bytes, graph.peak_bytes - graph.resting_bytes)
        note = "PyTorch's budget bounds what is kept, not the peak: this is the most that it can save"
        return Saving(peak_bytes=int((1 - self.budget) * kept), note=note)

    def change(self, model: nn.Module, optimizer: Optimizer | None) -> Undo:
        from memfit.techniques.compiled_forward import CompiledForward, Compiler
        from memfit.techniques.replaced_forward import set_forwards

        refuse_second(model, CompiledPartition)
        parts = {id(part): part for part in self._parts(bare_model(model))}.values()
        compiler = Compiler(self)
        forwards = [(p, CompiledForward(p, self, vars(p).get("forward"), compiler)) for p in parts]
        return set_forwards(forwards, self.name)

    def _parts(self, root: nn.Module) -> list[nn.Module]:
        from memfit.techniques.blocks import block_names, get_block

        if self.scope == "model":
            return [root]
        names = block_names(root)
        if not names:
            raise UsageError(
                f"{self.name}: no repeated blocks found in this {type(root).__name__}; give scope='model'"
            )
        return [get_block(root, name) for name in names]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
