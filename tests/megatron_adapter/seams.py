"""Attributes of Megatron's objects that the adapter reads or replaces, looked for on real ones.

Their names are Megatron's own business: a version that moves one must be noticed here, not by a
trace that lacks something.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from tests.megatron_adapter.model import Trainer
from upguard_plugin.integrations.megatron.adapter import FINALIZER
from upguard_plugin.integrations.megatron.coalesced import FLATTEN

OPTIMIZER = ("step", "get_grad_norm", "prepare_grads", "get_parameters", "optimizer", "config")
DISTRIBUTED = (
    "model_param_gbuf_map", "gbuf_ranges", "model_float16_groups", "shard_fp32_from_float16_groups",
    "shard_float16_groups", "model_fp32_groups", "shard_fp32_groups",
)  # fmt: skip
CHUNK = (
    "buffers", "expert_parallel_buffers", "bucket_groups", "expert_parallel_bucket_groups",
    "ddp_config", "use_forward_hook", "remove_forward_pre_hook_handles", "enable_forward_pre_hook",
    "zero_grad_buffer", "start_param_sync",
)  # fmt: skip
BUCKET = ("grad_data", "param_data", "params_list")
PARAMETER = ("main_grad", "tensor_model_parallel", "allreduce")
SPLIT = ("partition_dim", "partition_stride")
SCALER = ("scale", "_growth_tracker", "_hysteresis_tracker")


def moved_seams(trainer: Trainer) -> list[str]:
    """What is not where the adapter looks for it."""
    return [
        f"{type(thing).__name__}.{name}"
        for thing, names in _things(trainer)
        for name in names
        if not hasattr(thing, name)
    ]


def _things(trainer: Trainer) -> Iterator[tuple[Any, tuple[str, ...]]]:
    job = trainer.job
    yield import_module(FINALIZER), (FLATTEN,)
    yield trainer.optimizer, ("chained_optimizers", "step", "get_grad_norm")
    for each in trainer.optimizer.chained_optimizers:
        if getattr(each, "is_stub_optimizer", False):
            continue
        yield each, OPTIMIZER + (DISTRIBUTED if job.distributed else ())
        if job.dtype == "fp16":
            yield each, ("grad_scaler",)
            yield each.grad_scaler, SCALER
    for chunk in trainer.chunks:
        late = ("use_forward_hook", "remove_forward_pre_hook_handles")
        yield chunk, tuple(n for n in CHUNK if n not in late or (job.overlap and job.distributed))
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            yield group, ("start_param_sync",)
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            for bucket in buffer.buckets:
                yield bucket, BUCKET
    for gpt in trainer.gpts:
        for name, parameter in gpt.named_parameters():
            is_split = getattr(parameter, "tensor_model_parallel", False)
            names = PARAMETER if is_split else ("main_grad",)
            yield parameter, tuple(n for n in names if n != "allreduce" or ".experts." in name)
            if is_split:
                yield parameter, SPLIT
        for layer in gpt.decoder.layers:
            yield layer, ("layer_number",)
            if job.experts:
                yield layer.mlp, ("experts", "local_expert_indices")
