"""What the dry-run worker runs for the tests of this folder: GPT-2 as transformers builds it, three AdamW
steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from memfit.techniques import technique_from_settings, undo_all


class GPT2Steps:
    """GPT-2 124M, batch 8, 1024 tokens, float32: peaks and FLOPs of the third step under given techniques."""

    def __init__(self, autocast: bool = False) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM, masking_utils

        # Reads position ids back from the device, where all values are zeros: it would see packed texts.
        masking_utils.find_packed_sequence_indices = lambda positions: None
        with torch.device("cuda"):
            config = AutoConfig.for_model("gpt2", use_cache=False)
            self.model = AutoModelForCausalLM.from_config(config).train()
        self.autocast = autocast

    def measure(self, techniques: Sequence[dict[str, Any]]) -> dict[str, int]:
        torch.cuda.empty_cache()
        optimizer = torch.optim.AdamW(self.model.parameters())
        for settings in techniques:
            technique_from_settings(settings).apply(self.model, optimizer)
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            self._step(optimizer)
        peak = torch.cuda.memory_stats()["allocated_bytes.all.peak"]
        with FlopCounterMode(display=False) as flops:
            self._step(optimizer)
        undo_all(self.model)
        return {"allocated_bytes": peak, "flops": flops.get_total_flops()}

    def random_states(self, techniques: Sequence[dict[str, Any]]) -> list[list[int]]:
        """The generator's offset when each attention of a step runs, forward and recompute: (forward,
        recompute)."""
        from torch.utils._python_dispatch import TorchDispatchMode

        generator = torch.cuda.default_generators[0]
        offsets: list[int] = []

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if torch.Tag.nondeterministic_seeded in func.tags and "backward" not in func.__name__:
                    offsets.append(generator.get_offset())
                return func(*args, **(kwargs or {}))

        for settings in techniques:
            technique_from_settings(settings).apply(self.model)
        ids = torch.zeros(2, 64, dtype=torch.long, device="cuda")
        with Watch():
            loss = self.model(input_ids=ids, labels=ids).loss
            forward = list(offsets)
            loss.backward()
        undo_all(self.model)
        self.model.zero_grad()
        return [forward, offsets[len(forward) :], [generator.get_offset()]]

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        ids = torch.randint(0, 50257, (8, 1024), device="cuda")
        with torch.autocast("cuda", torch.bfloat16, enabled=self.autocast):
            loss = self.model(input_ids=ids, labels=ids).loss
        del ids
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad()


def allocator_settings() -> dict[str, Any]:
    """The allocator before, under and after the technique, in a process with settings of its own."""
    from memfit.techniques import AllocatorSettings, undo

    torch._C._accelerator_setAllocatorSettings("roundup_power2_divisions:[256:1,512:2],max_split_size_mb:40")
    model = torch.nn.Linear(1, 1)
    held, seen = [], {}

    def look(when: str) -> None:
        held.append(torch.empty(50 << 20, device="cuda"))
        snapshot = torch.cuda.memory._snapshot()
        start = held[-1].data_ptr()
        (own,) = [s for s in snapshot["segments"] if 0 <= start - s["address"] < s["total_size"]]
        settings = snapshot["allocator_settings"]
        seen[when] = [own["is_expandable"], settings["max_split_size"], settings["roundup_power2_divisions"]]

    look("before")
    AllocatorSettings().apply(model)
    look("applied")
    undo(model)
    look("undone")
    return seen


class Deep:
    """Twelve wide layers on the made-up GPU: the plain step does not fit 8 GB, a piece of it does."""

    def __init__(self) -> None:
        layers = [torch.nn.Sequential(torch.nn.Linear(2048, 2048), torch.nn.GELU()) for _ in range(12)]
        self.model = torch.nn.Sequential(*layers).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)

    def guarded(self, samples: int, steps: int) -> dict[str, Any]:
        """Steps under `memfit.guard`: what it did, and the peak of what was reserved."""
        from memfit import guard, training_step

        step = guard(training_step(self.model, self.optimizer, _mean_square))
        settings = []
        for _ in range(steps):
            step(torch.zeros(samples, 2048, device="cuda"))
            settings.append(str(step.setting))
        return {
            "settings": settings,
            "whats": [event.what for event in step.log],
            "reason": step.log[0].reason,
            "peak_bytes": torch.cuda.max_memory_reserved(),
            "total_bytes": torch.cuda.mem_get_info()[1],
        }

    def batch_size(self) -> dict[str, Any]:
        """What `memfit.find_batch_size` finds, and whether the size after it runs out of memory."""
        from memfit import find_batch_size

        found = find_batch_size(
            self.model,
            self.optimizer,
            _mean_square,
            lambda size: torch.zeros(size, 2048, device="cuda"),
            margin=0.0,
            start=1024,
            multiple_of=1024,
        )
        next_bytes = min(t.peak_bytes or 2**60 for t in found.tried if t.batch_size > found.batch_size)
        return {
            "batch_size": found.batch_size,
            "peak_bytes": found.peak_bytes,
            "limit_bytes": found.limit_bytes,
            "next_bytes": next_bytes,
            "state": len(self.optimizer.state),
        }


def _mean_square(model: Any, batch: Any) -> Any:
    return model(batch).square().mean()


def _devices_after_two_steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Where parameters are then, and where once all techniques are undone."""
    for _ in range(2):
        model(torch.zeros(8, 64, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    devices = {p.device.type for p in model.parameters()}
    undo_all(model)
    return sorted(devices) + sorted({p.device.type for p in model.parameters()})


class OffloadSteps:
    """Twelve wide blocks on the made-up GPU: peaks, the host's pool, and which stream waits for which."""

    def __init__(self, width: int = 1024, blocks: int = 12, batch: int = 4096) -> None:
        torch.manual_seed(0)
        layers = [
            torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Linear(width, width))
            for _ in range(blocks)
        ]
        self.model = torch.nn.Sequential(*layers).cuda()
        self.batch = torch.zeros(batch, width, device="cuda")

    def measure(self, techniques: Sequence[dict[str, Any]], steps: int = 3) -> dict[str, Any]:
        """Of the last step: the peak, bytes at rest, slabs pinned, waits as (stream, stream of the event)."""
        for settings in techniques:
            technique_from_settings(settings).apply(self.model)
        waits: list[tuple[str, str, str]] = []
        for number in range(steps):
            self.model.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            resting = torch.cuda.memory_allocated()
            with _WatchedStreams(waits if number == steps - 1 else []):
                self.model(self.batch).square().mean().backward()
        peak = torch.cuda.max_memory_allocated()
        forwards = [vars(block).get("forward") for block in self.model]
        keepers = [getattr(f, "keeper", None) for f in forwards]
        pools = {id(k.pool): k.pool for k in keepers if hasattr(k, "pool")}
        gradients = {p.grad.device.type for p in self.model.parameters() if p.grad is not None}
        undo_all(self.model)
        self.model.zero_grad()
        devices = {p.device.type for p in self.model.parameters()}
        return {
            "peak_bytes": peak,
            "resting_bytes": resting,
            "slabs": [pool.slab_count for pool in pools.values()],
            "waits": waits,
            "gradients": sorted(gradients),
            "devices": sorted(devices),
        }

    def norms(self) -> list[str]:
        """Blocks with norms and pruned weights whose parameters live on the host: devices after two steps."""
        from memfit.techniques import ParameterOffload, Pruning

        blocks = [torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Linear(64, 64)) for _ in range(3)]
        model = torch.nn.Sequential(*blocks).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        Pruning().apply(model, optimizer)
        ParameterOffload().apply(model)
        return _devices_after_two_steps(model, optimizer)

    def frozen(self, checkpointed: bool) -> list[str]:
        """Blocks of frozen layers with adapters, whose parameters live on the host: devices after two
        steps."""
        from memfit.techniques import GradientCheckpointing, LoRA, ParameterOffload

        blocks = [
            torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Linear(64, 64), torch.nn.GELU())
            for _ in range(3)
        ]
        model = torch.nn.Sequential(*blocks).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        LoRA(targets=["*.1"]).apply(model, optimizer)
        ParameterOffload().apply(model, optimizer)
        if checkpointed:
            GradientCheckpointing().apply(model)
        return _devices_after_two_steps(model, optimizer)


