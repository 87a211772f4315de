"""Notes every storage of a device that a step makes, with its labels, and when it dies.

A dispatch mode sees the results of every operator below autograd, and a weak reference on each storage tells
when it dies. No result is held: autograd hands a gradient over without a copy only while nobody else has it.
A block's bytes are those that were asked for. What an operator allocates and frees inside itself (a
convolution's workspace) is not seen here, but in the allocator's own figures (`memfit.profiling.devices`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from memfit.profiling.accumulation import accumulates
from memfit.profiling.place import Place
from memfit.profiling.records import INIT, Block, StepEvents

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class _Watch(weakref.ref[Any]):
    """A weak reference to a storage that knows the block."""

    __slots__ = ("block", "key")

    block: Block
    key: int


class StorageTracker:
    """Tracks the storages of one device type while a step runs in detail.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``.
    """

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self._is_ours: Callable[[torch.Tensor], bool] = attrgetter(f"is_{device_type}")
        self.place = Place(on_root=self._on_root, on_turn=self._on_backward)
        self.step: StepEvents | None = None
        self._live: dict[int, _Watch] = {}  # address of a storage -> its watch
        self._count = 0
        self._pass: list[Block] = []  # blocks made since the forward pass began
        self._op = ""
        self._mode = _Mode(self)
        self._roots: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._gradient_hooks: list[Any] = []
        self._module_of: dict[int, str] = {}  # parameter's id -> module, of the models that are called now

    def know(self, model: torch.nn.Module) -> None:
        """Name the modules of ``model`` before it is called for the first time."""
        self.place.meet(model)
        self._roots.add(model)

    def begin(self, number: int) -> None:
        """Begin to note a step."""
        live = sorted((watch.block for watch in self._live.values()), key=lambda block: block.number)
        total = sum(block.size_bytes for block in live)
        self.step = StepEvents(number=number, initial=live, now_bytes=total, peak_bytes=total)
        self._pass.clear()
        self._module_of.clear()
        for root in self._roots:
            self._label_model(root)
        for optimizer in self._optimizers:
            self.label_optimizer(optimizer, state=True)
        self.place.install()
        self._mode.__enter__()

    def end(self) -> StepEvents:
        """Stop noting; storages that live on are watched until they die."""
        assert self.step is not None
        self._mode.leave()
        self.place.remove()
        for hook in self._gradient_hooks:
            hook.remove()
        self._gradient_hooks.clear()
        step, self.step = self.step, None
        return step

    @property
    def live_bytes(self) -> int:
        """Bytes of all storages that are known and alive."""
        return sum(watch.block.size_bytes for watch in self._live.values())

    def label_optimizer(self, optimizer: torch.optim.Optimizer, *, state: bool) -> None:
        """Tell an optimizer's parameters and their gradients, or its state, from other storages."""
        self._optimizers.add(optimizer)
        if state:
            for parameter, held in optimizer.state.items():
                module = self._module_of.get(id(parameter), "")
                for leaf in tree_leaves(held):
                    if isinstance(leaf, torch.Tensor):
                        self.label(leaf, "optimizer_state", module)
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self.label(parameter, "parameter")
                if parameter.grad is not None:
                    self.label(parameter.grad, "gradient")

    def label(self, tensor: torch.Tensor, category: str, module: str = "") -> None:
        """Say what a tensor is for; one that is not known yet was there before the step."""
        if not self._is_ours(tensor) or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        watch = self._live.get(storage._cdata)
        if watch is None:
            self._there_before(storage, category, module)
        elif watch.block.category not in ("parameter", "buffer"):
            watch.block.category = category
            watch.block.module = watch.block.module or module

    def see(self, out: Any, fresh: bool) -> None:
        """Note the storages of an operator's results that are not known yet."""
        for tensor in (out,) if isinstance(out, torch.Tensor) else _tensors(out):
            if not self._is_ours(tensor) or tensor.layout is not torch.strided:
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._live:
                continue
            if fresh:
                self._born(storage, key)
            else:  # a view of, or a change to, what was there before
                self._there_before(storage, "other", "")

    def _born(self, storage: Any, key: int) -> None:
        step, place = self.step, self.place
        block = self._watched(storage, key, "temporary", place.phase, place.module, self._op, place.site)
        if step is None:
            return
        step.events.append((block, place.phase))
        step.now_bytes += block.size_bytes
        if step.now_bytes > step.peak_bytes:
            step.peak_bytes, step.peak_event = step.now_bytes, len(step.events)
        if place.phase in ("forward", "recompute", "other"):
            self._pass.append(block)

    def _there_before(self, storage: Any, category: str, module: str) -> None:
        block = self._watched(storage, storage._cdata, category, INIT, module, "", "")
        if self.step is not None:
            self.step.initial.append(block)
            self.step.now_bytes += block.size_bytes
            self.step.peak_bytes += block.size_bytes

    def _watched(self, storage: Any, key: int, *labels: str) -> Block:
        category, phase, module, op, site = labels
        block = Block(self._count, storage.nbytes(), category, phase, module, op, site)
        self._count += 1
        watch = _Watch(storage, self._died)
        watch.block, watch.key = block, key
        self._live[key] = watch
        return block

    def _died(self, watch: Any) -> None:
        key: int = watch.key
        if self._live.get(key) is watch:  # its address may be in use again
            del self._live[key]
        if self.step is not None:
            self.step.now_bytes -= watch.block.size_bytes
            self.step.events.append((watch.block, self.place.phase, self._op))

    def _on_root(self, root: torch.nn.Module, inputs: Any) -> None:
        """A model begins its forward: what is alive of the pass before is not this pass's to keep."""
        if root not in self._roots:
            self._roots.add(root)
            self._label_model(root)
        for leaf in tree_leaves(inputs):
            if isinstance(leaf, torch.Tensor):
                self.label(leaf, "input")

    def _on_backward(self) -> None:
        """The backward pass begins: what the forward pass made and left was kept for it."""
        alive = {id(watch.block) for watch in self._live.values()}
        for block in self._pass:
            if block.category == "temporary" and id(block) in alive:
                block.category = "activation"
        self._pass.clear()

    def _label_model(self, root: torch.nn.Module) -> None:
        for name, parameter in root.named_parameters():
            module = self._module_of[id(parameter)] = self.place.name_of(root, name)
            self.label(parameter, "parameter", module)
            if parameter.grad is not None:
                self.label(parameter.grad, "gradient", module)
            if parameter.requires_grad and parameter.is_leaf and self.step is not None:
                hook = parameter.register_post_accumulate_grad_hook(self._on_gradient)
                self._gradient_hooks.append(hook)
        for name, buffer in root.named_buffers():
            self.label(buffer, "buffer", self.place.name_of(root, name))

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None and self.step is not None:
            self.label(parameter.grad, "gradient")

    def dispatch(self, func: Any, name: str) -> None:
        """An operator is about to run."""
        self.place.locate()
        self._op = name


