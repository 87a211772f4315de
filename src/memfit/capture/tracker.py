"""Captures one training step as a `StepGraph`, on whatever device the step was built.

A dispatch mode sees every operator below autograd, and a weak reference on each storage tells when it dies:
between which two operators is then exact. The tracker keeps no reference to any result: autograd hands a
gradient over without a copy only while nobody else holds it, so a tracker that held one would change what it
measures.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memfit.capture.attribution import Attribution
from memfit.capture.graph import Op, StepGraph, Storage
from memfit.capture.operators import OpCall, sparse_parts, tensors_in
from memfit.capture.step import TrainingStep
from memfit.capture.temporaries import TemporaryMemory
from memfit.profiling.accumulation import accumulates

WARM_UP_STEPS = 2


class _Record:
    """A storage while the step runs; it becomes a `Storage` at the end."""

    __slots__ = ("born", "category", "died", "name", "phase", "saved", "size_bytes")

    def __init__(self, size_bytes: int, category: str, born: int, phase: str, name: str) -> None:
        self.size_bytes, self.category, self.born, self.phase, self.name = (
            size_bytes,
            category,
            born,
            phase,
            name,
        )
        self.died, self.saved = -1, False


class StepTracker(TorchDispatchMode):
    """Records the operators and storages of the step that runs under it. `capture` is the way to use it.

    Only storages on the step's device are recorded, and only operators that touch one.

    Args:
        step: what runs.
        temporaries: note what operators take beside their results too, which resets the allocator's peaks.
    """

    def __init__(self, step: TrainingStep, *, temporaries: bool = False) -> None:
        super().__init__()
        self._temporaries = TemporaryMemory(step.device.type) if temporaries else None
        self._step = step
        self._device_type = step.device.type
        self._attribution = Attribution(step.model)
        self._ops: list[Op] = []
        self._current = -1  # the operator running, or the last one that ran
        self._records: list[_Record] = []
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}  # address of a storage -> its id
        self._of_this_pass: list[int] = []  # storages made since the forward pass or recomputation began
        self._was_recomputing = False
        self._outside: list[int] = []  # forward operators that no module ran: the loss function's own
        self._register_step()

    def run(self) -> StepGraph:
        """Runs the step under the tracker and returns its graph."""
        hooks = [
            parameter.register_post_accumulate_grad_hook(self._on_gradient) for parameter in self._trained()
        ]
        begun = 0 if self._temporaries is None else self._temporaries.now()
        try:
            with _uncompiled(), self._attribution, self:
                self._step.run(self._on_phase)
        finally:
            for hook in hooks:
                hook.remove()
        ended = 0 if self._temporaries is None else self._temporaries.now()
        return self._graph(min(begun, ended))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if accumulates(func, args):
            func = torch.ops.aten.add_.Tensor
        phase, module = self._attribution.where()
        if self._was_recomputing != (phase == "recompute"):
            self._turn(phase)
        inputs = self._ids(tensors_in((*args, *kwargs.values())))
        previous = self._current
        self._current = len(self._ops)  # frees while it runs are its own
        meter = None if self._temporaries is None or func.is_view else self._temporaries
        before = 0 if meter is None else meter.before()
        out = func(*args, **kwargs)
        outputs = self._ids(tensors_in((out,)), phase)
        if inputs or outputs:
            temporary = 0 if meter is None else meter.after(before, self._made_bytes(outputs))
            self._record(OpCall(func, args, kwargs, out), phase, module, inputs, outputs, temporary)
        else:
            self._current = previous
        return out

    def _made_bytes(self, outputs: tuple[int, ...]) -> int:
        """Bytes of the outputs that the operator running has made."""
        return sum(
            record.size_bytes
            for record in map(self._records.__getitem__, outputs)
            if record.born == self._current
        )

    def _record(
        self,
        call: OpCall,
        phase: str,
        module: str,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        temporary_bytes: int,
    ) -> None:
        work = call.work()
        if phase == "forward" and not self._attribution.in_a_module:
            self._outside.append(self._current)
        self._ops.append(
            Op(
                index=self._current,
                name=call.facts.name,
                module=module,
                phase=phase,
                inputs=inputs,
                outputs=outputs,
                mutates=self._ids(call.written),
                is_view=call.is_view,
                random=call.is_random,
                flops=work.flops,
                work=work.work,
                bytes_moved=work.bytes_moved,
                dtype=work.dtype,
                temporary_bytes=temporary_bytes,
            )
        )

    def _ids(self, tensors: Iterable[torch.Tensor], phase: str | None = None) -> tuple[int, ...]:
        """Ids of the tensors' storages on the device, without repeats; those not seen yet are made by the
        operator running.

        With ``phase`` None they are operands: one not seen yet was there before the step, made by nobody
        that was told of.
        """
        found: dict[int, None] = {}
        for storage in self._storages(tensors):
            known = self._live.get(storage._cdata)
            if known is not None and self._records[known[1]].size_bytes == storage.nbytes():
                found[known[1]] = None
            elif known is not None:  # resized in place: the old memory has gone
                self._records[known[1]].died = self._current
                found[
                    self._new(storage, self._records[known[1]].category, self._current, phase or "other", "")
                ] = None
            elif phase is None:
                found[self._new(storage, "other", -1, "other", "")] = None
            else:
                found[self._new(storage, "temporary", self._current, phase, "")] = None
        return tuple(found)

    def _storages(self, tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
        for tensor in tensors:
            if tensor.device.type != self._device_type:
                continue
            if tensor.layout is torch.strided:
                yield tensor.untyped_storage()
            else:
                yield from (part.untyped_storage() for part in sparse_parts(tensor))

    def _new(self, storage: Any, category: str, born: int, phase: str, name: str) -> int:
        key, number = storage._cdata, len(self._records)
        self._records.append(_Record(storage.nbytes(), category, born, phase, name))
        self._live[key] = (
            weakref.ref(storage, self._watcher(key, number)),
            number,
        )
        if born >= 0:
            self._of_this_pass.append(number)
        return number

    def _watcher(self, key: int, number: int) -> Callable[[Any], None]:
        return lambda _: self._on_death(key, number)

    def _on_death(self, key: int, number: int) -> None:
        record = self._records[number]
        if record.died < 0:
            record.died = max(self._current, 0)
        if key in self._live and self._live[key][1] == number:  # its address may be used again at once
            del self._live[key]

    def _register_step(self) -> None:
        """What is there before the step: parameters, buffers, gradients, optimizer state, the batch."""
        step = self._step
        for name, parameter in step.model.named_parameters():
            self._label(parameter, "parameter", name)
            if parameter.grad is not None:
                self._label(parameter.grad, "gradient", name)
        for name, buffer in step.model.named_buffers():
            self._label(buffer, "buffer", name)
        self._label_optimizer_state()
        for leaf in tree_leaves(step.batch):
            if isinstance(leaf, torch.Tensor):
                self._label(leaf, "input", "")

    def _label(self, tensor: torch.Tensor, category: str, name: str) -> None:
        for storage in self._storages([tensor]):
            known = self._live.get(storage._cdata)
            if known is None:
                self._new(storage, category, -1, "other", name)
            elif self._records[known[1]].born >= 0:
                self._records[known[1]].category, self._records[known[1]].name = category, name

    def _label_optimizer_state(self) -> None:
        names: dict[Any, str] = {parameter: name for name, parameter in self._step.model.named_parameters()}
        for parameter, state in self._step.optimizer.state.items():
            for leaf in tree_leaves(state):
                if isinstance(leaf, torch.Tensor):
                    self._label(leaf, "optimizer_state", names.get(parameter, ""))

    def _trained(self) -> list[torch.Tensor]:
        self._trained_names = {id(parameter): name for name, parameter in self._step.model.named_parameters()}
        return [
            parameter
            for parameter in self._step.model.parameters()
            if parameter.requires_grad and parameter.is_leaf
        ]

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._label(parameter.grad, "gradient", self._trained_names[id(parameter)])

    def _on_phase(self, phase: str) -> None:
        if phase == "backward":
            self._keep(saved=True)
        if phase == "other":
            self._label_optimizer_state()
        self._attribution.begin(phase)
        self._of_this_pass.clear()

    def _turn(self, phase: str) -> None:
        """Recomputation begins or ends: what it leaves behind are activations again."""
        if self._was_recomputing:
            self._keep(saved=False)
        self._of_this_pass.clear()
        self._was_recomputing = phase == "recompute"

    def _keep(self, *, saved: bool) -> None:
        """What was made in the pass that ends here and is still alive is kept for the backward pass."""
        for number in self._of_this_pass:
            record = self._records[number]
            if record.died < 0 and record.category == "temporary":
                record.category, record.saved = "activation", saved

    def _graph(self, allocated_bytes: int) -> StepGraph:
        step = self._step
        resting = sum(record.size_bytes for record in self._records if record.born < 0)
        return StepGraph(
            ops=tuple(self._ops),
            storages=tuple(
                Storage(
                    id=number,
                    size_bytes=record.size_bytes,
                    category=record.category,
                    born=record.born,
                    died=record.died,
                    saved=record.saved,
                    name=record.name,
                )
                for number, record in enumerate(self._records)
            ),
            name=step.workload.name,
            device=str(step.device),
            modules={name: type(module).__name__ for name, module in step.model.named_modules()},
            meta={
                "torch": torch.__version__,
                "micro_batches": step.micro_batches,
                "precision": step.workload.precision,
                "unattributed_ops": self._attribution.unresolved,
                "outside_of_modules": self._outside,
                "beside_bytes": max(allocated_bytes - resting, 0),
            },
        )


def _uncompiled() -> AbstractContextManager[Any]:
    """What is compiled (torchao's optimizers) runs operator by operator: a compiled graph has none to show,
    and one that must be whole refuses to run under a tracker. Nothing is loaded where nothing is compiled."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def capture(step: TrainingStep, *, warm_up: int = WARM_UP_STEPS) -> StepGraph:
    """Runs ``step`` ``warm_up`` times, so that the optimizer has its state, and once more under the tracker.

    Raises UsageError when the step differentiates its own gradients (``create_graph=True``).
    """
    for _ in range(warm_up):
        step.run()
    return StepTracker(step).run()
