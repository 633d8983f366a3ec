"""A small GPT of real Megatron-Core parts, in any layout, with weights that do not depend on it."""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig, multi_latent_attention
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    get_moe_layer_wise_logging_tracker,
)
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from tests.megatron_adapter.jobs import Job
from tests.megatron_adapter.settings import HALF, configure
from tests.megatron_adapter.te_attention import TEDotProductAttention, TELinear

SEQUENCE, BATCH, VOCABULARY = 16, 2, 64
_layout_now: list[tuple] = []  # of the groups there are


@dataclass
class Trainer:
    """What a Megatron training loop holds."""

    job: Job
    config: TransformerConfig
    gpts: list[GPTModel]  # bare chunks
    chunks: list[Any]  # wrapped
    optimizer: Any


def build(job: Job) -> Trainer:
    """A new model on this rank; groups of an earlier one are replaced where they do not fit."""
    _initialize_groups(job)
    get_moe_layer_wise_logging_tracker().clear()  # it remembers how many layers there were
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    MTPLossLoggingHelper.tracker.clear()
    torch.manual_seed(7)
    tensor_parallel.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    config = configure(job)
    gpts = [_gpt(job, config, chunk) for chunk in range(job.vpp)]
    for gpt in gpts:
        _fill(gpt, job.untied, job.seed)
        for name, parameter in gpt.named_parameters():
            if job.marked and ".experts." in name:
                parameter.allreduce = False
        if job.smoothing:
            gpt.compute_language_model_loss = partial(_smoothed_loss, gpt)
        if job.deferred:
            _defer_output_layer_only(gpt)
    half = HALF.get(job.dtype)
    wrapped = [g if half is None else Float16Module(config, g) for g in gpts]
    chunks = [
        DistributedDataParallel(config, _ddp_config(job), w, disable_bucketing=i > 0)
        for i, w in enumerate(wrapped)
    ]
    optimizer = get_megatron_optimizer(_optimizer_config(job), chunks)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    no_sync = [chunk.no_sync for chunk in chunks]
    config.no_sync_func = no_sync[0] if len(no_sync) == 1 else no_sync
    return Trainer(job, config, gpts, chunks, optimizer)


def _ddp_config(job: Job) -> DistributedDataParallelConfig:
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=job.overlap,
        use_distributed_optimizer=job.distributed,
        overlap_param_gather=job.overlap and job.distributed,
        bucket_size=8000 if job.overlap else None,
    )


def _optimizer_config(job: Job) -> OptimizerConfig:
    return OptimizerConfig(
        lr=1e-3,
        weight_decay=0.1,
        bf16=job.dtype == "bf16",
        fp16=job.dtype == "fp16",
        initial_loss_scale=2.0**8,
        params_dtype=HALF.get(job.dtype, torch.float32),
        clip_grad=job.clip,
        use_distributed_optimizer=job.distributed,
        overlap_param_gather=job.overlap and job.distributed,
    )


def _initialize_groups(job: Job) -> None:
    """Making some thirty groups takes longer than the training: they serve for jobs in turn."""
    if _layout_now == [job.layout]:
        parallel_state.destroy_global_memory_buffer()  # as empty as in a new process
        parallel_state._set_global_memory_buffer()
        return
    parallel_state.destroy_model_parallel()
    _layout_now[:] = [job.layout]
    parallel_state.initialize_model_parallel(
        job.tp,
        job.pp,
        job.vpp if job.vpp > 1 else None,
        expert_model_parallel_size=job.ep,
        expert_tensor_parallel_size=job.etp,
    )


def train_step(trainer: Trainer, step: int, forward_only: bool = False) -> Any:
    """One step of Megatron's schedule; the optimizer's answer."""
    job = trainer.job
    if not forward_only:
        for chunk in trainer.chunks:
            chunk.zero_grad_buffer()
        trainer.optimizer.zero_grad()
    batches = [_batches(job, step) for _ in trainer.chunks]
    get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=batches if len(batches) > 1 else batches[0],
        model=trainer.chunks if len(trainer.chunks) > 1 else trainer.chunks[0],
        num_microbatches=job.microbatches_of(step),
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        forward_only=forward_only,
    )
    return None if forward_only else trainer.optimizer.step()


def _gpt(job: Job, config: TransformerConfig, chunk: int) -> GPTModel:
    vp_stage = chunk if job.vpp > 1 else None
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    spec = get_gpt_layer_local_spec(
        num_experts=job.experts or None,
        moe_grouped_gemm=False,
        qk_layernorm=job.qk_layernorm or job.latent,
        multi_latent_attention=job.latent,
    )
    if job.latent:  # it asks for Transformer Engine's classes, and for heads of two sizes
        multi_latent_attention.TELinear = TELinear
        spec.submodules.self_attention.submodules.core_attention = TEDotProductAttention
    further = None
    if job.further_tokens:
        further = get_gpt_mtp_block_spec(
            config, spec, use_transformer_engine=False, vp_stage=vp_stage
        )
    return GPTModel(
        config,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=not job.untied,
        position_embedding_type="rope",
        vp_stage=vp_stage,
        mtp_block_spec=further,
    ).cuda()


