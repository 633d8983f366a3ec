"""Transformer Engine's attention by a few plain operators: its name and call shapes."""

from __future__ import annotations

from typing import Any

import torch


class TELinear(torch.nn.Module):
    """A linear layer that every rank has whole. Only asked for by its class."""


class TEDotProductAttention(torch.nn.Module):
    """Attention whose keys and values may have other sizes, as latent attention needs it."""

    def __init__(
        self, config: Any, *_args: Any, softmax_scale: float | None = None, **_kwargs: Any
    ) -> None:
        super().__init__()
        self.config = config
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """query, key, value: (sequence, batch, heads, size). Returns (sequence, batch, hidden)."""
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        scale = self.softmax_scale or key.shape[-1] ** -0.5
        scores = (query @ key.transpose(-1, -2)) * scale
        if attention_mask is not None:
            scores = scores.masked_fill(attention_mask, -10000.0)
        out = scores.softmax(-1) @ value
        return out.permute(2, 0, 1, 3).flatten(2).contiguous()
