"""A language model's step with a chunked loss, micro-batches weighted by tokens, and a fused optimizer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memfit.techniques import ChunkedCrossEntropy, MicroBatching, OptimizerImplementation, undo_all

VOCABULARY, PADDING = 500, -100


class LanguageModel(nn.Module):
    """An embedding, a layer, and an output layer with the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.layer = nn.Linear(32, 32)
        self.head = nn.Linear(32, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids to logits."""
        return self.head(torch.relu(self.layer(self.embed(ids))))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean over the tokens that are no padding."""
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=PADDING)


def token_count(batch: dict[str, Tensor]) -> float:
    """Over how many tokens `loss` takes its mean."""
    return float((batch["labels"] != PADDING).sum())


torch.manual_seed(0)
model = LanguageModel()
optimizer = torch.optim.AdamW(model.parameters())
ids = torch.randint(0, VOCABULARY, (8, 12))
batch = {"ids": ids, "labels": ids.roll(-1, 1)}
batch["labels"][:3, 4:] = PADDING  # three short texts
loss(model, batch).backward()
whole = model.layer.weight.grad
optimizer.zero_grad()

micro_batching = MicroBatching(micro_batches=4)
ChunkedCrossEntropy(chunks=4).apply(model)
OptimizerImplementation(implementation="fused").apply(model, optimizer)

for piece, weight in micro_batching.split(batch, loss_weight=token_count):
    (weight * loss(model, piece)).backward()

torch.testing.assert_close(model.layer.weight.grad, whole, rtol=1e-4, atol=1e-6)
optimizer.step()
undo_all(model)
