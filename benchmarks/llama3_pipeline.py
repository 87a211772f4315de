"""The 405B model of `llama3_parallel` cut into pipeline stages, as torchtitan cuts it: 1F1B and interleaved.

    torchrun … benchmarks/llama3_pipeline.py --flavor 405B --batch 32 --seq 8192 --tp 8 --pp 8

Every rank has one stage, or with ``--schedule interleaved`` two (its own and the one half way on). Layers
are dealt as torchtitan's ``generate_split_points`` did: evenly, what is over to the stages after the first.
FSDP2 keeps blocks whole within a step, as there: a gather for every micro-batch would cost too much.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from typing import Any

import llama3_parallel as llama
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel


def layers_of(stage: int, stages: int, layers: int) -> range:
    """Which layers a stage has: the middle ones get those that are left over."""
    base, extra = divmod(layers, stages)
    sizes = [base] * stages
    for number in range(1, stages):
        if extra and number < stages:
            sizes[number], extra = sizes[number] + 1, extra - 1
    if sizes[-1] > base:  # what is left for the last stage is what the splits before it leave
        sizes[-1] = layers - sum(sizes[:-1])
    begin = sum(sizes[:stage])
    return range(begin, begin + sizes[stage])


class Stage(nn.Module):
    """Some layers, with the embedding before the first and the output layer after the last."""

    turns: Tensor

    def __init__(self, flavor: llama.Flavor, length: int, number: int, stages: int) -> None:
        super().__init__()
        self.first, self.last = number == 0, number == stages - 1
        self.tok_embeddings = nn.Embedding(llama.VOCABULARY, flavor.dim) if self.first else None
        chosen = layers_of(number, stages, flavor.layers)
        self.layers = nn.ModuleDict({str(i): llama.Block(flavor) for i in chosen})
        self.norm = llama.RMSNorm(flavor.dim) if self.last else None
        self.output = nn.Linear(flavor.dim, llama.VOCABULARY, bias=False) if self.last else None
        turns = torch.empty(length, flavor.head_dim // 2, dtype=torch.complex64)
        self.register_buffer("turns", turns)

    def forward(self, h: Tensor) -> Tensor:
        if self.tok_embeddings is not None:
            h = self.tok_embeddings(h)
        for layer in self.layers.values():
            h = layer(h, self.turns)
        return h if self.output is None or self.norm is None else self.output(self.norm(h))


def build(options: argparse.Namespace, mesh: DeviceMesh, number: int, stages: int) -> Stage:
    """One stage on this rank's GPU: cut by layers, by matrices, by rows."""
    with torch.device("meta"):
        stage = Stage(llama.FLAVORS[options.flavor], options.seq, number, stages)
    if options.tp > 1:
        llama.parallelize_tensors(stage, mesh["tp"], whole_output=False)
    if options.ac != "none":
        llama.checkpoint_blocks(stage, options.ac)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    data = mesh["dp", "cp"]._flatten("dp_cp") if options.cp > 1 else mesh["dp"]
    for block in stage.layers.values():
        fully_shard(block, mesh=data, mp_policy=policy, reshard_after_forward=False)
    fully_shard(stage, mesh=data, mp_policy=policy, reshard_after_forward=False)
    stage.to_empty(device="cuda")
    with torch.no_grad():
        for parameter in stage.parameters():
            nn.init.trunc_normal_(parameter, std=0.02)
    return stage


def shapes(options: argparse.Namespace, stage: Stage, micro_batch: int) -> tuple[Tensor, Tensor]:
    """What goes into a stage and comes out, of one micro-batch and one rank: on meta, only shapes count."""
    length, dim = options.seq // options.cp, llama.FLAVORS[options.flavor].dim
    bf16 = {"dtype": torch.bfloat16, "device": "meta", "requires_grad": True}
    hidden = torch.empty(micro_batch, length // options.tp, dim, **bf16)
    tokens = torch.empty(micro_batch, length, dtype=torch.int64, device="meta")
    logits = torch.empty(micro_batch, length, llama.VOCABULARY // options.tp, **bf16)
    return tokens if stage.first else hidden, logits if stage.last else hidden


def loss_of(mesh: DeviceMesh, tensor_parallel: bool, logits: Tensor, labels: Tensor) -> Tensor:
    whole = DTensor.from_local(logits, mesh["tp"], [Shard(-1)]) if tensor_parallel else logits
    return llama.cross_entropy(whole, labels)


def train(options: argparse.Namespace) -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    data = dist.get_world_size() // (options.pp * options.tp * options.cp)
    names = ("pp", "dp", "cp", "tp")
    mesh = init_device_mesh("cuda", (options.pp, data, options.cp, options.tp), mesh_dim_names=names)
    own, many = mesh["pp"].get_local_rank(), 2 if options.schedule == "interleaved" else 1
    numbers = range(own, options.pp * many, options.pp)
    parts = [build(options, mesh, number, options.pp * many) for number in numbers]
    micro_batch = options.batch // options.micro_batches
    stages = []
    for number, part in zip(numbers, parts, strict=True):
        enters, leaves = shapes(options, part, micro_batch)
        device = torch.device("cuda", torch.cuda.current_device())
        stages.append(
            PipelineStage(
                part, number, options.pp * many, device, enters, leaves, group=mesh["pp"].get_group()
            )
        )
    loss = partial(loss_of, mesh, options.tp > 1)
    schedule: Any = (
        Schedule1F1B(stages[0], options.micro_batches, loss_fn=loss)
        if many == 1
        else ScheduleInterleaved1F1B(stages, options.micro_batches, loss_fn=loss)
    )
    parameters = [parameter for part in parts for parameter in part.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)
    for _ in range(options.steps):
        one_step(options, mesh, parts, schedule)
        nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


def one_step(options: argparse.Namespace, mesh: DeviceMesh, parts: list[Stage], schedule: Any) -> None:
    size = (options.batch, options.seq)
    tokens, labels = (torch.randint(llama.VOCABULARY, size).to("cuda") for _ in range(2))
    buffers = [tokens, labels, *(part.turns for part in parts)]
    with (
        llama.sharded_sequence(options, mesh, buffers),
        loss_parallel(),
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
    ):
        inputs = (tokens,) if parts[0].first else ()
        target = {"target": labels, "losses": []} if parts[-1].last else {}
        schedule.step(*inputs, **target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flavor", choices=sorted(llama.FLAVORS), default="405B")
    parser.add_argument("--batch", type=int, default=32, help="of each data-parallel rank")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--ac", choices=["none", "selective", "full"], default="full")
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=8)
    parser.add_argument("--schedule", choices=["1f1b", "interleaved"], default="1f1b")
    parser.add_argument("--steps", type=int, default=2)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
