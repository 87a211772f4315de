"""Runs generation on the made-up GPU or the imitated one: prefill, then token after token, with each kind of
KV cache. Child side.

The loop is the one of greedy decoding: the model's own forward with ``use_cache``, only the last position's
logits, one token at a time, under inference mode. Each measurement runs in a fork of the process that built
the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from memfit.capture.step import build_batch
from memfit.capture.true_values import on_made_up_gpu
from memfit.capture.workloads import from_reference
from memfit.core.errors import MemfitError, UsageError
from memfit.dryrun.interception import resume
from memfit.planning.evaluate import device_of
from memfit.planning.fork import in_fork
from memfit.planning.generation_caches import CACHES, cache_bytes

_COUNTERS = ("requested", "allocated", "reserved")


class GenerationSession:
    """One model built once, in evaluation mode.

    Args:
        workload: a reference; its model must take ``input_ids``, ``past_key_values`` and ``use_cache``, as
            the causal language models of transformers do.
        engine: ``"dryrun"`` or ``"portable"``.
        target: the GPU that is planned for.
        seed: of everything random.
    """

    def __init__(
        self, workload: Mapping[str, Any], engine: str, target: Mapping[str, Any], seed: int = 0
    ) -> None:
        torch.set_num_threads(1)
        self._open = ExitStack()
        device, _ = self._open.enter_context(device_of(engine, target))
        self._device = torch.device(device)
        self._workload = from_reference(workload)
        with self._device:
            torch.manual_seed(seed)
            model = self._workload.model()
        self._model = model.to(self._device).eval().requires_grad_(False)
        if not hasattr(self._model, "config") or not hasattr(self._model, "generate"):
            raise UsageError(
                f"{self._workload.name!r} cannot generate: --inference takes causal language models of "
                "transformers, like hf:llama,batch=1,seq=1024"
            )
        taken = inspect.signature(self._model.forward).parameters
        self._cache_name = "cache" if "cache" in taken else "past_key_values"  # newer, older transformers
        if on_made_up_gpu():
            torch.cuda._is_in_bad_fork = lambda: False

    def close(self) -> None:
        """Takes back what the engine changed in this process."""
        self._open.close()

    def facts(self) -> dict[str, Any]:
        """Bytes of the weights, the prompt's shape, and how many positions the model has."""
        batch, prompt = self._prompt_shape()
        tensors = {id(t): t for t in (*self._model.parameters(), *self._model.buffers())}
        config = self._model.config.get_text_config(decoder=True)
        return {
            "name": self._workload.name,
            "batch": batch,
            "prompt": prompt,
            "weight_bytes": sum(t.numel() * t.element_size() for t in tensors.values()),
            "positions": getattr(config, "max_position_embeddings", None),
            "sliding_window": getattr(config, "sliding_window", None),
            "torch": torch.__version__,
        }

    def measure(self, cache: str, batch: int, prompt: int, new_tokens: int) -> dict[str, Any]:
        """Peaks of one generation; ``failure`` says why it cannot be run."""
        try:
            return dict(in_fork(lambda: self._measured(cache, batch, prompt, new_tokens)))
        except MemfitError as error:
            return {"failure": str(error)}

    def _prompt_shape(self) -> tuple[int, int]:
        made = build_batch(self._workload, device="cpu")
        tokens = made["input_ids"] if isinstance(made, Mapping) else tree_leaves(made)[0]
        return int(tokens.shape[0]), int(tokens.shape[1])

    def _measured(self, kind: str, batch: int, prompt: int, new_tokens: int) -> dict[str, Any]:
        if on_made_up_gpu():
            resume()
        torch.cuda.reset_peak_memory_stats()
        with torch.inference_mode():
            tokens = torch.zeros(batch, prompt, dtype=torch.long, device=self._device)
            cache = CACHES[kind](self._model.config, prompt + new_tokens)
            logits = self._forward(tokens, cache, 0)
            prefill = _peaks()
            after_prefill_bytes = cache_bytes(cache)
            for past in range(prompt, prompt + new_tokens - 1):
                token = logits[:, -1:].argmax(-1)
                del logits
                logits = self._forward(token, cache, past)
            del logits
            return {
                "prefill": prefill,
                "peak": _peaks(),
                "cache_bytes_after_prefill": after_prefill_bytes,
                "cache_bytes": cache_bytes(cache),
                "failure": None,
            }

    def _forward(self, tokens: torch.Tensor, cache: Any, past: int) -> torch.Tensor:
        positions = torch.arange(past, past + tokens.shape[1], device=self._device).unsqueeze(0)
        output = self._model(
            input_ids=tokens,
            use_cache=True,
            position_ids=positions,
            logits_to_keep=1,
            **{self._cache_name: cache},
        )
        logits: torch.Tensor = output.logits
        return logits


def _peaks() -> dict[str, int]:
    statistics = torch.cuda.memory_stats()
    return {f"{name}_bytes": int(statistics[f"{name}_bytes.all.peak"]) for name in _COUNTERS}
