"""Made-up jobs with known answers, event by event."""

from __future__ import annotations

from typing import Any

from memfit.analysis.configuration import Configuration
from memfit.analysis.evidence import Evidence
from memfit.core.recording import Recording
from memfit.core.trace import Action, TraceBuilder

MIB = 1 << 20
GIB = 1 << 30
LAYERS = 4


class Job:
    """A training job as a trace: ``LAYERS`` layers of one parameter each, step by step."""

    def __init__(self, *, parameter_bytes: int = 8 * MIB) -> None:
        self.builder = TraceBuilder()
        self.ends: list[int] = []
        self.parameter_bytes = parameter_bytes
        self.parameters = [
            self.take(parameter_bytes, "parameter", "init", where="train.py:3 build") for _ in range(LAYERS)
        ]
        self.states: list[int] = []

    def take(self, size_bytes: int, category: str, phase: str, **texts: str) -> int:
        return self.builder.alloc(size_bytes, category=category, phase=phase, **texts)

    def free(self, *blocks: int) -> None:
        for block in blocks:
            self.builder.free(block)

    def forward(self, activation_bytes: int, *, saved: int = 2) -> list[list[int]]:
        """Each layer saves ``saved`` blocks; the last of them is its output."""
        return [
            [
                self.take(
                    activation_bytes,
                    "activation",
                    "forward",
                    module=f"layers.{layer}.part{part}",
                    op="aten.mm",
                    where="model.py:7 forward",
                )
                for part in range(saved)
            ]
            for layer in range(LAYERS)
        ]

    def backward(self, activations: list[list[int]], *, gradients: bool = True) -> list[int]:
        made = []
        for layer in reversed(range(LAYERS)):
            module = f"layers.{layer}.part0"
            texts = {"module": module, "op": "aten.mm", "where": "train.py:20 step"}
            passing = self.take(512, "temporary", "backward", **texts)
            if gradients:
                made.append(self.take(self.parameter_bytes, "gradient", "backward", **texts))
            self.free(*reversed(activations[layer]), passing)
        return made

    def optimizer(self, *, spike_bytes: int = 0, state_bytes: int = 0) -> None:
        if state_bytes and not self.states:
            texts = {"where": "train.py:21 step"}
            self.states = [
                self.take(state_bytes, "optimizer_state", "optimizer", **texts) for _ in range(2 * LAYERS)
            ]
        spike = [
            self.take(
                spike_bytes, "temporary", "optimizer", op="aten._foreach_sqrt", where="train.py:21 step"
            )
            for _ in range(LAYERS if spike_bytes else 1)
            if spike_bytes
        ]
        self.free(*spike)

    def end(self) -> None:
        self.ends.append(len(self.builder))

    def step(self, activation_bytes: int = 2 * MIB, *, saved: int = 2, **optimizer: int) -> None:
        gradients = self.backward(self.forward(activation_bytes, saved=saved))
        self.optimizer(**optimizer)
        self.free(*gradients)
        self.end()

    def case(self, *, total_bytes: int | None = None, settings: str = "", **job: Any) -> Evidence:
        self.builder.meta["step_ends"] = self.ends
        recording = Recording(trace=self.builder.build(), total_bytes=total_bytes, settings=settings)
        return Evidence(recording=recording, configuration=Configuration(**job))


def sound_job(steps: int = 12) -> Job:
    """A job in which nothing is wrong."""
    job = Job()
    for _ in range(steps):
        job.step(state_bytes=64 * 1024)
    return job


def configured(**job: Any) -> Evidence:
    """A case of which only the configuration is known."""
    return Evidence(configuration=Configuration(**job))


def recorded(builder: TraceBuilder, *, total_bytes: int | None = None, **job: Any) -> Evidence:
    """A case of a bare trace."""
    recording = Recording(trace=builder.build(), total_bytes=total_bytes)
    return Evidence(recording=recording, configuration=Configuration(**job))


def out_of_memory(builder: TraceBuilder, size_bytes: int) -> None:
    """The event of a request that failed."""
    builder.append(Action.OOM, size_bytes=size_bytes)
