"""Failures that their words alone tell: not about memory, as a rule. One row each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memfit.analysis.explanations import remedies
from memfit.analysis.explanations.clues import Clues
from memfit.analysis.explanations.wording import where_of
from memfit.analysis.findings import Advice, Confidence, Finding, Severity, Verdict
from memfit.formats.messages import Message


@dataclass(frozen=True, kw_only=True)
class Symptom:
    """What a failure means, and what to do."""

    summary: str
    evidence: tuple[str, ...] = ()
    advice: tuple[Advice, ...] = ()
    verdict: Verdict = "not_memory"
    confidence: Confidence = "high"
    severity: Severity = "error"


def _text(action: str, typed: str | None = None, **more: str) -> Advice:
    kind = "text" if typed is None else "shell" if more.pop("shell", "") else "python"
    return Advice(action=action, typed=typed, kind=kind, **more)  # type: ignore[arg-type]


def _shell(action: str, typed: str) -> Advice:
    return Advice(action=action, typed=typed, kind="shell")


_FIND_LINE = (
    remedies.blocking_launch(),
    _text("run one step on the CPU: the reason is then named", "model.cpu()(batch.cpu())"),
)

SYMPTOMS: Mapping[str, Symptom] = {
    "illegal-access": Symptom(
        summary="a kernel read or wrote outside its memory: a fault of code, not a shortage",
        evidence=("it arrives later than it happens, so the line shown may be wrong",),
        advice=(*_FIND_LINE, _shell("or find the kernel", "compute-sanitizer python train.py")),
    ),
    "device-assert": Symptom(
        summary="a kernel's check failed, an index out of range as a rule: labels, token ids or positions",
        evidence=("every CUDA call after it fails too, also ones that ask for memory",),
        advice=(
            *_FIND_LINE,
            _text(
                "check the range of what indexes", "assert labels.min() >= 0 and labels.max() < num_classes"
            ),
        ),
    ),
    "no-kernel-image": Symptom(
        summary="this build of PyTorch or of an extension has no code for this GPU",
        advice=(
            _shell(
                "see what it was built for", 'python -c "import torch; print(torch.cuda.get_arch_list())"'
            ),
            _text("install a build for this GPU's architecture"),
        ),
    ),
    "driver-old": Symptom(
        summary="the NVIDIA driver is older than this build's CUDA needs",
        advice=(
            _shell("see the driver's version, and update it or take a build for an older CUDA", "nvidia-smi"),
        ),
    ),
    "driver-unreachable": Symptom(
        summary="nvidia-smi cannot reach the driver: nothing about memory can be known from it",
        evidence=(
            "after an update of the driver the loaded module and the library differ until a reboot; a "
            "container that was given no GPU, or not the right to ask, has the same",
        ),
        advice=(
            _shell(
                "see which versions are loaded", "cat /proc/driver/nvidia/version; modinfo nvidia | head -3"
            ),
            _shell(
                "in a container: see whether the GPU was given to it", "docker run --gpus all … nvidia-smi"
            ),
        ),
    ),
    "device-busy": Symptom(
        summary="the GPU is in exclusive use by another process, or in a bad state",
        evidence=("in mode 'E. Process' only one process may use a GPU, however much memory is free",),
        advice=(
            _shell("see its mode and who uses it", "nvidia-smi -q -d COMPUTE; nvidia-smi"),
            _shell("allow several processes (as root)", "nvidia-smi -c DEFAULT"),
        ),
        verdict="other_process",
        confidence="medium",
    ),
    "device-ordinal": Symptom(
        summary="there is no GPU of that number here",
        advice=(_shell("see which GPUs the process may use", "echo $CUDA_VISIBLE_DEVICES; nvidia-smi -L"),),
    ),
    "no-device": Symptom(
        summary="PyTorch sees no GPU: a build for CPUs only, no driver, or a device that is hidden",
        advice=(_shell("see why", 'python -c "import torch; print(torch.version.cuda)"; nvidia-smi -L'),),
    ),
    "launch-failure": Symptom(
        summary="a kernel crashed: a fault of code or of the hardware, not a shortage", advice=_FIND_LINE
    ),
    "hardware": Symptom(
        summary="the GPU or its memory has a hardware fault",
        advice=(
            _shell(
                "look at its errors, then reset or replace it", "nvidia-smi -q -d ECC; dmesg | grep -i xid"
            ),
        ),
    ),
    "launch-resources": Symptom(
        summary="a kernel wants more registers or threads than a block may have: not a matter of memory size",
        advice=_FIND_LINE[:1],
    ),
    "other-device": Symptom(
        summary="tensors of one operation are on different devices",
        advice=(_text("move them to one", "x = x.to(next(model.parameters()).device)"),),
    ),
    "nan": Symptom(
        summary="the loss is not a number: a matter of numbers, not of memory",
        evidence=("float16 overflows at 65,504; weights that were trained in bfloat16 do so often",),
        advice=(
            _text("use bfloat16 where the GPU has it", "torch.autocast('cuda', dtype=torch.bfloat16)"),
            _text("find the first operation", "torch.autograd.set_detect_anomaly(True)"),
        ),
        confidence="medium",
    ),
    "too-many-files": Symptom(
        summary="the process has too many open files; shared memory itself is not full",
        evidence=("every tensor that workers hand over keeps a file open",),
        advice=(
            _shell("allow more", "ulimit -n 65536"),
            _text("or share through files", "torch.multiprocessing.set_sharing_strategy('file_system')"),
            _text("do not keep worker tensors for long: copy them", "batch = copy.deepcopy(batch)"),
        ),
    ),
    "shm-gone": Symptom(
        summary="a tensor's shared file is gone: its owner ended before it was read",
        evidence=("the first process that failed has the true reason; look for an earlier error",),
        advice=(_text("keep the process that made it alive until it is read"),),
        confidence="medium",
    ),
    "shm-permission": Symptom(
        summary="shared memory may not be opened: a matter of permissions",
        advice=(_shell("look at the folder", "ls -ld /dev/shm; id"),),
    ),
    "disk-full": Symptom(
        summary="a disk is full: neither GPU nor RAM",
        advice=(_shell("see which", "df -h . /tmp ~/.cache"),),
    ),
    "worker-crash": Symptom(
        summary="a DataLoader worker crashed in native code",
        evidence=("a segmentation fault is a fault of code (a decoder, OpenCV, a fork after CUDA was used)",),
        advice=(
            _text("run without workers to see the error", "DataLoader(dataset, num_workers=0)"),
            _text("start workers afresh", "DataLoader(dataset, multiprocessing_context='spawn')"),
        ),
        confidence="medium",
    ),
    "worker-exit": Symptom(
        summary="a DataLoader worker ended without a word; the text does not say why",
        evidence=("killed for want of RAM, a full /dev/shm, or an exception in the dataset",),
        advice=(
            _text("run without workers to see the error", "DataLoader(dataset, num_workers=0)"),
            _shell("and look whether memory ran out", "dmesg -T | tail; df -h /dev/shm; free -g"),
        ),
        verdict="unknown",
        confidence="medium",
    ),
    "on-chip-memory": Symptom(
        summary="a Triton kernel wants more on-chip shared memory than a block has: not the GPU's memory",
        advice=(_text("use smaller blocks or fewer stages", "triton.Config({'BLOCK_M': 64}, num_stages=2)"),),
    ),
    "checkpoint-no-grad": Symptom(
        summary="reentrant checkpointing got inputs without gradients: these layers are silently not trained",
        advice=(
            _text("use the other kind", "model.gradient_checkpointing_enable({'use_reentrant': False})"),
            _text("or let inputs need gradients (PEFT)", "model.enable_input_require_grads()"),
        ),
    ),
    "ready-twice": Symptom(
        summary="DDP and reentrant checkpointing clash: a parameter became ready twice",
        advice=(
            _text("use the other kind of checkpointing", "checkpoint(f, x, use_reentrant=False)"),
            _text(
                "or tell DDP that the graph does not change",
                "DistributedDataParallel(model, static_graph=True)",
            ),
        ),
    ),
    "unscale-twice": Symptom(
        summary="gradients were unscaled twice between two updates",
        advice=(
            _text(
                "keep the order",
                "scaler.unscale_(opt); clip_grad_norm_(…); scaler.step(opt); scaler.update()",
            ),
        ),
    ),
    "unscale-fp16": Symptom(
        summary="the parameters themselves are float16, which a GradScaler cannot unscale",
        advice=(_text("keep parameters in float32 and autocast the forward pass", "model.float()"),),
    ),
    "backward-twice": Symptom(
        summary="a graph was used twice: it was freed by the first backward",
        advice=(_text("detach what is carried over between steps", "state = state.detach()"),),
    ),
    "recursion": Symptom(summary="a function calls itself without end: not the GPU's memory"),
    "shm-mmap": Symptom(
        summary="a shared file could not be mapped", verdict="shared_memory", confidence="medium"
    ),
    "nvml-assert": Symptom(
        summary="PyTorch ran out of memory, and could not ask the driver for the numbers of its message",
        evidence=(
            "NVML refuses on MIG slices and in some containers; the assert hides an out-of-memory error",
        ),
        advice=(
            _text(
                "see the numbers yourself, in an except block",
                "print(torch.cuda.memory_summary(), torch.cuda.mem_get_info())",
            ),
            remedies.snapshot(),
        ),
        verdict="device_full",
        confidence="medium",
    ),
    "outside-oom": Symptom(
        summary="a CUDA library ran out of memory outside PyTorch's cache",
        evidence=("PyTorch's cache may hold what it needs; many different shapes make cuDNN compile more",),
        advice=(
            _text("leave room, early in the program", "torch.cuda.set_per_process_memory_fraction(0.9)"),
        ),
        verdict="device_full",
        confidence="medium",
    ),
    "cuda-init-oom": Symptom(
        summary="CUDA could not be started for want of memory: the driver, the host or WSL had none",
        evidence=("this is before any tensor, so the program's own size is not the reason",),
        advice=(_shell("see what holds the GPU and the host", "nvidia-smi; free -g"),),
        verdict="unknown",
        confidence="medium",
    ),
    "nccl-unhandled": Symptom(
        summary="NCCL met a CUDA error that it does not name",
        evidence=("out of memory is one reason of several: a bad device, shared memory, an earlier fault",),
        advice=(
            _shell("let it say which", "NCCL_DEBUG=WARN torchrun …"),
            _shell("and look", "nvidia-smi; df -h /dev/shm"),
        ),
        verdict="unknown",
        confidence="medium",
    ),
    "offload-refused": Symptom(
        summary="the quantized model does not fit the GPUs that are free",
        evidence=(
            "part of it would be on the CPU or the disk, which the quantized layers do not allow by default",
        ),
        advice=(
            remedies.smaller_model(),
            _text(
                "or allow it", "BitsAndBytesConfig(load_in_8bit=True, llm_int8_enable_fp32_cpu_offload=True)"
            ),
        ),
        verdict="device_full",
        confidence="high",
    ),
    "offloaded": Symptom(
        summary="part of the model is on the CPU or the disk, because the GPU has no room for it",
        evidence=("it works, many times slower",),
        advice=(remedies.smaller_model(),),
        verdict="device_full",
        confidence="high",
        severity="warning",
    ),
    "no-batch-size": Symptom(
        summary="not even a batch of one fits",
        evidence=(
            "the search went down to zero; what does not depend on the batch fills the GPU, or was left over",
        ),
        advice=(remedies.smaller_model(), remedies.dry_run()),
        verdict="device_full",
        confidence="medium",
    ),
    "deepspeed-flushes": Symptom(
        summary="PyTorch's cache is flushed within steps: memory is at its limit, and each flush waits for "
        "the GPU",
        advice=(
            _text("use a smaller micro-batch, or offload more; it costs time, not correctness"),
            _text("or flush all ranks at once", "get_accelerator().empty_cache()"),
        ),
        verdict="device_full",
        confidence="medium",
        severity="warning",
    ),
}
"""Every failure that is explained by a row, by the kind of its message."""


def explain_symptom(message: Message, clues: Clues) -> Finding:
    """The row's finding."""
    row = SYMPTOMS[message.kind]
    return Finding(
        rule=message.kind.replace("-", "_"),
        verdict=row.verdict,
        severity=row.severity,
        confidence=row.confidence,
        summary=row.summary,
        evidence=row.evidence or (f"recognized by its words ({message.framework})",),
        where=where_of(message),
        advice=row.advice,
    )


