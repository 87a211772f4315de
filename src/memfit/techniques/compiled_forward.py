"""The forward of a module that is compiled: set on the instance, so that the module stays itself."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cached_property
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch import config as functorch_config

from memfit.core.errors import CannotRunHere
from memfit.techniques.joint_partition import PeakPartitioner
from memfit.techniques.replaced_forward import ReplacedForward

if TYPE_CHECKING:
    from memfit.techniques.compiled_partition import CompiledPartition


class CompiledForward(ReplacedForward):
    """Runs a module's own forward compiled whenever gradients are recorded, and as it is otherwise.

    Args:
        module: the module whose ``forward`` this replaces.
        settings: how it is compiled and cut.
        previous: a ``forward`` that was set on the instance before, if any.
        compiler: shared by modules that are alike, so that each graph is compiled once.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: CompiledPartition,
        previous: Callable[..., Any] | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        super().__init__(module, previous)
        self.settings = settings
        self._kind = type(module).__name__
        self._compiler = Compiler(settings) if compiler is None else compiler

    def __reduce__(self) -> tuple[Any, ...]:
        return CompiledForward, (self._module(), self.settings, self._previous)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        original = self.original()
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return original(*args, **kwargs)
        try:
            with torch._dynamo.config.patch(ignore_logging_functions=_logging_functions()):
                return self._compiler.compiled(original, args, kwargs)
        except torch._dynamo.exc.TorchDynamoException as problem:
            raise CannotRunHere(
                f"{self.settings.name}: torch.compile cannot compile this {self._kind}: "
                f"{_first_line(problem)}; memfit.undo(model) lets it run as it is"
            ) from problem


def _logging_functions() -> set[Callable[..., Any]]:
    """What loggers do: a word of a library in the middle of a model would break its graph in two."""
    names = ("debug", "info", "warning", "error", "log", "warning_once", "warning_advice")
    found = (getattr(logging.Logger, name, None) for name in names)
    return {*torch._dynamo.config.ignore_logging_functions, *filter(None, found)}


class Compiler:
    """``torch.compile`` with a technique's settings, at the first call.

    PyTorch keeps what it compiled with the code of the function that was compiled, up to a number of
    graphs, and compiles no further beyond it. So each compiler has a copy of the code of its own.
    """

    def __init__(self, settings: CompiledPartition) -> None:
        self._settings = settings

    @cached_property
    def compiled(self) -> Callable[..., Any]:
        """The compiled `_same`."""
        own = FunctionType(_same.__code__.replace(co_name=f"compiled_{id(self)}"), globals())
        return torch.compile(own, backend=backend_of(self._settings), dynamic=self._settings.dynamic)


def _same(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What is compiled: it gets the forward anew with each call, so that nothing compiled holds the
    module."""
    return forward(*args, **kwargs)


def _first_line(problem: BaseException) -> str:
    """What went wrong, as the compiler's part that failed says it."""
    inner = getattr(problem, "inner_exception", None) or problem.__cause__ or problem
    lines = [line.strip() for line in str(inner).splitlines() if line.strip()]
    return f"{type(inner).__name__}: {lines[0]}" if lines else type(inner).__name__


def backend_of(settings: CompiledPartition) -> Callable[[fx.GraphModule, Any], Any]:
    """What ``torch.compile(backend=…)`` takes."""
    partitioner = PeakPartitioner(settings.peak, settings.gpu, fused=settings.backend != "aot_eager")
    budget = 1.0 if settings.budget is None else settings.budget

    def compile_graph(graph: fx.GraphModule, inputs: Any) -> Any:
        with functorch_config.patch(activation_memory_budget=budget):
            return _COMPILERS[settings.backend](graph, inputs, partitioner)

    return compile_graph


def _with_inductor(graph: fx.GraphModule, inputs: Any, partitioner: PeakPartitioner) -> Any:
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    with config.patch(custom_partitioner_fn=partitioner):
        return compile_fx(graph, inputs)


def _op_by_op(graph: fx.GraphModule, inputs: Any, partitioner: PeakPartitioner) -> Any:
    compiler = aot_autograd(
        fw_compiler=boxed_nop, partition_fn=partitioner, keep_inference_input_mutations=True
    )
    return compiler(graph, inputs)


def _decomposed(graph: fx.GraphModule, inputs: Any, partitioner: PeakPartitioner) -> Any:
    from torch._inductor.decomposition import select_decomp_table

    compiler = aot_autograd(
        fw_compiler=boxed_nop,
        partition_fn=partitioner,
        decompositions=select_decomp_table,
        keep_inference_input_mutations=True,
    )
    return compiler(graph, inputs)


_COMPILERS: dict[str, Callable[[fx.GraphModule, Any, PeakPartitioner], Any]] = {
    "inductor": _with_inductor,
    "aot_eager": _op_by_op,
    "aot_eager_decomp_partition": _decomposed,
}
