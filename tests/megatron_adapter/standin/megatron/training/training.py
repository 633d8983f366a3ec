"""The training loop, with the real one's order of calls."""

import time

import torch
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.timers import Timers
from megatron.training.arguments import parse_args
from megatron.training.checkpointing import load_checkpoint, save_checkpoint

_ARGS = None
_TIMERS = None


def get_args():
    """The flags, once `pretrain` has read them."""
    return _ARGS


def pretrain(
    train_valid_test_dataset_provider, model_provider, model_type, forward_step_func,
    process_non_loss_data_func=None, extra_args_provider=None, args_defaults={},  # noqa: B006 (as the real one)
    get_embedding_ranks=None, get_position_embedding_ranks=None, non_loss_data_func=None,
    store=None, inprocess_call_wrapper=None,
):  # fmt: skip
    """Set up, train, evaluate, save."""
    global _ARGS, _TIMERS
    parse_args(extra_args_provider, ignore_unknown_args=True)
    _ARGS = parse_args(extra_args_provider)
    _TIMERS = Timers(2, "minmax")
    model, optimizer, scheduler = setup_model_and_optimizer(model_provider, model_type)
    batches = train_valid_test_dataset_provider(None)
    train(forward_step_func, model, optimizer, scheduler, batches, None, None, model[0].config,
          {}, None)  # fmt: skip


def setup_model_and_optimizer(model_provider_func, model_type, checkpointing_context=None):
    """The model on this rank, its optimizer and its scheduler."""
    model, optimizer = model_provider_func()
    load_checkpoint(model, optimizer, None)
    return model, optimizer, None


def train(
    forward_step_func, model, optimizer, opt_param_scheduler, train_data_iterator,
    valid_data_iterator, process_non_loss_data_func, config, checkpointing_context,
    non_loss_data_func, inference_model=None,
):  # fmt: skip
    """As many steps as the flags say."""
    args = get_args()
    run = get_forward_backward_func()
    for iteration in range(args.train_iters):
        args.curr_iteration = iteration
        loss_dict, skipped, _, _, _, norm, _, _ = train_step(
            forward_step_func, train_data_iterator, model, optimizer, opt_param_scheduler, config,
            run, iteration=iteration,
        )  # fmt: skip
        training_log(loss_dict, {}, 1e-3, iteration + 1, 1.0, False, skipped, norm, None, None, 0)
        evaluate(forward_step_func, train_data_iterator, model, None, config)
        save_checkpoint(iteration + 1, model, optimizer, opt_param_scheduler, 0)


def train_step(
    forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config,
    forward_backward_func, iteration=None,
):  # fmt: skip
    """One step; the second is run twice, as the rerun state machine may ask for."""
    for _ in range(2 if iteration == 1 else 1):
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        losses = forward_backward_func(
            forward_step_func=forward_step_func, data_iterator=data_iterator, model=model,
            num_microbatches=2, seq_length=16, micro_batch_size=2, decoder_seq_length=None,
            forward_only=False,
        )  # fmt: skip
    _, grad_norm, num_zeros = optimizer.step()
    loss = {"lm loss": torch.stack([each["loss"] for each in losses]).mean()}
    return loss, 0, False, False, 0, grad_norm, num_zeros, 0


def training_log(
    loss_dict, total_loss_dict, learning_rate, iteration, loss_scale, report_memory_flag,
    skipped_iter, grad_norm, params_norm, num_zeros_in_grad, max_attention_logit,
    pg_collection=None, is_first_iteration=False,
):  # fmt: skip
    """Print the loss, and exchange what the clock says."""
    print(f"iteration {iteration} loss {loss_dict['lm loss'].item():.6f}", flush=True)
    clock = torch.tensor([time.time_ns()])
    torch.distributed.all_reduce(clock)
    return report_memory_flag


def evaluate(
    forward_step_func, data_iterator, model, process_non_loss_data_func, config, verbose=False,
    non_loss_data_func=None, eval_iters=None,
):  # fmt: skip
    """Forward only; the timers then exchange their clocks."""
    _TIMERS("evaluate", log_level=0).start(barrier=True)
    for chunk in model:
        chunk.eval()
    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=forward_step_func, data_iterator=data_iterator, model=model,
            num_microbatches=2, seq_length=16, micro_batch_size=2, forward_only=True,
        )  # fmt: skip
    for chunk in model:
        chunk.train()
    _TIMERS("evaluate").stop()
    _TIMERS.log(["evaluate"])


assert ModelType.encoder_or_decoder  # what scripts pass as model_type
