"""The rules of `memfit diagnose`: one file each, one table of them all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace

from memfit.analysis.rules.act_dominant import ActDominant
from memfit.analysis.rules.alloc_retries import AllocRetries
from memfit.analysis.rules.base import Found, Rule
from memfit.analysis.rules.ckpt_error import CkptError
from memfit.analysis.rules.ckpt_ineffective import CkptIneffective
from memfit.analysis.rules.cudnn_workspace import CudnnWorkspace
from memfit.analysis.rules.ema_on_gpu import EmaOnGpu
from memfit.analysis.rules.empty_cache_abuse import EmptyCacheAbuse
from memfit.analysis.rules.eval_accumulation import EvalAccumulation
from memfit.analysis.rules.eval_with_grad import EvalWithGrad
from memfit.analysis.rules.expandable_not_active import ExpandableNotActive
from memfit.analysis.rules.expandable_unsafe import ExpandableUnsafe
from memfit.analysis.rules.frag_oom import FragOom
from memfit.analysis.rules.frag_pinned import FragPinned
from memfit.analysis.rules.grad_not_freed import GradNotFreed
from memfit.analysis.rules.kv_growth import KvGrowth
from memfit.analysis.rules.leak_gc_cycles import LeakGcCycles
from memfit.analysis.rules.leak_graph_retained import LeakGraphRetained
from memfit.analysis.rules.leak_monotonic import LeakMonotonic
from memfit.analysis.rules.leak_traceback import LeakTraceback
from memfit.analysis.rules.logits_spike import LogitsSpike
from memfit.analysis.rules.non_torch_memory import NonTorchMemory
from memfit.analysis.rules.optim_8bit_no_gain import Optim8BitNoGain
from memfit.analysis.rules.optim_foreach import OptimForeach
from memfit.analysis.rules.optim_lazy import OptimLazy
from memfit.analysis.rules.optim_state_heavy import OptimStateHeavy
from memfit.analysis.rules.rank_imbalance import RankImbalance
from memfit.analysis.rules.resume_duplicate import ResumeDuplicate
from memfit.analysis.rules.rounding_waste import RoundingWaste
from memfit.analysis.rules.shape_churn import ShapeChurn
from memfit.analysis.rules.sharding_waste import ShardingWaste
from memfit.analysis.rules.stray_contexts import StrayContexts
from memfit.analysis.rules.stream_delayed_free import StreamDelayedFree
from memfit.core.errors import UsageError

RULES: tuple[Rule, ...] = (
    FragOom(),
    FragPinned(),
    ExpandableNotActive(),
    ExpandableUnsafe(),
    RoundingWaste(),
    AllocRetries(),
    EmptyCacheAbuse(),
    LeakMonotonic(),
    LeakGraphRetained(),
    LeakGcCycles(),
    LeakTraceback(),
    EvalWithGrad(),
    EvalAccumulation(),
    OptimLazy(),
    OptimForeach(),
    OptimStateHeavy(),
    Optim8BitNoGain(),
    GradNotFreed(),
    ResumeDuplicate(),
    StrayContexts(),
    NonTorchMemory(),
    RankImbalance(),
    LogitsSpike(),
    ActDominant(),
    CkptIneffective(),
    CkptError(),
    CudnnWorkspace(),
    StreamDelayedFree(),
    ShardingWaste(),
    ShapeChurn(),
    EmaOnGpu(),
    KvGrowth(),
)
"""Every rule, by number."""


def rule_named(name: str, rules: Iterable[Rule] = RULES) -> Rule:
    """The rule of an id, in any case, or of a number.

    Raises:
        UsageError: there is none.
    """
    for rule in rules:
        if name.upper().replace("-", "_") == rule.id or name == str(rule.number):
            return rule
    raise UsageError(f"no rule {name!r}; `memfit rules` lists them")


def with_thresholds(settings: Iterable[str], rules: Iterable[Rule] = RULES) -> tuple[Rule, ...]:
    """The rules with thresholds as users type them: ``"LEAK_MONOTONIC.least_steps=4"``.

    Raises:
        UsageError: no such rule or threshold, or no number.
    """
    changed = {rule.id: rule for rule in rules}
    for text in settings:
        place, equals, value = text.partition("=")
        name, dot, key = place.strip().partition(".")
        if not (equals and dot):
            raise UsageError(f"--set {text}: write it like LEAK_MONOTONIC.least_steps=4")
        rule = rule_named(name, changed.values())
        kinds = {field.name: type(getattr(rule, field.name)) for field in fields(rule)}
        if key not in kinds:
            raise UsageError(f"--set {text}: {rule.id} has {', '.join(kinds) or 'no thresholds'}")
        try:
            number = float(value)
        except ValueError as error:
            raise UsageError(f"--set {text}: {value!r} is not a number") from error
        changed[rule.id] = replace(rule, **{key: kinds[key](number)})
    return tuple(changed.values())


__all__ = ["RULES", "Found", "Rule", "rule_named", "with_thresholds"]
