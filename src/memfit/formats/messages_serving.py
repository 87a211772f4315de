"""Servers of language models: vLLM, SGLang, TGI, llama.cpp and Ollama, each with a budget of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping

from memfit.formats.messages import Message, Passage, Signature
from memfit.formats.messages_amounts import first_amount, sized

_VLLM_SIZES: Mapping[str, re.Pattern[str]] = {
    "total": sized(r"total_gpu_memory\s{0,8}\(?AMOUNT"),
    "budget": sized(
        r"(?:gpu_memory_utilization\s{0,4}\([\d.]{1,8}\) = |current vLLM instance can use\s{2,8})AMOUNT"
    ),
    "weights": sized(r"(?:model weights take|Model loading took)\s{1,8}AMOUNT"),
    "non_torch": sized(r"non_torch_memory(?: takes)?\s{1,8}AMOUNT"),
    "activation_peak": sized(r"activation peak memory(?: takes)?\s{1,8}AMOUNT"),
    "kv_cache": sized(
        r"(?:reserved for KV Cache is|available_kv_cache_memory|Available KV cache memory:)\s{0,8}AMOUNT"
    ),
}
_UTILIZATION = re.compile(r"gpu_memory_utilization\s{0,8}\(?([01]?\.\d{1,6}|1(?:\.0{1,4})?|0)\b")
_KV_TOKENS = re.compile(r"max seq len \((\d{1,9})\) is larger than .{0,80}?KV cache \((\d{1,9})\)")
_NEEDED = sized(r"AMOUNT(?: of)? KV cache? ?(?:memory )?(?:cache )?is needed")
_AVAILABLE = sized(r"available KV ?cache memory \(AMOUNT")
_MODEL_LENGTH = re.compile(r"estimated maximum model length is (\d{1,9})")
_STARTUP = re.compile(
    r"Free memory on device.{0,40}?\(([\d.]{1,12})/([\d.]{1,12}) GiB\).{0,80}?"
    r"utilization \(([\d.]{1,8}), ([\d.]{1,12}) GiB\)",
    re.IGNORECASE,
)
_PROFILING = sized(r"Initial free memory\s{1,4}AMOUNT")
_PROFILING_NOW = sized(r"current free memory\s{1,4}AMOUNT")
_SAMPLER = re.compile(r"warming up sampler with (\d{1,9}) dummy requests")
_TGI = re.compile(r"Not enough memory to handle (\d{1,9}) prefill tokens")
_LLAMA = sized(r"allocating\s{1,4}AMOUNT on device (\d{1,3})")
_LLAMA_BUFFER = re.compile(r"failed to allocate (\w{1,20}) buffer(?: of size (\d{1,18}))?")
_LLAMA_TOTAL = re.compile(r"VRAM: (\d{3,7}) MiB|\((\d{3,7}) MiB, \d{1,8} MiB free\)")
_GIB = 1 << 30


def _vllm_profile(passage: Passage) -> Message | None:
    """A line of vLLM's own breakdown of its budget."""
    text = passage.line.text
    sizes = {
        name: value
        for name, pattern in _VLLM_SIZES.items()
        if (value := first_amount(pattern, text)) is not None
    }
    utilization = _UTILIZATION.search(text)
    figures = {} if utilization is None else {"utilization": float(utilization[1])}
    if not sizes and not figures:
        return None
    return Message(kind="vllm-profile", role="fact", framework="vllm", sizes=sizes, figures=figures)


def _no_blocks(passage: Passage) -> Message:
    return Message(kind="vllm-budget", framework="vllm", form="No available memory for the cache blocks")


def _max_length(passage: Passage) -> Message | None:
    text = passage.joined(4)
    found = _KV_TOKENS.search(text) or _KV_TOKENS.search(passage.joined_tightly())
    if found is None:
        return None
    figures = {"max_length": float(found[1]), "cache_tokens": float(found[2])}
    return Message(kind="vllm-length", framework="vllm", form="max seq len > KV cache", figures=figures)


def _one_request(passage: Passage) -> Message | None:
    texts = (passage.joined(5), passage.joined_tightly(5))
    sizes: dict[str, int] = {}
    figures: dict[str, float] = {}
    for text in texts:
        for name, pattern in (("needed", _NEEDED), ("available", _AVAILABLE)):
            value = first_amount(pattern, text)
            if value is not None:
                sizes.setdefault(name, value)
        length, estimate = re.search(r"max seq len \((\d{1,9})\)", text), _MODEL_LENGTH.search(text)
        if length is not None:
            figures.setdefault("max_length", float(length[1]))
        if estimate is not None:
            figures.setdefault("cache_tokens", float(estimate[1]))
    return Message(
        kind="vllm-length",
        framework="vllm",
        form="To serve at least one request",
        sizes=sizes,
        figures=figures,
    )


