"""Watch the memory of a Hugging Face Trainer: one callback.

python examples/watch_hf_trainer.py
"""

from __future__ import annotations

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from memfit.monitor.callbacks import trainer_callback


def main(steps: int = 4, **settings: object) -> None:
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=500, n_positions=64))
    tokens = [torch.randint(0, 500, (32,)) for _ in range(8 * steps)]
    data = [{"input_ids": one, "labels": one} for one in tokens]
    callback = trainer_callback(**settings)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=8, report_to=[], logging_steps=2,
            save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[callback])
        trainer.train()
    print(trainer.state.log_history[0])  # on a GPU it has memfit_peak_bytes beside the loss
    print("records in", callback.watcher.folder)


if __name__ == "__main__":
    main()
