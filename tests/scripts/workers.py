"""Trains from DataLoader workers (forked and spawned, pinned memory), and runs a subprocess on the way."""

import os
import subprocess
import sys

import torch
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((8,), float(index)), index % 2


def main():
    model = torch.nn.Linear(8, 2).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said = subprocess.run(
        [sys.executable, "-c", "open('from-child.txt', 'w').write('x'); print('child')"],
        capture_output=True,
        text=True,
        check=True,
    )
    print(said.stdout.strip())
    subprocess.Popen(["sleep", "300"], start_new_session=True)  # must not outlive the run
    for method in ("fork", "spawn"):
        loader = DataLoader(
            Numbers(), batch_size=8, num_workers=2, pin_memory=True, multiprocessing_context=method
        )
        for images, labels in loader:
            loss = torch.nn.functional.cross_entropy(
                model(images.cuda(non_blocking=True)), labels.cuda(non_blocking=True)
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(method, "done", os.path.exists("from-child.txt"))


if __name__ == "__main__":
    main()