_DIFFERENCES: Mapping[str, tuple[str, str, str]] = {
    "sharded": (
        "recomputed tensors have shape [0]: parameters are sharded (ZeRO-3, FSDP) and were not gathered "
        "again",
        "checkpoint inside the sharded wrap",
        "model = fully_shard(checkpoint_wrapper(block))",
    ),
    "dtype": (
        "recomputed tensors have another type: autocast was not the same in the recomputation",
        "run the whole step under one autocast, and use the kind that restores it",
        "checkpoint(f, x, use_reentrant=False)",
    ),
    "count": (
        "the recomputation saved another number of tensors: a branch, a cache or a first call differs",
        "switch caches off under checkpointing",
        "model.config.use_cache = False",
    ),
    "shape": (
        "recomputed tensors have another shape: routing or a random choice differs in the recomputation",
        "find the operation; then save its result instead of computing it again",
        "checkpoint(f, x, use_reentrant=False, debug=True)",
    ),
}


def explain_checkpoint(message: Message, clues: Clues) -> Finding:
    """A recomputation that differs from the first run."""
    reason, action, typed = _DIFFERENCES[message.words.get("difference", "shape")]
    return Finding(
        rule="checkpoint_mismatch",
        verdict="not_memory",
        severity="error",
        confidence="medium",
        summary="a checkpointed block computed something else the second time",
        evidence=(reason,),
        where=where_of(message),
        advice=(Advice(action=action, typed=typed, kind="python"),),
    )
