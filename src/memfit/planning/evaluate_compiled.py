"""What cuts of a compiled step would hold and cost: the step is traced once by the compiler, and every cut is
then replayed in thought. Child side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from memfit.capture.step import build_step
from memfit.capture.workloads import from_reference
from memfit.core.devices import GPU
from memfit.planning.figures import Settings
from memfit.planning.fused_seconds import fused_seconds, unfused_seconds
from memfit.techniques.compiled_partition import CompiledPartition
from memfit.techniques.joint_partition import KNOWN_BUDGETS, Partitioned, cost_seconds, observed_partitions
from memfit.techniques.joint_replay import Replay, replay
from memfit.techniques.joint_solver import choose, least


class CompiledSession:
    """One workload, traced by the compiler.

    Args:
        workload: a reference of `memfit.capture.workloads.workload_reference`.
        engine: ``"dryrun"`` or ``"portable"``.
        target: the GPU that is planned for.
        seed: of everything random.
        backend: one of `CompiledPartition`'s that runs op by op.
        budgets: of PyTorch, whose cuts are asked for later.
    """

    def __init__(
        self,
        workload: Mapping[str, Any],
        engine: str,
        target: Mapping[str, Any],
        seed: int = 0,
        backend: str = "aot_eager",
        budgets: Sequence[float] = (),
    ) -> None:
        from memfit.planning.evaluate import applied, device_of  # which asks this module for costs

        torch.set_num_threads(1)
        self._open = ExitStack()
        asked = (*budgets, *KNOWN_BUDGETS)
        self._gpu = GPU(**{**target, "compute_capability": tuple(target["compute_capability"])})
        self._fused = backend != "aot_eager"
        device, _ = self._open.enter_context(device_of(engine, target))
        step = build_step(from_reference(workload), device=device, seed=seed)
        settings = {"technique": "compiled_partition", "backend": backend}
        with observed_partitions(asked) as observation, applied(step, (settings,)):
            step.forward_backward()
        self._graphs = observation.graphs
        self._wholes = [replay(graph.step, graph.step.needed) for graph in self._graphs]

    def close(self) -> None:
        """Takes back what the engine changed in this process."""
        self._open.close()

    def whole(self) -> dict[str, Any]:
        """Nothing is run again: the figures that shares are of."""
        return self._figures(self._wholes, reached=True)

    def budget(self, budget: float) -> dict[str, Any]:
        """PyTorch's cut for a budget."""
        runs = [replay(graph.step, graph.by_budget[budget]) for graph in self._graphs]
        return self._figures(runs, reached=True)

    def peak(self, peak: float) -> dict[str, Any]:
        """memfit's cut for a peak, given as the technique takes it."""
        cuts = [
            self._cut(graph, whole, peak) for graph, whole in zip(self._graphs, self._wholes, strict=True)
        ]
        return self._figures([run for run, _ in cuts], reached=any(reached for _, reached in cuts))

    def _cut(self, graph: Partitioned, whole: Replay, peak: float) -> tuple[Replay, bool]:
        seconds = [cost_seconds(op, self._gpu, fused=self._fused) for op in graph.step.ops]
        known = [graph.by_budget[budget] for budget in KNOWN_BUDGETS if budget in graph.by_budget]
        cut = choose(graph.step, seconds, int(peak * whole.peak_bytes), known)
        return (cut or least(graph.step, seconds, known)).replay, cut is not None

    def _figures(self, runs: Sequence[Replay], *, reached: bool) -> dict[str, Any]:
        """Of all graphs together: the forwards run one after another, the backwards in the opposite order."""
        steps = [graph.step for graph in self._graphs]
        pairs = list(zip(steps, runs, strict=True))
        again = [step.ops[number] for step, run in pairs for number in run.again]
        return {
            "graphs": len(steps),
            "reached": reached,
            "peak_bytes": _peak_bytes(self._graphs, runs),
            "kept_bytes": sum(run.kept_bytes for run in runs),
            "recompute_flops": sum(op.flops for op in again),
            "recompute_seconds": sum(cost_seconds(op, self._gpu, fused=False) for op in again),
            "flops": sum(op.flops for step in steps for op in step.ops),
            "unfused_seconds": sum(unfused_seconds(step, run, self._gpu) for step, run in pairs),
            "fused_seconds": sum(fused_seconds(step, run, self._gpu) for step, run in pairs),
        }


def _peak_bytes(graphs: Sequence[Partitioned], runs: Sequence[Replay]) -> int:
    """Beside a graph there is what the earlier ones keep, and the gradients that the later ones made."""
    gradients = [sum(g.step.sizes_bytes[s] for s in g.step.gradients) for g in graphs]
    return max(
        (
            sum(earlier.kept_bytes for earlier in runs[:number])
            + run.peak_bytes
            + sum(gradients[number + 1 :])
            for number, run in enumerate(runs)
        ),
        default=0,
    )


def is_compiled(techniques: Sequence[Settings]) -> bool:
    """Whether one of them compiles the model."""
    return any(settings["technique"] == CompiledPartition.name for settings in techniques)


def is_fused(techniques: Sequence[Settings]) -> bool:
    """Whether one of them compiles the model to fused code, whose kernels the compiler tries out first."""
    return any(
        settings["technique"] == CompiledPartition.name and settings.get("backend", "inductor") == "inductor"
        for settings in techniques
    )


@contextmanager
def compiled(
    techniques: Sequence[Settings],
) -> Iterator[Callable[[dict[str, Any], GPU], dict[str, Any]] | None]:
    """For as long as a step with ``techniques`` is built and run: what corrects its costs where they
    compile it, else None."""
    if not is_compiled(techniques):
        yield None
        return
    fused = is_fused(techniques)
    with observed_partitions() as observation:
        yield lambda costs, gpu: _costs(costs, observation.graphs, gpu, fused=fused)


def _costs(plain: dict[str, Any], graphs: Sequence[Partitioned], gpu: GPU, *, fused: bool) -> dict[str, Any]:
    """The costs of a compiled step from those of its operators run plainly, which is how whatever counts them
    runs them: plus what runs again; where operators are fused, their groups in place of the operators."""
    again = [graph.step.ops[number] for graph in graphs for number in graph.replay.again]
    flops = sum(op.flops for op in again)
    more = sum(cost_seconds(op, gpu, fused=False) for op in again)
    if fused:
        alone = sum(unfused_seconds(g.step, replay(g.step, g.step.needed), gpu) for g in graphs)
        more = sum(fused_seconds(g.step, g.replay, gpu) for g in graphs) - alone
    return {
        "flops": plain["flops"] + flops,
        "recompute_flops": flops,
        "step_seconds": plain["step_seconds"] + more,
    }
