"""Watch the memory of a training loop: one line before it, and one in it for figures by the step.

    python examples/watch_training.py &
    memfit monitor                         # in another terminal; memfit dashboard in a browser

Runs on a GPU where there is one. On the CPU, where CUDA has no allocator, it keeps host memory and steps.
"""

from __future__ import annotations

import sys

import torch

import memfit


def main(steps: int = 50, folder: str | None = None) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512)).to(
        device
    )
    optimizer = torch.optim.AdamW(model.parameters())

    watcher = memfit.watch(folder=folder)  # the one line
    for _ in range(steps):
        batch = torch.randn(64, 512, device=device)
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        watcher.step()  # optional: the peak and the time of each step
    watcher.stop()  # optional: it also stops by itself when the process ends

    peak = memfit.format_bytes(watcher.peak_bytes)
    print(f"{steps} steps, at most {peak} on the GPU; records in {watcher.folder}")
    assert watcher.status is not None
    for alert in watcher.status.firing:
        print("alert:", alert.text)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
