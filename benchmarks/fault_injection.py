"""Kills a rank at random moments and compares every loss with an undisturbed run's, bit for bit.

    python benchmarks/fault_injection.py [--kills 20] [--ranks 2] [--strategy ddp] [--seed 0]

Each case trains `STEPS` steps with a checkpoint every 4. A rank, drawn by the seed, is sent SIGKILL after a
drawn time between the start of training and the undisturbed run's end: during steps, all-reduces, and saves
as it comes. All ranks are then killed and started again, as a launcher does, until the training is done.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

STEPS = 40


def train(out: Path, strategy: str) -> list[str]:
    """What each rank runs: the tests' training, slowed down so that a moment can be hit."""
    from distributed import train_ranks

    (out / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    return train_ranks.main(
        train_ranks.Config(out=str(out), strategy=strategy, steps=STEPS, step_seconds=0.02)
    )


def losses(out: Path, ranks: int) -> list[dict[int, str]]:
    """The losses of each rank by step; a step that was computed twice must have had the same loss."""
    found = []
    for rank in range(ranks):
        mine: dict[int, str] = {}
        for line in (out / f"losses-{rank}.txt").read_text().splitlines():
            step, loss = line.split()
            if mine.setdefault(int(step), loss) != loss:
                raise SystemExit(
                    f"rank {rank}, step {step}: {loss} after the restart, {mine[int(step)]} before"
                )
        found.append(mine)
    return found


def killer(out: Path, victim: int, delay: float, told: dict[str, float]) -> None:
    """Kills the victim ``delay`` seconds after its first loss."""
    log, pid = out / f"losses-{victim}.txt", out / f"pid-{victim}"
    deadline = time.monotonic() + 120
    while not (log.exists() and log.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(delay)
    try:
        os.kill(int(pid.read_text()), signal.SIGKILL)
        told["at"] = delay
    except ProcessLookupError:
        told["late"] = delay


def one_case(
    number: int, source: random.Random, args: argparse.Namespace, span: float
) -> tuple[Path, str, bool]:
    """One training with one kill; its folder, a line about it, and whether it was killed in time."""
    from distributed.ranks import until_done

    out = Path(tempfile.mkdtemp(prefix="memfit-faults-"))
    victim, delay, told = source.randrange(args.ranks), source.uniform(0, span), {}
    thread = threading.Thread(target=killer, args=(out, victim, delay, told), daemon=True)
    thread.start()
    began = time.monotonic()
    attempts = until_done(functools.partial(train, out, args.strategy), ranks=[args.ranks] * 3)
    thread.join()
    done = len((out / f"losses-{victim}.txt").read_text().splitlines())
    how = "killed" if "at" in told else "was done before its kill"
    text = f"{number:3d}  rank {victim} {how} at {delay:5.2f} s, {done - STEPS:2d} steps made again, "
    return out, text + f"{len(attempts)} starts, {time.monotonic() - began:.1f} s", "at" in told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--strategy", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    from distributed.ranks import expect

    undisturbed = Path(tempfile.mkdtemp(prefix="memfit-faults-"))
    expect(functools.partial(train, undisturbed, args.strategy), ranks=args.ranks)
    began = time.monotonic()
    wanted = losses(undisturbed, args.ranks)
    span = (undisturbed / "checkpoints" / "events.jsonl").stat().st_mtime
    span -= (undisturbed / "pid-0").stat().st_mtime
    source, equal, kills = random.Random(args.seed), 0, 0
    while kills < args.kills:
        out, text, killed = one_case(kills + 1, source, args, span)
        same = losses(out, args.ranks) == wanted
        kills += killed
        equal += same and killed
        print(text, "equal" if same else "DIFFERENT", flush=True)
    print(f"{equal} of {args.kills} equal bit for bit, {time.monotonic() - began:.0f} s")
    sys.exit(0 if equal == args.kills else 1)


if __name__ == "__main__":
    main()
