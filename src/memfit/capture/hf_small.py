"""A tiny form of a `transformers` configuration, for the CPU: same depth and module names, small widths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_HEADS, _KEY_HEADS, _HEAD_WIDTH = 4, 2, 16
_WIDTH = _HEADS * _HEAD_WIDTH
_VOCABULARY = 128
_PATCHES = 4

# The names that model families give to the same thing; a configuration has some of each.
_WIDTHS = ("hidden_size", "n_embd", "d_model", "dim", "pooler_output_size", "lru_width")
_EMBEDDING_WIDTHS = ("embedding_size", "word_embed_proj_dim")
_HEAD_COUNTS = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "encoder_attention_heads",
    "decoder_attention_heads",
)
_HEAD_WIDTHS = ("head_dim", "d_kv", "attention_head_size", "kv_channels")
_INNER_WIDTHS = (
    "intermediate_size", "n_inner", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "hidden_dim",
    "ffn_hidden_size",
    "moe_intermediate_size", "shared_expert_intermediate_size",
)  # fmt: skip


def small_overrides(config: PretrainedConfig) -> dict[str, Any]:
    """The attributes to change, under the configuration's own names."""
    current = config.to_dict()

    def present(names: tuple[str, ...]) -> list[str]:
        return [name for name in names if isinstance(current.get(name), int)]

    changes: dict[str, Any] = dict.fromkeys(present(_WIDTHS), _WIDTH)
    for name in present(
        _EMBEDDING_WIDTHS
    ):  # a projection to the blocks' width exists only where the two differ
        changes[name] = _WIDTH if current[name] == getattr(config, "hidden_size", None) else _WIDTH // 2
    changes |= dict.fromkeys(present(_HEAD_COUNTS), _HEADS)
    changes |= dict.fromkeys(present(_HEAD_WIDTHS), _HEAD_WIDTH)
    changes |= dict.fromkeys(present(_INNER_WIDTHS), 2 * _WIDTH)
    if isinstance(current.get("num_key_value_heads"), int):
        changes["num_key_value_heads"] = _key_heads(current)
    if isinstance(current.get("vocab_size"), int):
        changes |= {"vocab_size": min(_VOCABULARY, current["vocab_size"])} | _special_tokens(current)
    return changes | _image_overrides(current) | _stage_overrides(current)


def _key_heads(current: dict[str, Any]) -> int:
    heads = next((current[name] for name in _HEAD_COUNTS if isinstance(current.get(name), int)), 1)
    if current["num_key_value_heads"] == heads:
        return _HEADS
    return 1 if current["num_key_value_heads"] == 1 else _KEY_HEADS


def _special_tokens(current: dict[str, Any]) -> dict[str, Any]:
    """Token ids that a vocabulary of this size does not have become its last one."""
    ids = {key: value for key, value in current.items() if key.endswith("_token_id")}
    return {
        key: _VOCABULARY - 1 for key, value in ids.items() if isinstance(value, int) and value >= _VOCABULARY
    }


def _image_overrides(current: dict[str, Any]) -> dict[str, Any]:
    size, patch = current.get("image_size"), current.get("patch_size")
    if not isinstance(size, int):
        return {}
    if "window_size" in current:  # windows must tile the picture at every stage
        return {}
    return {"image_size": min(size, _PATCHES * patch if isinstance(patch, int) and patch >= 8 else 64)}


def _stage_overrides(current: dict[str, Any]) -> dict[str, Any]:
    """Staged models have lists of widths (ResNet, ConvNeXt), or of head counts with a first width (Swin)."""
    changes: dict[str, Any] = {}
    if isinstance(current.get("hidden_sizes"), list):
        changes["hidden_sizes"] = [_WIDTH * 2**stage for stage in range(len(current["hidden_sizes"]))]
    heads = current.get("num_heads")
    if isinstance(current.get("embed_dim"), int) and isinstance(heads, list):
        changes["embed_dim"] = heads[0] * 8
        changes["hidden_size"] = changes["embed_dim"] * 2 ** (len(heads) - 1)
    return changes
