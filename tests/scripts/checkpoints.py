"""Saves in the ways that people do, into folders that hold old checkpoints, and reads back what it saved."""

import ctypes
import os
import pathlib
import shutil
import tempfile

import numpy
import torch
from safetensors.torch import load_file, save_file

weights = {"w": torch.ones(1000, device="cuda")}


def best_every_step():
    assert torch.load("best.pt")["old"] == 1
    for step in range(3):
        torch.save({"step": step, **weights}, "best.pt")
        assert torch.load("best.pt", map_location="cpu")["step"] == step
    assert torch.load("best.pt", mmap=True, map_location="cpu")["step"] == 2


def written_aside_then_renamed():
    with tempfile.NamedTemporaryFile(dir=".", delete=False) as file:
        torch.save(weights, file)
    os.replace(file.name, "renamed.pt")
    assert "renamed.pt" in os.listdir(".") and os.path.basename(file.name) not in os.listdir(".")


def rotated():
    for step in (10, 20, 30):
        folder = pathlib.Path("checkpoints", f"step-{step}")
        folder.mkdir(parents=True)
        save_file(weights, folder / "model.safetensors")
        kept = sorted(pathlib.Path("checkpoints").glob("step-*"), key=lambda path: int(path.name[5:]))
        for old in kept[:-2]:
            shutil.rmtree(old)
    assert sorted(path.name for path in pathlib.Path("checkpoints").iterdir()) == ["step-20", "step-30"]
    assert not os.path.exists("checkpoints/step-1/model.pt")
    assert load_file("checkpoints/step-30/model.safetensors")["w"].shape == (1000,)


def logs_and_arrays():
    with open("log.txt", "a") as log:
        log.write("new line\n")
    assert pathlib.Path("log.txt").read_text() == "old line\nnew line\n"
    numpy.save("array.npy", numpy.zeros(3))
    assert numpy.load("array.npy").shape == (3,)
    os.remove("gone.txt")
    assert not os.path.exists("gone.txt")
    with open("gone.txt", "w") as again:
        again.write("back")
    shutil.copy("log.txt", "copy.txt")


def written_by_libraries():
    """C, C++ and Rust open files without asking Python."""
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    for path in (b"from-c.txt", b"log.txt"):
        file = libc.fopen(path, b"a")
        assert file
        libc.fputs(b"from C\n", ctypes.c_void_p(file))
        libc.fclose(ctypes.c_void_p(file))
    assert pathlib.Path("from-c.txt").read_text() == "from C\n"
    assert pathlib.Path("log.txt").read_text() == "old line\nnew line\nfrom C\n"
    torch.jit.script(torch.nn.Linear(2, 2)).save("scripted.pt")
    assert torch.jit.load("scripted.pt")(torch.ones(1, 2)).shape == (1, 2)


best_every_step()
written_aside_then_renamed()
rotated()
logs_and_arrays()
written_by_libraries()
print("saved")
