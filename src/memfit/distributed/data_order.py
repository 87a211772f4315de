"""`DataOrder`: which samples a step sees, the same for any number of ranks and after any restart."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from memfit.core.errors import UsageError
from memfit.distributed.groups import rank, world_size


class DataOrder:
    """The samples of every step, shuffled anew each epoch: a function of seed and step, so there is nothing
    to lose.

    The batch is that of all ranks together; each takes a contiguous share. With another number of ranks the
    step has the same batch. As ``batch_sampler`` of a ``DataLoader`` it yields this rank's shares from the
    step on at which training resumes.

    Args:
        samples: how many the data set has.
        batch_size: of a step, over all ranks.
        seed: of the shuffling.
        shuffle: in the data set's own order if False.

    Examples:
        >>> order = DataOrder(10, batch_size=4, seed=1)
        >>> order.steps_per_epoch, order.indices(0) == order.indices(0), len(order.indices(1))
        (2, True, 4)
    """

    def __init__(self, samples: int, *, batch_size: int, seed: int = 0, shuffle: bool = True) -> None:
        if not 1 <= batch_size <= samples:
            raise UsageError(f"batch_size must be 1 to {samples}, the number of samples, not {batch_size!r}")
        self.samples, self.batch_size, self.seed, self.shuffle = samples, batch_size, seed, shuffle
        self.next_step = 0
        self._epoch: tuple[int, torch.Tensor] | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches of an epoch; the samples that are left over differ from epoch to epoch."""
        return self.samples // self.batch_size

    def batch(self, step: int) -> list[int]:
        """The samples of a step, of all ranks."""
        epoch, number = divmod(step, self.steps_per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, self._shuffled(epoch))
        first = number * self.batch_size
        chosen: list[int] = self._epoch[1][first : first + self.batch_size].tolist()
        return chosen

    def indices(self, step: int) -> list[int]:
        """The samples of a step that are this rank's."""
        ranks, own = world_size(), rank()
        return self.batch(step)[self.batch_size * own // ranks : self.batch_size * (own + 1) // ranks]

    @property
    def loss_weight(self) -> float:
        """What to multiply this rank's mean loss by, so that the mean over ranks is that over the batch: 1
        where the batch divides evenly."""
        ranks, own = world_size(), rank()
        mine = self.batch_size * (own + 1) // ranks - self.batch_size * own // ranks
        return mine * ranks / self.batch_size

    def _shuffled(self, epoch: int) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self.samples)
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % (1 << 63))
        return torch.randperm(self.samples, generator=generator)

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's shares from ``next_step`` on, without end."""
        step = self.next_step
        while True:
            yield self.indices(step)
            step += 1

    def state_dict(self) -> dict[str, int]:
        """What the order is a function of, but for the step."""
        return {
            "samples": self.samples,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Check that the order is the one that was saved. Raises UsageError where it is another."""
        if state != self.state_dict():
            raise UsageError(
                f"the checkpoint was trained with the data order {state}, not {self.state_dict()}: give the "
                "same, or another checkpoint folder"
            )
