"""Runs a script, unchanged, with a configuration.

``python -m memfit.configuring.script SETTINGS KIND TARGET ARGUMENTS…``: SETTINGS is a JSON object with the
``places`` and ``flags`` of `memfit.configure`. Techniques are applied to a model when the script makes an
optimizer for its parameters. What is done is told on stderr.
"""

from __future__ import annotations

import functools
import gc
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memfit.config import load_configuration
from memfit.configuring.configured import Configured
from memfit.core.errors import MemfitError
from memfit.dryrun.entry import run_as_main
from memfit.techniques.base import bare_model

_OURS = (os.path.dirname(os.path.dirname(__file__)) + os.sep, "<frozen runpy>")
_LOG = logging.getLogger("memfit.run")


class ScriptConfiguration:
    """Applies a configuration to the models of a script that knows nothing of it.

    Args:
        configured: of the process, started.
    """

    def __init__(self, configured: Configured) -> None:
        self.configured = configured
        self._backward = torch.Tensor.backward

    def install(self) -> None:
        """From now on, see to every optimizer that is made, of any class."""
        for cls in _subclasses(Optimizer):
            self._wrap(cls)
        self._wrap_later_classes()
        torch.Tensor.backward = self._scaled_backward()  # type: ignore[method-assign]

    def _wrap(self, cls: type) -> None:
        original = cls.__dict__.get("__init__")
        if original is None:
            return

        @functools.wraps(original)
        def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            if type(optimizer).__init__ is init:  # the outermost: the optimizer is complete
                self._made(optimizer)

        cls.__init__ = init  # type: ignore[misc]

    def _wrap_later_classes(self) -> None:
        def init_subclass(cls: type[Optimizer], /, **kwargs: Any) -> None:
            super(Optimizer, cls).__init_subclass__(**kwargs)
            self._wrap(cls)

        Optimizer.__init_subclass__ = classmethod(init_subclass)  # type: ignore[assignment]

    def _made(self, optimizer: Optimizer) -> None:
        model = owner_of(optimizer)
        if model is None:
            _LOG.info("no module has the parameters of this %s: left as it is", type(optimizer).__name__)
            return
        if self.configured.model is not None:
            again = "the same model" if model is self.configured.model else "another model"
            _LOG.info("a second optimizer, of %s: left as it is", again)
            return
        before = len(self.configured.done)
        self.configured.apply(model, optimizer)
        for line in self.configured.done[before:]:
            _LOG.info("%s, on %s", line, type(model).__name__)

    def _scaled_backward(self) -> Callable[..., Any]:
        """Scales the losses of a script that does not: fp16 alone needs it."""
        original = self._backward

        @functools.wraps(original)
        def backward(tensor: torch.Tensor, gradient: Any = None, *args: Any, **kwargs: Any) -> Any:
            mp = self.configured.mixed_precision
            if mp is not None and mp.scales_losses and gradient is None and tensor.dim() == 0:
                tensor = mp.scale_loss(tensor)
            return original(tensor, gradient, *args, **kwargs)

        return backward


def owner_of(optimizer: Optimizer) -> nn.Module | None:
    """The living module whose parameters an optimizer has; None when there is none.

    Of the modules with all of them and the fewest others it is the outermost: a language model and not its
    body, though both have the same parameters where the head is tied.
    """
    wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    found: list[tuple[int, int, nn.Module]] = []
    for module in gc.get_objects():
        if not issubclass(type(module), nn.Module) or type(module).forward is nn.Module.forward:
            continue
        own = {id(parameter) for parameter in module.parameters()}
        if wanted <= own:
            found.append((len(own), -sum(1 for _ in module.modules()), module))
    return bare_model(min(found, key=lambda row: row[:2])[2]) if found else None


def _subclasses(cls: type) -> list[type]:
    found: list[type] = [cls]
    inner: type
    for inner in cls.__subclasses__():
        found += _subclasses(inner)
    return list(dict.fromkeys(found))


def main() -> None:
    """Run the script that the command line names; a mistake of the configuration is one message."""
    settings, kind, target, *arguments = sys.argv[1:]
    given = json.loads(settings)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("memfit: %(message)s"))
    _LOG.addHandler(handler)
    _LOG.setLevel(logging.INFO)
    _LOG.propagate = False
    try:
        configured = Configured(load_configuration(*given["places"], flags=given["flags"]))
        configured.start()  # `memfit run` has told what is doubtful
        for line in configured.done:
            _LOG.info("%s", line)
        ScriptConfiguration(configured).install()
        sys.path.pop(0)  # `python -m` put the working folder there, where the script's own comes
        run_as_main({"kind": kind, "target": target, "arguments": arguments})
    except MemfitError as problem:
        _LOG.error("error: %s", problem)
        sys.exit(problem.exit_code)
    except Exception as problem:
        traceback.print_exception(problem.with_traceback(_without_our_frames(problem.__traceback__)))
        sys.exit(1)


def _without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback as the script alone would have it."""
    while trace is not None and str(trace.tb_frame.f_code.co_filename).startswith(_OURS):
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    main()
