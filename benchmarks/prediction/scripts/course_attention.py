"""What is allocated right after one forward pass of attention in plain PyTorch, or compiled."""

from __future__ import annotations

import argparse
import gc

import torch
from course_model import attention
from reading import DEVICE, tell

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WARM_UP = 5


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("backend", choices=["pytorch", "compile"])
    for name in ("batch", "length", "width"):
        parser.add_argument(name, type=int)
    parser.add_argument("dtype", choices=DTYPES)
    parser.add_argument("--causal", action="store_true")
    options = parser.parse_args()
    operation = attention
    if options.backend == "compile":
        operation = torch.compile(attention)
        torch._functorch.config.donated_buffer = False
    shape, dtype = (options.batch, options.length, options.width), DTYPES[options.dtype]
    q, k, v = (torch.randn(shape, device=DEVICE, dtype=dtype, requires_grad=True) for _ in range(3))
    gradient = torch.randn_like(q)
    mask = _causal_mask(options.length) if options.causal else None
    for _ in range(WARM_UP):
        out = operation(q, k, v, mask=mask)
        out.backward(gradient)
        q.grad = k.grad = v.grad = None
    for _ in range(2):
        operation(q, k, v, mask=mask)
    gc.collect()
    torch.cuda.empty_cache()
    output = operation(q, k, v, mask=mask)
    tell(torch.cuda.memory_allocated())
    del out, output


def _causal_mask(length: int) -> torch.Tensor:
    numbers = torch.arange(length, device=DEVICE)
    return numbers[:, None] >= numbers[None, :]


if __name__ == "__main__":
    main()
