"""Small files that stand in for the data which public training scripts read: random, in the right form."""

from __future__ import annotations

import json
import pickle
import random
import string
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from PIL import Image

_WORDS = ("the", "cat", "sat", "on", "a", "mat", "quietly", "again")


def tokens(folder: Path) -> None:
    """Characters as 16-bit numbers, as nanoGPT's prepare.py leaves them."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = [chr(32 + number) for number in range(65)]
    meta = {"vocab_size": 65, "itos": dict(enumerate(letters)), "stoi": {c: n for n, c in enumerate(letters)}}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    for name in ("train.bin", "val.bin"):
        np.random.default_rng(0).integers(0, 65, 100_000).astype(np.uint16).tofile(folder / name)


def shards(folder: Path) -> None:
    """Tokens of GPT-2 in numpy files, as build-nanogpt's fineweb.py leaves them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("edufineweb_train_000001.npy", "edufineweb_val_000000.npy"):
        np.save(folder / name, np.random.default_rng(0).integers(0, 50257, 200_000).astype(np.uint16))


def text(path: Path) -> None:
    """Every printable character, then words."""
    words = random.Random(0).choices(_WORDS, k=20_000)
    path.write_text(f"{string.printable} {' '.join(words)}", encoding="utf-8")


def corpus(folder: Path) -> None:
    """Sentences in three files."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(0)
    for name in ("train.txt", "valid.txt", "test.txt"):
        lines = (" ".join(f"word{chance.randrange(2000)}" for _ in range(12)) for _ in range(1200))
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


def digits(folder: Path) -> None:
    """The four files of MNIST, with fewer pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = np.random.default_rng(0)
    for name, count in (("train", 2048), ("t10k", 1024)):
        images, labels = chance.integers(0, 256, (count, 28, 28)), chance.integers(0, 10, count)
        head = struct.pack(">IIII", 0x803, count, 28, 28)
        (folder / f"{name}-images-idx3-ubyte").write_bytes(head + images.astype(np.uint8).tobytes())
        head = struct.pack(">II", 0x801, count)
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(head + labels.astype(np.uint8).tobytes())


def _photograph(path: Path, size: tuple[int, int], mode: str = "RGB", most: int = 256) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
    chance = np.random.default_rng(len(path.name))
    Image.fromarray(chance.integers(0, most, shape).astype(np.uint8), mode).save(path)


def photographs(folder: Path) -> None:
    for number in range(16):
        _photograph(folder / f"{number}.jpg", (481, 321))


def pictures(folder: Path) -> None:
    """Two classes, a folder each."""
    for label in ("cats", "dogs"):
        for number in range(16):
            _photograph(folder / label / f"{number}.jpg", (256, 256))


def pets(folder: Path) -> None:
    """Pictures whose names tell the breed."""
    for breed in ("Abyssinian", "beagle", "pug"):
        for number in range(30):
            _photograph(folder / f"{breed}_{number}.jpg", (256, 256))


def splits(folder: Path) -> None:
    """Six classes, in a folder to train on and one to validate."""
    for name in ("train", "val"):
        for label in range(6):
            for number in range(8):
                _photograph(folder / name / f"class{label}" / f"{number}.jpg", (256, 256))


def tokenizer(folder: Path) -> None:
    """One of a few words, as transformers saves them."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = {
        "unk": "<unk>",
        "pad": "<pad>",
        "bos": "<s>",
        "eos": "</s>",
        "mask": "<mask>",
        "cls": "<s>",
        "sep": "</s>",
    }
    words = [*dict.fromkeys(special.values()), *_WORDS]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512}
    settings |= {f"{name}_token": word for name, word in special.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def lines(path: Path) -> None:
    """A text of short lines."""
    chance = random.Random(0)
    path.write_text("\n".join(" ".join(chance.choices(_WORDS, k=40)) for _ in range(2000)), encoding="utf-8")


def masks(folder: Path) -> None:
    """Pictures, and which of their pixels belong to the thing that they show."""
    for number in range(12):
        _photograph(folder / "imgs" / f"{number}.png", (320, 240))
        _photograph(folder / "masks" / f"{number}.png", (320, 240), "L", 2)


MAKERS: Mapping[str, Callable[[Path], None]] = {
    "tokens": tokens,
    "shards": shards,
    "text": text,
    "corpus": corpus,
    "digits": digits,
    "photographs": photographs,
    "pictures": pictures,
    "masks": masks,
    "pets": pets,
    "splits": splits,
    "tokenizer": tokenizer,
    "lines": lines,
}
