"""Which module and phase an operator belongs to, in the forward pass, the backward pass and recomputation.

Forward: a stack kept by global module hooks. Backward: each autograd node carries the sequence number that
the thread's counter had when the forward pass made it; the first operator after that was in the module
sought. (`setdefault`, since operators without a node follow under an unchanged number, perhaps already in
the next module.) Recomputation runs inside the backward pass with gradients enabled, which nothing else does
but second derivatives; those are refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from memfit.core.errors import UsageError

_CREATE_GRAPH_POSITION = 3
_next_number: Any = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]


def phase_of(phase: str) -> str:
    """The phase of the operator running now, given the phase that the step has announced."""
    if torch._C._current_graph_task_id() == -1:
        return phase
    return "recompute" if torch.is_grad_enabled() else "backward"


class Attribution:
    """Module and phase of the operator that is running. A context: its hooks are global while it is entered.

    Args:
        root: the model, whose module and parameter names are used.
    """

    def __init__(self, root: torch.nn.Module) -> None:
        self.phase = "forward"
        self.unresolved = 0
        self._names = {module: name for name, module in root.named_modules()}
        self._parameter_names = {id(parameter): name for name, parameter in root.named_parameters()}
        self._stack: list[str] = []
        self._made_in: dict[int, str] = {}  # sequence number of a node -> module
        self._made_again: dict[int, str] = {}  # the same for nodes of the latest recomputation
        self._outer_task: int | None = None
        self._recomputing: str | None = None  # the module being recomputed, as far as known
        self._hooks = contextlib.ExitStack()

    def __enter__(self) -> Attribution:
        self._hooks.callback(register_module_forward_pre_hook(self._enter).remove)
        # Also when forward raises: recomputation stops early by an exception.
        self._hooks.callback(register_module_forward_hook(self._leave, always_call=True).remove)
        self._hooks.enter_context(_refuse_second_derivatives())
        return self

    def __exit__(self, *exception: object) -> None:
        self._hooks.close()

    def begin(self, phase: str) -> None:
        """Announces the next phase of the step."""
        self.phase = phase
        self._outer_task, self._recomputing = None, None
        if phase == "forward":
            self._made_in.clear()

    def where(self) -> tuple[str, str]:
        """Phase and module of the operator that is about to run."""
        phase = phase_of(self.phase)
        if phase == "recompute":
            return phase, self._recomputed_module()
        if phase == "backward":
            self._recomputing = None
            return phase, self._backward_module()
        module = self._stack[-1] if self._stack else ""
        if torch.is_grad_enabled():
            self._made_in.setdefault(_next_number() - 1, module)
        return phase, module

    @property
    def in_a_module(self) -> bool:
        """Whether the code that runs now is called by a module of the model, the model itself among them."""
        return bool(self._stack)

    def _enter(self, module: torch.nn.Module, inputs: Any) -> None:
        outside = self._stack[-1] if self._stack else ""
        self._stack.append(self._names.get(module, outside))
        if self._recomputing is not None and len(self._stack) == 1:
            self._recomputing = self._stack[-1].rpartition(".")[0]

    def _leave(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        self._stack.pop()

    def _recomputed_module(self) -> str:
        """A recomputed block's own code runs outside of any module's call; its children tell which it is."""
        if self._recomputing is None:
            self._made_again.clear()
            self._recomputing = (
                self._stack[-1].rpartition(".")[0]
                if self._stack
                else self._backward_module().rpartition(".")[0]
            )
        module = self._stack[-1] if self._stack else self._recomputing
        self._made_again.setdefault(_next_number() - 1, module)
        return module

    def _backward_module(self) -> str:
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return ""
        if node.name().endswith("AccumulateGrad"):
            return self._parameter_names.get(id(node.variable), "").rpartition(".")[0]
        task = torch._C._current_graph_task_id()
        self._outer_task = task if self._outer_task is None else self._outer_task
        number = node._sequence_nr()
        # A backward pass inside the backward pass is that of a recomputed part, whose numbers may be another
        # thread's.
        module = self._made_again.get(number) if task != self._outer_task else None
        if module is None:
            module = self._made_in.get(number)
        if module is None:
            self.unresolved += 1
        return module or ""


@contextlib.contextmanager
def _refuse_second_derivatives() -> Iterator[None]:
    """With ``create_graph=True`` a backward pass has gradients enabled: it would look like recomputation."""
    run: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def checked(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("create_graph") or (
            len(args) > _CREATE_GRAPH_POSITION and args[_CREATE_GRAPH_POSITION]
        ):
            raise UsageError(
                "the step differentiates its own gradients (create_graph=True): second derivatives cannot be "
                "captured; a dry run of the script measures them"
            )
        return run(*args, **kwargs)

    torch.autograd._engine_run_backward = checked  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.autograd._engine_run_backward = run  # type: ignore[attr-defined]
