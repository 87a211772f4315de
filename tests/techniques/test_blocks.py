"""Repeated blocks of the architectures that people train, without marks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from technique_models import CASES, CNN, GPT, MLPBlock
from torch import nn

from memfit.core.errors import UsageError
from memfit.techniques.blocks import BlockChain, block_names, find_block_chains, get_block


def _summary(model: nn.Module) -> list[tuple[str, str, int, str]]:
    return [(c.names[0], c.names[-1], len(c.names), c.class_name) for c in find_block_chains(model)]


def _torchvision(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        return getattr(pytest.importorskip("torchvision").models, name)(weights=None)

    return make


def _hf(kind: str, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from transformers import AutoConfig, AutoModel

        return AutoModel.from_config(AutoConfig.for_model(kind, **settings))

    return make


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            _torchvision("resnet18"),
            [(f"layer{n}.0", f"layer{n}.1", 2, "BasicBlock") for n in (1, 2, 3, 4)],
        ),
        (
            _torchvision("resnet50"),
            [
                (f"layer{n}.0", f"layer{n}.{k - 1}", k, "Bottleneck")
                for n, k in ((1, 3), (2, 4), (3, 6), (4, 3))
            ],
        ),
        (
            _torchvision("vit_b_16"),
            [("encoder.layers.encoder_layer_0", "encoder.layers.encoder_layer_11", 12, "EncoderBlock")],
        ),
        (
            _torchvision("convnext_tiny"),
            [
                (f"features.{n}.0", f"features.{n}.{k - 1}", k, "CNBlock")
                for n, k in ((1, 3), (3, 3), (5, 9), (7, 3))
            ],
        ),
        (_hf("gpt2"), [("h.0", "h.11", 12, "GPT2Block")]),
        (_hf("bert"), [("encoder.layer.0", "encoder.layer.11", 12, "BertLayer")]),
        (
            _hf("t5"),
            [
                ("encoder.block.0", "encoder.block.5", 6, "T5Block"),
                ("decoder.block.0", "decoder.block.5", 6, "T5Block"),
            ],
        ),
        (_hf("mixtral", num_hidden_layers=3), [("layers.0", "layers.2", 3, "MixtralDecoderLayer")]),
        (
            _hf("swin"),
            [
                (f"encoder.layers.{n}.blocks.0", f"encoder.layers.{n}.blocks.{k - 1}", k, "SwinLayer")
                for n, k in ((0, 2), (1, 2), (2, 6), (3, 2))
            ],
        ),
        (
            _hf("jamba"),
            [
                ("layers.0", "layers.31", 28, "JambaMambaDecoderLayer"),
                ("layers.4", "layers.28", 4, "JambaAttentionDecoderLayer"),
            ],
        ),
        (
            _hf("albert"),
            [("encoder.albert_layer_groups.0", "encoder.albert_layer_groups.0", 1, "AlbertLayerGroup")],
        ),
    ],
)
def test_known_architectures(
    make: Callable[[], nn.Module], expected: list[tuple[str, str, int, str]]
) -> None:
    with torch.device("meta"):
        assert _summary(make()) == expected


def test_swin_and_efficientnet_stages_are_taken_apart() -> None:
    torchvision = pytest.importorskip("torchvision")
    with torch.device("meta"):
        swin = find_block_chains(torchvision.models.swin_t(weights=None))
        efficient = find_block_chains(torchvision.models.efficientnet_b0(weights=None))
    blocks = [len(c.names) for c in swin if c.class_name == "SwinTransformerBlock"]
    assert sorted(blocks) == [2, 2, 2, 6]
    assert sum(len(c.names) for c in efficient if c.class_name == "MBConv") == 16


class _Down(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv2d(width, 2 * width, 3), nn.ReLU(), nn.Conv2d(2 * width, 2 * width, 3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.convs(x)


class _UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.down3 = _Down(4), _Down(8), _Down(16)
        self.out = nn.Conv2d(4, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.down3(self.down2(self.down1(x))))


class _MoE(nn.Module):
    """A layer whose experts are a list of their own and hold nearly all of its parameters."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4)
        self.experts = nn.ModuleList(MLPBlock(width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.router(x).softmax(-1)
        return x + sum(shares[..., [n]] * expert(x) for n, expert in enumerate(self.experts))


def _with_an_odd_one() -> nn.Module:
    class Odd(MLPBlock):
        pass

    return nn.Sequential(*[MLPBlock(8) for _ in range(3)], Odd(8), MLPBlock(8), nn.Linear(8, 8))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (_UNet, [("down1", "down3", 3, "_Down")]),
        (lambda: nn.ModuleList(_MoE() for _ in range(3)), [("0", "2", 3, "_MoE")]),
        (lambda: _MoE(), []),
        (_with_an_odd_one, [("0", "4", 4, "MLPBlock"), ("3", "3", 1, "Odd")]),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), []),
        (lambda: nn.Sequential(nn.Embedding(4, 4), nn.LSTM(4, 4, 3)), []),
        (lambda: nn.Linear(4, 4), []),
        (
            lambda: nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)]),
            [("0", "2", 3, "Sequential")],
        ),
        (
            lambda: nn.ModuleDict({"a": MLPBlock(4), "b": MLPBlock(4), "act": nn.ReLU()}),
            [("a", "b", 2, "MLPBlock")],
        ),
        (
            lambda: nn.ModuleList(nn.ModuleList([MLPBlock(4), _MoE(4)]) for _ in range(2)),
            [("0.0", "1.0", 2, "MLPBlock"), ("0.1", "1.1", 2, "_MoE")],
        ),
        (CNN, [("layer1.0", "layer1.1", 2, "ResidualBlock"), ("layer2.0", "layer2.1", 2, "ResidualBlock")]),
    ],
)
def test_users_own_models(make: Callable[[], nn.Module], expected: list[tuple[str, str, int, str]]) -> None:
    assert _summary(make()) == expected


@pytest.mark.parametrize("case", CASES)
def test_the_models_of_the_other_tests(case: str) -> None:
    assert len(block_names(CASES[case].model())) == CASES[case].blocks


def test_wrapped_models_give_names_that_resolve() -> None:
    compiled = torch.compile(GPT(), backend="eager")
    names = block_names(compiled)
    assert names == ("_orig_mod.h.0", "_orig_mod.h.1", "_orig_mod.h.2")
    assert [get_block(compiled, name) for name in names] == list(compiled._orig_mod.h)
    assert get_block(compiled, "h.1") is compiled._orig_mod.h[1]
    assert get_block(compiled._orig_mod, "module._orig_mod.h.1") is compiled._orig_mod.h[1]


def test_blocks_compiled_one_by_one_keep_their_class_name() -> None:
    model = nn.ModuleList(torch.compile(MLPBlock(4), backend="eager") for _ in range(2))
    assert find_block_chains(model) == (BlockChain(names=("0", "1"), class_name="MLPBlock"),)


def test_an_unknown_name_says_what_there_is() -> None:
    with pytest.raises(UsageError, match="no module 'layers.0'; its blocks are h.0 … h.2"):
        get_block(GPT(), "layers.0")
