"""What CUDA's libraries and other users of a GPU say when memory runs out: cuBLAS, cuDNN, NCCL, CuPy …"""

from __future__ import annotations

import re

from memfit.formats.messages import Message, Passage, Signature
from memfit.formats.messages_amounts import first_amount, sized

_STATUS = re.compile(r"\b((?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE|CUFFT|HIPBLAS|ROCBLAS|MIOPEN)_STATUS_\w{3,40})")
_CALL = re.compile(r"when calling `?([^`]{1,80})`?")
_NCCL_BYTES = re.compile(
    r"(?:Failed to CUDA \w{0,10}alloc\w{0,6}|cuda \w{0,10}alloc)\s{1,4}(\d{1,15}) bytes", re.IGNORECASE
)
_CUPY_REQUEST = sized(r"allocating\s{1,4}AMOUNT")
_CUPY_HELD = sized(r"allocated so far:\s{1,4}AMOUNT")
_CUPY_LIMIT = sized(r"limit set to:\s{1,4}AMOUNT")
_ONNX_PLAIN = re.compile(r"(?:requested buffer of size|smaller than requested bytes of)\s{1,4}(\d{1,18})")
_ONNX_FREE = re.compile(r"Available memory of (\d{1,18})")
_PADDLE = sized(r"Cannot allocate\s{1,4}AMOUNT")
_PADDLE_HELD = sized(r"AMOUNT memory has been allocated")
_PADDLE_FREE = sized(r"available memory is only\s{1,4}AMOUNT")
_TRITON = re.compile(r"Required:\s{0,4}(\d{1,9}),\s{0,4}Hardware limit:\s{0,4}(\d{1,9})")


def _status(passage: Passage) -> Message | None:
    found = _STATUS.search(passage.line.text)
    if found is None or found[1].endswith("_SUCCESS"):
        return None
    call = _CALL.search(passage.joined(1))
    library, _, status = found[1].partition("_STATUS_")
    context = " ".join((*passage.before[-30:], passage.line.text)).lower()
    tensorflow = "tensorflow" in context or "stream_executor" in context
    jax = "jax" in context or "xla" in context
    words = {"library": library, "status": status}
    if call is not None:
        words["call"] = call[1]
    kind = "library-alloc" if status == "ALLOC_FAILED" else "library-status"
    framework = "tensorflow" if tensorflow else "jax/xla" if jax else "pytorch"
    return Message(kind=kind, framework=framework, form=found[1], words=words)


def _nccl(passage: Passage) -> Message | None:
    text = passage.joined(4)
    lowered = text.lower()
    if "nccl" not in " ".join((*passage.before[-3:], lowered)).lower():
        return None
    amount = _NCCL_BYTES.search(text)
    return Message(
        kind="nccl-oom",
        framework="nccl",
        sizes={} if amount is None else {"requested": int(amount[1])},
    )


def _nccl_unhandled(passage: Passage) -> Message | None:
    text = " ".join((*passage.before[-10:], passage.joined(6))).lower()
    if "out of memory" in text:
        return Message(kind="nccl-oom", framework="nccl")
    reason = re.search(r"cuda failure (?:\d{1,4} )?'([^']{1,80})'", text)
    return Message(
        kind="nccl-unhandled", framework="nccl", words={} if reason is None else {"reason": reason[1]}
    )


def _cupy(passage: Passage) -> Message | None:
    text = passage.joined(2)
    if "allocated so far" not in text:
        return None
    sizes = {
        name: value
        for name, pattern in (
            ("requested", _CUPY_REQUEST),
            ("allocated", _CUPY_HELD),
            ("allowed", _CUPY_LIMIT),
        )
        if (value := first_amount(pattern, text)) is not None
    }
    return Message(kind="library-oom", framework="cupy", sizes=sizes)


def _rmm(passage: Passage) -> Message:
    text = passage.joined(2)
    pool = "maximum pool size exceeded" in text.lower()
    return Message(kind="pool-limit" if pool else "library-oom", framework="rmm")


def _onnx(passage: Passage) -> Message:
    text = passage.joined(2)
    asked, free = _ONNX_PLAIN.search(text), _ONNX_FREE.search(text)
    sizes = {} if asked is None else {"requested": int(asked[1])}
    if free is not None:
        sizes["free"] = int(free[1])
    return Message(kind="library-oom", framework="onnxruntime", sizes=sizes)


def _paddle(passage: Passage) -> Message | None:
    text = passage.joined(4)
    sizes = {
        name: value
        for name, pattern in (("requested", _PADDLE), ("allocated", _PADDLE_HELD), ("free", _PADDLE_FREE))
        if (value := first_amount(pattern, text)) is not None
    }
    return Message(kind="library-oom", framework="paddle", sizes=sizes) if sizes else None


def _driver(passage: Passage) -> Message | None:
    text = passage.line.text.lower()
    if "stream_executor" in text or "failed to alloc" in text or "xla" in text:
        return None
    if "initialization" in text or "cudagetdevicecount" in text:
        return Message(kind="cuda-init-oom", framework="pytorch")
    return Message(kind="cuda-oom", framework="cuda", form="CUDA driver")


def _triton(passage: Passage) -> Message:
    found = _TRITON.search(passage.joined(2))
    sizes = {} if found is None else {"requested": int(found[1]), "allowed": int(found[2])}
    return Message(kind="on-chip-memory", framework="triton", sizes=sizes)


SIGNATURES = (
    Signature(trigger="_status_", read=_status),
    Signature(
        trigger="cuda failure", read=lambda p: _nccl(p) if "out of memory" in p.joined(1).lower() else None
    ),
    Signature(trigger="failed to cuda", read=_nccl),
    Signature(trigger="unhandled cuda error", read=_nccl_unhandled),
    Signature(trigger="ncclunhandledcudaerror", read=_nccl_unhandled),
    Signature(trigger="out of memory allocating", read=_cupy),
    Signature(trigger="allocated so far", read=_cupy),
    Signature(trigger="out_of_memory: cuda error", read=_rmm),
    Signature(trigger="rmm failure", read=_rmm),
    Signature(trigger="maximum pool size exceeded", read=_rmm),
    Signature(trigger="failed to allocate memory for requested buffer", read=_onnx),
    Signature(trigger="is smaller than requested bytes", read=_onnx),
    Signature(trigger="out of memory error on gpu", read=_paddle),
    Signature(
        trigger="cannot allocate", read=lambda p: _paddle(p) if "memory on GPU" in p.joined(1) else None
    ),
    Signature(trigger="driver error: out of memory", read=_driver),
    Signature(trigger="cuda_error_out_of_memory", read=_driver),
    Signature(trigger="error 2: out of memory", read=_driver),
    Signature(trigger="out of resource: shared memory", read=_triton),
)
