"""Saves with the libraries that people train with, into folders that hold checkpoints of the user's."""

import os
import pickle
import sys

import numpy
import torch
import torch.distributed.checkpoint as dcp

model = torch.nn.Linear(8, 2).cuda()


def distributed_checkpoints():
    for name in ("dcp", "old-dcp"):
        dcp.save({"w": model.weight.detach()}, checkpoint_id=name)
    dcp.async_save({"w": model.weight.detach()}, checkpoint_id="async-dcp").result()
    assert os.path.exists("dcp/.metadata") and os.path.exists("async-dcp/.metadata")
    loaded = {"w": torch.ones(2, 8)}
    dcp.load(loaded, checkpoint_id="dcp")
    assert loaded["w"].shape == (2, 8)


def pickles_and_arrays():
    with open("model.pkl", "wb") as file:
        pickle.dump(model, file)
    with open("model.pkl", "rb") as file:
        assert pickle.load(file).weight.is_cuda
    numpy.savez("weights.npz", w=model.weight.detach().cpu().numpy())
    model.weight.detach().cpu().numpy().tofile("weights.bin")
    numpy.load("weights.npz")["w"]
    numpy.memmap("weights.map", dtype="float32", mode="w+", shape=(4,))[:] = 1
    assert os.path.getsize("weights.bin") == 64


def hub():
    """An upload does nothing, and looks as if it worked."""
    from huggingface_hub import HfApi, create_repo

    assert create_repo("mine", exist_ok=True).repo_id == "user/mine"
    done = HfApi().upload_folder(repo_id="me/mine", folder_path=".", run_as_future=True)
    assert done.done() and len(done.result().oid) == 40


def trainer():
    """Keeps one checkpoint: the user's older ones would be deleted for good."""
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    data = [{"input_ids": list(range(8)), "attention_mask": [1] * 8, "labels": 1}] * 8
    arguments = TrainingArguments(
        "trainer", max_steps=3, save_steps=1, save_total_limit=1, per_device_train_batch_size=2,
        report_to=[], disable_tqdm=True, push_to_hub=False,
    )  # fmt: skip
    bert = BertForSequenceClassification(BertConfig(vocab_size=16, **sizes))
    Trainer(bert, arguments, train_dataset=data).train()
    assert os.listdir("trainer") == ["checkpoint-3"], os.listdir("trainer")


def accelerator():
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    settings = ProjectConfiguration("accelerated", automatic_checkpoint_naming=True, total_limit=1)
    accelerate = Accelerator(project_config=settings)
    prepared = accelerate.prepare(torch.nn.Linear(8, 2))
    for _ in range(2):
        accelerate.save_state()
    accelerate.save_model(prepared, "accelerated/whole")
    assert os.listdir("accelerated/whole") == ["model.safetensors"]
    assert len(os.listdir("accelerated/checkpoints")) == 1


def lightning():
    import lightning as L
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Lit(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 2)

        def training_step(self, batch, _):
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = torch.utils.data.TensorDataset(torch.randn(6, 8))
    best = ModelCheckpoint("lit", filename="best", enable_version_counter=False)
    options = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = L.Trainer(accelerator="gpu", max_epochs=1, callbacks=[best], default_root_dir=".", **options)
    trainer.fit(Lit(), torch.utils.data.DataLoader(data, batch_size=2))
    assert os.listdir("lit") == ["best.ckpt"] and os.path.getsize("lit/best.ckpt") > 100


for name in sys.argv[1:]:
    globals()[name]()
    print(name)
