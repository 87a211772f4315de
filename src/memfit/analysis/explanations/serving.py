"""vLLM, SGLang and TGI: servers with a budget that is computed before any request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from memfit.analysis.explanations import remedies
from memfit.analysis.explanations.clues import Clues
from memfit.analysis.explanations.wording import difference_of, total_of, where_of
from memfit.analysis.findings import Advice, Confidence, Finding, Verdict
from memfit.core.units import format_bytes
from memfit.formats.messages import Message

VLLM_SOURCE = "https://docs.vllm.ai/en/latest/configuration/conserving_memory/"
TRIED = (0.90, 0.95)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """vLLM's own breakdown, as far as the log has it."""

    sizes: Mapping[str, int]
    utilization: float | None

    @property
    def needed_bytes(self) -> int | None:
        """What there is before any cache: weights, other libraries, the peak of activations."""
        if "weights" not in self.sizes:
            return None
        return sum(self.sizes.get(name, 0) for name in ("weights", "non_torch", "activation_peak"))

    @property
    def whole(self) -> bool:
        """Whether every part of the sum is known."""
        return all(name in self.sizes for name in ("weights", "non_torch", "activation_peak"))

    def to_json(self) -> dict[str, float]:
        """Its numbers."""
        values: dict[str, float] = {f"{name}_bytes": size for name, size in self.sizes.items()}
        if self.utilization is not None:
            values["utilization"] = self.utilization
        if self.needed_bytes is not None:
            values["needed_before_cache_bytes"] = self.needed_bytes
        return values


def budget_of(clues: Clues) -> Budget:
    """The last breakdown that the log has."""
    sizes: dict[str, int] = {}
    utilization = None
    for message in clues.facts("vllm-profile"):
        sizes |= message.sizes
        utilization = message.figures.get("utilization", utilization)
    if "total" not in sizes and clues.hints.gpu_total_bytes is not None:
        sizes["total"] = clues.hints.gpu_total_bytes
    if "budget" not in sizes and utilization is not None and "total" in sizes:
        sizes["budget"] = round(utilization * sizes["total"])
    return Budget(sizes=sizes, utilization=utilization)


def explain_budget(message: Message, clues: Clues) -> Finding:
    """Nothing is left for the key-value cache."""
    budget = budget_of(clues)
    needed, total = budget.needed_bytes, budget.sizes.get("total")
    allowed, cache = budget.sizes.get("budget"), budget.sizes.get("kv_cache")
    evidence = []
    least = None
    if needed is not None and budget.whole:
        parts = (budget.sizes["weights"], budget.sizes["non_torch"], budget.sizes["activation_peak"])
        line = f"{total_of(*parts)} needed before any cache (weights, other libraries, activation peak)"
        evidence.append(line if allowed is None else f"{line}, budget {format_bytes(allowed)}")
    elif needed is not None:
        evidence.append(f"the weights take {format_bytes(budget.sizes['weights'])}")
    if cache is not None:
        evidence.append(f"that leaves {format_bytes(cache)} for the key-value cache")
    if needed is not None and budget.whole and total:
        least = needed / total
        evidence.append(_utilization_line(needed, total, least))
    if not evidence:
        evidence.append(
            "the log has no breakdown; the lines before the error name weights and activation peak"
        )
    evidence.append("this is vLLM's own budget: the GPU's allocator did not fail")
    return Finding(
        rule="serving_budget",
        verdict="budget_too_small",
        severity="error",
        confidence="high",
        summary="vLLM's own budget is too small: nothing is left for the key-value cache",
        evidence=tuple(evidence),
        bytes=None if needed is None or allowed is None else max(needed - allowed, 0),
        where=where_of(message),
        advice=tuple(_budget_advice(budget, least)),
    )


def _utilization_line(needed: int, total: int, least: float) -> str:
    sum_line = f"{needed / 2**30:.2f} / {total / 2**30:.2f} = {least:.2f}"
    text = f"the utilization must be above {sum_line} to leave anything"
    left = [
        f"{share:.2f} would leave about {(share * total - needed) / 2**30:.2f} GiB"
        for share in TRIED
        if share > least
    ]
    return f"{text}; {left[0]}" if left else f"{text}: this model does not fit this GPU as it is"


