"""`memfit.watch` inside the Trainer of Hugging Face's transformers and inside Lightning.

Each function makes the callback when it is called, so that neither library is loaded by importing this.
"""

from __future__ import annotations

from typing import Any

from memfit.core.errors import CannotRunHere
from memfit.monitor.watching import Watcher, watch


def trainer_callback(**settings: Any) -> Any:
    """A callback for ``transformers.Trainer(callbacks=[…])``: watches the training, step by step.

    The peak of PyTorch's CUDA allocator so far is put beside the loss (``memfit_peak_bytes``).

    Args:
        settings: those of `memfit.watch`.

    Raises:
        CannotRunHere: transformers is not installed.
    """
    try:
        from transformers import TrainerCallback
    except ImportError as error:
        raise CannotRunHere("transformers is not installed: pip install 'memfit[models]'") from error

    class MemfitCallback(TrainerCallback):
        watcher: Watcher | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.watcher = watch(**settings)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.watcher is not None:
                self.watcher.step()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if self.watcher is not None and logs is not None and self.watcher.peak_bytes:
                logs["memfit_peak_bytes"] = self.watcher.peak_bytes

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.watcher is not None:
                self.watcher.stop()

    return MemfitCallback()


def lightning_callback(**settings: Any) -> Any:
    """A callback for ``lightning.Trainer(callbacks=[…])``: watches the training, batch by batch.

    Args:
        settings: those of `memfit.watch`.

    Raises:
        CannotRunHere: Lightning is not installed.
    """
    try:
        from lightning.pytorch.callbacks import Callback
    except ImportError as error:
        raise CannotRunHere("Lightning is not installed: pip install lightning") from error

    class MemfitCallback(Callback):
        watcher: Watcher | None = None

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.watcher = watch(**settings)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if self.watcher is not None:
                self.watcher.step()

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            if self.watcher is not None:
                self.watcher.stop()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            if self.watcher is not None:
                self.watcher.stop()

    return MemfitCallback()
