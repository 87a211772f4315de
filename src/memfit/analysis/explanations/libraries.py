"""Other allocators' messages: MPS, CuPy, RMM, ONNX Runtime, Paddle, llama.cpp."""

from __future__ import annotations

from memfit.analysis.explanations import remedies
from memfit.analysis.explanations.clues import Clues
from memfit.analysis.explanations.wording import total_of, where_of
from memfit.analysis.findings import Advice, Finding, Verdict
from memfit.core.units import GIB, format_bytes
from memfit.formats.messages import Message


def explain_mps(message: Message, clues: Clues) -> Finding:
    """Apple's backend stops at a high watermark of its own."""
    sizes = message.sizes
    allocated, other = sizes.get("allocated", 0), sizes.get("other", 0)
    asked, allowed = sizes.get("requested", 0), sizes.get("allowed")
    evidence = [
        f"{total_of(allocated, other, asked)} against {format_bytes(allowed)} allowed: the backend's high "
        f"watermark"
        if allowed is not None
        else "the limit is not in the text",
        "this backend prints binary units as GB: 1 GB here is 2^30 bytes",
    ]
    if other > allocated:
        evidence.append(
            f"{format_bytes(other)} is 'other allocations': what Metal holds for this process beside tensors "
            "(compiled graphs, caches); changing shapes make it grow"
        )
    return Finding(
        rule="mps_message",
        verdict="process_limit",
        severity="error",
        confidence="high" if allowed is not None else "medium",
        summary="the MPS backend reached the limit that it sets for itself",
        evidence=tuple(evidence),
        bytes=asked or None,
        where=where_of(message),
        advice=(
            Advice(
                action="lower what is needed: a smaller batch or image, float16 weights, a smaller model",
            ),
            Advice(
                action="give back what is cached, between phases",
                typed="torch.mps.empty_cache()",
                kind="python",
                cost="a little time",
            ),
            Advice(
                action="or lift the limit, with nothing else running",
                typed="export PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0",
                kind="shell",
                cost="swapping, once the machine's memory is full",
                risks="the whole system may stall or the process be killed: memory is shared with the CPU",
                source="https://docs.pytorch.org/docs/stable/mps_environment_variables.html",
            ),
        ),
    )


def explain_library(message: Message, clues: Clues) -> Finding:
    """An allocator that states its numbers."""
    sizes = message.sizes
    asked, held = sizes.get("requested"), sizes.get("allocated")
    allowed, free = sizes.get("allowed"), sizes.get("free")
    limited = allowed is not None and allowed > 0
    evidence = [
        f"{name}: {format_bytes(value)}"
        for name, value in (("asked for", asked), ("held so far", held), ("limit", allowed), ("free", free))
        if value is not None and (name != "limit" or limited)
    ]
    verdict: Verdict = "process_limit" if limited or message.kind == "pool-limit" else "device_full"
    if message.framework == "onnxruntime" and free is not None:
        verdict = "process_limit"
        evidence.append("its arena has a limit of its own (gpu_mem_limit)")
    return Finding(
        rule="library_message",
        verdict=verdict,
        severity="error",
        confidence="high" if limited or message.kind == "pool-limit" else "medium",
        summary=f"{message.framework} got no memory"
        + ("" if asked is None else f" for {format_bytes(asked)}")
        + (": its own limit is reached" if verdict == "process_limit" else ": the device is full"),
        evidence=tuple(evidence) or (f"the message is {message.framework}'s, not PyTorch's",),
        bytes=asked,
        where=where_of(message),
        advice=(*_library_advice(message, limited), remedies.find_processes(message)),
    )


def _library_advice(message: Message, limited: bool) -> tuple[Advice, ...]:
    if message.framework == "cupy":
        typed = (
            "cupy.get_default_memory_pool().set_limit(size=0)"
            if limited
            else "cupy.get_default_memory_pool().free_all_blocks()"
        )
        action = "lift the pool's limit" if limited else "give back what CuPy's pool caches"
        return (Advice(action=action, typed=typed, kind="python"),)
    if message.framework == "rmm":
        return (
            Advice(
                action="start with a larger pool, or let it grow",
                typed="rmm.reinitialize(pool_allocator=True, maximum_pool_size=None)",
                kind="python",
            ),
        )
    if message.framework == "onnxruntime":
        return (
            Advice(
                action="raise the arena's limit, and let it grow by what is asked for",
                typed="options = {'gpu_mem_limit': 8 << 30, 'arena_extend_strategy': 'kSameAsRequested'}\n"
                "providers = [('CUDAExecutionProvider', options)]",
                kind="python",
            ),
        )
    return (Advice(action="use a smaller batch, or a model with fewer bytes of weights"),)


def explain_llama(message: Message, clues: Clues) -> Finding:
    """llama.cpp and Ollama load whole layers onto a GPU."""
    asked = message.sizes.get("requested")
    total = clues.fact_size("device-total", "total") or clues.hints.gpu_total_bytes
    exceeds = asked is not None and (asked > total if total is not None else asked > 256 * GIB)
    part = message.words.get("part", "")
    what = {
        "weights": "the model's weights",
        "context": "the context (key-value cache and compute buffers)",
    }.get(part, "a buffer")
    evidence = [
        f"{format_bytes(asked)} for {what} in one piece" if asked is not None else f"a buffer for {what}",
        *([f"the GPU has {format_bytes(total)} in total"] if total is not None else []),
    ]
    layers = Advice(
        action="put fewer layers on the GPU",
        typed="llama-server -m model.gguf -ngl 20",
        kind="shell",
        cost="layers on the CPU are many times slower",
    )
    context = Advice(
        action="use a shorter context, a smaller batch and a quantized cache",
        typed="llama-server -m model.gguf -c 8192 -ub 256 -ctk q8_0 -ctv q8_0 -fa on",
        kind="shell",
    )
    first = (context, layers) if part == "context" else (layers, context)
    return Finding(
        rule="llama_message",
        verdict="request_exceeds_device" if exceeds else "device_full",
        severity="error",
        confidence="high" if asked is not None and total is not None else "medium",
        summary=f"llama.cpp got no memory on the GPU for {what}",
        evidence=tuple(evidence),
        bytes=asked,
        where=where_of(message),
        advice=(
            *first,
            Advice(
                action="use a smaller quantization of the model (Q4_K_M instead of Q8_0)", cost="some quality"
            ),
            remedies.find_processes(message),
        ),
    )
