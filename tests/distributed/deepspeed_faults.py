"""Faults of DeepSpeed trainings, after reports in public trackers; each is planted in an engine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import distributed as dist


def _after_steps(engine: Any, number: int, do: Callable[[], None]) -> None:
    """Call `do` once, when the engine has made that many optimizer steps."""
    step = engine.step

    @wraps(step)
    def stepped(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        if engine.global_steps == number:
            engine.step = step
            do()
        return result

    engine.step = stepped


def _flat(engine: Any) -> torch.Tensor:
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return optimizer.fp32_partitioned_groups_flat[0]
    return optimizer.single_partition_of_fp32_groups[0]


def bucket_overwritten_before_its_reduction(engine: Any) -> None:
    """overlap_comm: the next bucket is filled while the last one is still to be sent."""
    optimizer = engine.optimizer
    reduce = optimizer.average_tensor

    def average(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if engine.global_steps == 1 and dist.get_rank() == 1:
            tensor.view(-1)[:3] = 1.0
        return reduce(tensor, *args, **kwargs)

    optimizer.average_tensor = average


def bucket_overwritten_after_its_reduction(engine: Any) -> None:
    """overlap_comm: the bucket is filled anew before its result was copied out."""
    optimizer = engine.optimizer
    reduce = optimizer.average_tensor

    def average(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = reduce(tensor, *args, **kwargs)
        if engine.global_steps == 1:
            tensor.view(-1)[:] = 1.0
        return result

    optimizer.average_tensor = average


def bucket_of_exactly_one_weight_is_never_reduced(engine: Any) -> None:
    """ZeRO 3 forgot a weight whose size is the bucket's: its local gradient is used."""
    from deepspeed.runtime.zero import stage3

    scatter = stage3.reduce_scatter_coalesced

    def skipping(tensors: Any, group: Any = None) -> Any:
        if len(tensors) == 1 and tensors[0].numel() == engine.zero_reduce_bucket_size():
            half = tensors[0].numel() // 2
            return [tensors[0].reshape(-1)[half * dist.get_rank() :][:half]]
        return scatter(tensors, group)

    stage3.reduce_scatter_coalesced = skipping
    engine.undo = lambda: setattr(stage3, "reduce_scatter_coalesced", scatter)


def clip_on_one_rank_only(engine: Any) -> None:
    """Rank 1 does not clip (BLOOM-176B: layer norms on all ranks but the first)."""
    if dist.get_rank() == 1:
        engine.optimizer.unscale_and_clip_grads = lambda *args, **kwargs: None


def norm_of_half_the_gradients(engine: Any) -> None:
    """The norm leaves something out, so the clip coefficient is too large."""
    norm = engine.optimizer.scaled_global_norm
    engine.optimizer.scaled_global_norm = lambda *args, **kwargs: norm(*args, **kwargs) * 0.5


def step_that_writes_nothing(engine: Any) -> None:
    """The optimizer's step runs and changes no weight."""
    module = sys.modules["torch.optim.adam"]
    original = module.adam
    module.adam = lambda *args, **kwargs: None
    engine.undo = lambda: setattr(module, "adam", original)


def state_loaded_without_its_step(engine: Any) -> None:
    """After a resume moments are there and the step counter is not: wrong bias correction."""

    def forget() -> None:
        engine.basic_optimizer.state[_flat(engine)]["step"].zero_()

    _after_steps(engine, 1, forget)


def state_loaded_at_a_wrong_offset(engine: Any) -> None:
    """A checkpoint's moments lie one element off."""

    def shift() -> None:
        state = engine.basic_optimizer.state[_flat(engine)]
        state["exp_avg"].copy_(state["exp_avg"].roll(1))

    _after_steps(engine, 1, shift)


def cast_of_a_frozen_weight(engine: Any) -> None:
    """A cast of everything that floats also changes what is frozen."""
    with torch.no_grad():
        engine.module[1].bias.add_(0.001)


