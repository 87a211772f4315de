"""What ranks do in the tests: functions that the ranks' processes can import."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from memfit.core.errors import MemfitError
from memfit.distributed import (
    DistributedMemory,
    MemorySynchronization,
    compare_with_one_process,
    groups,
    wrap,
)
from memfit.planning.plan import Plan


def refusals(*calls: Any) -> list[str]:
    """What each call is refused with."""
    texts = []
    for call in calls:
        try:
            call()
            texts.append("not refused")
        except MemfitError as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts


def memory() -> dict[str, Any]:
    """Distributed memory of a rank, with limits that differ."""
    limits = ["6000B", "3000B", "3000B"]
    with DistributedMemory(num_gpus=3, limit=limits) as own:
        block = own.allocate(shape=(300, 2), dtype="float32", name="weights")
        values = torch.arange(600.0).reshape(300, 2)
        own.write(block, values)
        dtensor = own.dtensor(block)
        local = dtensor.to_local().data_ptr() == own.local(block).data_ptr()
        full = torch.equal(dtensor.full_tensor(), values)
        doubled = torch.equal((dtensor * 2).full_tensor(), values * 2)
        before = own.synchronize()
        done = own.rebalance()
        same = torch.equal(own.read(block), values)
        rank = groups.rank()
        refused = refusals(
            lambda: own.allocate("9kB"),
            lambda: own.allocate("8kB"),
            lambda: own.allocate("12kB", split="by_free"),
            lambda: own.dtensor(block),
            lambda: own.allocate("1kB", split=[1, 2]),
            lambda: own.allocate("1Gb"),
            lambda: own.run(lambda shard: 1 / (rank - 1), block),
            lambda: DistributedMemory(num_gpus=2),
            lambda: DistributedMemory(limit=1000 + rank),
        )
        odd = own.allocate("100B", split=[50, 25, 25], name="odd")
        sums = own.run(lambda shard: float(shard.sum()), block)
        rows = own.block(block).rows
        own.deallocate(odd)
        refused += refusals(lambda: own.deallocate(odd))
        if rank == 1:
            own._rank("x").deallocate(block)
        refused += refusals(own.synchronize)
    refused += refusals(own.statistics)
    return {
        "local": local, "full": full, "doubled": doubled, "same": same, "rows": rows, "sums": sums,
        "before": before, "done": done, "refused": refused,
    }  # fmt: skip


def synchronize() -> dict[str, Any]:
    """Three ranks: one has a flipped bit in a parameter, another in optimizer state; buffers drift."""
    groups.join()
    rank = groups.rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    sync = MemorySynchronization(sync_frequency=2)
    wanted = model[0].weight.detach().clone()
    moment = optimizer.state[model[0].bias]["exp_avg"].clone()
    with torch.no_grad():
        if rank == 1:
            model[0].weight.view(torch.int32)[2, 3] ^= 1
        if rank == 2:
            optimizer.state[model[0].bias]["exp_avg"][0] += 1e-3
        model[1].running_mean.fill_(float(rank))
    first = sync.step(model, optimizer)
    second = sync.step(model, optimizer, statistics={"loss": float(rank)})
    repaired = torch.equal(model[0].weight, wanted)
    repaired &= torch.equal(optimizer.state[model[0].bias]["exp_avg"], moment)
    again = sync.synchronize(model, optimizer)
    return {
        "first": first,
        "second": second,
        "repaired": repaired,
        "again": again,
        "mean": model[1].running_mean,
    }


def cannot_repair() -> list[Any]:
    """Two ranks that differ: there is no majority, so a rank must be named; and parameters that are
    averaged."""
    groups.join()
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(float(groups.rank()))
        model.bias.fill_(0.0)
    refused = refusals(lambda: MemorySynchronization(1).step(model))
    refused += refusals(lambda: MemorySynchronization(1, repair="raise").step(model))
    untouched = model.weight.detach().clone()
    found = MemorySynchronization(1, repair=1).step(model)
    repaired = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.fill_(float(groups.rank()))
    MemorySynchronization(1, parameters="average").step(model)
    return [refused, untouched, found, repaired, model.weight.detach()]


def hybrid() -> list[Any]:
    """Four ranks, sharded by two and replicated by two: a flipped bit is repaired among the shard's
    copies."""
    from torch.distributed.device_mesh import init_device_mesh

    groups.join()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = wrap(nn.Linear(8, 8, bias=False), strategy="fsdp2", mesh=mesh)
    whole = model.weight.full_tensor()
    if groups.rank() == 3:
        model.weight.to_local().data.view(torch.int32)[0, 0] ^= 4
    found = MemorySynchronization(1, repair=1).step(model)
    pure = wrap(nn.Linear(8, 8), strategy="fsdp2")
    return [torch.equal(model.weight.full_tensor(), whole), found, MemorySynchronization(1).step(pure)]


class Blocks(nn.Module):
    """Equal blocks without dropout or BatchNorm: the same on any number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3)
        )
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Feed(nn.Module):
    """Two matrices by their usual names, with what tensor parallel does to biases."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(nn.functional.gelu(self.fc1(x)))


class Words(nn.Module):
    """Embedding, blocks, output layer; the loss is computed outside."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(Feed() for _ in range(3))
        self.head = nn.Linear(16, 50, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def a_plan(*techniques: dict[str, Any]) -> Plan:
    """A plan with these techniques; its figures are of no account here."""
    figures = {
        "peak_requested_bytes": 1, "peak_allocated_bytes": 1, "peak_reserved_bytes": 1, "step_seconds": 1.0
    }  # fmt: skip
    return Plan.from_json(
        {
            "schema_version": 1, "workload": "blocks", "workload_spec": None, "gpu": "a100-80gb",
            "budget_bytes": 1 << 30, "techniques": list(techniques), "exactness": "exact", "plain": figures,
            "planned": figures, "recompute_percent": 0.0, "lower_bound_percent": None, "engine": "dryrun",
            "torch": None, "seed": 0,
        }
    )  # fmt: skip


CHECKPOINTING = {"technique": "gradient_checkpointing", "blocks": {f"layers.{n}": [] for n in range(3)}}
CHUNKED = {"technique": "chunked_cross_entropy", "chunks": 3, "layer": "head"}
FUSED = {"technique": "optimizer_implementation", "implementation": "foreach"}


def guarded(trouble: str) -> dict[str, Any]:
    """A guarded training on two ranks, one of which is in trouble."""
    from memfit.techniques.adaptive import guard, training_step

    groups.join()
    rank = groups.rank()
    torch.manual_seed(3)
    model, batches = Blocks(), [torch.randn(8, 6) for _ in range(3)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if trouble == "wrapped":
        model = nn.parallel.DistributedDataParallel(model)
    updates = []

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        value = model(batch).square().mean()
        if trouble == "broken" and rank == 0:
            raise ValueError("a mistake")
        if rank == 1 and (trouble == "always" or (trouble == "short" and len(batch) > 2)):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return value

    def update(*_: Any) -> None:
        updates.append(1)
        if trouble == "update" and rank == 0 and len(updates) == 2:  # of the second step, once
            raise torch.OutOfMemoryError("CUDA out of memory")

    optimizer.register_step_post_hook(update)
    step = guard(training_step(model, optimizer, loss, max_grad_norm=0.5), model=model, optimizer=optimizer)
    try:
        for batch in batches:
            step(batch.tensor_split(2)[rank])
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "log": [event.what for event in step.log],
        "pieces": step.setting.micro_batches,
        "parameters": [parameter.detach() for parameter in model.parameters()],
    }


def agree() -> list[Any]:
    """Each strategy, plain and planned, against one process; and what `wrap` refuses."""
    torch.manual_seed(9)
    batches = [torch.randn(8, 6) for _ in range(3)]

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    found = [
        compare_with_one_process(
            Blocks,
            loss,
            batches,
            optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3),
            strategy=strategy,
            plan=plan,
        )
        for strategy in ("ddp", "fsdp2")
        for plan in (None, a_plan(CHECKPOINTING, FUSED))
    ]
    torch.manual_seed(8)
    words = [torch.randint(50, (8, 12)) for _ in range(2)]
    found += [
        compare_with_one_process(
            Words,
            lambda model, batch: nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten()),
            words,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
            strategy=strategy,
            plan=plan,
        )
        for strategy, plan in (("fsdp2", a_plan(CHUNKED)), ("zero1", None), ("tp", a_plan(CHECKPOINTING)))
    ]
    model, _ = wrap(
        Blocks(), strategy="fsdp2", plan=a_plan(CHECKPOINTING), optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
    )
    recomputed = []
    model.layers[0][0].register_forward_hook(lambda *_: recomputed.append(1))
    model(batches[0]).sum().backward()
    in_backward = {"technique": "optimizer_in_backward"}
    refused = refusals(
        lambda: wrap(Blocks(), plan=a_plan(FUSED)),
        lambda: wrap(Blocks(), plan=a_plan(in_backward), optimizer=torch.optim.SGD),
        lambda: wrap(Blocks(), strategy="zero"),
        lambda: wrap(Blocks(), strategy="hsdp"),
        lambda: wrap(Blocks(), strategy="tp"),
        lambda: wrap(Words(), strategy="tp2+ddp"),
        lambda: wrap(Words(), strategy="tp", plan=a_plan(CHUNKED)),
        lambda: wrap(nn.Linear(2, 2), plan=a_plan(CHECKPOINTING)),
        lambda: compare_with_one_process(Blocks, loss, [torch.randn(3, 6)], optimizer=torch.optim.SGD),
    )
    sharded = model.layers[0][0].weight.to_local().shape[0]
    dist.barrier()
    return [found, len(recomputed), refused, sharded]