class _WatchedStreams:
    """Notes each wait and each copy: ``("wait", stream, stream of the event)``, ``("copy", stream, "")``."""

    def __init__(self, log: list[tuple[str, str, str]]) -> None:
        self._log = log

    def __enter__(self) -> None:
        kind, log = torch.cuda.Stream, self._log
        self._before = kind.wait_event, kind.record_event, torch.Tensor.copy_
        recorded: dict[int, str] = {}
        held: list[Any] = []
        compute = torch.cuda.current_stream().cuda_stream
        names = {compute: "compute"}

        def name(stream: Any) -> str:
            return names.setdefault(stream.cuda_stream, f"side {len(names)}")

        def record(stream: Any, event: Any = None) -> Any:
            event = self._before[1](stream, event)
            recorded[id(event)] = name(stream)
            held.append(event)
            return event

        def wait(stream: Any, event: Any) -> None:
            log.append(("wait", name(stream), recorded.get(id(event), "earlier")))
            self._before[0](stream, event)

        def copy(tensor: Any, source: Any, non_blocking: bool = False) -> Any:
            if tensor.device != source.device:
                log.append(("copy", name(torch.cuda.current_stream()), tensor.device.type))
            return self._before[2](tensor, source, non_blocking)

        kind.wait_event, kind.record_event, torch.Tensor.copy_ = wait, record, copy

    def __exit__(self, *exc: Any) -> None:
        kind = torch.cuda.Stream
        kind.wait_event, kind.record_event, torch.Tensor.copy_ = self._before