class _Mode(TorchDispatchMode):
    """The dispatch mode; it can be left out of order, and then only passes calls on."""

    def __init__(self, tracker: StorageTracker) -> None:
        super().__init__()
        self._tracker = tracker
        self._known: dict[Any, tuple[str, bool]] = {}  # operator -> its name, and whether it makes storages
        self._entered = 0

    def __enter__(self) -> Any:
        self._entered += 1
        return super().__enter__()

    def leave(self) -> None:
        """Leave the mode, where the modes of others that were entered later do not stand in the way."""
        while self._entered and _get_current_dispatch_mode() is self:
            self._entered -= 1
            self.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tracker = self._tracker
        if tracker.step is None or func.namespace == "prim":
            return func(*args, **kwargs)
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented  # a tensor subclass: it comes back here with what it is made of
        if accumulates(func, args):
            func = torch.ops.aten.add_.Tensor
        known = self._known.get(func)
        if known is None:
            known = self._known[func] = (str(func), _makes_storage(func))
        tracker.dispatch(func, known[0])
        out = func(*args, **kwargs)
        if out is not None:
            tracker.see(out, known[1])
        return out


def _makes_storage(func: Any) -> bool:
    """Whether some result of the operator is neither a view of an operand nor an operand."""
    schema = getattr(func, "_schema", None)
    return schema is None or any(result.alias_info is None for result in schema.returns)


def _tensors(out: Any) -> Iterator[torch.Tensor]:
    if isinstance(out, (list, tuple)):
        for part in out:
            if isinstance(part, torch.Tensor):
                yield part
            elif isinstance(part, (list, tuple)):
                yield from _tensors(part)
