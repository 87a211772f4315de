"""Builds 8 billion parameters on the CPU in fp32, moves them to the GPU in bf16 and runs a step's backward.

Prints the parameters and the most host memory that the process had, in bytes.
"""

import resource
import sys

import torch
from torch.nn import Embedding, Linear, Module, Sequential


class Block(Module):
    def __init__(self):
        super().__init__()
        self.query, self.out = Linear(4096, 4096), Linear(4096, 4096)
        self.key, self.value = Linear(4096, 1024), Linear(4096, 1024)
        self.gate, self.up, self.down = Linear(4096, 14336), Linear(4096, 14336), Linear(14336, 4096)

    def forward(self, x):
        x = x + self.out(self.query(x) * (self.key(x) * self.value(x)).repeat(1, 1, 4))
        return x + self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


def plain():
    return Sequential(Embedding(128256, 4096), *(Block() for _ in range(32)), Linear(4096, 128256))


def from_transformers():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False))


model = plain() if sys.argv[1] == "plain" else from_transformers()
model = model.to("cuda", torch.bfloat16)
out = model(torch.randint(1000, (1, 64)).cuda())
getattr(out, "logits", out).float().mean().backward()
parameters = sum(parameter.numel() for parameter in model.parameters())
print(parameters, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
