"""JAX and TensorFlow: both take most of the card at the start, so that a small request can fail."""

from __future__ import annotations

from memfit.analysis.explanations import remedies
from memfit.analysis.explanations.clues import Clues, hint_lines
from memfit.analysis.explanations.wording import where_of
from memfit.analysis.findings import Advice, Confidence, Finding, Verdict
from memfit.core.units import GIB, MIB, format_bytes
from memfit.formats.messages import Message

JAX_SHARE = 0.75
SMALL_BYTES = 512 * MIB
JAX_SOURCE = "https://docs.jax.dev/en/latest/gpu_memory_allocation.html"
TF_SOURCE = "https://www.tensorflow.org/guide/gpu#limiting_gpu_memory_growth"


def explain_xla(message: Message, clues: Clues) -> Finding:
    """A message of XLA's client, the BFC allocator, or of a library that they start."""
    if message.framework == "tensorflow":
        return _tensorflow(message, clues)
    asked, program = message.sizes.get("requested"), message.sizes.get("program")
    total = message.sizes.get("total") or clues.hints.gpu_total_bytes or _device_total(clues)
    larger = max(asked or 0, program or 0)
    if total is not None and asked is not None and asked > total:
        return _finding(message, clues, "request_exceeds_device", "high", _needs(asked, program, total))
    if larger and total is not None and larger > JAX_SHARE * total:
        return _finding(
            message,
            clues,
            "device_full",
            "high" if larger > total else "medium",
            _needs(asked, program, total),
        )
    if message.kind in ("from-device", "handle-failed") or larger < SMALL_BYTES:
        return _preallocated(message, clues, asked, program)
    if program is not None and program > 4 * GIB or (asked or 0) > 2 * GIB:
        return _finding(message, clues, "device_full", "medium", _needs(asked, program, total))
    return _preallocated(message, clues, asked, program, sure="low")


def _device_total(clues: Clues) -> int | None:
    return clues.devices[0].total_bytes if len(clues.devices) == 1 else None


def _needs(asked: int | None, program: int | None, total: int | None) -> list[str]:
    lines = []
    if asked is not None:
        lines.append(f"{format_bytes(asked)} were asked for")
    if program is not None:
        lines.append(
            f"the compiled program itself needs {format_bytes(program)} (its arguments, outputs, temporaries)"
        )
    if total is not None:
        lines.append(f"the device has {format_bytes(total)}, of which JAX takes {JAX_SHARE:.0%} by default")
    return lines


def _preallocated(
    message: Message, clues: Clues, asked: int | None, program: int | None, sure: Confidence = "medium"
) -> Finding:
    evidence = [f"the message comes from {_name(message)}"]
    if asked is not None:
        evidence.append(
            f"{format_bytes(asked)} cannot be the real shortage: by default JAX takes most of the card "
            f"({JAX_SHARE:.0%}) at its start, and TensorFlow does the same"
        )
    if program is not None:
        evidence.append(f"the whole program needs {format_bytes(program)}")
    if clues.mentions("tensorflow") or any("tensorflow" in line.lower() for line in message.before):
        evidence.append("TensorFlow is in the same process: each takes its share of the card first")
    if message.kind == "handle-failed":
        evidence.append(
            "a library's handle could not be made: nothing was left for it beside what was taken up front"
        )
    evidence += hint_lines(clues.hints, "gpu", "used", "total")
    return _finding(message, clues, "preallocated", sure, evidence)


def _name(message: Message) -> str:
    return "TensorFlow" if message.framework == "tensorflow" else "XLA/JAX, not from PyTorch"


def _finding(
    message: Message, clues: Clues, verdict: Verdict, sure: Confidence, evidence: list[str]
) -> Finding:
    asked = message.sizes.get("requested")
    summary = {
        "preallocated": "the device's memory was taken up front, by JAX itself and by what runs beside it",
        "device_full": "the program needs more of the device than JAX has",
        "request_exceeds_device": "a single buffer is larger than the whole device",
    }[verdict]
    if verdict != "preallocated":
        evidence = [f"the message comes from {_name(message)}", *evidence]
    advice = _jax_advice(verdict, clues)
    return Finding(
        rule="xla_message",
        verdict=verdict,
        severity="warning" if message.role == "warning" else "error",
        confidence=sure,
        summary=summary,
        evidence=tuple(evidence),
        bytes=asked,
        where=where_of(message),
        advice=tuple(advice),
    )


