"""A job's settings as Megatron's own."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from tests.megatron_adapter.jobs import Job

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def configure(job: Job) -> TransformerConfig:
    """The config of a small model in the job's layout."""
    dropout = 0.1 if job.dtype == "bf16" and job.dropout else 0.0
    dtype = HALF.get(job.dtype, torch.float32)
    cls = MLATransformerConfig if job.latent else TransformerConfig
    return cls(
        num_layers=job.layers,
        hidden_size=job.hidden,
        num_attention_heads=4,
        ffn_hidden_size=2 * job.hidden,
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
        params_dtype=dtype,
        pipeline_dtype=dtype,
        deallocate_pipeline_outputs=job.pp > 1,  # as Megatron-LM has it
        overlap_p2p_comm=job.vpp > 1,  # two stages that swap both ways need it
        batch_p2p_comm=job.vpp == 1,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=job.fused,
        defer_embedding_wgrad_compute=job.deferred,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        mtp_num_layers=job.further_tokens or None,
        **_attention(job),
        **_recompute(job),
        **_experts(job),
    )


def _attention(job: Job) -> dict[str, Any]:
    if job.latent:
        sizes = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_head_dim": 8, "v_head_dim": 8}
        return {"qk_layernorm": True, "qk_pos_emb_head_dim": 4, "rope_type": "rope", **sizes}
    return {"qk_layernorm": job.qk_layernorm, "num_query_groups": job.query_groups}


def _recompute(job: Job) -> dict[str, Any]:
    if job.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    if job.recompute == "":
        return {}
    method = {"full": "uniform", "block": "block", "pairs": "uniform"}[job.recompute]
    layers = 2 if job.recompute == "pairs" else 1
    return {
        "recompute_granularity": "full",
        "recompute_method": method,
        "recompute_num_layers": layers,
    }


def _experts(job: Job) -> dict[str, Any]:
    if not job.experts:
        return {}
    return {
        "num_moe_experts": job.experts,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 32,
        "moe_token_dispatcher_type": "alltoall",
        "moe_aux_loss_coeff": 1e-2,
        "moe_router_load_balancing_type": "aux_loss",
        "add_bias_linear": False,
    }
