# ruff: noqa: E501  (a table of code, one case after another)
"""Corners of torch.cuda that must run on the made-up GPU, as code; each runs in a process of its own."""

from __future__ import annotations

CASES = {
    "element-wise and item": "x = cuda(100, 100); (x * x + 1).sum().item()",
    "matmul": "[cuda(64, 64, dtype=d) @ cuda(64, 64, dtype=d) for d in (torch.float32, torch.bfloat16, torch.float64)]",
    "batched products": "a = cuda(4, 8, 8); torch.bmm(a, a); torch.baddbmm(a, a, a); torch.addmm(a[0], a[0], a[0])",
    "sort, topk, cumsum": "x = cuda(10000); x.sort(); x.topk(10); x.cumsum(0)",
    "nonzero": "assert torch.ones(100, device='cuda').nonzero().numel() == 0",
    "unique": "torch.randint(10, (1000,), device='cuda').unique()",
    "embedding": (
        "torch.nn.Embedding(1000, 64).cuda()(torch.randint(1000, (8, 2048), device='cuda')).sum().backward()"
    ),
    "layer_norm, softmax, gelu": "F.gelu(F.layer_norm(grad(32, 64), (64,)).softmax(-1)).sum().backward()",
    "group_norm": "F.group_norm(grad(2, 32, 8, 8), 8).sum().backward()",
    "conv2d": "torch.nn.Conv2d(3, 8, 3).cuda()(cuda(2, 3, 32, 32)).sum().backward()",
    "conv2d benchmark": (
        "torch.backends.cudnn.benchmark = True\ntorch.nn.Conv2d(3, 8, 3).cuda()(cuda(2, 3, 32, 32)).sum().backward()"
    ),
    "conv2d channels_last bf16": (
        "last = {'memory_format': torch.channels_last}\n"
        "conv = torch.nn.Conv2d(16, 16, 3).cuda().bfloat16().to(**last)\n"
        "conv(cuda(2, 16, 32, 32, dtype=torch.bfloat16).to(**last)).sum().backward()"
    ),
    "conv2d without cuDNN": (
        "torch.backends.cudnn.enabled = False\ntorch.nn.Conv2d(3, 8, 3).cuda()(cuda(2, 3, 32, 32)).sum().backward()"
    ),
    "conv_transpose2d": "torch.nn.ConvTranspose2d(3, 8, 3).cuda()(cuda(2, 3, 32, 32)).sum().backward()",
    "batch_norm": "torch.nn.BatchNorm2d(8).cuda()(cuda(2, 8, 4, 4)).sum().backward()",
    "pooling, interpolation": (
        "F.interpolate(F.max_pool2d(grad(2, 3, 16, 16), 2), scale_factor=2, mode='bilinear').sum().backward()"
    ),
    "grid_sample": (
        "grid = F.affine_grid(torch.eye(2, 3, device='cuda').repeat(2, 1, 1), (2, 3, 8, 8), align_corners=True)\n"
        "F.grid_sample(grad(2, 3, 8, 8), grid, align_corners=True).sum().backward()"
    ),
    "attention flash": (
        "q = grad(2, 4, 64, 64, dtype=torch.bfloat16)\n"
        "with sdpa_kernel(SDPBackend.FLASH_ATTENTION):\n    F.scaled_dot_product_attention(q, q, q).sum().backward()"
    ),
    "attention cuDNN": (
        "q = grad(2, 4, 64, 64, dtype=torch.bfloat16)\n"
        "with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):\n    F.scaled_dot_product_attention(q, q, q).sum().backward()"
    ),
    "LSTM": (
        "net = torch.nn.LSTM(16, 16, num_layers=2, bidirectional=True, dropout=0.1).cuda()\n"
        "net(cuda(5, 2, 16))[0].sum().backward()\n"
        "assert all(p.grad.shape == p.shape for p in net.parameters())"
    ),
    "LSTM with projection": (
        "torch.nn.LSTM(16, 32, proj_size=8, num_layers=2).cuda()(cuda(5, 2, 16))[0].sum().backward()"
    ),
    "LSTM packed": (
        "rnn = torch.nn.utils.rnn\n"
        "y, _ = torch.nn.LSTM(16, 32).cuda()(rnn.pack_padded_sequence(cuda(5, 2, 16), torch.tensor([5, 3])))\n"
        "rnn.pad_packed_sequence(y)[0].sum().backward()"
    ),
    "LSTM autocast": (
        "net = torch.nn.LSTM(16, 32).cuda()\n"
        "with torch.autocast('cuda', torch.bfloat16):\n    y = net(cuda(5, 2, 16))[0]\n"
        "y.sum().backward()"
    ),
    "LSTM without cuDNN": (
        "torch.backends.cudnn.enabled = False\ntorch.nn.LSTM(16, 16).cuda()(cuda(5, 2, 16))[0].sum().backward()"
    ),
    "GRU": "torch.nn.GRU(16, 32, batch_first=True).cuda()(cuda(5, 2, 16))[0].sum().backward()",
    "RNN without bias": "torch.nn.RNN(16, 32, bias=False).cuda()(cuda(5, 2, 16))[0].sum().backward()",
    "CTC loss": (
        "F.ctc_loss(cuda(20, 2, 5).log_softmax(2), torch.randint(1, 5, (2, 6), device='cuda'), "
        "torch.tensor([20, 20]), torch.tensor([6, 6]))"
    ),
    "GradScaler": (
        "m = torch.nn.Linear(4, 4).cuda(); o = torch.optim.SGD(m.parameters(), 0.1); s = torch.amp.GradScaler('cuda')\n"
        "s.scale(m(cuda(2, 4)).sum()).backward(); s.step(o); s.update()"
    ),
    "clip_grad_norm_": (
        "m = torch.nn.Linear(4, 4).cuda(); m(cuda(2, 4)).sum().backward()\n"
        "torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)"
    ),
    "optimizers": (
        "o = torch.optim\n"
        "for kind in (o.SGD, o.Adam, o.AdamW, o.Adagrad, o.RMSprop, o.Adafactor, o.Muon):\n"
        "    m = torch.nn.Linear(64, 64, bias=False).cuda(); opt = kind(m.parameters())\n"
        "    m(cuda(2, 64)).sum().backward(); opt.step()"
    ),
    "CUDA graph": (
        "g = torch.cuda.CUDAGraph(); x = torch.ones(10, device='cuda')\nwith torch.cuda.graph(g):\n    y = x * 2\ng.replay()"
    ),
    "graphed callables": (
        "f = torch.cuda.make_graphed_callables(torch.nn.Linear(8, 8).cuda(), (grad(2, 8),)); f(grad(2, 8)).sum().backward()"
    ),
    "MemPool": (
        "p = torch.cuda.MemPool()\nwith torch.cuda.use_mem_pool(p):\n    torch.empty(1 << 22, device='cuda')"
    ),
    "pinned memory": "x = torch.randn(1000).pin_memory(); x.cuda(non_blocking=True); assert x.is_pinned()",
    "streams and events": (
        "s = torch.cuda.Stream(); e = torch.cuda.Event(); x = torch.ones(10, device='cuda')\n"
        "x.record_stream(s); e.record(s); e.synchronize()"
    ),
    "checkpoint": (
        "import torch.utils.checkpoint as c\n"
        "c.checkpoint(torch.nn.Linear(4, 4).cuda(), grad(2, 4), use_reentrant=False).sum().backward()"
    ),
    "expandable segments": (
        "torch._C._accelerator_setAllocatorSettings('expandable_segments:True')\n"
        "x = [torch.empty(30 << 20, device='cuda') for _ in range(4)]; del x; torch.cuda.empty_cache()"
    ),
    "FFT": (
        "x = grad(4, 64, 64); torch.fft.irfft2(torch.fft.rfft2(x)).sum().backward(); torch.fft.fftn(x)\n"
        "torch.stft(cuda(4096), 256, window=torch.ones(256, device='cuda'), return_complex=True)"
    ),
    "linear algebra": (
        "a = torch.eye(8, device='cuda').repeat(3, 1, 1); L = torch.linalg\n"
        "for f in (L.qr, L.cholesky, L.eigh, L.svd, L.inv, L.lu_factor, L.svdvals, L.eigvalsh, L.ldl_factor):\n    f(a)\n"
        "L.solve(a, a); L.lstsq(a, a); torch.cholesky_solve(a, a); L.solve_triangular(a, a, upper=True)"
    ),
    "run-time compiled operator": "torch.special.bessel_j0(cuda(8))",
    "sparse products": (
        "a = torch.eye(8, device='cuda'); torch.sparse.mm(a.to_sparse(), a); a.to_sparse_csr() @ a; a.to_sparse_csr() @ a[0]"
    ),
    "profiler": (
        "from torch.profiler import ProfilerActivity as A, profile\n"
        "with profile(activities=[A.CPU, A.CUDA]) as p:\n    cuda(8, 8) @ cuda(8, 8)\np.key_averages().table()"
    ),
    "NCCL alone": (
        "import torch.distributed as d\n"
        "d.init_process_group('nccl', store=d.HashStore(), rank=0, world_size=1)\n"
        "d.all_reduce(torch.ones(4, device='cuda')); d.barrier(); d.destroy_process_group()"
    ),
    "torch.compile without kernels": "torch.compile(lambda x: (x * 2).relu(), backend='aot_eager')(cuda(8))",
    "flex_attention": (
        "from torch.nn.attention.flex_attention import flex_attention\nimport warnings; warnings.simplefilter('ignore')\n"
        "q = cuda(1, 2, 16, 16); flex_attention(q, q, q)"
    ),
    "values are zeros": "assert torch.ones(4, device='cuda').cpu().sum() == 0",
    "print": "print(torch.ones(4, device='cuda'))",
    "TransformerEncoder": (
        "layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)\n"
        "torch.nn.TransformerEncoder(layer, 2).cuda()(cuda(2, 16, 64)).sum().backward()"
    ),
    "large vocabulary": (
        "F.cross_entropy(grad(512, 50257), torch.randint(50257, (512,), device='cuda')).backward()"
    ),
    "fp8 product": (
        "a = cuda(64, 64).to(torch.float8_e4m3fn); one = torch.ones((), device='cuda')\n"
        "torch._scaled_mm(a, a.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)"
    ),
}

PREAMBLE = """
import torch, torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
def cuda(*shape, **options): return torch.randn(*shape, device="cuda", **options)
def grad(*shape, **options): return cuda(*shape, requires_grad=True, **options)
"""

# What the code refused or made up by a rule, as the last line of its output.
REPORT = """
import ctypes, json
library = ctypes.CDLL(None)
library.memfit_unknown_calls.restype = library.memfit_estimates.restype = ctypes.c_char_p
torch.cuda.synchronize()
print(json.dumps([json.loads(library.memfit_unknown_calls()), json.loads(library.memfit_estimates())]))
"""
