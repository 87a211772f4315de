"""What to change, as it is typed. Each function gives one advice for what is known of the job."""

from __future__ import annotations

from memfit.allocators.candidates import RISKS
from memfit.analysis.explanations.clues import Clues
from memfit.analysis.findings import Advice
from memfit.core.units import GIB, MIB
from memfit.formats.messages import Message
from memfit.formats.messages_traceback import read_place

TORCH_NOTES = "https://docs.pytorch.org/docs/stable/notes/cuda.html"
PROCESS_QUERY = "nvidia-smi --query-compute-apps=pid,process_name,used_memory --format=csv"


def variable_of(message: Message, clues: Clues) -> str:
    """The variable that this build of PyTorch reads: as its own message names it, or else by version."""
    named = message.words.get("variable")
    if named is not None:
        return named
    if message.framework == "pytorch (ROCm)":
        return "PYTORCH_HIP_ALLOC_CONF"
    version = clues.torch_version
    return "PYTORCH_ALLOC_CONF" if version is not None and version >= (2, 10) else "PYTORCH_CUDA_ALLOC_CONF"


def shell_line(variable: str, value: str, *, windows: bool) -> str:
    """How a variable is set before the program starts."""
    return f"set {variable}={value}" if windows else f"export {variable}={value}"


def is_windows(message: Message) -> bool:
    """Whether the traceback has the paths of Windows."""
    return read_place(message.before).windows


def too_old_for_expandable(message: Message, clues: Clues) -> bool:
    """Whether this PyTorch is from before 2.1, by its version or by the form of its message."""
    version = clues.torch_version
    if version is not None:
        return version < (2, 1)
    return message.form.startswith(("1.", "0."))


def expandable_segments(message: Message, clues: Clues, saving_bytes: int | None) -> Advice:
    """Segments that grow: the remedy for reserved memory in pieces."""
    old = too_old_for_expandable(message, clues)
    upgrade = "; the format of the message is of an older version, so update PyTorch first" if old else ""
    return Advice(
        action=f"let segments grow instead of cutting up fixed ones (PyTorch 2.1 or later, Linux{upgrade})",
        typed=shell_line(variable_of(message, clues), "expandable_segments:True", windows=False),
        kind="shell",
        saving_bytes=saving_bytes,
        cost="none to a few percent of a step; set it before the program starts, in the launcher",
        risks=" ".join(RISKS["expandable_segments"][:2]),
        source=f"{TORCH_NOTES}#optimizing-memory-usage-with-pytorch-cuda-alloc-conf",
    )


def is_it_active() -> Advice:
    """The setting is there, and segments are in pieces all the same."""
    return Advice(
        action="expandable_segments is set already: see whether this process really has it (some builds "
        "leave it "
        "off, 2.9.1 ignored PYTORCH_ALLOC_CONF for CUDA, and it must be set before the first CUDA call)",
        typed='print(torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"])',
        kind="python",
    )


