"""Faults as they have been found in Megatron, planted in one step of a training.

Each function plants one and returns what takes it out again. None of them touches what capture
hooks into: it sees what follows from a fault, never the fault.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.optimizer import optimizer as optimizer_module
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention

from tests.megatron_adapter.model import Trainer

Undo = Callable[[], None]
Fault = Callable[[Trainer], Undo]
_ABSENT = object()


def set_for_now(owner: Any, name: str, value: Any) -> Undo:
    """Give an attribute another value; returns what gives it its own back."""
    before = vars(owner).get(name, _ABSENT)
    setattr(owner, name, value)

    def undo() -> None:
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    return undo


def flip(tensor: torch.Tensor) -> None:
    """As a broken memory cell would: autograd does not see it."""
    word = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    tensor.data.view(word).view(-1)[0] ^= 1 << 6 if word is torch.int16 else 1 << 20


def last_layer(trainer: Trainer) -> Any:
    return trainer.gpts[-1].decoder.layers[-1]


def inner_optimizer(trainer: Trainer) -> Any:
    return trainer.optimizer.chained_optimizers[0]


def is_rank_1() -> bool:
    return torch.distributed.get_rank() == 1


def nothing() -> None:
    """Undoes nothing."""


def final_norm_unmarked(trainer: Trainer) -> Undo:
    """The gradient of the final norm is not summed over tensor-parallel ranks."""
    return set_for_now(trainer.gpts[-1].decoder.final_layernorm.weight, "sequence_parallel", False)


def vocabulary_offset(trainer: Trainer) -> Undo:
    """Rank 1 looks its tokens up one row off."""
    embedding = trainer.gpts[0].embedding.word_embeddings
    if not is_rank_1():
        return nothing
    return set_for_now(embedding, "vocab_start_index", embedding.vocab_start_index + 1)


def row_not_reduced(trainer: Trainer) -> Undo:
    """One row-parallel layer keeps its partial sum."""
    return set_for_now(last_layer(trainer).mlp.linear_fc2, "explicit_expert_comm", True)


def clip_forgotten(trainer: Trainer) -> Undo:
    """Gradients are not clipped."""
    return set_for_now(optimizer_module, "clip_grad_by_total_norm_fp32", lambda *a, **k: None)


def buffers_zeroed(trainer: Trainer) -> Undo:
    """Only the gradients of the last micro-batch survive."""
    chunk = trainer.chunks[0]
    real = chunk.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        for buffer in chunk.buffers:
            buffer.grad_data.zero_()
        return real(*args, **kwargs)

    return set_for_now(chunk, "forward", forward)


def experts_doubled(trainer: Trainer) -> Undo:
    """Gradients of experts are scaled as if there were half as many ranks."""
    buckets = [b for buffer in trainer.chunks[0].expert_parallel_buffers for b in buffer.buckets]
    undos = [
        set_for_now(bucket, "gradient_scaling_factor", bucket.gradient_scaling_factor * 2)
        for bucket in buckets
    ]
    return lambda: [undo() for undo in undos] and None


def embedding_not_summed(trainer: Trainer) -> Undo:
    """The first and the last stage do not sum the gradients of their common weight."""
    # By its full name: the package has a function of the module's name.
    module = sys.modules["megatron.core.distributed.finalize_model_grads"]
    return set_for_now(module, "_allreduce_word_embedding_grads", lambda *a, **k: None)


def weights_not_gathered(trainer: Trainer) -> Undo:
    """Updated slices of the weights stay on the replicas that updated them."""
    undos = [
        set_for_now(group, "start_param_sync", lambda *a, **k: None)
        for group in trainer.chunks[0].bucket_groups
    ]
    return lambda: [undo() for undo in undos] and None


def tracker_moved(trainer: Trainer) -> Undo:
    """The random state for dropout in tensor-parallel regions is another."""
    tracker = tensor_parallel.get_cuda_rng_tracker()
    states = tracker.get_states()
    states["model-parallel-rng"] = torch.Generator().manual_seed(99).get_state()
    tracker.set_states(states)
    return nothing


def learning_rate_doubled(trainer: Trainer) -> Undo:
    """One group of parameters learns twice as fast."""
    trainer.optimizer.param_groups[0]["lr"] *= 2
    return nothing


def weight_flipped(trainer: Trainer) -> Undo:
    """One bit of a weight changes between two steps, on one rank."""
    if is_rank_1():
        flip(last_layer(trainer).mlp.linear_fc1.weight)
    return nothing


def output_flipped(trainer: Trainer) -> Undo:
    """One bit of an output changes in micro-batch 2, on one rank."""
    layer = last_layer(trainer).mlp.linear_fc2
    real, calls = layer.forward, []

    def forward(*args: Any, **kwargs: Any) -> Any:
        output, bias = real(*args, **kwargs)
        calls.append(None)
        if len(calls) == 3:
            flip(output)
        return output, bias

    return set_for_now(layer, "forward", forward) if is_rank_1() else nothing


def loss_doubled(trainer: Trainer) -> Undo:
    """The loss is scaled twice before backward."""
    real = trainer.config.grad_scale_func
    return set_for_now(trainer.config, "grad_scale_func", lambda loss: real(loss) * 2)


def recompute_differs(trainer: Trainer) -> Undo:
    """A layer computes something else when it is recomputed."""
    layer = last_layer(trainer).mlp.linear_fc1
    real = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output, bias = real(*args, **kwargs)
        if torch._C._current_graph_task_id() != -1:
            flip(output)
        return output, bias

    return set_for_now(layer, "forward", forward)


def moment_lost(trainer: Trainer) -> Undo:
    """A moment of the optimizer is zero when the step begins, as after a bad restart."""
    optimizer = inner_optimizer(trainer).optimizer
    next(iter(optimizer.state.values()))["exp_avg"].zero_()
    return nothing


def master_stale(trainer: Trainer) -> Undo:
    """A weight is updated, its fp32 master is not."""
    optimizer = inner_optimizer(trainer)
    master = last_layer(trainer).mlp.linear_fc1.weight.main_param
    stale, real = master.detach().clone(), optimizer._copy_main_params_to_model_params

    def copy_and_lose() -> None:
        real()
        master.data.copy_(stale)

    return set_for_now(optimizer, "_copy_main_params_to_model_params", copy_and_lose)


def mask_overwritten(trainer: Trainer) -> Undo:
    """Attention on rank 1 sees the future."""
    real = DotProductAttention.forward

    def forward(self: Any, query: Any, key: Any, value: Any, mask: Any, *a: Any, **k: Any) -> Any:
        return real(self, query, key, value, torch.zeros_like(mask), *a, **k)

    return set_for_now(DotProductAttention, "forward", forward) if is_rank_1() else nothing


def router_noise(trainer: Trainer) -> Undo:
    """The routers' weights of two ranks, replicas, part."""
    if is_rank_1():
        flip(last_layer(trainer).mlp.router.weight)
    return nothing


