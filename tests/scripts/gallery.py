"""Many ways in which PyTorch allocates, and chooses how: watching must not change a single event."""

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
device = "cuda"


def finish(parameters, optimizer=torch.optim.AdamW, **options):
    stepper = optimizer(parameters, **options)
    stepper.step()
    stepper.zero_grad()


def gathered_loss():
    layer = torch.nn.Linear(64, 1000).to(device)
    logits = layer(torch.randn(32, 64, device=device))
    target = torch.randint(1000, (32,), device=device)
    loss = (logits.logsumexp(-1) - logits.gather(1, target[:, None])[:, 0]).mean() + logits.max(
        -1
    ).values.sum()
    loss = (
        loss
        + logits[target % 32].sum()
        + logits.cumsum(0).prod(0).sum()
        + logits.masked_fill(logits > 0, 0).sum()
    )
    loss.backward()
    finish(layer.parameters())


def shared_inputs():
    x = torch.randn(64, 64, device=device, requires_grad=True)
    (x * 2 + x.sin() * x.exp() + x @ x + x.softmax(-1)).sum().backward()
    (x * 3).sum().backward()


def convolutions():
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3),
        torch.nn.BatchNorm2d(16),
        torch.nn.ReLU(inplace=True),
        torch.nn.MaxPool2d(2),
    )
    net = torch.nn.Sequential(net, torch.nn.Flatten(), torch.nn.LazyLinear(10)).to(device)
    net(torch.randn(4, 3, 32, 32, device=device)).logsumexp(-1).sum().backward()
    finish(net.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)


def attention():
    block = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True, dropout=0.1).to(device)
    x = torch.randn(4, 32, 64, device=device)
    with torch.autocast("cuda", torch.bfloat16):
        y = checkpoint(block, x, use_reentrant=False)
        q = y.view(4, 32, 4, 16).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    y.float().square().mean().backward()
    finish(block.parameters(), fused=True)


def scaled():
    layer = torch.nn.Linear(64, 64).to(device)
    optimizer = torch.optim.Adam(layer.parameters(), foreach=True)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(3):
        with torch.autocast("cuda", torch.float16):
            loss = layer(torch.randn(8, 64, device=device)).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0, error_if_nonfinite=True)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert optimizer.state, "no step was skipped"


def sequences():
    embedding, cell = torch.nn.Embedding(100, 32).to(device), torch.nn.GRUCell(32, 32).to(device)
    tokens = torch.randint(100, (4, 6), device=device)
    h = torch.zeros(4, 32, device=device)
    for t in range(6):
        h = cell(embedding(tokens[:, t]), h)
    F.cross_entropy(h, tokens[:, 0] % 32).backward()
    F.binary_cross_entropy_with_logits(
        embedding.weight, embedding.weight.detach().clone(), reduction="sum"
    ).backward()


parts = [gathered_loss, shared_inputs, convolutions, attention, scaled, sequences]
for part in parts:
    part()
    part()
