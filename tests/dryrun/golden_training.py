"""Small training jobs on the made-up GPU: what PyTorch's own allocator did, one fresh fork per job.

Run under the preloaded library: `python golden_training.py OUT_FOLDER JOB...`. torch is imported once; each
job then runs in a fork that chooses its GPU before it touches CUDA, so no job sees another's allocator.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer would import it, in every fork
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.nn.attention import SDPBackend

DEVICE_BASE = 0x100000000000
STEPS = 3
SHORT_ACTIONS = {
    "alloc": "a",
    "free_completed": "f",
    "segment_alloc": "S",
    "segment_free": "s",
    "segment_map": "M",
    "segment_unmap": "m",
    "oom": "o",
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training run; its name says it: MODEL-bBATCH-{fp32,bf16}-smCC[-VARIANT]."""

    model: str
    batch: int
    autocast: bool
    compute_capability: int
    variant: str = ""

    @classmethod
    def named(cls, name: str) -> Job:
        model, batch, dtype, arch, *variant = name.split("-")
        return cls(
            model=model,
            batch=int(batch[1:]),
            autocast=dtype == "bf16",
            compute_capability=int(arch[2:]),
            variant="".join(variant),
        )

    @property
    def optimizer(self) -> str:
        return self.variant if self.variant in ("fused", "single") else "foreach"

    @property
    def dropout(self) -> float:
        return 0.1 if self.variant == "dropout" else 0.0

    @property
    def allocator_settings(self) -> str:
        return "expandable_segments:True" if self.variant == "expandable" else ""


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = (z.view(b, t, self.heads, c // self.heads).transpose(1, 2) for z in self.qkv(x).split(c, 2))
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        return F.dropout(self.proj(y.transpose(1, 2).reshape(b, t, c)), self.dropout, self.training)


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln1, self.attn, self.ln2 = nn.LayerNorm(dim), Attention(dim, heads, dropout), nn.LayerNorm(dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, 4 * dim), nn.GELU(approximate="tanh"), nn.Linear(4 * dim, dim), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    vocab, seq, dim, heads, layers = 8192, 256, 384, 6, 2

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job
        self.tok, self.pos = nn.Embedding(self.vocab, self.dim), nn.Embedding(self.seq, self.dim)
        self.blocks = nn.ModuleList(Block(self.dim, self.heads, job.dropout) for _ in range(self.layers))
        self.ln, self.head = nn.LayerNorm(self.dim), nn.Linear(self.dim, self.vocab, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        x = self.tok(idx) + self.pos(torch.arange(idx.shape[1], device=idx.device))
        x = F.dropout(x, self.job.dropout, self.training)
        for block in self.blocks:
            if self.job.variant == "checkpoint":
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(self.ln(x))

    def example(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randint(self.vocab, (n, self.seq)), torch.randint(self.vocab, (n, self.seq))


class MLP(nn.Sequential):
    def __init__(self, job: Job) -> None:
        super().__init__(
            nn.Linear(784, 2048),
            nn.ReLU(),
            nn.Dropout(job.dropout),
            nn.Linear(2048, 2048),
            nn.GELU(),
            nn.Linear(2048, 10),
        )

    def example(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(n, 784), torch.randint(10, (n,))


class CNN(nn.Sequential):
    def __init__(self, job: Job) -> None:
        def stage(i: int, o: int) -> list[nn.Module]:
            return [
                nn.Conv2d(i, o, 3, padding=1, bias=False),
                nn.BatchNorm2d(o),
                nn.ReLU(inplace=True),
                nn.MaxPool2d(2),
            ]

        layers = [*stage(3, 64), *stage(64, 128), *stage(128, 256)]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 100))

    def example(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(n, 3, 128, 128), torch.randint(100, (n,))


MODELS: dict[str, Any] = {"mlp": MLP, "gpt": GPT, "cnn": CNN}


def stat(key: str, kind: str = "current") -> int:
    return torch._C._cuda_memoryStats(0)[key]["all"][kind]


def bytes_of(t: torch.Tensor) -> int:
    return t.numel() * t.element_size()


def rounded(t: torch.Tensor) -> int:
    return (bytes_of(t) + 511) // 512 * 512


def train_step(
    job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor
) -> dict[str, int]:
    torch.cuda.reset_peak_memory_stats()
    step = {"before": stat("allocated_bytes")}
    with torch.autocast("cuda", torch.bfloat16, enabled=job.autocast):
        out = model(x)
        loss = F.cross_entropy(out.flatten(0, -2), y.flatten())
    del out
    step |= {"after_forward": stat("allocated_bytes"), "peak_to_forward": stat("allocated_bytes", "peak")}
    loss.backward()
    step |= {"after_backward": stat("allocated_bytes"), "peak_to_backward": stat("allocated_bytes", "peak")}
    optimizer.step()
    step["peak_to_optimizer"] = stat("allocated_bytes", "peak")
    optimizer.zero_grad()
    del loss
    return step | {
        "after": stat("allocated_bytes"),
        "peak_requested": stat("requested_bytes", "peak"),
        "peak_reserved": stat("reserved_bytes", "peak"),
        "peak_active": stat("active_bytes", "peak"),
        "after_requested": stat("requested_bytes"),
    }


def attention_backend(job: Job, model: Any) -> str | None:
    """Which attention kernel PyTorch chose; asking allocates, so it comes last."""
    if job.model != "gpt":
        return None
    dtype = torch.bfloat16 if job.autocast else torch.float32
    shape = (job.batch, model.seq, model.heads, model.dim // model.heads)
    q = torch.empty(shape, device="cuda", dtype=dtype, requires_grad=True).transpose(1, 2)
    return SDPBackend(torch._fused_sdp_choice(q, q, q, None, job.dropout, True)).name


def force_attention(job: Job) -> None:
    if job.variant in ("math", "efficient"):
        for switch, variant in (
            ("flash", ""),
            ("cudnn", ""),
            ("mem_efficient", "efficient"),
            ("math", "math"),
        ):
            getattr(torch.backends.cuda, f"enable_{switch}_sdp")(variant == job.variant)


def event_count() -> int:
    return len(torch.cuda.memory._snapshot()["device_traces"][0])


def layout(snapshot: dict[str, Any], mark: int) -> dict[str, Any]:
    """The last step's events, by address from the device's base, and the segments at the end."""
    trace = snapshot["device_traces"][0][mark:]
    return {
        "last_step_events": [
            [SHORT_ACTIONS[e["action"]], e["addr"] - DEVICE_BASE, e["size"]]
            for e in trace
            if e["action"] in SHORT_ACTIONS
        ],
        "segments": [
            [
                s["total_size"],
                s["segment_type"],
                [[b["size"], b["requested_size"], b["state"][0] + b["state"][-1]] for b in s["blocks"]],
            ]
            for s in snapshot["segments"]
        ],
    }


def run(job: Job) -> dict[str, Any]:
    """Three AdamW steps; the result has the fields of the recorded files."""
    library = ctypes.CDLL(None)
    library.memfit_stats.restype = ctypes.c_char_p
    force_attention(job)
    model = MODELS[job.model](job)
    inputs, labels = model.example(job.batch)
    torch.cuda.memory._record_memory_history(max_entries=200000, stacks="python")
    model = model.cuda()
    after_model = stat("allocated_bytes")
    optimizer = torch.optim.AdamW(
        model.parameters(), foreach=job.optimizer == "foreach", fused=job.optimizer == "fused"
    )
    x, y = inputs.cuda(), labels.cuda()
    steps, mark = [], 0
    for i in range(STEPS):
        if i == STEPS - 1:
            mark = event_count()
        steps.append(train_step(job, model, optimizer, x, y))
    states = [t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t) and t.is_cuda]
    everything = {id(t): t for t in [*model.parameters(), *model.buffers(), x, y, *states]}.values()
    result = {
        "torch": torch.__version__,
        "model": job.model,
        "batch": job.batch,
        "autocast": job.autocast,
        "optim": job.optimizer,
        "dropout": job.dropout,
        "checkpoint": job.variant == "checkpoint",
        "conf": job.allocator_settings,
        "params_bytes": sum(map(rounded, model.parameters())),
        "buffers_bytes": sum(map(rounded, model.buffers())),
        "optimizer_bytes": sum(map(rounded, states)),
        "inputs_bytes": rounded(x) + rounded(y),
        "after_model": after_model,
        # What stays allocated and is none of the above: cuBLAS workspaces and the like.
        "other_requested_bytes": steps[-1]["after_requested"] - sum(map(bytes_of, everything)),
        "kernel_launches": json.loads(library.memfit_stats())["launches"],
        "steps": steps,
    }
    result |= layout(torch.cuda.memory._snapshot(), mark)
    torch.cuda.memory._record_memory_history(None)
    return result | {"sdpa": attention_backend(job, model)}


def child(name: str, folder: Path) -> None:
    job = Job.named(name)
    os.environ["MEMFIT_GPU_CC"] = str(job.compute_capability)
    if job.allocator_settings:
        torch._C._accelerator_setAllocatorSettings(job.allocator_settings)
    (folder / f"{name}.json").write_text(json.dumps(run(job)))


def main(folder: Path, names: list[str]) -> None:
    for name in names:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                child(name, folder)
                code = 0
            except Exception:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        if os.waitpid(pid, 0)[1]:
            print(f"{name} failed", file=sys.stderr)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