def _budget_advice(budget: Budget, least: float | None) -> list[Advice]:
    advice = []
    if least is None or least < TRIED[-1]:
        share = next((share for share in TRIED if least is None or share > least + 0.02), TRIED[-1])
        if budget.utilization is None or share > budget.utilization:
            advice.append(
                Advice(
                    action="give vLLM more of the card",
                    typed=f"vllm serve MODEL --gpu-memory-utilization {share:.2f}",
                    kind="shell",
                    cost="less for other programs on the GPU",
                    source=VLLM_SOURCE,
                )
            )
    peak = budget.sizes.get("activation_peak")
    advice.append(
        Advice(
            action="lower the activation peak"
            + ("" if peak is None else f" ({format_bytes(peak)})")
            + ": a shorter maximal length, fewer tokens at a time, no CUDA graphs",
            typed="vllm serve MODEL --max-model-len 4096 --max-num-batched-tokens 2048 --enforce-eager",
            kind="shell",
            cost="shorter requests; eager mode is slower",
            source=VLLM_SOURCE,
        )
    )
    advice.append(
        Advice(
            action="or serve a smaller or quantized model, or split it over GPUs",
            typed="vllm serve MODEL-AWQ --tensor-parallel-size 2",
            kind="shell",
        )
    )
    return advice


def explain_length(message: Message, clues: Clues) -> Finding:
    """One request of the maximal length does not fit the cache."""
    wanted, held = message.figures.get("max_length"), message.figures.get("cache_tokens")
    needed, available = message.sizes.get("needed"), message.sizes.get("available")
    evidence = []
    if wanted is not None and held is not None:
        evidence.append(f"one request of {wanted:,.0f} tokens is allowed, and the cache holds {held:,.0f}")
    if needed is not None and available is not None:
        evidence.append(
            f"{format_bytes(needed)} of cache are needed for one request, {format_bytes(available)} are "
            f"there: {difference_of(needed, available)} short"
        )
        if wanted:
            evidence.append(f"a token takes {needed / wanted / 1024:.1f} KiB of cache")
    most = math.floor(held / 16) * 16 if held is not None else None
    utilization = budget_of(clues).utilization
    return Finding(
        rule="serving_budget",
        verdict="budget_too_small",
        severity="error",
        confidence="high",
        summary="vLLM's key-value cache is smaller than one request of the maximal length",
        evidence=tuple(evidence) or ("the text is cut short",),
        bytes=None if needed is None or available is None else max(needed - available, 0),
        where=where_of(message),
        advice=(
            Advice(
                action="lower the maximal length to what the cache holds",
                typed=f"vllm serve MODEL --max-model-len {most if most else 8192}",
                kind="shell",
                cost="longer requests are refused",
                source=VLLM_SOURCE,
            ),
            Advice(
                action="or give vLLM more of the card"
                + ("" if utilization is None else f" (now {utilization:g})"),
                typed="vllm serve MODEL --gpu-memory-utilization 0.95",
                kind="shell",
                cost="less for other programs on the GPU",
            ),
            Advice(
                action="or halve the cache's bytes per token",
                typed="vllm serve MODEL --kv-cache-dtype fp8",
                kind="shell",
                risks="a small loss of quality",
            ),
        ),
    )


def explain_startup(message: Message, clues: Clues) -> Finding:
    """vLLM wants a share of the whole card, and something else holds part of it."""
    sizes = message.sizes
    free, total, wanted = sizes["free"], sizes["total"], sizes["budget"]
    share = math.floor(100 * free / total) / 100 if total else 0.0
    share = max(share - 0.01, 0.01) if share * total >= free else share
    held = max(total - free, 0)
    by_others = held > 0.01 * total
    verdict: Verdict = "other_process" if by_others else "budget_too_small"
    return Finding(
        rule="serving_startup",
        verdict=verdict,
        severity="error",
        confidence="high" if held > 0.05 * total else "medium",
        summary=f"{format_bytes(held)} of the GPU was in use before vLLM started, which wants "
        f"{format_bytes(wanted)} for itself",
        evidence=(
            f"{difference_of(total, free)} is held by others: another program, an earlier vLLM that has not "
            "ended, or the desktop",
            f"utilization {message.figures.get('utilization', 0):g} is a share of the whole card: "
            f"{format_bytes(wanted)}, and {format_bytes(free)} are free",
            f"what is free is {free / total:.2f} of the card" if total else "the total is not given",
        ),
        bytes=max(wanted - free, 0),
        where=where_of(message),
        advice=(
            remedies.find_processes(message),
            remedies.free_processes(tuple(p.pid for p in clues.processes if p.pid), held),
            Advice(
                action="or ask for what is free",
                typed=f"vllm serve MODEL --gpu-memory-utilization {share:.2f}",
                kind="shell",
                cost="a smaller cache; the model may no longer fit",
            ),
        ),
    )


