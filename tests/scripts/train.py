"""A training loop with the usual habits: prints, keeps the best, watches for NaN; options make it fail."""

import argparse
import os
import sys

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument(
    "--end", default="normally", choices=["normally", "raise", "exit", "os-exit", "after-backward", "kill"]
)
parser.add_argument("--save", action="store_true")
options = parser.parse_args()

model = torch.nn.Sequential(
    torch.nn.Linear(64, options.width), torch.nn.GELU(), torch.nn.Linear(options.width, 10)
).cuda()
optimizer = torch.optim.AdamW(model.parameters())
best = float("inf")


def step():
    images, labels = torch.randn(32, 64), torch.randint(10, (32,))
    loss = torch.nn.functional.cross_entropy(model(images.cuda()), labels.cuda())
    if torch.isnan(loss) or not torch.isfinite(loss):
        raise SystemExit("the loss is not a number")
    loss.backward()
    return loss


for number in range(options.steps):
    loss = step()
    if options.end == "after-backward":
        break
    optimizer.step()
    optimizer.zero_grad()
    print("step", number, "loss", loss.item())
    if options.save and loss.item() < best:
        best = loss.item()
        torch.save({"model": model.state_dict(), "best": best}, "best.pt.tmp")
        os.replace("best.pt.tmp", "best.pt")
    if options.end == "raise":
        raise ValueError("the script's own mistake")
    if options.end == "exit":
        sys.exit(3)
    if options.end == "os-exit":
        os._exit(4)
    if options.end == "kill":
        os.kill(os.getpid(), 9)