def _jax_advice(verdict: str, clues: Clues) -> list[Advice]:
    keep_off = Advice(
        action="keep TensorFlow off the GPU, right after it is imported",
        typed="tf.config.set_visible_devices([], 'GPU')",
        kind="python",
        cost="none, if it only reads data",
        source=JAX_SOURCE,
    )
    no_preallocation = Advice(
        action="do not take memory up front; set it before JAX is imported",
        typed="export XLA_PYTHON_CLIENT_PREALLOCATE=false",
        kind="shell",
        cost="allocation as needed: more pieces, a little slower",
        source=JAX_SOURCE,
    )
    share = Advice(
        action="or take another share of the card; set it before JAX is imported",
        typed=f"export XLA_PYTHON_CLIENT_MEM_FRACTION={'0.5' if verdict == 'preallocated' else '0.92'}",
        kind="shell",
        cost="less for JAX" if verdict == "preallocated" else "less for all else on the card",
        source=JAX_SOURCE,
    )
    if verdict == "preallocated":
        return [
            keep_off,
            no_preallocation,
            share,
            remedies.find_processes(Message(kind="", framework="jax/xla")),
        ]
    smaller = Advice(
        action="lower what the program needs: recompute in backward, donate arguments, a smaller batch",
        typed="jax.checkpoint(f); jax.jit(step, donate_argnums=(0,))",
        kind="python",
        cost="time for what is computed again",
    )
    return [smaller, share] if verdict == "device_full" else [smaller]


def _tensorflow(message: Message, clues: Clues) -> Finding:
    asked = message.sizes.get("requested")
    statistics = next(clues.facts("bfc-statistics"), None)
    limit = statistics.sizes.get("limit") if statistics else clues.fact_size("tf-device", "limit")
    in_use = statistics.sizes.get("in_use") if statistics else None
    evidence = ["the message comes from TensorFlow, not from PyTorch"]
    if "shape" in message.words:
        kind = message.words.get("dtype", "float, as assumed")
        evidence.append(f"a tensor of shape {message.words['shape']} ({kind}) is {format_bytes(asked or 0)}")
    if limit is not None:
        evidence.append(
            f"its allocator may hold {format_bytes(limit)}"
            + ("" if in_use is None else f", {format_bytes(in_use)} of it in use")
        )
    total = clues.hints.gpu_total_bytes or _device_total(clues)
    verdict, sure, summary = _tensorflow_verdict(message, asked, limit, in_use, total)
    return Finding(
        rule="tensorflow_message",
        verdict=verdict,
        severity="warning" if message.role == "warning" else "error",
        confidence=sure,
        summary=summary,
        evidence=(*evidence, *hint_lines(clues.hints, "gpu", "used", "total", "import", "process")),
        bytes=asked,
        where=where_of(message),
        advice=tuple(_tensorflow_advice(verdict)),
    )


def _tensorflow_verdict(
    message: Message, asked: int | None, limit: int | None, in_use: int | None, total: int | None
) -> tuple[Verdict, Confidence, str]:
    if message.kind in ("from-device", "handle-failed", "library-alloc", "library-status"):
        return "preallocated", "medium", "memory was taken up front, and nothing is left for what asks now"
    device = limit if limit is not None else total
    if asked is not None and device is not None and asked > device:
        return "request_exceeds_device", "high", "a single tensor is larger than all that TensorFlow has"
    if limit is not None and total is not None and limit < 0.5 * total:
        return (
            "preallocated",
            "medium",
            "TensorFlow got only a part of the card: others had taken theirs up front",
        )
    if in_use is not None and asked is not None and limit is not None and in_use + asked < 0.9 * limit:
        return "fragmentation", "medium", "what is free is in pieces too small for the tensor"
    sure: Confidence = "high" if in_use is not None else "medium"
    return "device_full", sure, "TensorFlow's share of the GPU is full"


def _tensorflow_advice(verdict: Verdict) -> list[Advice]:
    growth = Advice(
        action="let TensorFlow take memory as it needs it, before anything touches the GPU",
        typed="for gpu in tf.config.list_physical_devices('GPU'):\n    "
        "tf.config.experimental.set_memory_growth(gpu, True)",
        kind="python",
        cost="none to little; memory is not given back before the end",
        source=TF_SOURCE,
    )
    smaller = Advice(
        action="use a smaller batch, mixed precision, or gradient recomputation",
        typed="tf.keras.mixed_precision.set_global_policy('mixed_float16')",
        kind="python",
    )
    pieces = Advice(
        action="use CUDA's own pool, which joins free pieces",
        typed="export TF_GPU_ALLOCATOR=cuda_malloc_async",
        kind="shell",
        cost="none to little",
        source=TF_SOURCE,
    )
    look = remedies.find_processes(Message(kind="", framework="tensorflow"))
    if verdict == "preallocated":
        return [growth, look]
    if verdict == "fragmentation":
        return [pieces, growth]
    return [smaller, growth, pieces] if verdict == "device_full" else [smaller]
