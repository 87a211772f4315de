"""Llama 3 trained as torchtitan trains it, in a page: FSDP2, tensor and context parallel, checkpointing.

    torchrun --nproc-per-node 8 benchmarks/llama3_parallel.py --flavor 8B --batch 2 --seq 8192 --ac selective

Random tokens, and no more than what decides memory: the architecture (custom RMSNorm, complex rotary
embedding in fp32, repeated key and value heads), bf16 computation over fp32 shards, AdamW, gradient clipping,
and the selective policy that saves attention and every second matrix product. Built on meta: it needs no host
memory.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

VOCABULARY = 128_256
aten = torch.ops.aten
SAVED = {
    aten.mm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}


@dataclass(frozen=True)
class Flavor:
    """One size of Llama 3.1."""

    dim: int
    layers: int
    heads: int
    hidden: int
    kv_heads: int = 8

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


FLAVORS = {
    "debug": Flavor(dim=256, layers=2, heads=8, hidden=768),
    "8B": Flavor(dim=4096, layers=32, heads=32, hidden=14336),
    "70B": Flavor(dim=8192, layers=80, heads=64, hidden=28672),
    "405B": Flavor(dim=16384, layers=126, heads=128, hidden=53248),
}


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[: x.shape[1], None, :]).flatten(3).type_as(x)


class Attention(nn.Module):
    def __init__(self, f: Flavor) -> None:
        super().__init__()
        self.f = f
        self.wq = nn.Linear(f.dim, f.heads * f.head_dim, bias=False)
        self.wk = nn.Linear(f.dim, f.kv_heads * f.head_dim, bias=False)
        self.wv = nn.Linear(f.dim, f.kv_heads * f.head_dim, bias=False)
        self.wo = nn.Linear(f.heads * f.head_dim, f.dim, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (layer(x).view(batch, length, -1, self.f.head_dim) for layer in (self.wq, self.wk, self.wv))
        q, k = rotate(q, turns), rotate(k, turns)
        times = self.f.heads // self.f.kv_heads
        k, v = (
            t.unsqueeze(3).expand(-1, -1, -1, times, -1).reshape(batch, length, -1, self.f.head_dim)
            for t in (k, v)
        )
        out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        return self.wo(out.transpose(1, 2).contiguous().view(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self, f: Flavor) -> None:
        super().__init__()
        self.w1 = nn.Linear(f.dim, f.hidden, bias=False)
        self.w2 = nn.Linear(f.hidden, f.dim, bias=False)
        self.w3 = nn.Linear(f.dim, f.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, f: Flavor) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(f), FeedForward(f)
        self.attention_norm, self.ffn_norm = RMSNorm(f.dim), RMSNorm(f.dim)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), turns)
        return h + self.feed_forward(self.ffn_norm(h))


class Llama(nn.Module):
    turns: Tensor

    def __init__(self, f: Flavor, length: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, f.dim)
        self.layers = nn.ModuleDict({str(i): Block(f) for i in range(f.layers)})
        self.norm = RMSNorm(f.dim)
        self.output = nn.Linear(f.dim, VOCABULARY, bias=False)
        self.register_buffer("turns", torch.empty(length, f.head_dim // 2, dtype=torch.complex64))

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, self.turns)
        return self.output(self.norm(h))


def selective_contexts() -> Any:
    """Saves attention and every second matrix product."""
    count: defaultdict[bool, int] = defaultdict(int)

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if func == aten.mm.default:
            count[context.is_recompute] += 1
            if count[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if func in SAVED else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def checkpoint_blocks(model: Any, mode: str) -> None:
    options = {"context_fn": selective_contexts} if mode == "selective" else {}
    for name, block in model.layers.named_children():
        model.layers.register_module(name, checkpoint_wrapper(block, preserve_rng_state=False, **options))


def parallelize_tensors(model: Any, mesh: DeviceMesh, *, whole_output: bool = True) -> None:
    """Tensor parallel with sequence parallel between, and a loss over shards of the vocabulary.

    With ``whole_output=False`` logits come as this rank's own part, since pipelines pass on plain tensors;
    parts that a stage has not are left out.
    """
    model_plan = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=not whole_output
        ),
    }
    parallelize_module(
        model, mesh, {n: style for n, style in model_plan.items() if getattr(model, n) is not None}
    )
    for block in model.layers.values():
        plan = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
            ),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            **{f"feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")},
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)


def shard(model: Llama, mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for name, block in model.layers.items():
        last = int(name) == len(model.layers) - 1
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=not last)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def build(options: argparse.Namespace) -> tuple[Llama, DeviceMesh]:
    world = dist.get_world_size()
    data = world // (options.tp * options.cp)
    mesh = init_device_mesh("cuda", (data, options.cp, options.tp), mesh_dim_names=("dp", "cp", "tp"))
    with torch.device("meta"):
        model = Llama(FLAVORS[options.flavor], options.seq)
    if options.tp > 1:
        parallelize_tensors(model, mesh["tp"])
    if options.ac != "none":
        checkpoint_blocks(model, options.ac)
    if options.compile:
        for name, block in model.layers.named_children():
            model.layers.register_module(name, torch.compile(block, fullgraph=True))
    shard(model, mesh["dp", "cp"]._flatten("dp_cp") if options.cp > 1 else mesh["dp"])
    model.to_empty(device="cuda")
    with torch.no_grad():
        for parameter in model.parameters():
            nn.init.trunc_normal_(parameter, std=0.02)
    return model, mesh


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


def sharded_sequence(options: argparse.Namespace, mesh: DeviceMesh, buffers: list[Tensor]) -> Any:
    if options.cp == 1:
        return contextlib.nullcontext()
    from torch.distributed.tensor.experimental import context_parallel

    return context_parallel(
        mesh["cp"],
        buffers=buffers,
        buffer_seq_dims=[1, 1, *[0] * (len(buffers) - 2)],
        no_restore_buffers={*buffers[:2]},
    )


def train(options: argparse.Namespace) -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    model, mesh = build(options)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, foreach=True
    )
    whole_vocabulary = partial(loss_parallel) if options.tp > 1 else contextlib.nullcontext
    for _ in range(options.steps):
        tokens, labels = (
            torch.randint(VOCABULARY, (options.batch, options.seq)).to("cuda") for _ in range(2)
        )
        optimizer.zero_grad()
        with (
            sharded_sequence(options, mesh, [tokens, labels, model.turns]),
            whole_vocabulary(),
            sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        ):
            logits = model(tokens)
            loss = cross_entropy(logits, labels)
            del logits
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flavor", choices=sorted(FLAVORS), default="8B")
    parser.add_argument("--batch", type=int, default=2, help="of each data-parallel rank")
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--ac", choices=["none", "selective", "full"], default="selective")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument(
        "--compile", action="store_true", help="each block by torch.compile, as torchtitan does"
    )
    parser.add_argument("--steps", type=int, default=3)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
