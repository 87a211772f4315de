"""The portable engine beside the dry run: peaks of the same steps, and how far apart they are.

    python benchmarks/portable_engine.py                          # all, on an RTX 3060 and an H100
    python benchmarks/portable_engine.py gpt2 --gpu a100-80gb --json results.jsonl

Needs what the dry run needs (a CUDA build of PyTorch, a C compiler, Linux), and no GPU. Prints a Markdown
table, a row as soon as it is known. The GPU's memory is taken as 4 TiB, so that every step fits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from memfit.capture.portable import measure_portable
from memfit.core.devices import GPU, find_gpu
from memfit.core.errors import MemfitError
from memfit.dryrun.worker import Worker

LLAMA = (
    "hf:llama,hidden_size=2048,num_hidden_layers=16,num_attention_heads=32,num_key_value_heads=8,"
    "intermediate_size=8192,vocab_size=128256,batch=1,seq=2048,dtype=bf16"
)
HERE = Path(__file__).resolve().parent
MORE = HERE / "portable_workloads.py"
SMALL_LLAMA = (
    "hidden_size=1024,num_hidden_layers=8,num_attention_heads=16,num_key_value_heads=4,"
    "intermediate_size=2816,vocab_size=32000,batch=4,seq=1024"
)
SMALL_T5 = "d_model=512,d_ff=1024,num_layers=4,num_heads=8,batch=8,seq=256"
MOE = (
    "hidden_size=512,num_hidden_layers=4,num_attention_heads=8,num_key_value_heads=4,intermediate_size=1024,"
    "num_local_experts=8,vocab_size=32000,batch=4,seq=512"
)
WORKLOADS = {
    "gpt2": "hf:gpt2,batch=8,seq=1024",
    "gpt2-autocast": "hf:gpt2,batch=8,seq=1024,dtype=bf16-autocast",
    "gpt2-fp16-sgd": "hf:gpt2,batch=4,seq=512,dtype=fp16-autocast,optimizer=sgd-momentum",
    "gpt2-fused-adamw": "hf:gpt2,batch=4,seq=512,optimizer=adamw-fused",
    "gpt2-adamw-by-loop": "hf:gpt2,batch=4,seq=512,optimizer=adamw-for-loop",
    "gpt2-adafactor": "hf:gpt2,batch=4,seq=512,optimizer=adafactor",
    "bert": "hf:bert,batch=8,seq=512",
    "bert-autocast": "hf:bert,batch=8,seq=512,dtype=bf16-autocast",
    "distilbert": "hf:distilbert,batch=8,seq=256,dtype=bf16-autocast",
    "deberta": "hf:deberta-v2,num_hidden_layers=4,batch=4,seq=256",
    "llama-1b-bf16": LLAMA,
    "llama-grouped-heads": f"hf:llama,{SMALL_LLAMA}",
    "qwen3-autocast": f"hf:qwen3,{SMALL_LLAMA},head_dim=64,dtype=bf16-autocast",
    "gemma2": f"hf:gemma2,{SMALL_LLAMA},head_dim=64",
    "opt": "hf:opt,batch=4,seq=512",
    "mixtral": f"hf:mixtral,{MOE}",
    "mamba": "hf:mamba,hidden_size=512,num_hidden_layers=4,vocab_size=32000,batch=2,seq=256",
    "t5-small": "hf:t5,batch=8,seq=512",
    "t5-small-autocast": "hf:t5,batch=8,seq=512,dtype=bf16-autocast",
    "bart": "hf:bart,batch=4,seq=256",
    "vit": "hf:vit,batch=32",
    "vit-autocast": "hf:vit,batch=32,dtype=bf16-autocast",
    "resnet50": "tv:resnet50,batch=32",
    "resnet50-autocast": "tv:resnet50,batch=32,dtype=bf16-autocast",
    "vgg16": "tv:vgg16,batch=16,optimizer=sgd-momentum",
    "mobilenet-v3": "tv:mobilenet_v3_large,batch=32",
    "densenet121": "tv:densenet121,batch=16",
    "efficientnet-b0": "tv:efficientnet_b0,batch=16,dtype=bf16-autocast",
    "convnext-tiny": "tv:convnext_tiny,batch=16",
    "swin-t": "tv:swin_t,batch=16",
    "swin-t-autocast": "tv:swin_t,batch=16,dtype=bf16-autocast",
    **{
        name.replace("_", "-"): f"{MORE}:{name}"
        for name in (
            "checkpointed",
            "encoder",
            "gpt_fp16",
            "gru",
            "listening",
            "lora",
            "lstm",
            "perceptron",
            "unet",
            "unet_autocast",
        )
    },
}
PEAKS = ("requested", "allocated", "reserved")
HEADER = (
    "| workload | GPU | requested, MiB | allocated, MiB | reserved, MiB "
    "| apart: requested | allocated | reserved |\n|---|---|---|---|---|---|---|---|"
)


def roomy(gpu: GPU) -> GPU:
    """The same chip with so much memory that every step fits."""
    return replace(gpu, runtime_total_bytes=4 << 40, nvml_total_bytes=4 << 40)


def both(worker: Worker, spec: str, gpu: GPU) -> tuple[dict[str, Any], dict[str, Any]]:
    """The last of three steps by the dry run, and by the portable engine."""
    arguments: dict[str, Any] = {
        "workload": {"spec": spec, "folder": "."},
        "gpu_key": gpu.key,
        "costs": False,
    }
    dry = worker.call("memfit.capture.measure:measure", gpu=roomy(gpu), **arguments)
    return dry, measure_portable(gpu=roomy(gpu), **arguments)


def row(name: str, gpu: GPU, dry: dict[str, Any], portable: dict[str, Any]) -> str:
    """One line of the table."""
    sizes = [portable[f"peak_{peak}_bytes"] / 2**20 for peak in PEAKS]
    return (
        " | ".join([f"| {name}", gpu.key, *(f"{size:,.1f}" for size in sizes), *apart(dry, portable)]) + " |"
    )


def apart(dry: dict[str, Any], portable: dict[str, Any]) -> list[str]:
    """By how much the portable engine is above the dry run."""
    cells = []
    for peak in PEAKS:
        want, got = dry[f"peak_{peak}_bytes"], portable[f"peak_{peak}_bytes"]
        cells.append("0 B" if got == want else f"{got - want:+,} B ({100 * (got / want - 1):+.3f} %)")
    return cells


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=list(WORKLOADS), help=", ".join(WORKLOADS))
    parser.add_argument("--gpu", action="append", help="may be given several times")
    parser.add_argument("--json", type=Path, help="write both results of each row, a line each")
    arguments = parser.parse_args()
    lines, pairs = [], []
    print(HEADER, flush=True)
    for key in arguments.gpu or ["rtx3060-12gb", "h100-80gb"]:
        gpu = find_gpu(key)
        with Worker(roomy(gpu)) as worker:
            for name in arguments.names:
                try:
                    dry, portable = both(worker, WORKLOADS[name], gpu)
                except (MemfitError, RuntimeError, ValueError) as problem:
                    print(f"| {name} | {key} | {problem} | | | | | |", flush=True)
                    continue
                print(row(name, gpu, dry, portable), flush=True)
                pairs.append((dry, portable))
                lines.append(json.dumps({"workload": name, "gpu": key, "dryrun": dry, "portable": portable}))
    print(summary(pairs))
    if arguments.json is not None:
        arguments.json.write_text("\n".join(lines) + "\n")


def summary(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    """How many are equal, the median and the largest difference, of each peak."""
    parts = []
    for peak in PEAKS:
        key = f"peak_{peak}_bytes"
        errors = [abs(portable[key] / dry[key] - 1) for dry, portable in pairs]
        equal = sum(error == 0 for error in errors)
        middle, most = (f"{100 * find(errors):.3f} %" for find in (statistics.median, max))
        parts.append(f"{peak}: {equal} of {len(errors)} equal, median {middle}, largest {most}")
    return "; ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
