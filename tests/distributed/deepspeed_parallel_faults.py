"""Faults of DeepSpeed's experts, Ulysses, AutoTP, mpu and recompute, planted in an engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist


def _replace(engine: Any, owner: Any, name: str, new: Any) -> Any:
    """Put another function there until the training is over. Returns the one that was there."""
    original = getattr(owner, name)
    setattr(owner, name, new)
    before = getattr(engine, "undo", lambda: None)

    def undo() -> None:
        setattr(owner, name, original)
        before()

    engine.undo = undo
    return original


def norm_averages_the_experts(engine: Any) -> None:
    """The norms of disjoint experts are averaged where their squares should be added up."""
    average = engine.optimizer._average_expert_grad_norms

    def too_small(norms: Any) -> None:
        average(norms)
        for i, norm in enumerate(norms):
            if engine.optimizer.is_moe_param_group[i]:
                norms[i] = norm / 2.0

    engine.optimizer._average_expert_grad_norms = too_small


def expert_gradients_are_scaled_once_more(engine: Any) -> None:
    """Gradients of experts are twice as large: divided by the ranks of the wrong group."""
    optimizer = engine.optimizer
    average = optimizer.average_tensor

    def scaled(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        entries = optimizer.ipg_buckets[tensor.dtype].params
        inside = [optimizer.bit16_groups[group][index] for group, index, _ in entries]
        result = average(tensor, *args, **kwargs)
        start = 0
        for parameter in inside:
            if not getattr(parameter, "allreduce", True):
                tensor.view(-1)[start : start + parameter.numel()] *= 2.0
            start += parameter.numel()
        return result

    optimizer.average_tensor = scaled


def heads_of_another_model(engine: Any) -> None:
    """Ulysses: heads are laid out by a number that was kept from an earlier model."""
    from deepspeed.sequence import layer

    def exchange(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs).roll(1, -2)

    original = _replace(engine, layer, "single_all_to_all", exchange)


def gradients_of_queries_are_zero(engine: Any) -> None:
    """Ulysses: the exchange has no backward, so what lies before it gets zeros."""
    from deepspeed.sequence import layer

    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        first, gradient, *others = original(ctx, *grads)
        return first, torch.zeros_like(gradient), *others

    original = _replace(engine, layer._SeqAllToAll, "backward", staticmethod(backward))


def partial_sums_are_not_added_up(engine: Any) -> None:
    """AutoTP: the all-reduce behind a row-parallel layer is skipped."""
    from deepspeed.module_inject import layers

    def forward(ctx: Any, group: Any, x: torch.Tensor, is_inference: bool) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    _replace(engine, layers.RowParallel, "forward", staticmethod(forward))


def replicated_gradients_are_clipped_on_rank_0_only(engine: Any) -> None:
    """Weights that tensor-parallel ranks share are clipped by the first of them alone."""
    if dist.get_rank() == 0:
        return
    optimizer = engine.optimizer
    clip = optimizer.unscale_and_clip_grads
    mapping = engine.module.norm.weight._hp_mapping.get_hp_fragment_address()
    mine = slice(mapping.start, mapping.start + mapping.numel)

    def partly(grads: Any, *args: Any, **kwargs: Any) -> Any:
        kept = grads[0][mine].clone()
        clip(grads, *args, **kwargs)
        grads[0][mine] = kept

    optimizer.unscale_and_clip_grads = partly


def recompute_gets_shifted_arguments(engine: Any) -> None:
    """The arguments of a recomputed block change places."""
    from deepspeed.runtime.activation_checkpointing import checkpointing

    def shifted(*args: Any, **kwargs: Any) -> Any:
        return tuple(reversed(original(*args, **kwargs)))

    original = _replace(engine, checkpointing, "merge_tensors", shifted)
