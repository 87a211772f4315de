"""memfit in a Hugging Face Trainer: techniques or a plan on the model, and a callback that watches.

    memfit fit hf:gpt2,batch=8,seq=1024 --gpu rtx3060-12gb --budget 6GiB --plan plan.json
    python examples/integrate_hf_trainer.py

The Trainer makes the optimizer by itself, so what is applied here changes the model alone. A plan for
the model goes the same way: `memfit.Plan.load("plan.json").apply(model)`.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import memfit
from memfit.monitor.callbacks import trainer_callback


def main(steps: int = 4, *, techniques: bool = True, **watching: Any) -> list[float]:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=64, n_head=2, vocab_size=500, n_positions=64))
    data = [{"input_ids": one, "labels": one} for one in torch.randint(0, 500, (4 * steps, 32))]
    if techniques:
        memfit.GradientCheckpointing(checkpoint_frequency=1).apply(model)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=4, logging_steps=1, save_strategy="no",
            report_to=[], disable_tqdm=True, seed=0,
        )  # fmt: skip
        callback = trainer_callback(**watching)
        trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[callback])
        trainer.train()
    if techniques:
        memfit.undo(model)  # optional: state_dict has the same keys either way
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


if __name__ == "__main__":
    print(main())
