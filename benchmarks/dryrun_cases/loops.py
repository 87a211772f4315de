"""Ways to train: optimizers, precision, loops, loaders, checkpoints, compilation."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from case import EVERY, FEW, ONE, Case
from torch import Tensor, nn
from torch.nn import functional as F
from training import GPT, cnn, gpt_loss, image_loss, tokens, train


def optimizer(name: str, **options: Any) -> None:
    model = GPT().cuda()
    loss = gpt_loss(model)
    made = getattr(torch.optim, name)(model.parameters(), lr=1e-3, **options)
    if name == "LBFGS":

        def closure() -> Tensor:
            made.zero_grad()
            value = loss()
            value.backward()
            return value

        made.step(closure)
    else:
        train(model, loss, optimizer=made)


def muon() -> None:
    model = GPT().cuda()
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    train(model, gpt_loss(model), optimizer=torch.optim.Muon(matrices))


def scaled_fp16() -> None:
    model = GPT().cuda()
    made, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cuda")
    loss = gpt_loss(model)
    for _ in range(3):
        with torch.autocast("cuda", torch.float16):
            value = loss()
        scaler.scale(value).backward()
        scaler.unscale_(made)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(made)
        scaler.update()
        made.zero_grad()
        value.item()


def accumulation() -> None:
    model = GPT().cuda()
    made, loss = torch.optim.AdamW(model.parameters()), gpt_loss(model)
    for number in range(8):
        (loss() / 4).backward()
        if number % 4 == 3:
            made.step()
            made.zero_grad(set_to_none=True)


def generation(cache: str | None) -> None:
    """Tokens one after the other, with a cache that grows or that is there from the start."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama",
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1000,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda().eval()
    ids = tokens(1000, 2, 16)
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12}
    for more in ({"do_sample": False}, {"do_sample": True, "top_p": 0.9, "top_k": 20}, {"num_beams": 3}):
        model.generate(ids, **options, **more, **({"cache_implementation": cache} if cache else {}))


def evaluation() -> None:
    """A metric over batches of which the last is smaller, and the best model kept."""
    model = cnn().cuda()
    train_loss, made, best, kept = image_loss(model), torch.optim.SGD(model.parameters(), 0.1), 0.0, None
    for _ in range(3):
        train(model, train_loss, optimizer=made, steps=1)
        model.eval()
        right = total = 0
        with torch.inference_mode():
            for size in (8, 8, 3):
                images = torch.randn(size, 3, 32, 32, device="cuda")
                labels = torch.randint(10, (size,), device="cuda")
                right += (model(images).argmax(1) == labels).sum().item()
                total += size
        model.train()
        if right / total > best:
            best, kept = right / total, copy.deepcopy(model.state_dict())
    del kept


def resuming() -> None:
    """Save, load and go on."""
    model = GPT().cuda()
    made = torch.optim.AdamW(model.parameters())
    train(model, gpt_loss(model), optimizer=made)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "last.pt"
        torch.save({"model": model.state_dict(), "optimizer": made.state_dict(), "step": 2}, path)
        state = torch.load(path, map_location="cuda")
    model.load_state_dict(state["model"])
    made.load_state_dict(state["optimizer"])
    train(model, gpt_loss(model), optimizer=made)


def averaging() -> None:
    model = GPT().cuda()
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99)
    )
    for _ in range(2):
        train(model, gpt_loss(model), steps=1)
        average.update_parameters(model)
    average(tokens())


