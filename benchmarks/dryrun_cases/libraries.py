"""Libraries that people train with: adapters, quantization, kernels, trainers."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from case import EVERY, FEW, ONE, Case
from families import CAUSAL
from torch import Tensor, nn
from training import GPT, gpt_loss, tokens, train


def _llama() -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **CAUSAL["llama"]))


def _language_loss(model: nn.Module) -> Any:
    ids = tokens()
    return lambda: model(input_ids=ids, labels=ids).loss


def lora() -> None:
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(_llama(), adapters).cuda()
    train(model, _language_loss(model))
    model.merge_and_unload()


def qlora() -> None:
    """4-bit weights, adapters beside them, a paged optimizer."""
    import bitsandbytes as bnb
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    model = _llama()
    for layer in model.model.layers:
        for part, name in ((layer.self_attn, "q_proj"), (layer.self_attn, "v_proj"), (layer.mlp, "up_proj")):
            plain = getattr(part, name)
            four = bnb.nn.Linear4bit(
                plain.in_features,
                plain.out_features,
                bias=False,
                compute_dtype=torch.bfloat16,
                quant_type="nf4",
                compress_statistics=True,
            )
            four.load_state_dict(plain.state_dict())
            setattr(part, name, four)
    model.is_loaded_in_4bit = True
    model = prepare_model_for_kbit_training(model.cuda())
    adapters = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(model, adapters)
    trained = [p for p in model.parameters() if p.requires_grad]
    train(model, _language_loss(model), optimizer=bnb.optim.PagedAdamW8bit(trained))


def bits_and_bytes(name: str) -> None:
    import bitsandbytes as bnb

    model = GPT(width=256).cuda()
    train(model, gpt_loss(model), optimizer=getattr(bnb.optim, name)(model.parameters(), lr=1e-3))


def eight_bit_layers() -> None:
    import bitsandbytes as bnb

    layer = bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False, threshold=6.0).cuda()
    layer(torch.randn(4, 64, device="cuda", dtype=torch.float16)).sum().backward()


def quantized(kind: str) -> None:
    from torchao import quantization

    model = _llama().to(torch.bfloat16).cuda().eval()
    quantization.quantize_(model, getattr(quantization, kind)())
    with torch.no_grad():
        model(tokens())


def float8_training() -> None:
    from torchao.float8 import convert_to_float8_training

    model = GPT().cuda().to(torch.bfloat16)
    convert_to_float8_training(model)
    train(model, gpt_loss(model), autocast=None)


def low_bit_optimizer(name: str) -> None:
    from torchao import optim

    model = GPT(width=256).cuda()
    train(model, gpt_loss(model), optimizer=getattr(optim, name)(model.parameters()))


def liger() -> None:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(rope=True, swiglu=True, rms_norm=True, fused_linear_cross_entropy=True)
    model = _llama().cuda().train()
    train(model, _language_loss(model))


class _Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.arange(3, 35)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def trainer(**options: Any) -> None:
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "per_device_train_batch_size": 4,
            "max_steps": 4,
            "logging_steps": 1,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "save_steps": 2,
            "report_to": [],
            "disable_tqdm": True,
        }
        arguments = TrainingArguments(output_dir=folder, **{**settings, **options})
        Trainer(model=_llama(), args=arguments, train_dataset=_Texts(), eval_dataset=_Texts()).train()


def accelerated() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = _llama()
    loader = torch.utils.data.DataLoader(_Texts(), batch_size=4)
    made = torch.optim.AdamW(model.parameters())
    model, made, loader = accelerator.prepare(model, made, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            made.step()
            made.zero_grad()
            accelerator.gather(loss.detach()).mean().item()


def lightning() -> None:
    import lightning as L  # noqa: N812  (as its own documentation calls it)

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = GPT()

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            ids = batch["input_ids"]
            loss = nn.functional.cross_entropy(self.model(ids).flatten(0, 1), ids.flatten())
            self.log("loss", loss, prog_bar=True)
            return loss

        def validation_step(self, batch: dict[str, Tensor], _: int) -> None:
            self.log("validation", self.model(batch["input_ids"]).mean())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    loader = torch.utils.data.DataLoader(_Texts(), batch_size=4)
    with tempfile.TemporaryDirectory() as folder:
        fit = L.Trainer(
            max_epochs=1,
            accelerator="gpu",
            devices=1,
            precision="bf16-mixed",
            accumulate_grad_batches=2,
            gradient_clip_val=1.0,
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
        )
        fit.fit(Module(), loader, loader)


def data_parallel() -> None:
    """One rank with DistributedDataParallel."""
    import torch.distributed as dist

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    model = nn.parallel.DistributedDataParallel(GPT().cuda())
    train(model, gpt_loss(model))
    dist.destroy_process_group()


def sharded() -> None:
    """One rank with FSDP2."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    model = GPT().cuda()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    train(model, gpt_loss(model))
    dist.destroy_process_group()


CASES: Mapping[str, Case] = {
    "LoRA (peft)": Case(run=lora),
    "QLoRA (peft, bitsandbytes)": Case(run=qlora),
    **{
        f"bitsandbytes {name}": Case(run=partial(bits_and_bytes, name), on=ONE)
        for name in ("AdamW8bit", "PagedAdamW32bit", "Lion8bit")
    },
    "bitsandbytes Linear8bitLt": Case(run=eight_bit_layers),
    "torchao int8 weights": Case(run=partial(quantized, "Int8WeightOnlyConfig")),
    "torchao float8 training": Case(run=float8_training, on=EVERY, since="89"),
    **{
        f"torchao {name}": Case(run=partial(low_bit_optimizer, name), on=FEW if "8" in name else ONE)
        for name in ("AdamW8bit", "AdamW4bit")
    },
    "Liger kernels": Case(run=liger, on=EVERY),
    "HF Trainer": Case(run=partial(trainer, bf16=True), on=ONE, words=("python", "{}")),
    "HF Trainer, fp16, checkpointing, Adafactor": Case(
        run=partial(trainer, fp16=True, gradient_checkpointing=True, optim="adafactor"),
        on=ONE,
        words=("python", "{}"),
    ),
    "accelerate": Case(run=accelerated, on=ONE),
    "accelerate launch": Case(
        run=accelerated, on=ONE, words=("accelerate", "launch", "--mixed_precision=bf16", "{}")
    ),
    "Lightning": Case(run=lightning, on=ONE),
    "DDP, one rank": Case(run=data_parallel, on=ONE),
    "FSDP2, one rank": Case(run=sharded, on=ONE),
}
