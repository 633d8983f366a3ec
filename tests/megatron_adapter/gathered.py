"""Whole tensors, put together from all ranks by Megatron's own marks, and their fingerprints.

Uses nothing of the adapter: it is what the adapter's placements are checked against.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.megatron_adapter.model import (
    Trainer,
    is_gated,
    join,
    split_dim,
    tensor_place,
    whole_name,
)
from upguard_plugin.fingerprint import fingerprint

Facts = dict[str, dict[str, list[Any]]]


def gather(trainer: Trainer) -> Facts:
    """kind -> name -> [h, s, dtype, shape] of the whole tensor; the same on all ranks."""
    mine = _local(trainer)
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, mine)
    facts: Facts = {}
    keys = dict.fromkeys(key for rank in everyone for key in rank)
    for kind, name in keys:
        parts = [rank[kind, name] for rank in everyone if (kind, name) in rank]
        whole = _whole(parts)
        if whole is not None:
            found = fingerprint(whole)
            facts.setdefault(kind, {})[name] = [found.h, found.s, found.dtype, list(found.shape)]
    return facts


def _local(trainer: Trainer) -> dict[tuple[str, str], tuple[Any, ...]]:
    """(kind, name) -> (tp index, shape, dim, halves, start, flat data) of this rank."""
    found: dict[tuple[str, str], tuple[Any, ...]] = {}
    optimizers = getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])
    slices = [o for o in optimizers if hasattr(o, "model_param_gbuf_map")]
    for gpt in trainer.gpts:
        for name, parameter in gpt.named_parameters():
            key = whole_name(gpt, name)
            if key == "output_layer.weight" and not trainer.job.untied:
                key = "embedding.word_embeddings.weight"  # the same weight on the last stage
            _, index = tensor_place(".local_experts." in key)
            place = (
                index,
                tuple(parameter.shape),
                split_dim(parameter),
                is_gated(key, trainer.job.gated),
            )

            def add(kind: str, tensor: torch.Tensor, start: int = 0, key=key, place=place) -> None:
                found[kind, key] = (*place, start, tensor.detach().reshape(-1).clone())

            add("param", parameter)
            if not slices:
                add("main_grad", parameter.main_grad)
            master, inner = _master(optimizers, parameter)
            if master is None:
                continue
            start, end = _range(slices, parameter)
            if slices:
                add("main_grad", parameter.main_grad.view(-1)[start:end], start)
            if trainer.job.dtype != "fp32":  # else a slice of the weight itself
                add("master", master, start)
            for slot in ("exp_avg", "exp_avg_sq"):
                if slot in inner.state[master]:  # absent before the first step
                    add(slot, inner.state[master][slot], start)
    return found


def _master(optimizers: list[Any], parameter: Any) -> tuple[Any, Any]:
    for each in optimizers:
        pairs = [("float16_groups", "fp32_from_float16_groups")]
        pairs += [("model_float16_groups", "shard_fp32_from_float16_groups")]
        pairs += [("model_fp32_groups", "shard_fp32_groups")]
        for models, masters in pairs:
            for a, b in zip(getattr(each, models, []), getattr(each, masters, []), strict=True):
                for model, master in zip(a, b, strict=True):
                    if model is parameter:
                        return master, each.optimizer
        for group in each.optimizer.param_groups:
            if any(p is parameter for p in group["params"]):
                return parameter, each.optimizer
    return None, None


def _range(slices: list[Any], parameter: Any) -> tuple[int, int]:
    for each in slices:
        if parameter in each.model_param_gbuf_map:
            place = each._get_model_param_range_map(parameter)["param"]
            return place.start, place.end
    return 0, parameter.numel()


def _whole(parts: list[tuple[Any, ...]]) -> torch.Tensor | None:
    shape, dim, halves = parts[0][1:4]
    by_index: dict[int, torch.Tensor] = {}
    for index, _, _, _, start, data in parts:
        flat = by_index.setdefault(index, torch.zeros(torch.Size(shape).numel(), dtype=data.dtype))
        flat[start : start + data.numel()] = data
    local = [by_index[index].view(shape) for index in sorted(by_index)]
    return local[0] if dim is None else join(local, dim, halves)