class _Numbers(torch.utils.data.Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((3, 32, 32), float(index)), index % 10


def workers(context: str) -> None:
    loader = torch.utils.data.DataLoader(
        _Numbers(),
        batch_size=8,
        num_workers=2,
        pin_memory=True,
        shuffle=True,
        persistent_workers=True,
        multiprocessing_context=context,
    )
    model = cnn().cuda()
    made = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        for images, labels in loader:
            F.cross_entropy(model(images.cuda(non_blocking=True)), labels.cuda(non_blocking=True)).backward()
            made.step()
            made.zero_grad()


def sparse_embedding() -> None:
    model = nn.Embedding(1000, 64, sparse=True).cuda()
    made = torch.optim.SparseAdam(model.parameters())
    bag = nn.EmbeddingBag(100, 16, mode="sum").cuda()
    for _ in range(2):
        (model(tokens()).sum() + bag(tokens(100, 4, 8)).sum()).backward()
        made.step()
        made.zero_grad()


def recurrent(kind: str) -> None:
    net = getattr(nn, kind)(32, 64, num_layers=2, dropout=0.1, batch_first=True).cuda()
    x = torch.randn(4, 16, 32, device="cuda")
    train(net, lambda: net(x)[0].float().square().mean())


def checkpointed(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    model = GPT(blocks=3).cuda()
    ids = tokens()

    def loss() -> Tensor:
        x = model.embed(ids)
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return F.cross_entropy(model.head(x).flatten(0, 1), ids.flatten())

    train(model, loss)


def offloaded() -> None:
    model = GPT().cuda()
    loss = gpt_loss(model)
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        train(model, loss)


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * grads[0]


def custom_function() -> None:
    x = torch.randn(64, 64, device="cuda", requires_grad=True)
    _Cube.apply(x).sum().backward()


def penalty() -> None:
    """Two networks against each other, with gradients of gradients."""
    critic, maker = cnn().cuda(), nn.Linear(16, 3 * 32 * 32).cuda()
    first, second = (torch.optim.Adam(net.parameters(), betas=(0.0, 0.9)) for net in (critic, maker))
    for _ in range(2):
        fake = maker(torch.randn(4, 16, device="cuda")).view(4, 3, 32, 32)
        mixed = fake.detach().requires_grad_()
        (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        (critic(fake.detach()).mean() + (slope.flatten(1).norm(dim=1) - 1).square().mean()).backward()
        first.step()
        critic.zero_grad()
        (-critic(maker(torch.randn(4, 16, device="cuda")).view(4, 3, 32, 32)).mean()).backward()
        second.step()
        maker.zero_grad()


def policy() -> None:
    """An agent that samples what it does, whose episodes end by chance."""
    net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2)).cuda()
    made = torch.optim.Adam(net.parameters())
    for _ in range(2):
        chances, state = [], torch.zeros(4)
        for _ in range(20):
            choice = torch.distributions.Categorical(logits=net(state.cuda()))
            action = choice.sample()
            chances.append(choice.log_prob(action))
            state = state + 0.1 * (action.item() - 0.5)
        (-torch.stack(chances).sum()).backward()
        made.step()
        made.zero_grad()


def per_sample_gradients() -> None:
    from torch.func import functional_call, grad, vmap

    net = nn.Linear(16, 4).cuda()
    values = {name: p.detach() for name, p in net.named_parameters()}

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(net, params, (x,)).square().sum()

    vmap(grad(loss), in_dims=(None, 0))(values, torch.randn(8, 16, device="cuda"))


def halving() -> None:
    """A batch that is halved until it fits."""
    size = 1 << 22
    while True:
        try:
            x = torch.empty(size, 1 << 16, device="cuda")
            break
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            size //= 2
    assert x.numel() * 4 < torch.cuda.get_device_properties(0).total_memory


def streams() -> None:
    side, model = torch.cuda.Stream(), GPT().cuda()
    loss = gpt_loss(model)
    for _ in range(2):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            value = loss()
        torch.cuda.current_stream().wait_stream(side)
        value.record_stream(torch.cuda.current_stream())
        value.backward()
    torch.cuda.synchronize()


def graphed() -> None:
    """A whole step in a CUDA graph."""
    model = GPT().cuda()
    made, loss = torch.optim.AdamW(model.parameters(), capturable=True), gpt_loss(model)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        train(model, loss, optimizer=made)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss().backward()
        made.step()
    for _ in range(3):
        graph.replay()


def compiled(**options: Any) -> None:
    model = GPT(blocks=1).cuda()
    step = torch.compile(model, **options)
    train(model, gpt_loss(step), steps=3)


def flexible_attention(compiled_too: bool) -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    attend = torch.compile(flex_attention) if compiled_too else flex_attention
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 128, device="cuda")
    q = torch.randn(2, 4, 128, 32, device="cuda", requires_grad=True)
    attend(q, q, q, block_mask=mask).sum().backward()


