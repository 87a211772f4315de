"""Where the program is when something is allocated: phase, module and line of the user's code.

Outside of the backward pass: the innermost module whose forward runs, and the innermost frame outside of
PyTorch. In it: those of the forward operator whose autograd node runs, found by the node's sequence number
(see `memfit.capture.attribution`, which does the same for a step that is captured).
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

_MOST_VIEWS = 8  # nodes in a row that only make views and are not seen
_TORCH, _MEMFIT, _STANDARD = (
    os.path.join(os.path.dirname(path), "")
    for path in (torch.__file__, os.path.dirname(__file__), os.__file__)
)
_graph_task = torch._C._current_graph_task_id
_node = torch._C._current_autograd_node
_sequence_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]


def _is_skipped(filename: str) -> bool:
    """Whether frames of this file say nothing: PyTorch's, memfit's, the standard library's."""
    if filename.startswith((_TORCH, _MEMFIT, "<frozen")):
        return True
    return filename.startswith(_STANDARD) and "-packages" not in filename


class Place:
    """Follows the program through modules and phases while it is installed.

    Attributes:
        phase, module, site: of the operator that was located last; ``site`` is ``"train.py:12 main"``.
        state: the phase that the program is in outside of the backward pass.
    """

    def __init__(
        self, *, on_root: Callable[[torch.nn.Module, Any], None], on_turn: Callable[[], None]
    ) -> None:
        self.phase = self.state = "other"
        self.module = self.site = ""
        self._on_root = on_root
        self._on_turn = on_turn
        self._names: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
        self._has_root = False
        self._stacks: dict[int, list[str]] = {}
        self._made: dict[int, tuple[str, str]] = {}  # sequence number of a node -> module and site
        self._sites: dict[tuple[CodeType, int], str] = {}
        self._skipped: dict[CodeType, bool] = {}
        self._hooks = contextlib.ExitStack()
        # torch.compile warns of global hooks; these are not the program's.
        warnings.filterwarnings("ignore", message=r"Using `torch.compile\(module\)` when there are global")

    def install(self) -> None:
        """Hook into the forward of every module. The hooks cost nothing where a frame is compiled."""
        self._hooks.callback(register_module_forward_pre_hook(self._enter).remove)
        self._hooks.callback(register_module_forward_hook(self._leave, always_call=True).remove)

    def remove(self) -> None:
        """Take the hooks off; what is known of models is kept."""
        self._hooks.close()
        self._stacks.clear()
        self._made.clear()
        self.state = "other"

    def meet(self, root: torch.nn.Module) -> None:
        """Learn the names of a model's modules; those of a second model begin with its class."""
        prefix = type(root).__name__ if self._has_root else ""
        self._has_root = True
        for name, module in root.named_modules():
            plain = name.replace("_orig_mod.", "").removesuffix("_orig_mod")  # torch.compile's wrapper
            inside = ".".join(part for part in (prefix, plain) if part)
            self._names.setdefault(module, inside or type(root).__name__)

    def name_of(self, root: torch.nn.Module, member: str) -> str:
        """The name of the module that a parameter or buffer of ``root`` belongs to."""
        return self._names.get(root.get_submodule(member.rpartition(".")[0]), "")

    def locate(self) -> None:
        """Set `phase`, `module` and `site` for the operator that is about to run in this thread."""
        if _graph_task() == -1:
            self._note_forward(self.state if self.state != "backward" else self._after_backward())
        elif torch.is_grad_enabled():
            self._note_forward("recompute")
        else:
            if self.state != "backward":
                self.state = "backward"
                self._on_turn()
            self.phase = "backward"
            node = _node()
            self.module, self.site = ("", "") if node is None else self._made_at(node._sequence_nr())

    def _after_backward(self) -> str:
        self.state = "other"
        self._made.clear()
        return "other"

    def _note_forward(self, phase: str) -> None:
        stack = self._stacks.get(threading.get_ident())
        self.phase, self.module = phase, stack[-1] if stack else ""
        self.site = self._user_site()
        if torch.is_grad_enabled():
            # The first operator after a node is made has its number; later ones that make none must not
            # take it.
            self._made.setdefault(_sequence_number() - 1, (self.module, self.site))

    def _made_at(self, number: int) -> tuple[str, str]:
        for earlier in range(number, number - _MOST_VIEWS, -1):
            found = self._made.get(earlier)
            if found is not None:
                return found
        return "", ""

    def _user_site(self) -> str:
        frame: FrameType | None = sys._getframe(3)
        skipped = self._skipped
        while frame is not None:
            code = frame.f_code
            skip = skipped.get(code)
            if skip is None:
                skip = skipped[code] = _is_skipped(code.co_filename)
            if not skip:
                key = (code, frame.f_lineno)
                return self._sites.get(key) or self._sites.setdefault(key, _site_text(code, frame.f_lineno))
            frame = frame.f_back
        return ""

    def _enter(self, module: torch.nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        stack = self._stacks.setdefault(threading.get_ident(), [])
        name = self._names.get(module)
        if not stack and _graph_task() == -1:
            if name is None:
                self.meet(module)
            self._on_root(module, inputs)
            if self.state in ("other", "backward"):
                self._after_backward()
                self.state = "forward"
        stack.append(name or self._names.get(module) or (stack[-1] if stack else type(module).__name__))

    def _leave(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        stack = self._stacks.get(threading.get_ident())
        if stack and not torch.compiler.is_compiling():
            stack.pop()


def _site_text(code: CodeType, line: int) -> str:
    path = code.co_filename
    here = os.getcwd() + os.sep
    return f"{_notebook_cell(path) or path.removeprefix(here)}:{line} {code.co_name}"


def _notebook_cell(path: str) -> str | None:
    """``In [3]`` for the code of a notebook's cell, which has a made-up file name; else None."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    cells = getattr(getattr(shell, "compile", None), "_filename_map", {})
    return f"In [{cells[path]}]" if path in cells else None
