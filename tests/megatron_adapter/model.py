"""A small GPT of real Megatron-Core parts, in any layout, with weights that do not depend on it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from tests.megatron_adapter.jobs import Job

SEQUENCE, BATCH, VOCABULARY = 16, 2, 64


@dataclass
class Trainer:
    """What a Megatron training loop holds."""

    job: Job
    config: TransformerConfig
    gpts: list[GPTModel]  # bare chunks
    chunks: list[Any]  # wrapped
    optimizer: Any


def build(job: Job) -> Trainer:
    """A new model on this rank; groups of an earlier one are replaced."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        job.tp,
        job.pp,
        job.vpp if job.vpp > 1 else None,
        expert_model_parallel_size=job.ep,
        expert_tensor_parallel_size=job.etp,
    )
    torch.manual_seed(7)
    tensor_parallel.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    config = _config(job)
    gpts = [_gpt(job, config, chunk) for chunk in range(job.vpp)]
    for gpt in gpts:
        _fill(job, gpt)
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(job.dtype)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=job.overlap,
        use_distributed_optimizer=job.distributed,
        overlap_param_gather=job.overlap and job.distributed,
        bucket_size=8000 if job.overlap else None,
    )
    wrapped = [g if half is None else Float16Module(config, g) for g in gpts]
    chunks = [
        DistributedDataParallel(config, ddp_config, w, disable_bucketing=i > 0)
        for i, w in enumerate(wrapped)
    ]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=1e-3,
            weight_decay=0.1,
            bf16=job.dtype == "bf16",
            fp16=job.dtype == "fp16",
            initial_loss_scale=2.0**8,
            params_dtype=half or torch.float32,
            clip_grad=job.clip,
            use_distributed_optimizer=job.distributed,
            overlap_param_gather=job.overlap and job.distributed,
        ),
        chunks,
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    no_sync = [chunk.no_sync for chunk in chunks]
    config.no_sync_func = no_sync[0] if len(no_sync) == 1 else no_sync
    return Trainer(job, config, gpts, chunks, optimizer)


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
        num_microbatches=job.num_microbatches,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        forward_only=forward_only,
    )
    return None if forward_only else trainer.optimizer.step()


def _config(job: Job) -> TransformerConfig:
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(job.dtype, torch.float32)
    dropout = 0.1 if job.dtype == "bf16" and job.dropout else 0.0
    recompute: dict[str, Any] = {}
    if job.recompute:
        recompute = {
            "recompute_granularity": "full", "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }  # fmt: skip
    moe: dict[str, Any] = {}
    if job.experts:
        moe = {
            "num_moe_experts": job.experts, "moe_router_topk": 2, "moe_ffn_hidden_size": 32,
            "moe_token_dispatcher_type": "alltoall", "moe_aux_loss_coeff": 1e-2,
            "moe_router_load_balancing_type": "aux_loss", "add_bias_linear": False,
        }  # fmt: skip
    return TransformerConfig(
        num_layers=job.layers,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=job.query_groups,
        ffn_hidden_size=64,
        gated_linear_unit=job.gated,
        activation_func=torch.nn.functional.silu if job.gated else torch.nn.functional.gelu,
        tensor_model_parallel_size=job.tp,
        pipeline_model_parallel_size=job.pp,
        virtual_pipeline_model_parallel_size=job.vpp if job.vpp > 1 else None,
        expert_model_parallel_size=job.ep,
        expert_tensor_parallel_size=job.etp,
        sequence_parallel=job.sequence_parallel,
        hidden_dropout=dropout,
        attention_dropout=dropout,
        bf16=job.dtype == "bf16",
        fp16=job.dtype == "fp16",
        params_dtype=half,
        pipeline_dtype=half,
        deallocate_pipeline_outputs=job.pp > 1,  # as Megatron-LM has it
        overlap_p2p_comm=job.vpp > 1,  # two stages that swap both ways need it
        batch_p2p_comm=job.vpp == 1,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **recompute,
        **moe,
    )


def _gpt(job: Job, config: TransformerConfig, chunk: int) -> GPTModel:
    vp_stage = chunk if job.vpp > 1 else None
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    spec = get_gpt_layer_local_spec(num_experts=job.experts or None, moe_grouped_gemm=False)
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
    ).cuda()


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


def is_gated(name: str, job: Job) -> bool:
    """Whether a parameter holds two halves, each split over the ranks."""
    return job.gated and ".linear_fc1." in name


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


def _fill(job: Job, gpt: GPTModel) -> None:
    for name, parameter in gpt.named_parameters():
        if "layernorm" in name:
            continue
        dim = split_dim(parameter)
        is_expert = ".local_experts." in name
        size, index = tensor_place(is_expert)
        shape = list(parameter.shape)
        if dim is not None:
            shape[dim] *= size
        key = whole_name(gpt, name)
        if key == "output_layer.weight" and not job.untied:
            key = "embedding.word_embeddings.weight"
        if job.seed:
            key = f"{job.seed} {key}"
        seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big")
        full = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.05
        part = full if dim is None else cut(full, dim, size, index, is_gated(name, job))
        with torch.no_grad():
            parameter.copy_(part)


def _batches(job: Job, step: int) -> Any:
    replicas = parallel_state.get_data_parallel_world_size()
    replica = parallel_state.get_data_parallel_rank()
    for k in range(job.num_microbatches):
        seed = (step * job.num_microbatches + k) * replicas + replica
        generator = torch.Generator().manual_seed(1000 * (1 + job.seed) + seed)
        yield torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)


def _forward_step(batches: Any, model: torch.nn.Module) -> Any:
    batch = next(batches)
    tokens, labels = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
    position_ids = torch.arange(SEQUENCE).expand_as(tokens)
    causal = torch.ones(1, 1, SEQUENCE, SEQUENCE).tril() < 0.5
    return model(tokens, position_ids, causal, labels=labels), _mean_loss


def _mean_loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = losses.float().mean()
    return loss, {"loss": loss.detach().clone()}
