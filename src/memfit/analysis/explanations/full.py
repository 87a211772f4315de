"""A full device: what to change depends on what was going on when it filled."""

from __future__ import annotations

from memfit.analysis.explanations import remedies
from memfit.analysis.explanations.clues import Clues
from memfit.analysis.findings import Advice
from memfit.formats.messages import Message
from memfit.formats.messages_traceback import read_place

_PHASE_WORDS = {
    "loading a checkpoint": "it was loading a checkpoint: a copy on the GPU beside the model is the usual "
    "reason",
    "saving": "it was saving: gathering a whole state on one GPU is the usual reason",
    "optimizer step": "it was in the optimizer's step: its state appears in the first one, and foreach makes "
    "temporary copies",
    "evaluation": "it was evaluating: a graph that is kept, larger batches, or outputs that pile up on the "
    "GPU",
    "generation": "it was generating: the key-value cache grows with every token",
    "loss": "it was at the loss: logits of every token over the whole vocabulary, their copy and their "
    "gradient",
    "attention": "it was in attention: a matrix of scores grows with the square of the sequence",
    "backward": "it was in backward: activations that forward kept are the largest part, as a rule",
    "moving the model to the device": "it was moving a model to the GPU: the weights themselves do not fit",
    "convolution": "it was in a convolution: its workspace can be many times its tensors",
}


def phase_line(message: Message) -> list[str]:
    """What the traceback tells of what was going on."""
    phase = read_place(message.before).phase
    return [_PHASE_WORDS[phase]] if phase in _PHASE_WORDS else []


def advice_for_phase(message: Message, clues: Clues) -> list[Advice]:
    """The changes that lower this peak, the one with the least cost first."""
    if any("vllm" in line for line in message.before):
        return [_server(), remedies.smaller_model()]
    phase = read_place(message.before).phase
    first = {
        "loading a checkpoint": [remedies.load_on_cpu()],
        "saving": [_sharded_state()],
        "optimizer step": [remedies.optimizer_step(), _eight_bits()],
        "evaluation": [remedies.inference_mode()],
        "generation": [remedies.inference_mode(), _cache()],
        "loss": [remedies.chunked_loss()],
        "attention": [remedies.attention()],
        "moving the model to the device": [remedies.smaller_model()],
        "convolution": [_workspace()],
    }.get(phase, [])
    if phase in ("evaluation", "generation", "moving the model to the device"):
        return [*first, _smaller_batch(), remedies.dry_run()]
    general = [remedies.half_precision(), remedies.micro_batches(), remedies.checkpointing(clues)]
    return [*first, *general, remedies.dry_run()]


def _server() -> Advice:
    return Advice(
        action="leave vLLM more room beside its cache: fewer requests at once, fewer tokens at a time, a "
        "smaller share",
        typed="vllm serve MODEL --max-num-seqs 64 --gpu-memory-utilization 0.85",
        kind="shell",
        cost="less throughput under load",
        source="https://docs.vllm.ai/en/latest/configuration/conserving_memory/",
    )


def _smaller_batch() -> Advice:
    return Advice(action="use a smaller batch or a shorter sequence", cost="more steps for the same data")


def _sharded_state() -> Advice:
    return Advice(
        action="save sharded, or gather on rank 0's CPU only",
        typed="options = StateDictOptions(full_state_dict=True, cpu_offload=True)\n"
        "state = get_model_state_dict(model, options=options)",
        kind="python",
        cost="time for the copy to the host",
        source="https://docs.pytorch.org/docs/stable/distributed.checkpoint.html",
    )


def _eight_bits() -> Advice:
    return Advice(
        action="keep the optimizer's state in 8 bits",
        typed="bitsandbytes.optim.AdamW8bit(model.parameters(), lr=lr)",
        kind="python",
        cost="none to little",
        risks="saves about 6 of 8 bytes per trained parameter: little where activations are the larger part",
    )


def _cache() -> Advice:
    return Advice(
        action="bound the cache: fewer new tokens, a smaller batch, or a quantized or static cache",
        typed="model.generate(**inputs, max_new_tokens=256, cache_implementation='static')",
        kind="python",
        cost="a static cache has its full size from the start",
    )


def _workspace() -> Advice:
    return Advice(
        action="let cuDNN choose algorithms with small workspaces",
        typed="torch.backends.cudnn.benchmark = False\ntorch.backends.cudnn.deterministic = True",
        kind="python",
        cost="slower convolutions",
    )
