"""Faults of Megatron in moving data, in recompute, and in the life of buffers.

As `faults.py`: each function plants one and returns what takes it out again.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state

from tests.megatron_adapter import model as training
from tests.megatron_adapter.faults import (
    Undo,
    found_in,
    is_rank_1,
    last_layer,
    nothing,
    set_for_now,
)
from tests.megatron_adapter.model import Trainer


def _is_recomputing() -> bool:
    return torch._C._current_graph_task_id() != -1


def _at_microbatch(trainer: Trainer, number: int, deed: Any) -> Undo:
    """Do something just before a micro-batch's forward."""
    chunk = trainer.chunks[0]
    real, calls = chunk.forward, []

    def forward(*args: Any, **kwargs: Any) -> Any:
        if len(calls) == number:
            deed()
        calls.append(None)
        return real(*args, **kwargs)

    return set_for_now(chunk, "forward", forward)


def another_group(trainer: Trainer) -> Undo:
    """One layer's collective runs in the group of the replicas, not in its own."""
    layer = last_layer(trainer).mlp.linear_fc2
    return set_for_now(layer, "tp_group", parallel_state.get_data_parallel_group())


def local_layer_numbers(trainer: Trainer) -> Undo:
    """The second stage has loaded the layer of that number on the first stage."""
    if is_rank_1():
        layer = last_layer(trainer)
        for name, parameter in layer.named_parameters():
            if "layernorm" not in name:
                training.fill_one(parameter, f"decoder.layers.0.{name}")
    return nothing


def halves_mixed(trainer: Trainer) -> Undo:
    """A gated weight was split over the ranks as if it were one tensor."""
    weight = last_layer(trainer).mlp.linear_fc1.weight
    training.fill_one(weight, "decoder.layers.1.mlp.linear_fc1.weight", halves=False)
    return nothing


def states_swapped(trainer: Trainer) -> Undo:
    """An expert has the moment of a dense layer, and that one the expert's."""
    layer = last_layer(trainer)
    pair = (layer.self_attention.linear_proj.weight, layer.mlp.experts.local_experts[0].linear_fc1)
    moments = []
    for parameter in (pair[0], pair[1].weight):
        for optimizer in trainer.optimizer.chained_optimizers:
            state = optimizer.optimizer.state
            if parameter in state:
                moments.append(state[parameter]["exp_avg"])
    one, other = moments
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)
    return nothing


def copy_reduced(trainer: Trainer) -> Undo:
    """The gradient that leaves the output layer was summed in a copy, which was dropped."""
    real, shape = torch.distributed.all_reduce, trainer.gpts[-1].output_layer.weight.shape[1]
    calls: list[None] = []

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        is_output_layers = kwargs.get("async_op") and tensor.shape[-1] == shape and not calls
        if is_output_layers:
            calls.append(None)
            tensor = tensor.clone()
        return real(tensor, *args, **kwargs)

    return set_for_now(torch.distributed, "all_reduce", all_reduce)


def weights_of_other_tokens(trainer: Trainer) -> Undo:
    """Experts weigh their tokens by the probabilities of others."""
    dispatcher = last_layer(trainer).mlp.token_dispatcher
    real = dispatcher.dispatch_postprocess

    def dispatch(*args: Any) -> Any:
        tokens, counts, probabilities = real(*args)
        return tokens, counts, probabilities.roll(1)

    return set_for_now(dispatcher, "dispatch_postprocess", dispatch)


def first_input_again(trainer: Trainer) -> Undo:
    """When two layers are recomputed together, the second one gets what the first one got."""
    first, second = trainer.gpts[0].decoder.layers[:2]
    kept: list[torch.Tensor] = []

    def keep(module: Any, args: Any, kwargs: Any) -> None:
        if _is_recomputing():
            kept[:] = [kwargs["hidden_states"]]

    def give(module: Any, args: Any, kwargs: Any) -> Any:
        if _is_recomputing():
            return args, kwargs | {"hidden_states": kept[0]}
        return None

    handles = [
        layer.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
        for layer, hook in ((first, keep), (second, give))
    ]
    return lambda: [handle.remove() for handle in handles] and None


def detached_in_checkpoint(trainer: Trainer) -> Undo:
    """Where a layer is recomputed, gradients end at what enters its second half."""
    layer = last_layer(trainer).mlp
    real = layer.forward

    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        taken = hidden_states.detach() if _is_recomputing() else hidden_states
        return real(taken, *args, **kwargs)

    return set_for_now(layer, "forward", forward)


def stale_reload(trainer: Trainer) -> Undo:
    """A layer is recomputed from the activation of the micro-batch before."""
    layer = last_layer(trainer)
    kept: list[torch.Tensor] = []

    def reload(module: Any, args: Any, kwargs: Any) -> Any:
        if not _is_recomputing():
            kept.append(kwargs["hidden_states"].detach())
            return None
        hidden = kwargs["hidden_states"]
        if len(kept) > 1:
            hidden.data.copy_(kept[-2])
        return args, kwargs

    handle = layer.register_forward_pre_hook(reload, with_kwargs=True, prepend=True)
    return handle.remove


def stale_gradient(trainer: Trainer) -> Undo:
    """What was left in a buffer is added to the gradients of one parameter."""
    norm = trainer.gpts[-1].decoder.final_layernorm
    return _at_microbatch(trainer, 1, lambda: norm.bias.main_grad.add_(1e-3))


def gradient_overwritten(trainer: Trainer) -> Undo:
    """The second micro-batch writes one gradient in place of adding to it."""
    weight = last_layer(trainer).mlp.linear_fc1.weight
    return _at_microbatch(trainer, 1, lambda: weight.main_grad.zero_())


def batch_remembered(trainer: Trainer) -> Undo:
    """A batch is changed in place where the data loader keeps it."""
    real = training._batches

    def batches(*args: Any) -> Any:
        for number, batch in enumerate(real(*args)):
            if number == 1:
                batch[0, 0] += 1
            yield batch

    return set_for_now(training, "_batches", batches)


def embedding_summed_too_early(trainer: Trainer) -> Undo:
    """Stages sum the gradients of their common weight before the replicas have summed theirs."""
    import sys

    module = sys.modules["megatron.core.distributed.finalize_model_grads"]
    real = module._allreduce_word_embedding_grads
    chunk = trainer.chunks[0]
    finish = chunk.finish_grad_sync

    def finish_late(*args: Any, **kwargs: Any) -> Any:
        real([chunk], trainer.config)
        return finish(*args, **kwargs)

    undo = [
        set_for_now(chunk, "finish_grad_sync", finish_late),
        set_for_now(module, "_allreduce_word_embedding_grads", lambda *a, **k: None),
    ]
    return lambda: [each() for each in undo] and None


FAULTS = found_in(globals(), __name__)
