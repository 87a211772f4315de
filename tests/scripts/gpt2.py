"""GPT-2 124M from its configuration, batch 8, sequence 1024, bf16 autocast, AdamW."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

config = AutoConfig.for_model("gpt2", use_cache=False)
with torch.device("cuda"):
    model = AutoModelForCausalLM.from_config(config)
model.train()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    tokens = torch.randint(config.vocab_size, (8, 1024), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    del loss, tokens
    optimizer.step()
    optimizer.zero_grad()