def _startup(passage: Passage) -> Message | None:
    found = _STARTUP.search(passage.joined(3)) or _STARTUP.search(passage.joined_tightly(3))
    if found is None:
        return None
    free, total, utilization, wanted = (float(group) for group in found.groups())
    return Message(
        kind="vllm-startup",
        framework="vllm",
        form="Free memory on device",
        sizes={"free": round(free * _GIB), "total": round(total * _GIB), "budget": round(wanted * _GIB)},
        figures={"utilization": utilization},
    )


def _profiling(passage: Passage) -> Message:
    text = passage.joined(4)
    sizes = {
        name: value
        for name, pattern in (("before", _PROFILING), ("free", _PROFILING_NOW))
        if (value := first_amount(pattern, text)) is not None
    }
    return Message(kind="vllm-profiling", framework="vllm", form="Error in memory profiling", sizes=sizes)


def _sampler(passage: Passage) -> Message:
    found = _SAMPLER.search(passage.joined(2))
    figures = {} if found is None else {"requests": float(found[1])}
    return Message(kind="vllm-sampler", framework="vllm", form="warming up sampler", figures=figures)


def _sglang(passage: Passage) -> Message:
    return Message(kind="sglang-budget", framework="sglang", form="increase --mem-fraction-static")


def _tgi(passage: Passage) -> Message | None:
    found = _TGI.search(passage.joined(2))
    if found is None:
        return None
    return Message(kind="tgi-budget", framework="tgi", figures={"tokens": float(found[1])})


def _llama(passage: Passage) -> Message | None:
    text = passage.joined(4)
    if "failed" not in text:
        return None
    found, buffer = _LLAMA.search(text), _LLAMA_BUFFER.search(text)
    size = first_amount(_LLAMA, text)
    if size is None and buffer is not None and buffer[2]:
        size = int(buffer[2])
    words = {} if found is None else {"gpu": found[2]}
    lowered = text.lower()
    for part, marks in (
        ("context", ("compute", "gallocr", "kv_cache", "kv cache")),
        ("weights", ("load_tensors", "loading model", "alloc_tensor_range", "load model")),
    ):
        if any(mark in lowered for mark in marks):
            words.setdefault("part", part)
    return Message(
        kind="llama-oom",
        framework="llama.cpp",
        sizes={} if size is None else {"requested": size},
        words=words,
    )


def _llama_device(passage: Passage) -> Message | None:
    found = _LLAMA_TOTAL.search(passage.line.text)
    if found is None:
        return None
    return Message(
        kind="device-total",
        role="fact",
        framework="llama.cpp",
        sizes={"total": int(found[1] or found[2]) << 20},
    )


SIGNATURES = (
    Signature(trigger="total_gpu_memory", read=_vllm_profile),
    Signature(trigger="gpu_memory_utilization ", read=_vllm_profile),
    Signature(trigger="current vllm instance can use", read=_vllm_profile),
    Signature(trigger="model weights take", read=_vllm_profile),
    Signature(trigger="model loading took", read=_vllm_profile),
    Signature(trigger="non_torch_memory", read=_vllm_profile),
    Signature(trigger="activation peak memory", read=_vllm_profile),
    Signature(trigger="available_kv_cache_memory", read=_vllm_profile),
    Signature(trigger="available kv cache memory:", read=_vllm_profile),
    Signature(trigger="no available memory for the cache blocks", read=_no_blocks),
    Signature(trigger="max seq len (", read=_max_length),
    Signature(trigger="to serve at least one request", read=_one_request),
    Signature(trigger="free memory on device", read=_startup),
    Signature(trigger="error in memory profiling", read=_profiling),
    Signature(trigger="warming up sampler", read=_sampler),
    Signature(trigger="increase --mem-fraction-static", read=_sglang),
    Signature(trigger="not enough memory to handle", read=_tgi),
    Signature(trigger="cudamalloc failed", read=_llama),
    Signature(trigger="ggml_gallocr_reserve", read=_llama),
    Signature(trigger="mib free)", read=_llama_device),
    Signature(trigger=", vram: ", read=_llama_device),
)
