"""A rank of a job: what it does is the first argument; prints PyTorch's own account as JSON."""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WIDTH, BLOCKS = 1024, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def blocks() -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def ddp() -> nn.Module:
    return nn.parallel.DistributedDataParallel(blocks().cuda(), find_unused_parameters=True)


def sharded(mesh: object, reshard: bool = True) -> nn.Module:
    with torch.device("meta"):
        model = blocks()
    for block in model:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh).to_empty(device="cuda")


def fsdp() -> nn.Module:
    return sharded(init_device_mesh("cuda", (dist.get_world_size(),)))


def kept() -> nn.Module:
    return sharded(init_device_mesh("cuda", (dist.get_world_size(),)), reshard=False)


def hsdp() -> nn.Module:
    names = ("replicate", "shard")
    return sharded(init_device_mesh("cuda", (dist.get_world_size() // 8, 8), mesh_dim_names=names))


def flat() -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({Block})
    return FullyShardedDataParallel(blocks().cuda(), auto_wrap_policy=policy, use_orig_params=True)


def tensor() -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cuda", (dist.get_world_size() // 8, 8), mesh_dim_names=("data", "tensor"))
    model = blocks().cuda()
    for block in model:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def train(kind: str) -> dict[str, int]:
    makers = {
        "ddp": ddp,
        "zero": ddp,
        "fsdp": fsdp,
        "kept": kept,
        "hsdp": hsdp,
        "flat": flat,
        "tensor": tensor,
    }
    model = makers[kind]()
    if kind == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW)
    else:
        optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(16, WIDTH, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"global": sum(parameter.numel() for parameter in model.parameters())}


def objects() -> dict[str, object]:
    rank, world = dist.get_rank(), dist.get_world_size()
    everybody, own, part = [None] * world, [rank], [None]
    dist.all_gather_object(everybody, {"rank": rank})
    dist.broadcast_object_list(own, src=0)
    dist.scatter_object_list(part, list(range(world)), src=rank)
    dist.barrier()
    total, most, counts = torch.tensor(3).cuda(), torch.tensor(3).cuda(), torch.arange(world).cuda()
    dist.all_reduce(total)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts)
    group = dist.new_group([0, rank])
    return {
        "everybody": everybody, "own": own, "part": part, "sum": total.item(), "max": most.item(),
        "received": received.tolist()[:3], "ranks": [rank, world, dist.get_rank(group)],
    }  # fmt: skip


if __name__ == "__main__":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    found = objects() if sys.argv[1] == "objects" else train(sys.argv[1])
    stats = torch.cuda.memory_stats()
    names = ("requested_bytes", "allocated_bytes", "reserved_bytes")
    print(json.dumps({**found, **{name: stats[f"{name}.all.peak"] for name in names}}))
    dist.destroy_process_group()
