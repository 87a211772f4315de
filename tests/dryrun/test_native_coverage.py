"""What PyTorch programs do with a GPU, they can do with the made-up one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest
from coverage_cases import CASES, PREAMBLE, REPORT
from forked import Case, Outcome, run_cases

from memfit.core.devices import find_gpu
from memfit.dryrun.environment import gpu_environment

pytestmark = pytest.mark.dryrun

ESTIMATED = {
    "conv2d": ["cuDNN workspace", "convolution workspace beside the peaks"],
    "LSTM": ["cuDNN dropout states", "cuDNN RNN workspace and reserve space"],
    "GRU": ["cuDNN RNN workspace and reserve space"],
    "FFT": ["cuFFT work area"],
    "matmul": [],
}

GPT_STEP = """
class Block(torch.nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.norm, self.qkv = heads, torch.nn.LayerNorm(dim), torch.nn.Linear(dim, 3 * dim)
        up, down = torch.nn.Linear(dim, 4 * dim), torch.nn.Linear(4 * dim, dim)
        self.mlp = torch.nn.Sequential(up, torch.nn.GELU(), down)
    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.norm(x)).split(c, 2))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        return x + self.mlp(x)
blocks = [Block(128, 2), Block(128, 2)]
model = torch.nn.Sequential(torch.nn.Embedding(512, 128), *blocks, torch.nn.Linear(128, 512)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
tokens = torch.randint(512, (4, 129), device="cuda")
for _ in range(2):
    with torch.autocast("cuda", torch.bfloat16):
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
assert torch.cuda.get_device_capability() == {capability}
# CUB asks which of the compiled architectures runs, and has no other.
torch.nn.EmbeddingBag(500, 48).cuda()(torch.randint(500, (8, 9), device="cuda")).sum().backward()
x = cuda(10000)
x.sort(stable=True), x.cumsum(0), x.kthvalue(3), x.cummax(0), torch.randperm(10000, device="cuda")
torch.unique_consecutive(tokens), torch.unique(tokens, return_counts=True), x[tokens.flatten()]
assert torch.cuda.max_memory_allocated() > 4 * 4 * sum(p.numel() for p in model.parameters())
"""

ARCHITECTURES = ("75", "80", "86", "89", "90", "100", "103", "120")


def quiet(base: dict[str, str]) -> dict[str, str]:
    return {**base, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    cases = {name: Case(code=PREAMBLE + code + REPORT) for name, code in CASES.items()}
    for arch in ARCHITECTURES:
        code = GPT_STEP.replace("{capability}", str(divmod(int(arch), 10)))
        cases[arch] = Case(code=PREAMBLE + code, env={"MEMFIT_GPU_CC": arch})
    return run_cases(cases, quiet(gpu_environment(find_gpu("h100-80gb"))))


@pytest.mark.parametrize("name", CASES)
def test_it_runs(name: str, outcomes: dict[str, Outcome]) -> None:
    assert outcomes[name].code == 0, outcomes[name].output


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture_trains_a_gpt(arch: str, outcomes: dict[str, Outcome]) -> None:
    assert outcomes[arch].code == 0, outcomes[arch].output


@pytest.mark.parametrize("name", ESTIMATED)
def test_sizes_that_are_made_up_are_named(name: str, outcomes: dict[str, Outcome]) -> None:
    refused, estimates = json.loads(outcomes[name].output.splitlines()[-1])
    assert estimates == ESTIMATED[name]
    assert refused == []


def test_skipped_calls_are_named(outcomes: dict[str, Outcome]) -> None:
    refused, _ = json.loads(outcomes["profiler"].output.splitlines()[-1])
    assert "cuptiActivityEnable" in refused


BACKWARD = """
import torch, sys
model = torch.nn.Linear(4, 4).cuda()
model(torch.randn(2, 4, device="cuda")).sum().backward()
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [("", 0), ("raise ValueError('mine')", 1), ("sys.exit(3)", 3)],
    ids=["end", "raise", "exit"],
)
def test_a_process_that_ends_right_after_backward_ends_cleanly(end: str, code: int) -> None:
    env = quiet(gpu_environment(find_gpu("rtx3060-12gb")))
    done = subprocess.run(
        [sys.executable, "-c", BACKWARD + end], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert "terminate" not in done.stderr


def test_the_asynchronous_allocator() -> None:
    env = quiet(gpu_environment(find_gpu("rtx3060-12gb"))) | {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}
    code = "import torch; x = torch.ones(1 << 20, device='cuda'); print(torch.cuda.memory_allocated())"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str(4 << 20), done.stderr


@pytest.mark.slow
def test_torch_compile_with_real_kernels(tmp_path: os.PathLike[str]) -> None:
    caches = {name: str(tmp_path) for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}
    env = quiet(gpu_environment(find_gpu("a100-80gb"))) | caches | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    code = """
        import torch
        step = torch.compile(lambda x: (x * 2).relu().sum())
        step(torch.randn(64, 64, device="cuda", requires_grad=True)).backward()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
