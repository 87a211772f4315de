"""A first training step on several GPUs, each gradient averaged when it is there: the peak of one phase.

The optimizer is PyTorch's AdamW, of all parameters or of this rank's part of them.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from course_model import Transformer, cross_entropy
from reading import tell

PHASES = ("after_model_init", "before_optimizer_step", "after_optimizer_step")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=["baseline", "sharded"])
    parser.add_argument("phase", choices=PHASES)
    for name in ("batch", "context", "width", "inner", "layers", "heads", "vocabulary"):
        parser.add_argument(name, type=int)
    options = parser.parse_args()
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    tell(phase_peaks(options)[options.phase])


def phase_peaks(options: Any) -> dict[str, int]:
    """The largest allocated bytes of each phase."""
    peaks = {}

    def end(phase: str) -> None:
        torch.cuda.synchronize()
        peaks[phase] = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()

    sizes = {name: getattr(options, name) for name in ("vocabulary", "context", "width", "layers", "heads")}
    model = Transformer(**sizes, inner=options.inner).to("cuda")
    handles = _reduce_gradients(model)
    end(PHASES[0])
    optimizer = (Sharded if options.mode == "sharded" else torch.optim.AdamW)(
        model.parameters(), lr=1e-3, foreach=False
    )
    shape = (options.batch, options.context)
    tokens, targets = (torch.randint(options.vocabulary, shape, device="cuda") for _ in range(2))
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cuda", torch.bfloat16):
        loss = cross_entropy(model(tokens), targets)
    loss.backward()
    for handle in handles:
        handle.wait()
    handles.clear()
    end(PHASES[1])
    optimizer.step()
    end(PHASES[2])
    return peaks


def _reduce_gradients(model: torch.nn.Module) -> list[Any]:
    """Parameters come from the first rank; each gradient is averaged when it is there."""
    handles: list[Any] = []
    with torch.no_grad():
        for parameter in model.parameters():
            dist.broadcast(parameter, src=0)

    def reduce(parameter: torch.Tensor) -> None:
        handles.append(dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG, async_op=True))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(reduce)
    return handles


class Sharded:
    """All parameters become parts of one tensor, of which every rank updates its share."""

    @torch.no_grad()
    def __init__(self, parameters: Any, **settings: Any) -> None:
        self.parameters = list(parameters)
        count = sum(parameter.numel() for parameter in self.parameters)
        self.flat = torch.empty(count, device="cuda")
        begin = 0
        for parameter in self.parameters:
            end = begin + parameter.numel()
            self.flat[begin:end].copy_(parameter.data.view(-1))
            parameter.set_(self.flat[begin:end].view_as(parameter))
            begin = end
        size, rank = count // dist.get_world_size(), dist.get_rank()
        self.first, self.last = rank * size, (rank + 1) * size
        self.parts = list(self._parts())
        self.optimizer = torch.optim.AdamW([part for part, *_ in self.parts], **settings)

    def _parts(self) -> Any:
        begin = 0
        for parameter in self.parameters:
            end = begin + parameter.numel()
            low, high = max(begin, self.first), min(end, self.last)
            if low < high:
                yield self.flat[low:high], parameter, low - begin, high - begin
            begin = end

    def zero_grad(self, set_to_none: bool) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def step(self) -> None:
        for part, parameter, low, high in self.parts:
            part.grad = parameter.grad.view(-1)[low:high]
        self.optimizer.step()
        dist.all_gather_into_tensor(self.flat, self.flat[self.first : self.last])


if __name__ == "__main__":
    main()
