"""Which phase, operation and module is allocating: a short text that PyTorch stamps on each allocator event.

The allocator's history keeps, with every event, a text that the thread has set (``_cuda_setMemoryMetadata``).
The probe sets it before each operation, so the history can be read back operation by operation.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch

from memfit.dryrun.history import SEPARATOR

_MOST_NODES = 1_000_000
_MOST_VIEWS = 8  # in a row

_graph_task = torch._C._current_graph_task_id
_node = torch._C._current_autograd_node
_sequence_number = torch._C._autograd._get_sequence_nr
_set_text: Callable[[str], None] = getattr(torch._C, "_cuda_setMemoryMetadata", lambda text: None)


class _Stack(threading.local):
    """The names of the modules whose forward runs in this thread, outermost first."""

    def __init__(self) -> None:
        self.names: list[str] = []


class Labels:
    """Says for each operation its phase, its name and its module.

    In the backward pass the module is that of the forward operation whose autograd node runs, found by the
    node's sequence number. `phase` is what the main thread is at outside of the backward pass.
    """

    def __init__(self) -> None:
        self.phase = "init"
        self.on_new_root: Callable[[torch.nn.Module], None] = lambda module: None
        self._names: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
        self._stack = _Stack()
        self._by_node: dict[int, str] = {}
        self._texts: dict[tuple[str, Any, str], str] = {}
        self.last = ("init", None, "")

    def stamp(self, func: Any) -> None:
        """Label what ``func`` is about to allocate."""
        phase, module = self._place()
        key = (phase, func, module)
        self.last = key
        text = self._texts.get(key)
        if text is None:
            text = self._texts.setdefault(key, SEPARATOR.join((phase, op_name(func), module)))
        _set_text(text)

    def enter(self, phase: str) -> None:
        """The main thread is in another phase now; so are allocations that come without an operation."""
        self.phase = phase
        _set_text(SEPARATOR.join((phase, "", "")))

    def end_of_step(self) -> None:
        """The step's graph is done with: forget which module made which node."""
        self._by_node.clear()

    def install(self) -> None:
        """Follow every module's forward. The hooks cost nothing where a frame is compiled."""
        # torch.compile warns of global hooks; these are not the script's.
        warnings.filterwarnings("ignore", message=r"Using `torch.compile\(module\)` when there are global")
        torch.nn.modules.module.register_module_forward_pre_hook(self._enter)
        torch.nn.modules.module.register_module_forward_hook(self._leave, always_call=True)

    def _place(self) -> tuple[str, str]:
        names = self._stack.names
        if _graph_task() == -1:
            module = names[-1] if names else ""
            self._note_node(module)
            return self.phase, module
        if torch.is_grad_enabled():
            module = names[-1] if names else ""
            self._note_node(module)
            return "recompute", module
        node = _node()
        return "backward", "" if node is None else self._module_of(node._sequence_nr())

    def _module_of(self, number: int) -> str:
        """The module that made the node; of nodes that only make views, which are not seen, the one
        before."""
        for earlier in range(number, number - _MOST_VIEWS, -1):
            module = self._by_node.get(earlier)
            if module is not None:
                return module
        return ""

    def _note_node(self, module: str) -> None:
        if module and torch.is_grad_enabled() and len(self._by_node) < _MOST_NODES:
            # The first operation after a node is made has its number; later ones that make no node must not
            # take it.
            self._by_node.setdefault(_sequence_number() - 1, module)

    def _enter(self, module: torch.nn.Module, _inputs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        stack = self._stack.names
        name = self._names.get(module)
        if name is None:
            name = type(module).__name__
            if not stack:
                self._meet(module)
        stack.append(name)
        if self.phase == "init":
            self.phase = "forward"

    def _leave(self, module: torch.nn.Module, _inputs: Any, _output: Any) -> None:
        if not torch.compiler.is_compiling() and self._stack.names:
            self._stack.names.pop()

    def _meet(self, root: torch.nn.Module) -> None:
        """A model that is called for the first time: learn the names of its modules."""
        for name, module in root.named_modules():
            self._names.setdefault(module, name or type(root).__name__)
        self.on_new_root(root)


def op_name(func: Any) -> str:
    """``"aten.mm"``: the operation without its overload."""
    packet = getattr(func, "overloadpacket", None)
    return str(packet) if packet is not None else getattr(func, "__name__", str(func))
