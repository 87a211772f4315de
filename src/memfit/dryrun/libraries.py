"""What libraries and drivers take of a GPU: each constant with its spread, and where it was read.

PyTorch's own decisions need none of these: workspaces of cuBLAS and cuBLASLt, pools of CUDA graphs, buffers
of Triton kernels go through its allocator, which the dry run runs. The table is what remains. No figure comes
from rows that memfit's predictions are then held against, but where ``source`` says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from memfit.core.units import MIB

BESIDE_THE_PEAKS = "convolution workspace beside the peaks"
"""The estimate that is no part of the peaks: the largest workspace that cuDNN's convolutions would like."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A figure that a library or driver decides.

    Args:
        what: in words.
        low, expected, high: bytes, or shares of something that ``what`` names.
        source: where it was read, or by what it was fitted.
    """

    what: str
    low: float
    expected: float
    high: float
    source: str


_BARE = "a process that has done nothing yet"

CONTEXTS: Mapping[int, Spread] = MappingProxyType(
    {
        75: Spread(
            what="context on Turing",
            low=200 * MIB,
            expected=240 * MIB,
            high=400 * MIB,
            source="240 MiB idle on a T4 (Zheng-Chong/CatVTON#133); 200 to 700 MiB before kernels were "
            "loaded lazily (pytorch/pytorch#28113)",
        ),
        80: Spread(
            what="context on A100 and A30",
            low=380 * MIB,
            expected=414 * MIB,
            high=520 * MIB,
            source=f"414 MiB of {_BARE}, 80 GB card, in a public out-of-memory message; about 400 MB "
            "(pytorch/pytorch#109888)",
        ),
        86: Spread(
            what="context on GeForce RTX 30, A-series",
            low=250 * MIB,
            expected=320 * MIB,
            high=420 * MIB,
            source="287,047,680 B in all with one tensor of 12 MiB and lazy loading (pytorch/pytorch#86509); "
            "300-odd MB (pytorch/pytorch#107667)",
        ),
        89: Spread(
            what="context on Ada",
            low=426 * MIB,
            expected=470 * MIB,
            high=560 * MIB,
            source=f"426 MiB of {_BARE}, torch 2.10+cu130 (unslothai/unsloth-zoo#1053); 470 MiB with kernels "
            "loaded (3DTopia/Phidias-Diffusion#8)",
        ),
        90: Spread(
            what="context on Hopper",
            low=500 * MIB,
            expected=612 * MIB,
            high=720 * MIB,
            source=f"612 MiB of {_BARE} on an H200, in a public out-of-memory message",
        ),
        120: Spread(
            what="context on GeForce RTX 50, RTX PRO",
            low=450 * MIB,
            expected=503 * MIB,
            high=620 * MIB,
            source=f"503 MiB of {_BARE} on an RTX 5090 (Ksuriuri/index-tts-vllm#91)",
        ),
    }
)
"""By compute capability. The ends of the spreads are one reading's distance to both sides where there is but
one; capabilities that are not here take a quarter to both sides of the catalogue's figure."""

UNKNOWN_CONTEXT_SHARE = 0.25

LOADED_KERNELS = Spread(
    what="kernels loaded into the context while a script runs (part of the context above)",
    low=0,
    expected=44 * MIB,
    high=150 * MIB,
    source="470 MiB with kernels loaded less 426 MiB bare, both on Ada (see there)",
)

EAGER_LOADING = Spread(
    what="more context with CUDA_MODULE_LOADING=EAGER",
    low=300_000_000,
    expected=379_584_512,
    high=1_000_000_000,
    source="666,632,192 B instead of 287,047,680 B (pytorch/pytorch#86509); more than 1000 MB before "
    "CUDA 11.7 (pytorch/pytorch#107667)",
)

CONVOLUTIONS = Spread(
    what="memory that convolutions' workspaces add to the reserved peak, in largest workspaces by the rule",
    low=0,
    expected=0.5,
    high=4.0,
    source="0: a cached block serves; 1: it gets a segment of its own; expected: the middle of the two. The "
    "upper end is from recordings (MnasNet, 3.6), and bounded by the share below",
)
"""The rule itself is in ``native/workspaces.c``: cuDNN transposes NCHW for tensor cores (ptrblck,
https://discuss.pytorch.org/t/123686; https://docs.mosaicml.com/projects/composer, Channels Last); Winograd's
sizes on GPUs without TF32 are those of Kineto's public trace of ResNet-50 on a V100."""

CACHING_SHARE = Spread(
    what="reserved peak where convolutions with workspaces ran, as a share of the dry run's",
    low=-0.08,
    expected=0.0,
    high=0.20,
    source="ten recordings of seven CNNs on an RTX 3060 and an RTX 4060 (xMem): -7.7 % (ConvNeXt-Tiny) to "
    "+18.7 % (MnasNet), after LOADED_KERNELS",
)
"""Fitted on the rows that benchmarks/prediction holds it against. There each model is judged by the spread of
the others."""

RULED_SIZE_SHARE = Spread(
    what="sizes by a rule inside the peaks (cuDNN RNN, CTC, cuFFT, cuSOLVER), as a share of the rule's",
    low=-1.0,
    expected=0.0,
    high=1.0,
    source="not measured by anybody that was found; nothing, and twice as much",
)

NCCL_SHARE = Spread(
    what="memory of NCCL's communicators, as a share of 600 MB each",
    low=-0.15,
    expected=0.0,
    high=0.25,
    source="544 MB for two and 688 MB for more A100 with NVLink (NVIDIA/nccl#964), to which sends between "
    "single ranks may add much more (4.3 GB by all-to-all among eight H100, NVIDIA/nccl#1685)",
)

CUBLAS = (
    Spread(
        what="cuBLAS workspace of a thread and stream, before Hopper (in the peaks: PyTorch allocates it)",
        low=8_519_680,
        expected=8_519_680,
        high=8_519_680,
        source="PyTorch's own code, aten/src/ATen/cuda/CublasHandlePool.cpp; seen in public snapshots",
    ),
    Spread(
        what="the same since Hopper",
        low=33_554_432,
        expected=33_554_432,
        high=33_554_432,
        source="PyTorch's own code, aten/src/ATen/cuda/CublasHandlePool.cpp; seen in public snapshots",
    ),
)
"""Not used by memfit: PyTorch's own code decides, in the dry run too. Here for the reader."""

ALL: tuple[Spread, ...] = (
    *CONTEXTS.values(),
    LOADED_KERNELS,
    EAGER_LOADING,
    CONVOLUTIONS,
    CACHING_SHARE,
    RULED_SIZE_SHARE,
    NCCL_SHARE,
    *CUBLAS,
)
"""Every constant, as docs/library-memory.md lists them."""
