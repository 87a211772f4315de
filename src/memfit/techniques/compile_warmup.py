"""A compiled model for service: warmed up over the usual shapes, which are remembered across restarts, with a
counter that shows whether anything was compiled since.

    served = warm_up(model, make_inputs, shapes=[(1, 128), (8, 128)], shape_file="shapes.json")
    served(ids)                        # a shape that was warmed up: nothing compiles
    served.recompilations              # 0

A shape that comes up in service for the first time compiles once, counts, and is written to the file, so the
next start warms it up as well. What inductor has compiled is kept by inductor itself: let
``TORCHINDUCTOR_CACHE_DIR`` name a folder that outlives the process, and the next warm-up takes a fraction.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from memfit.core.errors import InputError, UsageError
from memfit.core.files import write_atomically

Shape = tuple[int, ...]
MakeInputs = Callable[[Shape], Any]
SCHEMA_VERSION = 1


class WarmModel:
    """What `warm_up` gives: call it like the model.

    Attributes:
        model: the plain model.
        warmed: shapes that were compiled before service began.
        unexpected: shapes that came up in service first, with how many compilations each took.
        warm_up_seconds: how long the warm-up took.
    """

    def __init__(self, model: nn.Module, backend: str | Callable[..., Any], dynamic: bool | None) -> None:
        self.model = model
        self.warmed: tuple[Shape, ...] = ()
        self.unexpected: dict[Shape, int] = {}
        self.warm_up_seconds = 0.0
        self.compilations = 0
        self._gradients = False
        self._before_service = 0
        self._file: Path | None = None
        self._compiled = torch.compile(model, backend=self._counting(backend), dynamic=dynamic)

    @property
    def recompilations(self) -> int:
        """Graphs that were compiled since the warm-up ended: 0 proves that service never waited for one."""
        return self.compilations - self._before_service

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = self.compilations
        with torch.set_grad_enabled(self._gradients):  # another mode would be another graph
            result = self._compiled(*args, **kwargs)
        if self.compilations != before:
            self._remember(shape_of((args, kwargs)), self.compilations - before)
        return result

    def warm(self, shapes: Iterable[Shape], make_inputs: MakeInputs, *, gradients: bool) -> None:
        """Runs each shape twice: what the first run compiles, and what only a second run would."""
        begun = time.perf_counter()
        self._gradients = gradients
        done = []
        for shape in shapes:
            inputs = make_inputs(shape)
            args = inputs if isinstance(inputs, tuple) else (inputs,)
            for _ in range(2):
                with torch.set_grad_enabled(gradients):
                    self._compiled(*args)
            done.append(shape)
        self.warmed, self._before_service = tuple(done), self.compilations
        self.warm_up_seconds = time.perf_counter() - begun

    def keep_shapes_in(self, file: Path | None) -> None:
        """Writes the shapes that were warmed up, and from now on each new one."""
        self._file = file
        self._write()

    def _counting(self, backend: str | Callable[..., Any]) -> Callable[..., Any]:
        from torch._dynamo.backends.registry import lookup_backend

        compile_graph: Any = lookup_backend(backend)

        def counted(graph: Any, inputs: Any) -> Any:
            self.compilations += 1
            return compile_graph(graph, inputs)

        return counted

    def _remember(self, shape: Shape, compilations: int) -> None:
        self.unexpected[shape] = self.unexpected.get(shape, 0) + compilations
        self._write()

    def _write(self) -> None:
        if self._file is not None:
            shapes = sorted({*self.warmed, *self.unexpected})
            data = {"schema_version": SCHEMA_VERSION, "shapes": [list(shape) for shape in shapes]}
            write_atomically(self._file, json.dumps(data) + "\n")


def warm_up(
    model: nn.Module,
    make_inputs: MakeInputs,
    *,
    shapes: Sequence[Sequence[int]] = (),
    shape_file: str | os.PathLike[str] | None = None,
    backend: str | Callable[..., Any] = "inductor",
    dynamic: bool | None = False,
    gradients: bool = False,
) -> WarmModel:
    """Compiles a model for all shapes that it is going to meet, before it meets them.

    Args:
        model: as for ``torch.compile``.
        make_inputs: ``(shape) -> tensor or tuple of arguments`` of that shape; the shape is that of the first
            tensor.
        shapes: to warm up, with those of the file.
        shape_file: JSON file that remembers the shapes; made when it is not there.
        backend: of ``torch.compile``.
        dynamic: of ``torch.compile``; False: one graph for each shape.
        gradients: whether calls need gradients; without, they run under ``no_grad`` and nothing is compiled
            for a backward pass.

    Raises:
        UsageError: there is no shape at all.
        InputError: the file cannot be read.

    Examples:
        >>> served = warm_up(torch.nn.Linear(4, 2), torch.zeros, shapes=[(1, 4), (3, 4)], backend="eager")
        >>> _ = served(torch.ones(3, 4))
        >>> served.warmed, served.recompilations
        (((1, 4), (3, 4)), 0)
    """
    file = None if shape_file is None else Path(shape_file)
    wanted = {tuple(int(size) for size in shape) for shape in shapes} | set(_read(file))
    if not wanted:
        raise UsageError("warm_up: name shapes, or a shape_file that has some")
    limit: Any = torch._dynamo.config
    limit.recompile_limit = max(limit.recompile_limit, 2 * len(wanted) + 8)
    served = WarmModel(model, backend, dynamic)
    served.warm(sorted(wanted), make_inputs, gradients=gradients)
    served.keep_shapes_in(file)
    return served


def shape_of(arguments: Any) -> Shape:
    """The shape of the first tensor among arguments; empty where there is none."""
    first = next((leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)), None)
    return () if first is None else tuple(first.shape)


def _read(file: Path | None) -> list[Shape]:
    if file is None or not file.exists():
        return []
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        return [tuple(int(size) for size in shape) for shape in data["shapes"]]
    except (OSError, ValueError, TypeError, KeyError) as problem:
        raise InputError(
            f"{file}: no file of shapes ({type(problem).__name__}: {problem}); delete it to begin anew"
        ) from problem