def max_split_size(message: Message, clues: Clues, requested_bytes: int | None) -> Advice:
    """Keep large blocks whole."""
    size = 512 if requested_bytes is None else max(20, min(512, requested_bytes // (2 * MIB)))
    return Advice(
        action="do not let small tensors cut up large blocks (any version since 1.10)",
        typed=shell_line(
            variable_of(message, clues), f"max_split_size_mb:{size}", windows=is_windows(message)
        ),
        kind="shell",
        cost="more cudaMalloc calls when memory is nearly full, each of which waits for the GPU",
        risks=RISKS["max_split_size_mb"][0] + " Instead of expandable segments, not beside them.",
        source=f"{TORCH_NOTES}#optimizing-memory-usage-with-pytorch-cuda-alloc-conf",
    )


def keep_the_big_tensor() -> Advice:
    """Allocate once."""
    return Advice(
        action="allocate the big tensor once, before the loop, and write into it in each step",
        typed="- out = torch.empty(shape, device='cuda')  # in every step\n+ torch.mul(a, b, out=buffer)  "
        "# buffer is made once",
        kind="diff",
        cost="its bytes stay taken between steps",
    )


def split_the_request() -> Advice:
    """Work on a part at a time."""
    return Advice(
        action="split the big tensor: process the batch, the sequence or the rows in chunks",
        typed="torch.cat([f(part) for part in x.split(len(x) // 4)])",
        kind="python",
        cost="a few more kernel launches",
    )


def attention() -> Advice:
    """Attention without the score matrix."""
    return Advice(
        action="use memory-efficient attention, which never holds the matrix of scores",
        typed="- attn = (q @ k.transpose(-2, -1) * scale).softmax(-1) @ v\n"
        "+ attn = F.scaled_dot_product_attention(q, k, v, is_causal=True)",
        kind="diff",
        cost="none; faster as a rule (transformers: attn_implementation='sdpa')",
        risks="attention weights cannot be returned, and results differ in the last bits",
        source="https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html",
    )


def shorter_sequence() -> Advice:
    """Quadratic terms."""
    return Advice(
        action="shorten or chunk the sequence (or the image, the video): half the length is a quarter of "
        "such a matrix",
        cost="less context at a time",
    )


def checkpointing(clues: Clues) -> Advice:
    """Recompute activations; memfit finds the cheapest plan."""
    return Advice(
        action="recompute activations in backward instead of keeping them, where that is cheapest",
        typed="memfit fit train.py:workload --gpu GPU --budget SIZE",
        kind="shell",
        cost="up to about a third more time per step if every block is recomputed; the plan says how much",
        source="docs/planning.md",
    )


def micro_batches() -> Advice:
    """The same step in parts."""
    return Advice(
        action="split the batch into micro-batches and add up their gradients: the same step, fewer "
        "activations",
        typed="- model(x).loss.backward()\n+ for part in x.chunk(4):\n+     (model(part).loss / "
        "4).backward()",
        kind="diff",
        cost="smaller kernels; batch statistics (BatchNorm) see the micro-batch",
    )


def half_precision() -> Advice:
    """Autocast."""
    return Advice(
        action="run the forward pass in bfloat16",
        typed="with torch.autocast('cuda', dtype=torch.bfloat16):\n    loss = model(x).loss",
        kind="python",
        cost="none; faster on GPUs since Ampere. Weights stay in float32",
        risks="other rounding: compare the loss curve",
    )


def inference_mode() -> Advice:
    """No graph where nothing is trained."""
    return Advice(
        action="evaluate without keeping a graph, and move results to the CPU as they come",
        typed="- outputs.append(model(x))\n+ with torch.inference_mode():\n+     "
        "outputs.append(model(x).cpu())",
        kind="diff",
        cost="none",
    )


def optimizer_step() -> Advice:
    """Fused instead of foreach."""
    return Advice(
        action="update without temporary copies of the parameters: the fused optimizer",
        typed="torch.optim.AdamW(model.parameters(), lr=lr, fused=True)  # or foreach=False",
        kind="python",
        cost="none for fused; foreach=False is slower",
        risks="the optimizer's state itself appears in the first step and stays",
    )


def load_on_cpu() -> Advice:
    """Map a checkpoint, free it, and set the device first."""
    return Advice(
        action="load the checkpoint on the CPU, and choose the rank's own GPU before anything touches CUDA",
        typed="+ torch.cuda.set_device(int(os.environ['LOCAL_RANK']))\n"
        "- state = torch.load(path)\n+ state = torch.load(path, map_location='cpu', mmap=True)",
        kind="diff",
        cost="none; the copy to the GPU happens in load_state_dict",
        source="https://docs.pytorch.org/docs/stable/generated/torch.load.html",
    )


def chunked_loss() -> Advice:
    """Logits in parts."""
    return Advice(
        action="compute the loss in chunks of tokens, so that the logits are never whole",
        typed="memfit fit train.py:workload --gpu GPU --budget SIZE --allow reordered",
        kind="shell",
        cost="little: the last layer's output is computed again in backward",
        source="docs/techniques.md",
    )


def smaller_model() -> Advice:
    """Weights that do not fit."""
    return Advice(
        action="load fewer bytes of weights: bfloat16, 8 or 4 bits, or part of the model on the CPU",
        typed="AutoModel.from_pretrained(name, dtype=torch.bfloat16, device_map='auto')",
        kind="python",
        cost="device_map moves what does not fit to the CPU, which is slow",
    )


def find_processes(message: Message) -> Advice:
    """Who holds the device."""
    if message.framework == "pytorch (ROCm)":
        return Advice(
            action="see who holds the GPU", typed="rocm-smi --showpids --showmeminfo vram", kind="shell"
        )
    return Advice(
        action="see who holds the GPU; inside a container nvidia-smi may not show processes of the host",
        typed=PROCESS_QUERY,
        kind="shell",
    )


def free_processes(pids: tuple[int, ...], saving_bytes: int | None) -> Advice:
    """End what is yours and left over."""
    named = " ".join(map(str, pids[:6])) or "PID"
    return Advice(
        action="end those that are yours and no longer needed (a stopped notebook, a crashed run); ask for "
        "the rest",
        typed=f"ps -o pid,user,etime,cmd -p {named.replace(' ', ',')}\nkill {named}",
        kind="shell",
        saving_bytes=saving_bytes,
        cost="ends those programs",
        risks="check first whose they are",
    )


def another_gpu() -> Advice:
    """Move to a free device."""
    return Advice(
        action="or run on a GPU that is free",
        typed="CUDA_VISIBLE_DEVICES=1 python train.py",
        kind="shell",
    )


def raise_fraction(message: Message) -> Advice:
    """The per-process limit."""
    return Advice(
        action="raise or reset the per-process fraction; find where it is set",
        typed="torch.cuda.set_per_process_memory_fraction(1.0)",
        kind="python",
        cost="none; other processes on that GPU then have less",
        source="https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory.set_per_process_memory_fraction.html",
    )


def find_fraction() -> Advice:
    """Where the limit came from."""
    return Advice(
        action="look for what set the limit: a test, a framework, or per_process_memory_fraction in the "
        "variable",
        typed="grep -rn memory_fraction . ; env | grep ALLOC_CONF",
        kind="shell",
    )


def snapshot() -> Advice:
    """What would tell more."""
    return Advice(
        action="record the allocations up to the failure, and give memfit the file beside this text",
        typed="torch.cuda.memory._record_memory_history(max_entries=100_000)\n"
        "torch.cuda.memory._dump_snapshot('oom.pickle')  # in an except block\n"
        "# then: memfit explain error.txt oom.pickle",
        kind="python",
        cost="about 2 µs per allocation",
    )


def dry_run() -> Advice:
    """Where the memory goes, without the GPU."""
    return Advice(
        action="see where the memory goes, on a made-up GPU",
        typed="memfit dryrun --gpu GPU -- train.py",
        kind="shell",
        cost="seconds; no GPU is needed",
    )


def blocking_launch() -> Advice:
    """The true line of an asynchronous error."""
    return Advice(
        action="run once with synchronous launches to see the true line",
        typed="CUDA_LAUNCH_BLOCKING=1 python train.py",
        kind="shell",
        cost="slow: for finding the place only",
    )


def shm_size(bytes_wanted: int | None) -> Advice:
    """More /dev/shm."""
    gib = max(8, -(-(bytes_wanted or 0) // GIB))
    return Advice(
        action="give the container more shared memory (Docker's default is 64 MB)",
        typed=f"docker run --shm-size={gib}g …   # or --ipc=host",
        kind="shell",
        cost="RAM, as it is used",
        source="https://docs.docker.com/reference/cli/docker/container/run/",
    )
