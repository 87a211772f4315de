"""Logits of a language model's head and their cross entropy in plain PyTorch, what it takes above its inputs."""

from __future__ import annotations

import argparse

import torch
from reading import DEVICE, tell


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["fw", "bw", "fw+bw"])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--width", type=int, default=2304)
    parser.add_argument("--vocabulary", type=int, default=256000)
    options = parser.parse_args()
    kwargs = {"device": DEVICE, "dtype": torch.bfloat16, "requires_grad": True}
    hidden = torch.randn(options.tokens, options.width, **kwargs)
    head = torch.randn(options.vocabulary, options.width, **kwargs)
    labels = torch.randint(options.vocabulary, (options.tokens,), device=DEVICE)
    backward = options.kind != "fw"
    loss = (
        torch.nn.functional.cross_entropy((hidden @ head.T).float(), labels) if options.kind == "bw" else None
    )
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    if loss is None:
        loss = torch.nn.functional.cross_entropy((hidden @ head.T).float(), labels)
    if backward:
        loss.backward()
    tell(torch.cuda.max_memory_allocated() - before)


if __name__ == "__main__":
    main()