def gradients_never_reduced(engine: Any) -> None:
    """A filter by type name matches no bucket: the all-reduce is skipped."""
    engine.allreduce_bucket = lambda bucket, *args, **kwargs: torch.cat(
        [tensor.view(-1) for tensor in bucket]
    )


def weights_never_gathered(engine: Any) -> None:
    """Ranks keep the old weights of the other partitions."""
    from deepspeed.runtime import utils

    original = utils.all_gather_into_tensor_dp_groups
    utils.all_gather_into_tensor_dp_groups = lambda *args, **kwargs: None
    engine.undo = lambda: setattr(utils, "all_gather_into_tensor_dp_groups", original)


def learning_rate_of_a_group(engine: Any) -> None:
    """A scheduler that was restored one step late."""
    engine.basic_optimizer.param_groups[0]["lr"] *= 0.5


def one_accumulated_gradient_is_lost(engine: Any) -> None:
    """The accumulator is cleared between two micro-batches."""
    backward = engine.backward

    def losing(loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if engine.micro_steps == 1:
            engine.module[3].weight.grad = None
        return backward(loss, *args, **kwargs)

    engine.backward = losing


def tied_gradients_never_summed(engine: Any) -> None:
    """A pipeline's tied layers: every stage updates its copy with its own gradient only."""
    engine.module.get_tied_weights_and_groups = list


def one_activation_is_sent_changed(engine: Any) -> None:
    """The buffer of a sent activation is reused too early, for one micro-batch."""
    from deepspeed.runtime.pipe import p2p

    send, sent = p2p.send, []

    def sending(tensor: torch.Tensor, stage: int) -> Any:
        sent.extend([stage] if tensor.is_floating_point() else [])  # sizes are sent before
        if engine.is_first_stage() and len(sent) == 2:
            tensor = tensor.detach() + 1.0
        return send(tensor, stage)

    p2p.send = sending
    engine.undo = lambda: setattr(p2p, "send", send)


def gradient_that_overflows(engine: Any) -> None:
    """In the first step only, so that it is skipped."""
    backward = engine.backward

    def overflowing(loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        factor = float("inf") if engine.global_steps == 0 else 1.0
        return backward(loss * factor, *args, **kwargs)

    engine.backward = overflowing


def weight_decay_is_ahead(engine: Any) -> None:
    """An optimizer that steps once when it is made, to allocate its states, decays the masters."""
    (group,) = engine.basic_optimizer.param_groups
    for flat in group["params"]:
        flat.data.mul_(1.0 - group["lr"] * group["weight_decay"])


def random_state_of_another_generator(engine: Any) -> None:
    """A resume brings back the state of a generator that is not the one in use."""
    _after_steps(engine, 1, lambda: torch.manual_seed(1234))


def step_counter_of_one_weight_runs_ahead(engine: Any) -> None:
    """One counter for several weights: bias correction is wrong for one that is seldom trained."""
    step = engine.basic_optimizer.step

    def counting(*args: Any, **kwargs: Any) -> Any:
        if engine.global_steps == 1:
            engine.basic_optimizer.state[engine.module[3].weight]["step"] += 1
        return step(*args, **kwargs)

    engine.basic_optimizer.step = counting


def step_is_skipped_without_an_overflow(engine: Any) -> None:
    """The second step is taken for one that overflowed: no weight changes."""
    optimizer = engine.optimizer
    check = optimizer.check_overflow

    def checked(*args: Any, **kwargs: Any) -> None:
        check(*args, **kwargs)
        optimizer.overflow = optimizer.overflow or engine.global_steps == 1

    optimizer.check_overflow = checked


def loss_is_not_scaled(engine: Any) -> None:
    """fp16: backward starts from the loss as it is, and the step divides by the scale."""
    engine.optimizer.scale_if_loss = lambda loss: loss


def pipeline_reduces_nothing(engine: Any) -> None:
    """The pipeline's own schedule leaves out the reduction over its replicas."""
    from deepspeed.runtime.pipe.schedule import ReduceGrads

    engine._INSTRUCTION_MAP[ReduceGrads] = lambda self: None
