"""Numbers in a message that cannot be what they claim: wrapped sizes, capacities that are another's."""

from __future__ import annotations

from memfit.analysis.explanations import remedies
from memfit.analysis.explanations.clues import Clues, hint_lines
from memfit.analysis.explanations.situation import Situation
from memfit.analysis.findings import Advice, Confidence, Verdict
from memfit.core.units import GIB, format_bytes
from memfit.formats.messages import Message

Answer = tuple[Verdict, str, list[str], list[Advice], Confidence]
LARGER = 1.3


def impossible_size(message: Message) -> Answer | None:
    """A request that no device has: a negative number, printed as an unsigned one."""
    wrapped = message.misread.get("requested")
    if message.kind != "torch-size-overflow" and wrapped is None:
        return None
    evidence = ["no device has so much: the size was computed wrongly, memory is not what is short"]
    if wrapped:
        evidence.append(f"as a signed number it is {format_bytes(wrapped)}: an overflow or a negative size")
    evidence.append(
        "usual reasons: a shape with a negative or garbage number (an earlier error, a broken file, a rank "
        "that "
        "received nothing), or a library's workspace for a tensor beyond 2^31 elements"
    )
    advice = [
        Advice(
            action="print the shapes right before the failing line, and look for an earlier error in the log",
            typed="print({name: getattr(x, 'shape', x) for name, x in locals().items()})",
            kind="python",
        ),
        Advice(
            action="if it is a convolution over a huge input: split the input, or update PyTorch and cuDNN",
            typed="torch.backends.cudnn.enabled = False  # to see whether it is cuDNN's workspace",
            kind="python",
            cost="slow: for finding the reason only",
        ),
    ]
    return (
        "not_memory",
        "the size that was asked for is nonsense, so this is a bug and no shortage",
        evidence,
        advice,
        "high",
    )


def misreported(message: Message, clues: Clues, at: Situation) -> Answer | None:
    """The runtime's idea of the device's memory is wrong."""
    real, source = _real_capacity(clues)
    total, free = at.total_bytes, at.free_bytes
    evidence: list[str] = []
    sure: Confidence = "high"
    if total is not None and free is not None and free > 1.02 * total:
        evidence.append(
            f"{format_bytes(free)} free of {format_bytes(total)} in total: more free than there is, so the "
            f"total "
            "is not the memory that the device can use"
        )
    if total is not None and real is not None and real > LARGER * total:
        evidence.append(
            f"the message takes the device to have {format_bytes(total)}, {source} says "
            f"{format_bytes(real)}: "
            f"{format_bytes(real - total)} are not counted"
        )
    if "total" in message.misread or "free" in message.misread:
        names = " and ".join(name for name in ("total", "free") if name in message.misread)
        evidence.append(f"the {names} of the device is a wrapped negative number, which is no size")
    shared = clues.unified_memory
    if not evidence and shared and _beyond(at):
        sure = "medium"
        evidence.append(
            f"this device ({shared}) shares the host's memory; {format_bytes(total or 0)} is the part that "
            f"was set "
            "aside for graphics or the runtime's cap, not what the device can address"
        )
    if not evidence:
        return None
    if shared:
        evidence.append(f"{shared}: a GPU with unified memory, of which runtimes report the wrong part")
    return (
        "misreported_capacity",
        f"the runtime reports {format_bytes(total) if total is not None else 'an amount'} for this device, "
        f"which is "
        "not its true capacity",
        evidence + hint_lines(clues.hints, "vram", "gtt", "ram", "total", "bios", "uma"),
        _advice(message),
        sure,
    )


def _beyond(at: Situation) -> bool:
    if at.total_bytes is None or at.requested_bytes is None:
        return False
    held = at.allocated_bytes or 0
    return held + at.requested_bytes > 0.9 * at.total_bytes and at.total_bytes < 100 * GIB


def _real_capacity(clues: Clues) -> tuple[int | None, str]:
    """What the driver or the system says of the device, and who says it."""
    vram = clues.fact_size("amd-memory", "vram")
    gtt = clues.fact_size("amd-memory", "gtt")
    if vram is not None or gtt is not None:
        return max(vram or 0, gtt or 0), "the kernel (amdgpu)"
    if any(device.mig for device in clues.devices) or clues.mentions("mig"):
        return None, ""  # a slice has less than its card, and says so rightly
    return clues.hints.gpu_total_bytes, "what was given beside the message"


def _advice(message: Message) -> list[Advice]:
    hip = message.framework == "pytorch (ROCm)"
    look = (
        "grep . /sys/class/drm/card*/device/mem_info_{vram,gtt}_total"
        if hip
        else 'python -c "import torch; print(torch.cuda.mem_get_info())"'
    )
    advice = [
        Advice(action="compare what the kernel and what the runtime say", typed=look, kind="shell"),
        Advice(
            action="update the runtime and PyTorch: this is a known fault of some releases"
            + (" of ROCm on APUs" if hip else ""),
            typed="pip install --upgrade torch  # a build for the newest runtime" if hip else None,
            kind="shell" if hip else "text",
        ),
    ]
    if hip:
        advice.append(
            Advice(
                action="on an APU: give graphics memory in the firmware (UMA buffer), or raise the share "
                "that the "
                "GPU may map (GTT) with kernel parameters",
                typed="amdgpu.gttsize=126976 ttm.pages_limit=32505856   # kernel command line, for 124 GiB",
                kind="shell",
                cost="memory that the host then cannot use at the same time",
            )
        )
    return [*advice, remedies.split_the_request()]
