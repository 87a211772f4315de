"""What the capture tests run in forks of a worker."""

from __future__ import annotations

import gc

from memfit.capture.step import build_step
from memfit.capture.true_values import true_values
from memfit.capture.workloads import from_reference


def run_small(reference):
    """Follows a reference and runs its small step; the workload's name and text."""
    workload = from_reference(reference)
    build_step(workload, device="cpu", size="small").run()
    return [workload.name, workload.spec]


def plain_loop(reference, steps=3):
    """A training loop as anybody writes it; the allocator's peaks in the last step."""
    import torch

    with true_values():
        workload = from_reference(reference)
        step = build_step(workload, device="cuda")
        model, optimizer, batch = step.model, step.optimizer, step.batch
        del step
        dtype = {"bf16-autocast": torch.bfloat16, "fp16-autocast": torch.float16}.get(workload.precision)
        for _ in range(steps):
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
            with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
                loss = workload.loss(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss
        statistics = torch.cuda.memory_stats()
    return {
        f"peak_{name}_bytes": statistics[f"{name}_bytes.all.peak"]
        for name in ("requested", "allocated", "reserved")
    }


def allocations_of_step(reference):
    """Sizes of the allocations of the third step, as PyTorch's own memory history records them."""
    import torch

    with true_values():
        step = build_step(from_reference(reference), device="cuda")
        step.run()
        step.run()
        gc.collect()
        torch.cuda.memory._record_memory_history(stacks="python")
        step.run()
        events = torch.cuda.memory._snapshot()["device_traces"][0]
    return [event["size"] for event in events if event["action"] == "alloc"]
