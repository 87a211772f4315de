"""The models of xMem's experiments, from their public configurations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_SMALL = (
    (16, 3, 16, 16, True, "RE", 2), (16, 3, 72, 24, False, "RE", 2), (24, 3, 88, 24, False, "RE", 1),
    (24, 5, 96, 40, True, "HS", 2), (40, 5, 240, 40, True, "HS", 1), (40, 5, 240, 40, True, "HS", 1),
    (40, 5, 120, 48, True, "HS", 1), (48, 5, 144, 48, True, "HS", 1), (48, 5, 288, 96, True, "HS", 2),
    (96, 5, 576, 96, True, "HS", 1), (96, 5, 576, 96, True, "HS", 1),
)  # fmt: skip
_LARGE = (
    (16, 3, 16, 16, False, "RE", 1), (16, 3, 64, 24, False, "RE", 2), (24, 3, 72, 24, False, "RE", 1),
    (24, 5, 72, 40, True, "RE", 2), (40, 5, 120, 40, True, "RE", 1), (40, 5, 120, 40, True, "RE", 1),
    (40, 3, 240, 80, False, "HS", 2), (80, 3, 200, 80, False, "HS", 1), (80, 3, 184, 80, False, "HS", 1),
    (80, 3, 184, 80, False, "HS", 1), (80, 3, 480, 112, True, "HS", 1), (112, 3, 672, 112, True, "HS", 1),
    (112, 5, 672, 160, True, "HS", 2), (160, 5, 960, 160, True, "HS", 1), (160, 5, 960, 160, True, "HS", 1),
)  # fmt: skip
"""Of MobileNetV3's blocks: input, kernel, expanded and output channels, squeeze, activation, stride."""


def vision_model(name: str) -> torch.nn.Module:
    """A torchvision model with 1000 classes; MnasNet and MobileNetV3 with 10."""
    from torchvision import models

    def mobile(rows: tuple[Any, ...], last: int) -> torch.nn.Module:
        setting = models.mobilenetv3.InvertedResidualConfig
        return models.MobileNetV3([setting(*row, 1, 1.0) for row in rows], last_channel=last, num_classes=10)

    makers: Mapping[str, Callable[[], torch.nn.Module]] = {
        "MobeNetV3Small": partial(mobile, _SMALL, 1024),
        "MobeNetV3Large": partial(mobile, _LARGE, 1280),
        "MnasNet": partial(models.MNASNet, alpha=1.0, num_classes=10),
    }
    return makers[name]() if name in makers else models.get_model(VISION[name], weights=None)


VISION: Mapping[str, str] = {
    "VGG11": "vgg11",
    "VGG16": "vgg16",
    "VGG19": "vgg19",
    "ResNet50": "resnet50",
    "ResNet101": "resnet101",
    "ResNet152": "resnet152",
    "MobileNetV2": "mobilenet_v2",
    "MobeNetV3Small": "",
    "MobeNetV3Large": "",
    "MnasNet": "",
    "ConvNeXtTiny": "convnext_tiny",
    "ConvNeXtBase": "convnext_base",
    "RegNetX400MF": "regnet_x_400mf",
    "RegNetX32GF": "regnet_x_32gf",
    "RegNetY400MF": "regnet_y_400mf",
    "RegNetY32GF": "regnet_y_32gf",
}
"""xMem's names, and torchvision's; "" where the model is built above."""

_NEO = [[["global", "local"], 6]]
_GPT2: Mapping[str, Any] = {"n_embd": 768, "n_layer": 12, "n_head": 12}


def _llama(hidden: int, inner: int, layers: int, heads: int, groups: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        **more,
    }


def _t5(width: int, inner: int, layers: int, heads: int) -> dict[str, Any]:
    sizes = {"d_model": width, "d_kv": 64, "d_ff": inner, "num_layers": layers, "num_heads": heads}
    return {**sizes, "vocab_size": 32128, "decoder_start_token_id": 0}


_QWEN = {"vocab_size": 151936}
LANGUAGE: Mapping[str, tuple[str, Mapping[str, Any], str]] = {
    "EleutherAI/gpt-neo-125M": (
        "GPTNeoConfig",
        {"hidden_size": 768, "num_layers": 12, "num_heads": 12, "attention_types": _NEO},
        "eager",
    ),
    "T5-small": ("T5Config", _t5(512, 2048, 6, 8), "eager"),
    "T5-base": ("T5Config", _t5(768, 3072, 12, 12), "eager"),
    "cerebras/Cerebras-GPT-111M": (
        "GPT2Config",
        {**_GPT2, "n_layer": 10, "n_inner": 3072, "n_positions": 2048, "activation_function": "gelu"},
        "sdpa",
    ),
    "distilbert/distilgpt2": ("GPT2Config", {**_GPT2, "n_layer": 6}, "sdpa"),
    "openai-community/gpt2": ("GPT2Config", _GPT2, "sdpa"),
    "gpt2": ("GPT2Config", _GPT2, "sdpa"),
    "facebook/opt-125m": (
        "OPTConfig",
        {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "ffn_dim": 3072},
        "sdpa",
    ),
    "facebook/opt-350m": (
        "OPTConfig",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "ffn_dim": 4096,
            "word_embed_proj_dim": 512,
            "do_layer_norm_before": False,
        },
        "sdpa",
    ),
    "EleutherAI/pythia-1b": (
        "GPTNeoXConfig",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 8,
            "intermediate_size": 8192,
            "vocab_size": 50304,
        },
        "sdpa",
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": (
        "Qwen2Config",
        _llama(1536, 8960, 28, 12, 2, **_QWEN, tie_word_embeddings=False),
        "sdpa",
    ),
    "Qwen/Qwen3-0.6B": (
        "Qwen3Config",
        _llama(1024, 3072, 28, 16, 8, head_dim=128, **_QWEN, tie_word_embeddings=True),
        "sdpa",
    ),
    "Qwen/Qwen3-1.7B": (
        "Qwen3Config",
        _llama(2048, 6144, 28, 16, 8, head_dim=128, **_QWEN, tie_word_embeddings=True),
        "sdpa",
    ),
    "Qwen/Qwen3-4B": (
        "Qwen3Config",
        _llama(2560, 9728, 36, 32, 8, head_dim=128, **_QWEN, tie_word_embeddings=True),
        "sdpa",
    ),
    "meta-llama/Llama-3.2-1B": (
        "LlamaConfig",
        _llama(2048, 8192, 16, 32, 8, head_dim=64, vocab_size=128256, tie_word_embeddings=True),
        "sdpa",
    ),
    "meta-llama/Llama-3.2-3B-Instruct": (
        "LlamaConfig",
        _llama(3072, 8192, 28, 24, 8, head_dim=128, vocab_size=128256, tie_word_embeddings=True),
        "sdpa",
    ),
    "google/gemma-2-2b-it": (
        "Gemma2Config",
        _llama(2304, 9216, 26, 8, 4, head_dim=256, vocab_size=256000, query_pre_attn_scalar=256),
        "eager",
    ),
}
"""Configuration class, its fields, and the attention that transformers of early 2025 took by itself."""


def language_model(name: str) -> torch.nn.Module:
    """A transformers model in fp32, with random weights."""
    import torch
    import transformers

    kind, fields, attention = LANGUAGE[name]
    config = getattr(transformers, kind)(**fields)
    config._attn_implementation = attention
    maker = transformers.AutoModelForSeq2SeqLM if kind == "T5Config" else transformers.AutoModelForCausalLM
    return maker.from_config(config, dtype=torch.float32)
