"""Weights of a training in a checkpoint that any layout can read, by Megatron's own means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing

from tests.megatron_adapter.model import Trainer


def save_weights(trainer: Trainer, folder: Path) -> None:
    folder.mkdir(parents=True)
    dist_checkpointing.save(_shards(trainer), str(folder))


def load_weights(trainer: Trainer, folder: Path) -> None:
    """Every rank takes its part; masters of weights of 16 bits follow."""
    for gpt in trainer.gpts:
        for parameter in gpt.parameters():
            parameter.data.zero_()
    loaded = dist_checkpointing.load(_shards(trainer), str(folder))
    for number, gpt in enumerate(trainer.gpts):
        gpt.load_state_dict(loaded[f"model{number}"])
    trainer.optimizer.reload_model_params()


def _shards(trainer: Trainer) -> dict[str, Any]:
    return {f"model{i}": gpt.sharded_state_dict() for i, gpt in enumerate(trainer.gpts)}