def explain_profiling(message: Message, clues: Clues) -> Finding:
    """Another program changed the free memory while vLLM measured it."""
    sizes = message.sizes
    numbers = [
        f"{name} measuring: {format_bytes(sizes[key])} free"
        for name, key in (("before", "before"), ("after", "free"))
        if key in sizes
    ]
    return _plain(
        message,
        "other_process",
        "the free memory grew while vLLM measured it: another process gave memory back in between",
        [*numbers, "vLLM takes the difference for its own use, so nothing else may start or end meanwhile"],
        (
            Advice(action="start servers on one GPU one after another, and wait for each to be ready"),
            remedies.find_processes(message),
        ),
        "high",
    )


def explain_sampler(message: Message, clues: Clues) -> Finding:
    """The cache took all, and the sampler's tensors have no room."""
    requests = message.figures.get("requests")
    return _plain(
        message,
        "preallocated",
        "vLLM's cache took the GPU's memory up front, and its sampler has no room left",
        [
            f"the sampler is tried with {requests:,.0f} requests of the whole vocabulary"
            if requests
            else "the sampler is tried with the most requests at once",
            "the share that vLLM takes is too large here, not too small",
        ],
        (
            Advice(
                action="fewer requests at once",
                typed="vllm serve MODEL --max-num-seqs 64",
                kind="shell",
                cost="less throughput under load",
                source=VLLM_SOURCE,
            ),
            Advice(
                action="or a smaller share for vLLM",
                typed="vllm serve MODEL --gpu-memory-utilization 0.85",
                kind="shell",
                cost="a smaller cache",
            ),
        ),
        "medium",
    )


def explain_sglang(message: Message, clues: Clues) -> Finding:
    """SGLang's static share holds weights and cache."""
    return _plain(
        message,
        "budget_too_small",
        "SGLang's static share is too small for the weights and any cache",
        [
            "--mem-fraction-static covers the weights and the key-value cache; the rest is for activations",
            "at start it must be raised; out of memory while serving asks for the opposite",
        ],
        (
            Advice(
                action="raise the static share, in small steps",
                typed="python -m sglang.launch_server --model-path MODEL --mem-fraction-static 0.9",
                kind="shell",
                cost="less for activations",
                source="https://docs.sglang.io/advanced_features/hyperparameter_tuning.html",
            ),
            Advice(action="or serve a quantized model, or over more GPUs (--tp 2)"),
        ),
        "high",
    )


def explain_tgi(message: Message, clues: Clues) -> Finding:
    """TGI warms up with the most tokens that it may be given."""
    return _plain(
        message,
        "budget_too_small",
        "the server's warm-up with the most prefill tokens does not fit",
        [f"it was tried with {message.figures.get('tokens', 0):,.0f} prefill tokens"],
        (
            Advice(
                action="allow fewer tokens at a time",
                typed="text-generation-launcher --max-batch-prefill-tokens 2048 --max-input-tokens 2048",
                kind="shell",
            ),
        ),
        "high",
    )


def _plain(
    message: Message,
    verdict: Verdict,
    summary: str,
    evidence: list[str],
    advice: tuple[Advice, ...],
    confidence: Confidence,
) -> Finding:
    return Finding(
        rule="serving_message",
        verdict=verdict,
        severity="error",
        confidence=confidence,
        summary=summary,
        evidence=tuple(evidence),
        where=where_of(message),
        advice=advice,
    )
