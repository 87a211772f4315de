"""Gemma 2's head and its cross entropy in plain PyTorch: what they take above what is there before."""

from __future__ import annotations

import argparse

import torch
from reading import DEVICE, tell
from torch import Tensor

CAP = 30.0  # of Gemma 2's logits


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["fw", "bw", "fw+bw"])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--width", type=int, default=2304)
    parser.add_argument("--vocabulary", type=int, default=256000)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    loss_of = torch.compile(_loss, fullgraph=True) if options.compile else _loss
    hidden, head = (
        torch.randn(rows, options.width, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        for rows in (options.tokens, options.vocabulary)
    )
    labels = torch.randint(options.vocabulary, (options.tokens,), device=DEVICE)
    loss_of(hidden, head, labels).backward()  # their first repetition, which is not counted
    if options.kind != "fw":
        hidden.grad = head.grad = None
    before = _start()
    loss = loss_of(hidden, head, labels)
    if options.kind == "bw":
        before = _start()
    if options.kind != "fw":
        loss.backward()
    tell(torch.cuda.max_memory_allocated() - before)


def _start() -> int:
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.max_memory_allocated()


def _loss(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    logits = hidden @ head.T
    logits = torch.tanh(logits / CAP) * CAP
    return torch.nn.functional.cross_entropy(logits.float(), labels)


if __name__ == "__main__":
    main()
