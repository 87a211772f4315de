"""Small models of transformers, with and without padding: the attention they ask for, on the GPU and the CPU.

The values of the CPU are real, so what a model decides there is the truth.
"""

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

HEADS = {"num_attention_heads": 4, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64}
KV = {**HEADS, "num_key_value_heads": 2, "vocab_size": 128}
MODELS = {
    "gpt2": {"n_head": 4, "n_layer": 2, "n_embd": 64, "vocab_size": 128},
    "llama": KV,
    "bert": {**HEADS, "vocab_size": 128},
    "t5": {"d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 128},
    "mixtral": {**KV, "num_local_experts": 4, "num_experts_per_tok": 2},
}
TOKENS = (4, 48)
asked = []


def noting(attention):
    def note(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
        mask = None if attn_mask is None else (tuple(attn_mask.shape), str(attn_mask.dtype))
        asked.append((mask, is_causal, tuple(query.shape), tuple(key.shape)))
        return attention(query, key, value, attn_mask, dropout_p, is_causal, **options)

    return note


def asked_on(device, name, padding):
    asked.clear()
    options = {"experts_implementation": "eager"} if name == "mixtral" else {}
    config = AutoConfig.for_model(name, use_cache=False, **MODELS[name])
    kind = AutoModel if name in ("bert", "t5") else AutoModelForCausalLM
    model = kind.from_config(config, **options).to(device).train()
    inputs = {"input_ids": torch.randint(2, 100, TOKENS)}
    if padding is not None:
        inputs["attention_mask"] = torch.ones(TOKENS, dtype=torch.long)
        inputs["attention_mask"][1, TOKENS[1] - padding :] = 0
    if name == "t5":
        inputs["decoder_input_ids"] = torch.randint(2, 100, TOKENS)
    out = model(**{key: value.to(device) for key, value in inputs.items()})
    out[0].float().mean().backward()
    return list(asked)


torch.nn.functional.scaled_dot_product_attention = noting(torch.nn.functional.scaled_dot_product_attention)
for name in MODELS:
    for padding in (None, 0, 7):
        choices = asked_on("cuda", name, padding)
        assert choices == asked_on("cpu", name, padding), (name, padding, choices[:1], asked[:1])
        print(name, padding, len(choices), choices[0][0] is not None if choices else None)
