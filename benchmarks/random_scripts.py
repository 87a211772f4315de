"""Small training scripts drawn by chance, and whether the dry run brings each to its right end.

    python benchmarks/random_scripts.py [--seeds 0-99] [--show SEED]

A seed makes one script: a model, an optimizer, a precision, a loop, things that scripts do beside training
(threads, forks, programs, files, exit handlers), and an end. It prints what PyTorch says its peak was just
before the end. The dry run must give the exit code that the script asks for, and the same peak; and it must
leave no process, and no file in the script's folder.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "dryrun"))

GPUS = ("t4-16gb", "a100-80gb", "rtx4090-24gb", "h100-80gb", "rtx5090-32gb")
MARK = "RANDOM_SCRIPT"

MODELS: Mapping[str, tuple[str, str]] = {
    "dense": (
        "nn.Sequential(nn.Linear({w}, 4 * {w}), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * {w}, 10))",
        "torch.randn(batch, {w})",
    ),
    "convolutions": (
        "nn.Sequential(nn.Conv2d(3, {w}, 3, 2), nn.BatchNorm2d({w}), nn.ReLU(), nn.Conv2d({w}, 8, 3), "
        "nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))",
        "torch.randn(batch, 3, 32, 32)",
    ),
    "attention": (
        "nn.Sequential(nn.TransformerEncoderLayer({w}, 4, 2 * {w}, batch_first=True), nn.Linear({w}, 10))",
        "torch.randn(batch, 16, {w})",
    ),
    "words": (
        "nn.Sequential(nn.Embedding(500, {w}), nn.LayerNorm({w}), nn.Linear({w}, 10))",
        "torch.randint(500, (batch, 24))",
    ),
    "bags": (
        "nn.Sequential(nn.EmbeddingBag(500, {w}), nn.Linear({w}, 10))",
        "torch.randint(500, (batch, 9))",
    ),
    "recurrent": (
        "Last(nn.GRU({w}, {w}, batch_first=True), nn.Linear({w}, 10))",
        "torch.randn(batch, 12, {w})",
    ),
}
OPTIMIZERS = (
    "SGD(params, lr=0.1, momentum=0.9)",
    "AdamW(params)",
    "AdamW(params, fused=True)",
    "Adam(params, foreach=False)",
    "RMSprop(params)",
    "Adagrad(params)",
    "Adafactor(params)",
    "NAdam(params)",
)
PRECISIONS: Mapping[str, str] = {
    "full": "contextlib.nullcontext()",
    "bf16": "torch.autocast('cuda', torch.bfloat16)",
    "fp16": "torch.autocast('cuda', torch.float16)",
}
LOOPS: Mapping[str, str] = {
    "plain": """
        for step in range({steps}):
            update(batch={batch})
    """,
    "accumulated": """
        for step in range({steps}):
            update(batch={batch}, only_gradients=step % 2 == 0)
    """,
    "stops early": """
        best, patience = float("inf"), 2
        for step in range(50):
            value = update(batch={batch}).item()
            patience = 2 if value < best else patience - 1
            best = min(best, value)
            if not patience:
                break
    """,
    "evaluates": """
        for step in range({steps}):
            update(batch={batch})
            model.eval()
            with torch.no_grad():
                right = (model(inputs({batch} + 1)).flatten(1).argmax(1) == 0).float().mean()
            print(f"accuracy {{right.item():.2f}}")
            model.train()
    """,
    "halves its batch": """
        size = 1 << 40
        while size:
            try:
                torch.empty(size, device="cuda")
                break
            except torch.OutOfMemoryError:
                size //= 2
        for step in range({steps}):
            update(batch={batch})
    """,
    "stops on not a number": """
        for step in range({steps}):
            if not math.isfinite(update(batch={batch}).item()):
                sys.exit(77)
    """,
    "grows": """
        kept = []
        for step in range({steps}):
            kept.append(update(batch={batch} + step))
        print(sum(kept))
    """,
    "in a function that fails once": """
        tries = 0
        while True:
            try:
                update(batch={batch})
                if (tries := tries + 1) < 2:
                    raise ConnectionError("try again")
                break
            except ConnectionError as problem:
                print("failed:", problem)
    """,
}
BESIDE: Mapping[str, str] = {
    "nothing": "",
    "a thread": """
        def count():
            time.sleep(0.05)
            print("thread done")
        threading.Thread(target=count).start()
    """,
    "a thread that fails": """
        def fail():
            raise ValueError("in a thread")
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
    """,
    "a thread that never ends": """
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    """,
    "a program": """
        done = subprocess.run([sys.executable, "-S", "-c", "print(6 * 7)"], capture_output=True, text=True)
        assert done.stdout == "42\\n", done
    """,
    "a program that goes on": """
        subprocess.Popen(["sleep", "600"])
    """,
    "a program that fails": """
        assert subprocess.run(["sh", "-c", "exit 9"]).returncode == 9
    """,
    "a fork": """
        child = os.fork()
        if child == 0:
            os._exit(5)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    """,
    "a fork that raises": """
        child = os.fork()
        if child == 0:
            sys.stderr.close()
            raise SystemExit(6)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 6
    """,
    "a fork that goes on": """
        if os.fork() == 0:
            time.sleep(600)
    """,
    "files": """
        torch.save(model.state_dict(), "model.pt")
        with open("log.txt", "a") as log:
            log.write("step\\n")
        os.makedirs("runs/1", exist_ok=True)
        assert set(torch.load("model.pt")) == set(model.state_dict())
    """,
    "workers": """
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(abs, [-1, 2]) == [1, 2]
    """,
    "exit handler": """
        atexit.register(print, "goodbye")
    """,
    "signal handler": """
        signal.signal(signal.SIGUSR1, lambda number, frame: print("told"))
        os.kill(os.getpid(), signal.SIGUSR1)
    """,
    "an alarm": """
        signal.signal(signal.SIGALRM, lambda number, frame: None)
        signal.setitimer(signal.ITIMER_REAL, 0.01)
    """,
}
ENDS: tuple[tuple[str, int], ...] = (
    ("", 0),
    ("sys.exit()", 0),
    ("sys.exit(0)", 0),
    ("sys.exit(3)", 3),
    ("sys.exit(256 + 7)", 7),
    ("sys.exit(-1)", 255),
    ("sys.exit(True)", 1),
    ("sys.exit('no more data')", 1),
    ("sys.exit((1, 2))", 1),
    ("exit(4)", 4),
    ("raise SystemExit(8)", 8),
    ("raise ValueError('a mistake')", 1),
    ("raise KeyboardInterrupt", 130),
    ("assert False, 'never'", 1),
    ("1 / 0", 1),
    ("os._exit(9)", 9),
    ("torch.ones(2, device='cuda') @ torch.ones(3, device='cuda')", 1),
    ("model(inputs(2)[..., :1, :1, :1, :1])", 1),
    ("import no_such_module", 1),
    ("try:\n    raise OSError('first')\nexcept OSError:\n    raise RuntimeError('second')", 1),
    ("class Own(BaseException): pass\nraise Own('mine')", 1),
)

FRAME = """
import atexit, contextlib, math, multiprocessing, os, signal, subprocess, sys, threading, time
import torch
from torch import nn
from torch.nn import functional as F

