"""Model families of the transformers library, each a small one of its own configuration class."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from case import EVERY, ONE, Case
from training import tokens, train

_LLAMA = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "pad_token_id": 0,
}
_BERT = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 1000,
}
_VISION = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 64,
}
_MAMBA = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 1000}

CAUSAL: Mapping[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 128, "n_layer": 2, "n_head": 4, "vocab_size": 1000},
    "gpt_neox": _BERT,
    "opt": {
        "hidden_size": 128,
        "ffn_dim": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 1000,
        "word_embed_proj_dim": 128,
    },
    "bloom": {"hidden_size": 128, "n_layer": 2, "n_head": 4, "vocab_size": 1000},
    "falcon": {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 1000,
    },
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": {**_LLAMA, "head_dim": 32},
    "gemma": {**_LLAMA, "head_dim": 32},
    "gemma2": {**_LLAMA, "head_dim": 32},
    "phi": _LLAMA,
    "phi3": _LLAMA,
    "mixtral": {**_LLAMA, "num_local_experts": 4},
    "qwen3_moe": {
        **_LLAMA,
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
    },
    "mamba": _MAMBA,
    "mamba2": {**_MAMBA, "num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 16},
    "rwkv": {"hidden_size": 128, "num_hidden_layers": 2, "vocab_size": 1000, "attention_hidden_size": 128},
}
MASKED: Mapping[str, dict[str, Any]] = {
    "bert": _BERT,
    "roberta": {**_BERT, "pad_token_id": 1},
    "distilbert": {"dim": 128, "hidden_dim": 256, "n_layers": 2, "n_heads": 4, "vocab_size": 1000},
    "electra": {**_BERT, "embedding_size": 64},
    "albert": {**_BERT, "embedding_size": 64},
    "deberta-v2": {**_BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "modernbert": {**_BERT, "pad_token_id": 0},
}
TRANSLATING: Mapping[str, dict[str, Any]] = {
    "t5": {
        "d_model": 128,
        "d_ff": 256,
        "d_kv": 32,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 1000,
        "decoder_start_token_id": 0,
    },
    "bart": {
        "d_model": 128,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 256,
        "decoder_ffn_dim": 256,
        "vocab_size": 1000,
    },
    "switch_transformers": {
        "d_model": 128,
        "d_ff": 256,
        "d_kv": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_experts": 4,
        "vocab_size": 1000,
        "decoder_start_token_id": 0,
    },
}
SEEING: Mapping[str, dict[str, Any]] = {
    "vit": _VISION,
    "beit": _VISION,
    "dinov2": _VISION,
    "swin": {"embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "image_size": 64, "window_size": 4},
    "convnext": {"hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 2, 1]},
    "resnet": {"embedding_size": 16, "hidden_sizes": [32, 64, 96, 128], "depths": [1, 1, 1, 1]},
    "segformer": {"hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 1, 1]},
}
_AUDIO = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "conv_dim": (32,) * 7,
    "vocab_size": 32,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}


def _made(kind: str, changes: Mapping[str, Any], maker: str) -> torch.nn.Module:
    import transformers

    config = transformers.AutoConfig.for_model(kind, **changes)
    model: torch.nn.Module = getattr(transformers, maker).from_config(config)
    return model.cuda().train()


def _padded(shape: tuple[int, int] = (2, 64)) -> torch.Tensor:
    """A mask of which the second row is half padding."""
    mask = torch.ones(shape, dtype=torch.long)
    mask[1, shape[1] // 2 :] = 0
    return mask.cuda()


def causal(kind: str) -> None:
    model, ids = _made(kind, CAUSAL[kind], "AutoModelForCausalLM"), tokens()
    train(model, lambda: model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss)


def masked(kind: str) -> None:
    model, ids, mask = _made(kind, MASKED[kind], "AutoModelForMaskedLM"), tokens(), _padded()
    train(model, lambda: model(input_ids=ids, attention_mask=mask, labels=ids).loss)


def translating(kind: str) -> None:
    model, ids, mask = _made(kind, TRANSLATING[kind], "AutoModelForSeq2SeqLM"), tokens(), _padded()
    train(model, lambda: model(input_ids=ids, attention_mask=mask, labels=ids).loss)


def seeing(kind: str) -> None:
    model = _made(kind, SEEING[kind], "AutoModelForImageClassification")
    images, labels = torch.randn(2, 3, 64, 64, device="cuda"), torch.randint(2, (2,), device="cuda")
    train(model, lambda: model(pixel_values=images, labels=labels).loss)


def whisper() -> None:
    changes = {
        **TRANSLATING["bart"],
        "num_mel_bins": 80,
        "max_source_positions": 100,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
    }
    model = _made("whisper", changes, "AutoModelForSpeechSeq2Seq")
    sound, ids = torch.randn(2, 80, 200, device="cuda"), tokens(1000, 2, 32)
    train(model, lambda: model(input_features=sound, labels=ids).loss)


def listening(kind: str) -> None:
    model = _made(kind, _AUDIO, "AutoModelForCTC")
    sound, labels = torch.randn(2, 8000, device="cuda"), torch.randint(1, 30, (2, 8), device="cuda")
    train(model, lambda: model(input_values=sound, labels=labels).loss)


def hearing() -> None:
    """Sounds as pictures."""
    changes = {**_VISION, "max_length": 128, "num_mel_bins": 64}
    model = _made("audio-spectrogram-transformer", changes, "AutoModelForAudioClassification")
    sound, labels = torch.randn(2, 128, 64, device="cuda"), torch.randint(2, (2,), device="cuda")
    train(model, lambda: model(input_values=sound, labels=labels).loss)


def clip() -> None:
    from transformers import CLIPConfig, CLIPModel

    small = {key: value for key, value in _BERT.items() if key != "vocab_size"}
    text = {**_BERT, "max_position_embeddings": 64, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    config = CLIPConfig(text_config=text, vision_config={**small, "image_size": 64, "patch_size": 16})
    model = CLIPModel(config).cuda().train()
    ids, images = tokens(1000, 2, 16), torch.randn(2, 3, 64, 64, device="cuda")
    train(model, lambda: model(input_ids=ids, pixel_values=images, return_loss=True).loss)


_DIFFER = frozenset({"gpt2", "llama", "mixtral", "bert"})  # what differs by capability: attention, experts

CASES: Mapping[str, Case] = {
    **{
        f"transformers {kind}": Case(run=partial(run, kind), on=EVERY if kind in _DIFFER else ONE)
        for run, kinds in (
            (causal, CAUSAL),
            (masked, MASKED),
            (translating, TRANSLATING),
            (seeing, SEEING),
            (listening, ("wav2vec2", "hubert")),
        )
        for kind in kinds
    },
    "transformers whisper": Case(run=whisper, on=ONE),
    "transformers audio-spectrogram-transformer": Case(run=hearing, on=ONE),
    "transformers clip": Case(run=clip, on=ONE),
}
