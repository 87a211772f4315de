"""Workloads beside those of `transformers` and `torchvision`, for the comparison of the two engines."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from memfit import Workload
from memfit.core.workload import Precision

sys.path.insert(0, str(Path(__file__).resolve().parent / "dryrun_cases"))

from training import GPT
from vision import UNet

TOKENS, WORDS = (16, 512), 32_000


def _words() -> tuple[Tensor, Tensor]:
    return torch.randint(WORDS, TOKENS), torch.randint(WORDS, TOKENS)


def _cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def _language(name: str, model: Callable[[], nn.Module], precision: Precision = "fp32") -> Workload:
    return Workload(name=name, model=model, batch=_words, loss=_cross_entropy, precision=precision)


class _Recurrent(nn.Module):
    """Words through a recurrent network."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 512), nn.Linear(512, WORDS)
        self.net = getattr(nn, kind)(512, 512, num_layers=2, dropout=0.1, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.net(self.embed(ids))[0])


def lstm() -> Workload:
    return _language("LSTM", partial(_Recurrent, "LSTM"))


def gru() -> Workload:
    return _language("GRU", partial(_Recurrent, "GRU"), "bf16-autocast")


class _Checkpointed(GPT):
    """Each block is computed again in the backward pass."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def checkpointed() -> Workload:
    return _language("checkpointed GPT", partial(_Checkpointed, 512, 6, WORDS), "bf16-autocast")


def gpt_fp16() -> Workload:
    return _language("GPT, fp16", partial(GPT, 512, 6, WORDS), "fp16-autocast")


def encoder() -> Workload:
    """PyTorch's own encoder layers."""
    layer = partial(nn.TransformerEncoderLayer, 512, 8, 2048, batch_first=True)
    model: Callable[[], nn.Module] = lambda: nn.Sequential(  # noqa: E731
        nn.Embedding(WORDS, 512), nn.TransformerEncoder(layer(), 6), nn.Linear(512, WORDS)
    )
    return _language("nn.TransformerEncoder", model)


def _noise_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return F.mse_loss(model(batch[0], batch[1]), batch[2])


def _noise() -> tuple[Tensor, ...]:
    images = torch.randn(64, 3, 64, 64)
    return images, torch.randint(1000, (64,)), torch.randn_like(images)


def unet() -> Workload:
    return Workload(name="diffusion U-Net", model=UNet, batch=_noise, loss=_noise_loss)


def unet_autocast() -> Workload:
    return Workload(
        name="diffusion U-Net, bf16",
        model=UNet,
        batch=_noise,
        loss=_noise_loss,
        precision="bf16-autocast",
    )


def lora() -> Workload:
    """Adapters of peft on a frozen Llama in bf16."""

    def model() -> nn.Module:
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM, LlamaConfig

        config = LlamaConfig(
            hidden_size=1024,
            num_hidden_layers=8,
            num_attention_heads=16,
            num_key_value_heads=4,
            intermediate_size=2816,
            vocab_size=WORDS,
        )
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        adapters: nn.Module = get_peft_model(
            plain, LoraConfig(r=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        )
        return adapters

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        found: Tensor = model(input_ids=batch[0], labels=batch[1]).loss
        return found

    return Workload(name="LoRA", model=model, batch=_words, loss=loss)


def listening() -> Workload:
    """Wav2vec 2.0 on two seconds of sound."""

    def model() -> nn.Module:
        from transformers import AutoModelForAudioClassification, Wav2Vec2Config

        config = Wav2Vec2Config(num_hidden_layers=4, mask_time_prob=0.0, layerdrop=0.0)
        made: nn.Module = AutoModelForAudioClassification.from_config(config)
        return made

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        found: Tensor = model(input_values=batch[0], labels=batch[1]).loss
        return found

    return Workload(
        name="wav2vec 2.0",
        model=model,
        batch=lambda: (torch.randn(4, 32_000), torch.randint(2, (4,))),
        loss=loss,
    )


def perceptron() -> Workload:
    """Dense layers with batch norm and dropout, by RMSprop."""

    def model() -> nn.Module:
        width = 2048
        parts = (nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.1))
        return nn.Sequential(*(copy.deepcopy(part) for _ in range(4) for part in parts))

    return Workload(
        name="perceptron",
        model=model,
        batch=lambda: (torch.randn(4096, 2048), torch.randint(2048, (4096,))),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.RMSprop(parameters, momentum=0.9, centered=True),
    )
