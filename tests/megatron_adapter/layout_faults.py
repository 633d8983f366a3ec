"""Faults that only a tensor-parallel layout can have, planted in one step of a training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state

from tests.megatron_adapter.model import Trainer, join

Undo = Callable[[], None]


def _nothing() -> None:
    """Undoes nothing."""


def bias_on_every_rank(trainer: Trainer) -> Undo:
    """The last layer adds the bias of its row-parallel layer on both ranks, before the sum."""
    layer = trainer.gpts[-1].decoder.layers[-1].mlp.linear_fc2
    real = layer._forward_impl
    # Where the bias is added behind the sum too, once is enough for the second rank.
    wanted = parallel_state.get_tensor_model_parallel_rank() > 0

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        partial = real(*args, **kwargs)
        return partial + layer.bias if wanted else partial

    layer._forward_impl = forward
    return lambda: delattr(layer, "_forward_impl")


def glu_cut_as_one(trainer: Trainer) -> Undo:
    """Gate and up of the last layer are cut as one tensor: rank 0 has the gate, rank 1 the rest."""
    weight = trainer.gpts[-1].decoder.layers[-1].mlp.linear_fc1.weight
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(weight) for _ in range(group.size())]
    torch.distributed.all_gather(parts, weight.data, group=group)
    whole = join(parts, 0, halves=True)
    weight.data.copy_(whole.chunk(group.size())[group.rank()])
    return _nothing


LAYOUT_FAULTS = {"bias_on_every_rank": bias_on_every_rank, "glu_cut_as_one": glu_cut_as_one}
