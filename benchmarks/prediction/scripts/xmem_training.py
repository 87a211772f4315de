"""xMem's training loops: four iterations of a torchvision or transformers model in fp32.

    xmem_training.py vision|language MODEL OPTIMIZER BATCH start|backward

The last word says when gradients are set to None: at the start of an iteration, or before backward. Language
models see lines of wikitext-2, padded to the longest of a batch and cut at 128 tokens. Which lines is not
recorded, and what the allocator reserves depends on it: the reading is the middle of several draws.
"""

from __future__ import annotations

import gc
import random
import statistics
import sys

import torch
from reading import DEVICE, tell
from xmem_models import language_model, vision_model

from memfit.dryrun.libraries import LOADED_KERNELS

ITERATIONS, MOST_TOKENS, SIDE, DRAWS = 4, 128, 86, 5


def main() -> None:
    """Trains, and leaves what was reserved at most."""
    kind, name, optimizer, batch, zero = sys.argv[1:]
    if kind == "vision":
        _train_vision(name, optimizer, int(batch), zero)
        return
    reserved = []
    for draw in range(DRAWS):
        _train_language(name, optimizer, _longest(int(batch), random.Random(draw)), int(batch), zero)
        reserved.append(torch.cuda.max_memory_reserved())
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    tell(int(statistics.median(reserved) + LOADED_KERNELS.expected), reserved_by_draw=sorted(reserved))


def _train_vision(name: str, optimizer: str, batch: int, zero: str) -> None:
    model = vision_model(name)
    model.to(DEVICE)
    model.train()
    updates = getattr(torch.optim, optimizer)(params=model.parameters(), lr=1e-3)
    criterion = torch.nn.CrossEntropyLoss()
    for _ in range(ITERATIONS):
        inputs, labels = torch.randn(batch, 3, SIDE, SIDE), torch.randint(0, 10, (batch,))
        if zero == "start":
            updates.zero_grad()
        inputs, labels = inputs.to(DEVICE), labels.to(DEVICE)
        outputs = model(inputs)
        loss = criterion(outputs, labels)
        if zero == "backward":
            updates.zero_grad()
        loss.backward()
        updates.step()
        _, _predictions = torch.max(outputs, 1)


def _train_language(name: str, optimizer: str, lengths: list[int], batch: int, zero: str) -> None:
    model = language_model(name)
    model.train()
    updates = _optimizer(optimizer, model)
    model.to(DEVICE)
    for length in lengths:
        tokens = torch.randint(0, 1000, (batch, length))
        data = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}
        if zero == "start":
            updates.zero_grad()
        data = {key: value.to(DEVICE) for key, value in data.items()}
        outputs = model(**data)
        if zero == "backward":
            updates.zero_grad()
        outputs.loss.backward()
        updates.step()


def _optimizer(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    if name == "Adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(model.parameters(), lr=1e-3, relative_step=False)
    made: torch.optim.Optimizer = getattr(torch.optim, name)(params=model.parameters(), lr=1e-3)
    return made


def _longest(batch: int, draws: random.Random) -> list[int]:
    """The longest line of each batch, in tokens. Of wikitext-2's lines a third is empty, a sixth are
    headings, and paragraphs have about 130 tokens: more or less, by a log-normal distribution."""
    return [max(1, min(MOST_TOKENS, max(_line(draws) for _ in range(batch)))) for _ in range(ITERATIONS)]


def _line(draws: random.Random) -> int:
    kind = draws.random()
    if kind < 1 / 3:
        return 0
    return 8 if kind < 1 / 2 else int(draws.lognormvariate(4.7, 0.6))


if __name__ == "__main__":
    main()
