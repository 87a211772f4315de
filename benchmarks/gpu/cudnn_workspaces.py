"""Workspaces of cuDNN's convolutions on this machine's GPU, against the rule that memfit goes by.

    python benchmarks/gpu/cudnn_workspaces.py [--json FILE] [--stand-in]

Each convolution runs forward and both ways back, and its workspace is the largest block that came and went in
the call, by PyTorch's own memory history. About a minute. ``--stand-in`` tries the script itself where there
is no GPU: nothing is measured. The exit code is 6 where there is no GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sides import real_side, run_on, this_gpu

from memfit.core.errors import MemfitError
from memfit.core.files import write_atomically
from memfit.core.units import format_bytes

SHAPES = (
    (3, 64, 224, 7), (3, 32, 224, 3), (16, 48, 43, 1), (32, 16, 43, 1), (64, 64, 86, 3), (64, 128, 43, 3),
    (64, 256, 56, 1), (128, 128, 28, 3), (256, 64, 56, 1), (256, 256, 14, 3), (512, 512, 7, 3),
    (96, 96, 21, 5),
)  # fmt: skip
"""Input and output channels, height and width, window."""
BATCHES = (8, 64)
DTYPES = ("float32", "float16", "bfloat16")
SCHEMA_VERSION = 1


def measure(file: Path) -> None:
    """In the process on the GPU: every reading, as JSON."""
    import torch

    from memfit.dryrun.calibration_steps import read_convolution

    torch.empty(1, device="cuda")
    grid = itertools.product(BATCHES, SHAPES, DTYPES, ("NCHW", "NHWC"))
    found = [
        {**vars(reading), "batch": batch}
        for batch, shape, dtype, layout in grid
        for reading in read_convolution(batch, shape, getattr(torch, dtype), layout)
    ]
    file.write_text(json.dumps(found), encoding="utf-8")


def table(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Markdown, one line per convolution and family that has a workspace or should have one."""
    yield "| convolution | family | measured | rule | share |"
    yield "|---|---|---|---|---|"
    for one in found:
        measured, rule = one["measured_bytes"], one["rule_bytes"]
        if measured or rule:
            share = f"{measured / rule:.2f}" if rule else "–"
            sizes = (format_bytes(measured), format_bytes(rule))
            yield f"| {' | '.join([one['configuration'], one['family'], *sizes, share])} |"


def main() -> int:
    """Measures in a process of its own and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write every reading here too")
    parser.add_argument("--stand-in", action="store_true", help="make the GPU up")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        measure(options.measure)
        return 0
    try:
        gpu = this_gpu(options.stand_in)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "readings.json"
            run_on(real_side(gpu, options.stand_in), Path(__file__), "--measure", str(file))
            found = json.loads(file.read_text(encoding="utf-8"))
    except MemfitError as problem:
        print(problem, file=sys.stderr)
        return problem.exit_code
    print(f"{gpu.name}{', made up: nothing was measured' if options.stand_in else ''}\n")
    print(*table(found), sep="\n")
    if options.json is not None:
        whole = {"schema_version": SCHEMA_VERSION, "gpu": gpu.key, "stand_in": options.stand_in}
        write_atomically(options.json, json.dumps({**whole, "readings": found}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
