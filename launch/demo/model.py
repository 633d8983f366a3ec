"""The demo's model: a small Megatron-Core GPT with Megatron's own DDP, optimizer and schedule.

Nothing here is a toy of ours: parallel layers, the bf16 wrapper, fp32 masters, gradient buffers and
weight-decay groups are Megatron's. Import it under `emulate_cuda()` only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from upguard_plugin.launch.demo.jobs import LAYOUTS
from upguard_plugin.launch.demo.text import VOCABULARY_SIZE

SEQUENCE_LENGTH = 32
_SEED = 1234
_NUM_STEPS_PLANNED = 100  # of the learning-rate schedule, not of the demo


@dataclass(frozen=True, slots=True)
class Trainer:
    """What a Megatron training loop holds."""

    model: DistributedDataParallel
    gpt: GPTModel  # inside `model` and its bf16 wrapper
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler


def build_trainer(layout: str) -> Trainer:
    """A new model on this rank, always with the same weights.

    layout: one of LAYOUTS. The default process group must have two ranks; the model-parallel
    groups of an earlier training are replaced.
    """
    tensor_parallel_size, sequence_parallel = LAYOUTS[layout]
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_parallel_size)
    torch.manual_seed(_SEED)
    tensor_parallel.model_parallel_cuda_manual_seed(_SEED, force_reset_rng=True)
    config = _transformer_config(tensor_parallel_size, sequence_parallel)
    gpt = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY_SIZE,
        max_sequence_length=SEQUENCE_LENGTH,
        position_embedding_type="rope",
    ).cuda()
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    model = DistributedDataParallel(config, ddp_config, Float16Module(config, gpt))
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=1e-3,
            min_lr=1e-4,
            weight_decay=0.1,
            bf16=True,
            params_dtype=torch.bfloat16,
            clip_grad=1.0,
        ),
        [model],
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    config.no_sync_func = model.no_sync
    return Trainer(model, gpt, optimizer, _scheduler(optimizer))


def _transformer_config(tensor_parallel_size: int, sequence_parallel: bool) -> TransformerConfig:
    return TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        ffn_hidden_size=256,
        tensor_model_parallel_size=tensor_parallel_size,
        sequence_parallel=sequence_parallel,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_cpu_initialization=True,
        # Fused kernels need a GPU.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )


def _scheduler(optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optimizer,
        init_lr=2e-4,
        max_lr=1e-3,
        min_lr=1e-4,
        lr_warmup_steps=2,
        lr_decay_steps=_NUM_STEPS_PLANNED,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=_NUM_STEPS_PLANNED,
        wd_incr_style="constant",
    )
