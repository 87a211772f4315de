"""One script by the portable engine: ``portable_run.py GPU SCRIPT WORDS…`` prints its figures as JSON."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

from memfit.capture.measure import out_of_memory_as_value
from memfit.capture.portable import portable_gpu
from memfit.core.devices import find_gpu


def main() -> None:
    """Runs it, with ``meta`` for its device."""
    gpu, script = find_gpu(sys.argv[1]), Path(sys.argv[2])
    sys.argv[:] = sys.argv[2:]
    sys.path[0] = str(script.parent)
    os.environ["MEMFIT_PREDICTION_DEVICE"] = "meta"
    import reading

    told: dict[str, Any] = {}
    reading.keep = told.update
    with portable_gpu(gpu) as portable:
        with out_of_memory_as_value(phase="script") as caught:
            runpy.run_path(str(script), run_name="__main__")
        book, context = portable.memory.allocator.stats_book, gpu.context_bytes
        figures = {
            "requested": book.peak_requested_bytes,
            "allocated": book.peak_allocated_bytes,
            "reserved": book.peak_reserved_bytes,
            "device": context + book.peak_reserved_bytes,
            "context": context,
        }
        notes = portable.not_modelled()
    print(
        json.dumps(
            {
                "figures": figures,
                "told": told,
                "error": "",
                "fits": not caught,
                "torch": torch.__version__,
                "not_modelled": notes,
            }
        )
    )


if __name__ == "__main__":
    main()