def _defer_output_layer_only(gpt: GPTModel) -> None:
    """As Transformer Engine's layers do, which do not look at this setting; Megatron's own do."""
    others = copy.copy(gpt.config)
    others.defer_embedding_wgrad_compute = False
    for module in gpt.decoder.modules():
        if isinstance(module, tensor_parallel.ColumnParallelLinear):
            module.config = others


def whole_name(gpt: GPTModel, name: str) -> str:
    """A parameter's name in the whole model, told by the layer's own number."""
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(gpt.decoder.layers[int(parts[2])].layer_number - 1)
    if "local_experts" in parts:
        at = parts.index("local_experts") + 1
        rank, size = (
            parallel_state.get_expert_model_parallel_rank(),
            parallel_state.get_expert_model_parallel_world_size(),
        )
        parts[at] = str(int(parts[at]) + rank * (gpt.config.num_moe_experts // size))
    return ".".join(parts)


def is_gated(name: str, gated: bool) -> bool:
    """Whether a parameter holds two halves, each split over the ranks."""
    return gated and ".linear_fc1." in name


def cut(full: torch.Tensor, dim: int, size: int, index: int, halves: bool) -> torch.Tensor:
    """A tensor-parallel rank's part of a whole parameter."""
    if not halves:
        return full.chunk(size, dim)[index]
    return torch.cat([half.chunk(size, dim)[index] for half in full.chunk(2, dim)], dim)


def join(parts: list[torch.Tensor], dim: int, halves: bool) -> torch.Tensor:
    """The whole parameter of all its parts, in the order of the ranks."""
    if not halves:
        return torch.cat(parts, dim)
    split = [part.chunk(2, dim) for part in parts]
    return torch.cat([torch.cat([s[k] for s in split], dim) for k in range(2)], dim)


def tensor_place(is_expert: bool) -> tuple[int, int]:
    """(size, index) of the tensor-parallel group that splits a parameter."""
    if is_expert:
        return (
            parallel_state.get_expert_tensor_parallel_world_size(),
            parallel_state.get_expert_tensor_parallel_rank(),
        )
    return (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )


def split_dim(parameter: torch.nn.Parameter) -> int | None:
    """The dim over which tensor parallelism has split a parameter."""
    is_split = getattr(parameter, "tensor_model_parallel", False)
    return parameter.partition_dim if is_split else None


def _fill(gpt: GPTModel, untied: bool, seed: int) -> None:
    for name, parameter in gpt.named_parameters():
        if "layernorm" in name:
            continue
        key = whole_name(gpt, name)
        if key == "output_layer.weight" and not untied:
            key = "embedding.word_embeddings.weight"
        if seed:
            key = f"{seed} {key}"
        fill_one(parameter, key, halves=is_gated(name, gpt.config.gated_linear_unit))


def fill_one(parameter: torch.nn.Parameter, key: str, halves: bool = False) -> None:
    """This rank's part of the tensor that a name in the whole model always stands for."""
    dim = split_dim(parameter)
    size, index = tensor_place(".local_experts." in key)
    shape = list(parameter.shape)
    if dim is not None:
        shape[dim] *= size
    full = whole_of(key, shape)
    with torch.no_grad():
        parameter.copy_(full if dim is None else cut(full, dim, size, index, halves))


def whole_of(key: str, shape: list[int]) -> torch.Tensor:
    """The whole tensor that a name stands for."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.05


def _batches(job: Job, step: int) -> Any:
    replicas = parallel_state.get_data_parallel_world_size()
    replica = parallel_state.get_data_parallel_rank()
    for k in range(job.microbatches_of(step)):
        seed = (step * job.num_microbatches + k) * replicas + replica
        generator = torch.Generator().manual_seed(1000 * (1 + job.seed) + seed)
        yield torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)


def _forward_step(batches: Any, model: torch.nn.Module) -> Any:
    batch = next(batches)
    tokens, labels = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
    position_ids = torch.arange(SEQUENCE).expand_as(tokens)
    causal = torch.ones(1, 1, SEQUENCE, SEQUENCE).tril() < 0.5
    return model(tokens, position_ids, causal, labels=labels), _mean_loss


def _smoothed_loss(gpt: GPTModel, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """A tenth of each token's probability is spread over all tokens."""
    whole = tensor_parallel.gather_from_tensor_model_parallel_region(logits)
    smooth = whole.log_softmax(-1)
    if getattr(gpt, "smooths_over", "all") == "own":
        size, index = tensor_place(False)
        smooth = smooth.chunk(size, -1)[index]
    losses = GPTModel.compute_language_model_loss(gpt, labels, logits)
    return 0.9 * losses - 0.1 * smooth.mean(-1).transpose(0, 1)


def _mean_loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = losses.float().mean()
    return loss, {"loss": loss.detach().clone()}