def nested() -> None:
    parts = [torch.randn(size, 32, device="cuda", requires_grad=True) for size in (5, 9)]
    rows = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    nn.Linear(32, 8).cuda()(rows).values().sum().backward()


def float8() -> None:
    a = torch.randn(64, 64, device="cuda").to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")
    torch._scaled_mm(a, a.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


def plain() -> None:
    model = GPT().cuda()
    train(model, gpt_loss(model))


_CONF = "PYTORCH_ALLOC_CONF"
_OPTIMIZERS: Mapping[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "AdamW fused": {"fused": True},
    "AdamW one by one": {"foreach": False},
    "Adafactor": {},
    "Adagrad": {},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"centered": True},
    "Rprop": {},
    "ASGD": {},
    "LBFGS": {"max_iter": 4, "line_search_fn": "strong_wolfe"},
}


def _case(run: Callable[..., None], *arguments: Any, on: tuple[str, ...] = ONE, **options: Any) -> Case:
    return Case(run=partial(run, *arguments), on=on, **options)


CASES: Mapping[str, Case] = {
    **{
        f"optimizer {name}": Case(run=partial(optimizer, name.split()[0], **options), on=ONE)
        for name, options in _OPTIMIZERS.items()
    },
    "optimizer Muon": _case(muon),
    "AMP fp16 with GradScaler": _case(scaled_fp16, on=EVERY),
    "gradient accumulation": _case(accumulation),
    "generation, growing KV cache": _case(generation, None, on=FEW),
    "generation, static KV cache": _case(generation, "static"),
    "evaluation in the loop": _case(evaluation),
    "checkpoint saved and loaded": _case(resuming),
    "EMA of the weights": _case(averaging),
    "DataLoader, forked workers, pinned": _case(workers, "fork"),
    "DataLoader, spawned workers, pinned": _case(workers, "spawn", words=("python", "{}")),
    "sparse embedding, SparseAdam": _case(sparse_embedding),
    "LSTM bf16": _case(recurrent, "LSTM", on=FEW),
    "GRU bf16": _case(recurrent, "GRU"),
    "checkpointing": _case(checkpointed, False, on=FEW),
    "checkpointing, reentrant": _case(checkpointed, True),
    "activations on the CPU": _case(offloaded),
    "custom autograd function": _case(custom_function),
    "GAN with gradient penalty": _case(penalty),
    "policy gradient": _case(policy),
    "per-sample gradients (vmap)": _case(per_sample_gradients),
    "batch halved until it fits": _case(halving, on=FEW),
    "several streams": _case(streams),
    "step in a CUDA graph": _case(graphed, on=FEW),
    "torch.compile": _case(compiled, on=EVERY),
    "torch.compile reduce-overhead": _case(partial(compiled, mode="reduce-overhead"), on=FEW),
    "torch.compile dynamic": _case(partial(compiled, dynamic=True)),
    "flex_attention": _case(flexible_attention, False),
    "flex_attention compiled": _case(flexible_attention, True, on=EVERY),
    "nested tensors": _case(nested),
    "fp8 product": Case(run=float8, on=EVERY, since="89"),
    "expandable segments": _case(
        plain, on=FEW, words=("python", "{}"), environment={_CONF: "expandable_segments:True"}
    ),
    "torchrun": _case(plain, words=("torchrun", "--standalone", "--nproc-per-node=1", "{}")),
}
