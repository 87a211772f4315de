"""Torchvision's models, a U-Net of the kind that diffusion uses, and layouts of images."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from case import EVERY, FEW, ONE, Case
from torch import Tensor, nn
from torch.nn import functional as F
from training import cnn, image_loss, train


def classification(name: str) -> None:
    import torchvision

    model = torchvision.models.get_model(name, num_classes=10).cuda()
    train(model, image_loss(model, 224), autocast=None)


def every_classifier() -> None:
    """One step of each classification model of torchvision."""
    import torchvision

    for name in torchvision.models.list_models(module=torchvision.models):
        with torch.device("cuda"):
            model = torchvision.models.get_model(name, num_classes=10)
        side = getattr(model, "image_size", 299 if "inception" in name else 224)
        images = torch.randn(2, 3, side, side, device="cuda")
        out = model(images)
        logits = out if isinstance(out, Tensor) else out[0]
        F.cross_entropy(logits, torch.zeros(2, dtype=torch.long, device="cuda")).backward()
        del model, out, logits, images


def detection(name: str) -> None:
    import torchvision

    model = torchvision.models.get_model(name, num_classes=5, weights_backbone=None).cuda().train()
    images = [torch.rand(3, 160, 200, device="cuda") for _ in range(2)]
    boxes = torch.tensor([[10.0, 10.0, 60.0, 60.0], [30.0, 20.0, 120.0, 100.0]], device="cuda")
    masks = torch.zeros(2, 160, 200, dtype=torch.uint8, device="cuda")
    labels = torch.tensor([1, 2], device="cuda")
    points = torch.ones(2, 17, 3, device="cuda")
    targets = [{"boxes": boxes, "labels": labels, "masks": masks, "keypoints": points} for _ in images]
    train(model, lambda: sum(model(images, targets).values()), autocast=None, steps=1)
    model.eval()
    with torch.no_grad():
        model(images)


def segmentation(name: str) -> None:
    import torchvision

    model = torchvision.models.get_model(name, num_classes=5, weights_backbone=None).cuda().train()
    images, labels = torch.rand(2, 3, 128, 128, device="cuda"), torch.zeros(2, 128, 128, device="cuda").long()
    train(model, lambda: F.cross_entropy(model(images)["out"], labels), autocast=None)


def video() -> None:
    import torchvision

    model = torchvision.models.video.r3d_18(num_classes=5).cuda()
    clips, labels = torch.rand(1, 3, 8, 64, 64, device="cuda"), torch.zeros(1, device="cuda").long()
    train(model, lambda: F.cross_entropy(model(clips), labels), autocast=None)


class _Residual(nn.Module):
    def __init__(self, channels_in: int, channels: int, time: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.GroupNorm(8, channels_in), nn.SiLU(), nn.Conv2d(channels_in, channels, 3, 1, 1)
        )
        self.time = nn.Linear(time, channels)
        self.second = nn.Sequential(
            nn.GroupNorm(8, channels), nn.SiLU(), nn.Conv2d(channels, channels, 3, 1, 1)
        )
        self.skip = nn.Conv2d(channels_in, channels, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.first(x) + self.time(F.silu(time))[:, :, None, None]
        return self.second(h) + self.skip(x)


class _Attention(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.GroupNorm(8, channels), nn.Conv2d(channels, 3 * channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, high, wide = x.shape
        q, k, v = (
            p.flatten(2).transpose(1, 2).unflatten(2, (4, -1)).transpose(1, 2)
            for p in self.qkv(self.norm(x)).chunk(3, 1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v)
        return x + mixed.transpose(2, 3).reshape(batch, channels, high, wide)


class UNet(nn.Module):
    """Down, through attention, and up again with what was kept on the way."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        time = 4 * width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.enter, self.leave = nn.Conv2d(3, width, 3, 1, 1), nn.Conv2d(width, 3, 3, 1, 1)
        self.down = nn.ModuleList([_Residual(width, width, time), _Residual(width, 2 * width, time)])
        self.middle = nn.ModuleList([_Residual(2 * width, 2 * width, time), _Attention(2 * width)])
        self.up = nn.ModuleList([_Residual(4 * width, width, time), _Residual(2 * width, width, time)])

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angles = t[:, None] * torch.exp(torch.linspace(0, -9, 16, device=x.device))
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        h, kept = self.enter(x), []
        for block in self.down:
            h = block(h, time)
            kept.append(h)
            h = F.avg_pool2d(h, 2)
        h = self.middle[1](self.middle[0](h, time))
        for block in self.up:
            h = F.interpolate(h, scale_factor=2.0, mode="nearest")
            h = block(torch.cat([h, kept.pop()], 1), time)
        return self.leave(h)


def diffusion(half: torch.dtype | None) -> None:
    """Training on noise, then ten steps of sampling."""
    model = UNet().cuda()
    images = torch.randn(4, 3, 32, 32, device="cuda")
    kept = torch.linspace(0.99, 0.01, 1000, device="cuda")

    def loss() -> Tensor:
        t = torch.randint(0, 1000, (4,), device="cuda")
        noise, share = torch.randn_like(images), kept[t][:, None, None, None]
        return F.mse_loss(model(share.sqrt() * images + (1 - share).sqrt() * noise, t), noise)

    train(model, loss, autocast=half)
    x = torch.randn(4, 3, 32, 32, device="cuda")
    with torch.no_grad():
        for step in range(990, -1, -99):
            x = x - 0.1 * model(x, torch.full((4,), step, device="cuda"))


def channels_last() -> None:
    model = cnn().cuda().to(memory_format=torch.channels_last)
    train(model, image_loss(model, memory_format=torch.channels_last))


def segmentation_by_transposed_convolutions() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.ConvTranspose2d(16, 5, 2, 2), nn.Upsample(scale_factor=1.5)
    ).cuda()
    images, labels = (
        torch.randn(2, 3, 32, 32, device="cuda"),
        torch.zeros(2, 48, 48, dtype=torch.long, device="cuda"),
    )
    train(model, lambda: F.cross_entropy(model(images), labels), autocast=None)


CASES: Mapping[str, Case] = {
    **{
        f"torchvision {name}": Case(run=partial(classification, name), on=ONE)
        for name in (
            "resnet18",
            "mobilenet_v3_small",
            "efficientnet_b0",
            "vit_b_16",
            "convnext_tiny",
            "swin_t",
        )
    },
    "torchvision, every classifier": Case(run=every_classifier, on=ONE),
    **{
        f"torchvision {name}": Case(run=partial(detection, name), on=ONE)
        for name in (
            "fasterrcnn_resnet50_fpn",
            "fcos_resnet50_fpn",
            "keypointrcnn_resnet50_fpn",
            "maskrcnn_resnet50_fpn",
            "retinanet_resnet50_fpn",
            "ssdlite320_mobilenet_v3_large",
        )
    },
    **{
        f"torchvision {name}": Case(run=partial(segmentation, name), on=ONE)
        for name in ("deeplabv3_resnet50", "fcn_resnet50", "lraspp_mobilenet_v3_large")
    },
    "torchvision video r3d_18": Case(run=video, on=ONE),
    "diffusion U-Net fp32": Case(run=partial(diffusion, None)),
    "diffusion U-Net bf16": Case(run=partial(diffusion, torch.bfloat16), on=EVERY),
    "channels_last": Case(run=channels_last, on=EVERY),
    "transposed convolutions": Case(run=segmentation_by_transposed_convolutions, on=FEW),
}
