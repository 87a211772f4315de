"""The dry run against this machine's GPU, event by event.

    python benchmarks/gpu/predict_vs_real.py [--json FILE] [--only NAME …] [--stand-in]

Ten small workloads run on the GPU and on a made-up one of the same model, both under PyTorch's own memory
history. The table says how many allocations were the same in the same order, which allocations and frees only
one side has, and the peaks. About five minutes. ``--stand-in`` tries the script itself where there is no GPU:
both sides are made up, and nothing is measured. The exit code is 6 where there is no GPU.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sides import made_up_side, real_side, run_on, this_gpu

from memfit.core.devices import GPU
from memfit.core.errors import MemfitError
from memfit.core.files import write_atomically
from memfit.core.units import format_bytes

SCRIPT = Path(__file__).with_name("small_steps.py")
NAMES = (
    "perceptron, AdamW",
    "perceptron, SGD with momentum, one by one",
    "residual net, fp32",
    "residual net, bf16, channels last",
    "LSTM",
    "GPT, fp32",
    "GPT, bf16 autocast",
    "GPT, fp16 autocast, fused AdamW",
    "GPT, checkpointed",
    "GPT, 4 micro-batches",
)
PEAKS = ("requested", "allocated", "reserved")
SCHEMA_VERSION = 1
MOST_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One workload on both sides.

    Args:
        name: of the workload.
        allocations: of the real side.
        same: of them, those that the dry run has in the same order.
        only_real, only_dry: sizes that one side has, with how often; those of frees are below zero.
            The order of frees is not compared: autocast forgets its copies in an order that no two runs
            share.
        real_peaks, dry_peaks: bytes, by `PEAKS`.
        torch: version of the real side.
    """

    name: str
    allocations: int
    same: int
    only_real: Mapping[int, int]
    only_dry: Mapping[int, int]
    real_peaks: Mapping[str, int]
    dry_peaks: Mapping[str, int]
    torch: str


def compare(name: str, real: Mapping[str, Any], dry: Mapping[str, Any]) -> Comparison:
    """What both sides' files say of one workload."""
    taken = {
        side: [size for size in told["events"] if size > 0] for side, told in (("real", real), ("dry", dry))
    }
    blocks = difflib.SequenceMatcher(None, taken["real"], taken["dry"], autojunk=False).get_matching_blocks()
    return Comparison(
        name=name,
        allocations=len(taken["real"]),
        same=sum(block.size for block in blocks),
        only_real=dict(Counter(real["events"]) - Counter(dry["events"])),
        only_dry=dict(Counter(dry["events"]) - Counter(real["events"])),
        real_peaks={peak: real[peak] for peak in PEAKS},
        dry_peaks={peak: dry[peak] for peak in PEAKS},
        torch=real["torch"],
    )


def run_both(name: str, gpu: GPU, stand_in: bool) -> Comparison:
    """The workload on both sides, a process each."""
    with tempfile.TemporaryDirectory() as folder:
        told = {}
        for side, environment in (("real", real_side(gpu, stand_in)), ("dry", made_up_side(gpu))):
            file = Path(folder) / f"{side}.json"
            run_on(environment, SCRIPT, name, str(file))
            told[side] = json.loads(file.read_text(encoding="utf-8"))
    return compare(name, told["real"], told["dry"])


def table(found: Sequence[Comparison]) -> Iterator[str]:
    """Markdown, one line per workload."""
    heads = "workload | allocations | same, in order | only on the GPU | only in the dry run"
    heads += " | requested | reserved"
    yield f"| {heads} |"
    yield "|---|---|---|---|---|---|---|"
    for one in found:
        peaks = (_beside(one, peak) for peak in ("requested", "reserved"))
        only = (_sizes(one.only_real), _sizes(one.only_dry))
        yield f"| {' | '.join([one.name, str(one.allocations), str(one.same), *only, *peaks])} |"


def _beside(one: Comparison, peak: str) -> str:
    real, dry = one.real_peaks[peak], one.dry_peaks[peak]
    return (
        f"{format_bytes(real)}, equal"
        if real == dry
        else f"{format_bytes(real)}, {100 * (dry / real - 1):+.2f} %"
    )


def _sizes(sizes: Mapping[int, int]) -> str:
    """The largest allocations among them; a free has the size of its allocation."""
    taken = sorted(((size, count) for size, count in sizes.items() if size > 0), reverse=True)
    shown = [f"{count} × {format_bytes(size)}" for size, count in taken[:MOST_SHOWN]]
    return ", ".join(shown + ["…"] * (len(taken) > MOST_SHOWN)) or "–"


def main() -> int:
    """Runs what is asked for and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write everything here too")
    parser.add_argument("--only", action="append", choices=NAMES, help="may be given several times")
    parser.add_argument("--stand-in", action="store_true", help="make up both sides")
    options = parser.parse_args()
    try:
        gpu = this_gpu(options.stand_in)
        found = [run_both(name, gpu, options.stand_in) for name in options.only or NAMES]
    except MemfitError as problem:
        print(problem, file=sys.stderr)
        return problem.exit_code
    side = "made up on both sides: nothing was measured" if options.stand_in else "real against made up"
    print(f"{gpu.name}, torch {found[0].torch}, {side}\n")
    print(*table(found), sep="\n")
    if options.json is not None:
        whole = {"schema_version": SCHEMA_VERSION, "gpu": gpu.key, "stand_in": options.stand_in}
        write_atomically(
            options.json, json.dumps({**whole, "workloads": [asdict(one) for one in found]}, indent=1)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
