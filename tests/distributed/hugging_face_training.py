"""Hugging Face's Trainer and Accelerate with a DeepSpeed config, on a tiny model from a config."""

from __future__ import annotations

import os
from typing import Any

import torch
from deepspeed_training import prepare
from torch import distributed as dist
from torch.utils.data import DataLoader, Dataset


class Tokens(Dataset):
    """Sequences of eight tokens, drawn from one seed."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._rows = torch.randint(0, 17, (16, 8), generator=generator)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._rows[i], "labels": self._rows[i]}


def ds_config(stage: int, block: dict[str, Any] | None) -> dict[str, Any]:
    """What a user writes, "auto" included."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
    }
    return config if block is None else config | {"upguard": block}


def _prepare_rank() -> None:
    """The variables that a launcher would have set, and nothing left of an earlier training."""
    prepare()
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    rank = str(dist.get_rank())
    os.environ.update(zip(names, (rank, rank, "2", "127.0.0.1", "0"), strict=True))
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


def _model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, set_seed

    set_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=17, n_positions=8, n_embd=8, n_layer=1, n_head=2))


def accelerate(folder: str, stage: int, block: dict[str, Any] | None) -> dict[str, torch.Tensor]:
    """A loop of two steps with Accelerate's own calls; the weights afterwards."""
    _prepare_rank()
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    config = ds_config(stage, block) | {"train_micro_batch_size_per_gpu": 2}
    config |= {"gradient_accumulation_steps": 1, "gradient_clipping": 1.0}
    del config["optimizer"]  # the loop's own is used
    config["zero_force_ds_cpu_optimizer"] = False
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Tokens(), batch_size=2)
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    engine, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _, batch in zip(range(2), loader, strict=False):
        accelerator.backward(engine(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine.destroy()
    return weights


def fine_tune(folder: str, stage: int, block: dict[str, Any] | None) -> dict[str, torch.Tensor]:
    """Two optimizer steps of two micro-batches each; the weights afterwards."""
    _prepare_rank()
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=folder, use_cpu=True, max_steps=2, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, report_to=[], save_strategy="no", disable_tqdm=True,
        logging_strategy="no", deepspeed=ds_config(stage, block),
    )  # fmt: skip
    model = _model()
    trainer = Trainer(model=model, args=arguments, train_dataset=Tokens())
    trainer.train()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer.model_wrapped.destroy()
    return weights
