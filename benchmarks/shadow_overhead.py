"""What watching costs: the time of a training step on the made-up GPU with all of the probe, and without.

    python benchmarks/shadow_overhead.py [--gpu a100-80gb] [--steps 20]

All are timed in one process, after a warm-up; each figure is the median over the steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from memfit.core.devices import find_gpu
from memfit.dryrun.environment import gpu_environment

MOST = 3.0
"""Times as long as without: more is too slow."""

MODELS: dict[str, tuple[str, dict[str, Any], tuple[int, int]]] = {
    "GPT-2 124M, batch 8, 1024 tokens": ("gpt2", {}, (8, 1024)),
    "Llama 1.2B, batch 1, 2048 tokens": (
        "llama",
        {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_key_value_heads": 8},
        (1, 2048),
    ),
    "BERT base, batch 16, 512 tokens": ("bert", {}, (16, 512)),
}


def training_step(kind: str, changes: dict[str, Any], shape: tuple[int, int]) -> Callable[[], None]:
    """A step of bf16 autocast and AdamW on ``cuda``."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    config = AutoConfig.for_model(kind, use_cache=False, **changes)
    make = AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM
    with torch.device("cuda"):
        model = make.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        tokens = torch.randint(config.vocab_size, shape, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def median_seconds(step: Callable[[], None], steps: int) -> float:
    seconds = []
    for _ in range(steps):
        begun = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def measure(steps: int) -> dict[str, dict[str, float]]:
    """Seconds of a step of each model: bare, with the allocator's history and the hooks, and with all of the
    probe. Runs on the made-up GPU."""
    from memfit.dryrun import interception
    from memfit.dryrun.probe import Probe

    made = {name: training_step(*settings) for name, settings in MODELS.items()}
    for step in made.values():
        median_seconds(step, 3)
    bare = {name: median_seconds(step, steps) for name, step in made.items()}
    probe = Probe(steps=None, end=lambda: None, real_host_values=False)
    probe.start()
    found = {}
    for name, step in made.items():
        watched, recorded = [], []
        for _ in range(steps):
            watched.append(median_seconds(step, 1))
            with interception.standing_back():
                recorded.append(median_seconds(step, 1))
        seconds = {"recorded": statistics.median(recorded), "watched": statistics.median(watched)}
        found[name] = {
            "bare_seconds": bare[name],
            "recorded_seconds": seconds["recorded"],
            "watched_seconds": seconds["watched"],
            "shadow_ratio": seconds["watched"] / seconds["recorded"],
            "whole_ratio": seconds["watched"] / bare[name],
        }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", default="a100-80gb")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    if "MEMFIT_GPU_CC" in os.environ:
        print(json.dumps(measure(options.steps), indent=2))
        return 0
    environment = gpu_environment(find_gpu(options.gpu)) | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--steps", str(options.steps)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    print(done.stdout, end="")
    return int(max(row["shadow_ratio"] for row in json.loads(done.stdout).values()) > MOST)


if __name__ == "__main__":
    sys.exit(main())
