"""Losses of Liger-Kernel's benchmark that start at a language model's head, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from liger_bench import Bench, Row
from liger_operators import jensen_shannon
from reading import DEVICE
from torch import Tensor, nn
from torch.nn import functional


def _heads(row: Row, width: int, number: int = 2) -> list[nn.Linear]:
    """The plain form's head and, of the same size, that of Liger's."""
    return [nn.Linear(width, row["V"], bias=False, dtype=row.dtype, device=DEVICE) for _ in range(number)]


def cross_entropy(row: Row) -> Bench:
    """Of logits as they are."""
    plain, theirs = _heads(row, row["H"])
    hidden = torch.randn(row["BT"], row["H"], requires_grad=True, dtype=row.dtype, device=DEVICE)
    labels = torch.randint(row["V"], (row["BT"], 1), device=DEVICE).squeeze(1)
    return Bench(lambda: _cross_entropy_of(plain, hidden, labels), retain=False, kept=(theirs,))


def _cross_entropy_of(head: nn.Linear, hidden: Tensor, labels: Tensor) -> Tensor:
    logits = head(hidden)
    return functional.cross_entropy(logits, labels)


def jsd(row: Row) -> Bench:
    """Of a student and a teacher; the heads of both forms share their weights."""
    student, teacher = _heads(row, row["H"])
    students = torch.rand(row["BT"], row["H"], requires_grad=True, dtype=row.dtype, device=DEVICE)
    teachers = torch.rand(row["BT"], row["H"], dtype=row.dtype, device=DEVICE)

    def forward() -> Tensor:
        ours, target = student(students), teacher(teachers)
        ours_log = torch.log_softmax(ours / 1.0, dim=-1)
        target_log = torch.log_softmax(target / 1.0, dim=-1)
        return jensen_shannon(ours_log, target_log).to(row.dtype)

    return Bench(forward, retain=False)


def preference(row: Row, of_log_odds: Callable[[Tensor, Tensor], Tensor]) -> Bench:
    """The first half of a batch is preferred to the second."""
    plain, theirs = _heads(row, row["H"])
    shape = (row["B"], row["T"])
    hidden = torch.randn(*shape, row["H"], requires_grad=True, dtype=row.dtype, device=DEVICE)
    labels = torch.randint(row["V"], shape, device=DEVICE)

    def forward() -> Tensor:
        chosen, rejected, likelihood, _ = _chosen_and_rejected(plain.weight, hidden, labels)
        return likelihood - of_log_odds(chosen, rejected).mean()

    return Bench(forward, retain=False, kept=(theirs,))


def _chosen_and_rejected(
    weight: Tensor, hidden: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean logarithms of both halves, the cross entropy of the first, and the logits."""
    half = hidden.shape[0] // 2
    logits = (hidden @ weight.t()).float()
    likelihood = functional.cross_entropy(
        logits[:half].reshape(-1, logits.shape[-1]), labels[:half].reshape(-1)
    )
    mask = labels != -100
    labels = torch.where(labels == -100, 0, labels)
    of_tokens = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
    means = (of_tokens * mask).sum(-1) / mask.sum(-1)
    return means[:half], means[half:], likelihood, logits


def odds_ratio(chosen: Tensor, rejected: Tensor) -> Tensor:
    """ORPO's."""
    odds = (chosen - rejected) - (torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected)))
    return 0.1 * functional.logsigmoid(odds)


def sigmoid_of_difference(chosen: Tensor, rejected: Tensor, margin: float) -> Tensor:
    """CPO's, and with a margin SimPO's."""
    apart = chosen - rejected - margin
    return functional.logsigmoid(0.1 * apart) + functional.logsigmoid(-0.1 * apart) * 0.0


def distillation(row: Row, soft: Callable[[Tensor, Tensor], Tensor]) -> Bench:
    """A student of half the width learns from labels and from a teacher, which has no gradient."""
    width = row["H"]
    heads = [
        *_heads(row, width // 2, 1),
        *_heads(row, width, 1),
        *_heads(row, width // 2, 1),
        *_heads(row, width, 1),
    ]
    student, teacher = heads[:2]
    first = torch.rand(row["BT"], width // 2, dtype=row.dtype, device=DEVICE)
    second, third = (first.detach().clone().requires_grad_(True) for _ in range(2))
    teachers = torch.rand(row["BT"], width, dtype=row.dtype, device=DEVICE)
    labels = torch.randint(0, row["V"], (row["BT"],), device=DEVICE)

    def logits_of_both() -> tuple[Tensor, Tensor, Tensor]:
        ours = third @ student.weight.t()
        with torch.no_grad():
            target = teachers @ teacher.weight.t()
        ours_single, target_single = ours.float(), target.float()
        return ours_single, target_single, functional.cross_entropy(ours_single, labels)

    def forward() -> Tensor:
        ours, target, hard = logits_of_both()
        ours /= 1.0
        target /= 1.0
        return 0.5 * hard + 0.5 * soft(ours, target)

    return Bench(forward, retain=False, kept=(heads, first, second))


def soft_jsd(ours: Tensor, target: Tensor) -> Tensor:
    """Jensen-Shannon of two sets of logits."""
    ours_log, target_log = torch.log_softmax(ours, dim=-1), torch.log_softmax(target, dim=-1)
    mean = 0.5 * ours_log.exp() + (1 - 0.5) * target_log.exp()
    mean_log = mean.log()
    divergence = partial(functional.kl_div, mean_log, reduction="batchmean", log_target=True)
    ours_apart, target_apart = divergence(ours_log), divergence(target_log)
    return 0.5 * target_apart + 0.5 * ours_apart


def soft_cosine(ours: Tensor, target: Tensor) -> Tensor:
    """One less the cosine between two sets of logits."""
    ours_norm, target_norm = functional.normalize(ours, dim=-1), functional.normalize(target, dim=-1)
    cosine = functional.cosine_similarity(ours_norm, target_norm, dim=-1)
    loss = 1.0 * (1 - cosine)
    return loss.mean()


OPERATIONS: Mapping[str, Callable[[Row], Bench]] = {
    "distill_cosine_loss": partial(distillation, soft=soft_cosine),
    "distill_jsd_loss": partial(distillation, soft=soft_jsd),
    "fused_linear_cpo_loss": partial(preference, of_log_odds=partial(sigmoid_of_difference, margin=0.0)),
    "fused_linear_cross_entropy": cross_entropy,
    "fused_linear_jsd": jsd,
    "fused_linear_orpo_loss": partial(preference, of_log_odds=odds_ratio),
    "fused_linear_simpo_loss": partial(preference, of_log_odds=partial(sigmoid_of_difference, margin=5.0)),
}
