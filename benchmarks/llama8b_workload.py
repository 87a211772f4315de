"""An 8B Llama (32 layers, 4096 wide, 8 of 32 heads for keys) in bf16, one sample of 4096 tokens.

    memfit fit benchmarks/llama8b_workload.py:llama_8b --gpu h100-80gb --budget 72GiB

Its full size fits no ordinary host, so the factories have a small form, on which plans are verified.
"""

from __future__ import annotations

import torch

from memfit.core.workload import Workload

TOKENS = {"full": 4096, "small": 64}
VOCABULARY = {"full": 128_256, "small": 512}


def _model(size: str = "full") -> torch.nn.Module:
    from transformers import AutoModelForCausalLM, LlamaConfig

    small = {"hidden_size": 64, "intermediate_size": 224, "num_attention_heads": 4, "num_key_value_heads": 1}
    full = {
        "hidden_size": 4096, "intermediate_size": 14_336, "num_attention_heads": 32, "num_key_value_heads": 8
    }  # fmt: skip
    config = LlamaConfig(
        **(full if size == "full" else small),
        num_hidden_layers=32,
        vocab_size=VOCABULARY[size],
        max_position_embeddings=TOKENS["full"],
        use_cache=False,
    )
    model: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model


def _batch(size: str = "full") -> dict[str, torch.Tensor]:
    ids = torch.randint(VOCABULARY[size], (1, TOKENS[size]))
    return {"input_ids": ids, "labels": ids}


def _loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def llama_8b() -> Workload:
    """The workload, with AdamW."""
    return Workload(name="llama-8b", model=_model, batch=_batch, loss=_loss)
