"""Saving: exchanges the time of day, as the real one exchanges pickled objects."""

import time

import torch


def save_checkpoint(
    iteration, model, optimizer, opt_param_scheduler, num_floating_point_operations_so_far,
    checkpointing_context=None, pipeline_rank=None, expert_rank=None, tensor_rank=None,
    pipeline_parallel=None, expert_parallel=None, non_persistent_ckpt=False,
    train_data_iterator=None, preprocess_common_state_dict_fn=None, release=False,
    tp_group=None, pp_group=None, dp_cp_group=None,
):  # fmt: skip
    """Exchange something that no two runs have in common."""
    torch.distributed.all_gather_object([None], time.time_ns())


def load_checkpoint(
    ddp_model, optimizer, opt_param_scheduler, load_arg="load", strict=True,
    checkpointing_context=None, skip_load_to_model_and_opt=False,
    tp_group=None, pp_group=None, dp_cp_group=None,
):  # fmt: skip
    """Nothing is ever there."""
    return 0, 0