def router_unmarked(trainer: Trainer) -> Undo:
    """The gradient of one router is not summed over tensor-parallel ranks."""
    return set_for_now(last_layer(trainer).mlp.router.weight, "sequence_parallel", False)


def schedule_skips(trainer: Trainer) -> Undo:
    """The optimizer believes it has seen an overflow, and skips the step."""
    optimizer = inner_optimizer(trainer)
    real = optimizer.prepare_grads
    return set_for_now(optimizer, "prepare_grads", lambda: bool(real()) or True)


def norm_of_one_rank(trainer: Trainer) -> Undo:
    """The gradient norm leaves out the other ranks."""
    inner = inner_optimizer(trainer)
    real = inner.get_grad_norm
    return set_for_now(inner, "get_grad_norm", lambda: real() * 0.5)


def head_norm_not_summed(trainer: Trainer) -> Undo:
    """The gradient of a norm that all heads share is not summed over tensor-parallel ranks."""
    return set_for_now(trainer.config, "qk_layernorm", False)


def another_update_rule(trainer: Trainer) -> Undo:
    """The last stage updates the weight that it has in common with the first in another way."""
    if not is_rank_1():
        return nothing
    optimizer = inner_optimizer(trainer).optimizer
    weight = trainer.gpts[-1].output_layer.weight
    real = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        before = weight.detach().clone()
        result = real(*args, **kwargs)
        weight.data.copy_(before - 1e-3 * (before - weight.detach()).sign())
        return result

    return set_for_now(optimizer, "step", step)


def smoothed_over_own_tokens(trainer: Trainer) -> Undo:
    """Label smoothing takes the mean over the tokens of one rank."""
    return set_for_now(trainer.gpts[-1], "smooths_over", "own")


def logits_gathered(trainer: Trainer) -> Undo:
    """The loss takes whole logits for those of one rank."""
    gpt = trainer.gpts[-1]
    real = gpt.compute_language_model_loss

    def compute(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return real(labels, gather_from_tensor_model_parallel_region(logits))

    return set_for_now(gpt, "compute_language_model_loss", compute)


def found_in(module: dict[str, Any], name: str) -> dict[str, Fault]:
    """The faults that a module defines: its own public functions of a trainer."""
    return {
        key: value
        for key, value in module.items()
        if callable(value)
        and getattr(value, "__module__", "") == name
        and getattr(value, "__annotations__", {}).get("trainer") == "Trainer"
        and value.__annotations__.get("return") == "Undo"
    }


FAULTS = found_in(globals(), __name__)
