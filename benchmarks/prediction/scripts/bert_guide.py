"""One setting of the transformers performance guide of 2022: bert-large-uncased, 512 tokens, two classes.

    bert_guide.py BATCH ACCUMULATED checkpoint|keep fp16|fp32 adamw|adafactor|adam8bit

``bert_guide.py nothing`` and ``bert_guide.py weights`` stop before training. Attention is written out, as the
transformers of 2022 had it, and softmax keeps its input for backward, as PyTorch did before 1.11.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from reading import DEVICE
from torch.nn import functional
from transformers import BertConfig, BertForSequenceClassification

STEPS, TOKENS = 3, 512
LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}


class OldSoftmax(torch.autograd.Function):
    """Softmax whose backward is given the input too; it looked at its dtype only."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int) -> torch.Tensor:
        result = torch._softmax(x, dim, False)
        ctx.save_for_backward(x, result)
        ctx.dim = dim
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, result = ctx.saved_tensors
        return torch._softmax_backward_data(gradients[0], result, ctx.dim, x.dtype), None


def old_softmax(x: torch.Tensor, dim: int, **_options: Any) -> torch.Tensor:
    """In fp32 under autocast, as softmax is."""
    return OldSoftmax.apply(x.float() if torch.is_autocast_enabled("cuda") else x, dim)


def main() -> None:
    """Trains for a few optimizer steps; the counter is the device's own."""
    if sys.argv[1] == "nothing":
        torch.ones((1, 1)).to(DEVICE)
        return
    functional.softmax = old_softmax
    config = BertConfig(vocab_size=30522, **LARGE)
    config._attn_implementation = "eager"
    model = BertForSequenceClassification(config).to(DEVICE)
    if sys.argv[1] == "weights":
        return
    batch, accumulated, checkpoint, precision, optimizer = sys.argv[1:]
    _train(model, int(batch), int(accumulated), checkpoint == "checkpoint", precision == "fp16", optimizer)


def _train(
    model: torch.nn.Module, batch: int, accumulated: int, checkpoint: bool, half: bool, optimizer: str
) -> None:
    if checkpoint:
        model.gradient_checkpointing_enable()
    model.train()
    updates, scaler = _optimizer(optimizer, model), torch.amp.GradScaler("cuda", enabled=half)
    for _ in range(STEPS):
        for _ in range(accumulated):
            data = {
                "input_ids": torch.randint(100, 30000, (batch, TOKENS)).to(DEVICE),
                "labels": torch.randint(0, 2, (batch,)).to(DEVICE),
            }
            with torch.autocast("cuda", torch.float16, enabled=half):
                loss = model(**data).loss
            scaler.scale(loss / accumulated).backward()
        scaler.unscale_(updates)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(updates)
        scaler.update()
        model.zero_grad(set_to_none=False)  # as PyTorch of 2022 did by itself


def _optimizer(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    if name == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(model.parameters(), scale_parameter=False, relative_step=False, lr=5e-5)
    if name == "adam8bit":
        import bitsandbytes

        return bitsandbytes.optim.Adam8bit(model.parameters(), lr=5e-5)
    return torch.optim.AdamW(model.parameters(), lr=5e-5, foreach=False)  # a loop, as that of 2022


if __name__ == "__main__":
    main()
