"""The stretch that a memory snapshot recorded: a forward pass, or a training step, after five to warm up."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from course_model import AdamW, Transformer, cross_entropy
from reading import DEVICE, recorded_sizes, tell

BATCH, VOCABULARY, WARM_UP = 4, 10000, 5


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["inference", "training"])
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--autocast", action="store_true")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--inner", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--heads", type=int, default=16)
    options = parser.parse_args()
    model = Transformer(
        vocabulary=VOCABULARY,
        context=options.context,
        width=options.width,
        layers=options.layers,
        heads=options.heads,
        inner=options.inner,
    ).to(DEVICE)
    optimizer = AdamW(model.parameters())
    run = _training if options.kind == "training" else _inference
    run(model, optimizer, options.context, torch.autocast("cuda", torch.bfloat16, enabled=options.autocast))
    statistics = torch.cuda.memory_stats()
    tell(
        statistics["requested_bytes.all.peak"],
        reserved=statistics["reserved_bytes.all.current"],
        allocations=recorded_sizes(),
    )


def _tokens(steps: int, context: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (steps, BATCH, context), device=DEVICE)


def _inference(model: Transformer, _: Any, context: int, autocast: Any) -> None:
    warm_up, tokens = _tokens(WARM_UP, context), _tokens(1, context)
    model.eval()
    with torch.inference_mode():
        for i in range(WARM_UP):
            with autocast:
                model(warm_up[i])
        _start_recording()
        with autocast:
            model(tokens[0])


def _training(model: Transformer, optimizer: AdamW, context: int, autocast: Any) -> None:
    warm_up, tokens = _tokens(WARM_UP, context), _tokens(1, context)
    warm_up_targets, targets = _tokens(WARM_UP, context), _tokens(1, context)
    for i in range(WARM_UP):
        with autocast:
            output = model(warm_up[i])
            loss = cross_entropy(output, warm_up_targets[i])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    del output, loss
    _start_recording()
    with autocast:
        output = model(tokens[0])
        loss = cross_entropy(output, targets[0])
    loss.backward()
    optimizer.step()


def _start_recording() -> None:
    torch.cuda.reset_peak_memory_stats()
    if DEVICE == "cuda":
        torch.cuda.memory._record_memory_history(max_entries=1000000, context=None)


if __name__ == "__main__":
    main()