class Last(nn.Module):
    def __init__(self, rnn, head):
        super().__init__()
        self.rnn, self.head = rnn, head
    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])

def inputs(batch):
    return {inputs}.cuda()

model = {model}.cuda()
params = list(model.parameters())
optimizer = torch.optim.{optimizer}
scaler = torch.amp.GradScaler("cuda", enabled={scaled})

def update(batch, only_gradients=False):
    with {precision}:
        out = model(inputs(batch)).flatten(1)
        loss = F.cross_entropy(out, torch.zeros(batch, dtype=torch.long, device="cuda"))
    scaler.scale(loss).backward()
    if not only_gradients:
        if {clipped}:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(params, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none={to_none})
    return loss.detach()

{beside}
{loop}
print("PEAK", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), flush=True)
{end}
"""


@dataclass(frozen=True, kw_only=True)
class Script:
    """One that was drawn: its text, the GPU, and the exit code that it asks for."""

    text: str
    gpu: str
    exit_code: int


def draw(seed: int) -> Script:
    """The script of a seed."""
    chance = random.Random(seed)
    model, inputs = MODELS[chance.choice(list(MODELS))]
    width = 8 * chance.randint(2, 16)
    precision = chance.choice(list(PRECISIONS))
    loop = LOOPS[chance.choice(list(LOOPS))].format(steps=chance.randint(1, 4), batch=chance.randint(2, 32))
    end, code = chance.choice(ENDS)
    text = FRAME.format(
        model=model.format(w=width),
        inputs=inputs.format(w=width),
        optimizer=chance.choice(OPTIMIZERS),
        scaled=precision == "fp16",
        precision=PRECISIONS[precision],
        clipped=chance.random() < 0.5,
        to_none=chance.random() < 0.7,
        beside=_dedented(BESIDE[chance.choice(list(BESIDE))]),
        loop=_dedented(loop),
        end=end,
    )
    return Script(text=text, gpu=chance.choice(GPUS), exit_code=code)


def _dedented(text: str) -> str:
    import textwrap

    return textwrap.dedent(text).strip()


def trouble_of(seed: int, run: Callable[..., Any], folder: Path) -> list[str]:
    """What is wrong with the dry run of a seed's script; nothing, as it should be.

    Args:
        run: ``Preloaded.run_words``, or another with its arguments.
        folder: an empty one, where the script is put and run.
    """
    script, mark = draw(seed), uuid.uuid4().hex
    path = folder / "script.py"
    path.write_text(script.text, encoding="utf-8")
    outcome = run(
        ["python", str(path)],
        folder=folder,
        gpu=script.gpu,
        steps="all",
        timeout_seconds=60,
        environment={MARK: mark},
    )
    result = outcome.result
    found = []
    if result.exit_code != script.exit_code or result.ended in ("timeout", "interrupted"):
        got = f"exit code {result.exit_code} ({result.ended})"
        found.append(f"{got} instead of {script.exit_code}: {outcome.stderr[-600:]}")
    told = re.search(r"PEAK (\d+) (\d+)", outcome.stdout)
    if told is None:
        found.append(f"the script did not come to its end: {outcome.stderr[-600:]}")
    else:
        own = (result.peak_allocated_bytes, result.peak_reserved_bytes)
        if own != (int(told[1]), int(told[2])):
            found.append(f"peaks of {own}, PyTorch says {told[1]}, {told[2]}")
    left = {one.name for one in folder.iterdir()} - {"script.py", ".output"}
    if left:
        found.append(f"left files: {sorted(left)}")
    found += [f"left a process: {name}" for name in _processes_with(mark)]
    return found


def _processes_with(mark: str) -> list[str]:
    """The commands of what still runs and has the mark in its environment."""
    import psutil

    return [
        " ".join(process.info["cmdline"] or [])
        for process in psutil.process_iter(["environ", "cmdline", "status"])
        if (process.info["environ"] or {}).get(MARK) == mark
        and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", default="0-99", help="the first and the last")
    parser.add_argument("--show", type=int, help="print the script of this seed instead")
    options = parser.parse_args()
    if options.show is not None:
        print(draw(options.show).text)
        return 0
    from preloaded import Preloaded

    first, _, last = options.seeds.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    process, wrong, begun = Preloaded(), 0, time.monotonic()
    try:
        for seed in seeds:
            with tempfile.TemporaryDirectory(prefix="random-script-") as folder:
                found = trouble_of(seed, process.run_words, Path(folder))
            wrong += bool(found)
            print(f"seed {seed}: {'; '.join(found) or 'ok'}", flush=True)
    finally:
        process.close()
    print(f"{len(seeds)} scripts, {wrong} with trouble, {time.monotonic() - begun:.0f} s")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
