"""Training steps with optimizers of small states: the peak of allocated bytes of the whole run."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from reading import DEVICE, tell
from torch import nn

STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=["huge", "giant-dinov2", "llama2-7b"])
    parser.add_argument("optimizer", choices=OPTIMIZERS)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--tokens", type=int, default=512, help="of a sequence; for the language model")
    parser.add_argument("--autocast", action="store_true", help="bf16; else all of it is bf16")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--offload", choices=["states", "gradients"])
    options = parser.parse_args()
    dtype = torch.float32 if options.autocast else torch.bfloat16
    train = _language_model if options.model == "llama2-7b" else _vision_model
    model, loss = train(options, dtype)
    if options.compile:
        model.compile(fullgraph=True)
    optimizer = _optimizer(options, model)
    for _ in range(STEPS):
        with torch.autocast("cuda", torch.bfloat16, enabled=options.autocast):
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
    tell(torch.cuda.max_memory_allocated())


def _vision_model(options: Any, dtype: torch.dtype) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    from vision_transformers import CLASSES, IMAGE, VisionTransformer

    model = VisionTransformer(options.model, checkpointing=options.checkpointing).to(dtype).to(DEVICE).train()

    def loss() -> torch.Tensor:
        images = torch.randn(options.batch, 3, IMAGE, IMAGE, device=DEVICE, dtype=dtype)
        labels = torch.randint(CLASSES, (options.batch,), device=DEVICE)
        return nn.functional.cross_entropy(model(images), labels)

    return model, loss


def _language_model(options: Any, dtype: torch.dtype) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(intermediate_size=11008, use_cache=False, dtype=dtype)  # the rest: 7B's sizes
    with torch.device(DEVICE):
        model = LlamaForCausalLM(config).to(dtype).train()
    if options.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    def loss() -> torch.Tensor:
        tokens = torch.randint(config.vocab_size, (options.batch, options.tokens), device=DEVICE)
        return model(input_ids=tokens, labels=tokens).loss

    return model, loss


def _torchao(name: str) -> Callable[..., Any]:
    import torchao.optim

    return getattr(torchao.optim, name)


def _bitsandbytes(name: str) -> Callable[..., Any]:
    import bitsandbytes

    return getattr(bitsandbytes.optim, name)


OPTIMIZERS: dict[str, Callable[[], Callable[..., Any]]] = {
    "foreach": lambda: torch.optim.AdamW,
    "fused": lambda: partial(torch.optim.AdamW, fused=True),
    "torchao-8bit": lambda: _torchao("AdamW8bit"),
    "torchao-4bit": lambda: _torchao("AdamW4bit"),
    "torchao-fp8": lambda: _torchao("AdamWFp8"),
    "bitsandbytes-8bit": lambda: _bitsandbytes("AdamW8bit"),
}


def _optimizer(options: Any, model: nn.Module) -> Any:
    made = OPTIMIZERS[options.optimizer]()
    if options.offload:
        gradients = options.offload == "gradients"
        made = partial(_torchao("CPUOffloadOptimizer"), optimizer_class=made, offload_gradients=gradients)
    return made(model.parameters(), lr=1e-4, weight_decay=0)


if __name__ == "__main__":
    main()
