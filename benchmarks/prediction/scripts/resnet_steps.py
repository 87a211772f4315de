"""Training steps of torchvision's ResNet-50 with SGD: how far one rises above where it starts."""

from __future__ import annotations

import argparse

import torch
import torchvision
from reading import DEVICE, recorded_sizes, tell

STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("batch", type=int)
    parser.add_argument("shape", type=int, nargs=3)
    options = parser.parse_args()
    model = torchvision.models.resnet50().to(DEVICE).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, foreach=False)
    criterion = torch.nn.CrossEntropyLoss()
    for step in range(STEPS):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        if step == STEPS - 1 and DEVICE == "cuda":
            torch.cuda.memory._record_memory_history(max_entries=1000000, context=None)
        images = torch.randn(options.batch, *options.shape).to(DEVICE)
        labels = torch.randint(1000, (options.batch,)).to(DEVICE)
        outputs = model(images)
        loss = criterion(outputs, labels)
        forward = len(recorded_sizes())
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
    tell(torch.cuda.max_memory_allocated() - before, forward=recorded_sizes()[:forward])


if __name__ == "__main__":
    main()
