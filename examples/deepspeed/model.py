"""A small causal transformer over bytes."""

from __future__ import annotations

import torch
from torch import nn

NUM_BYTES = 256


class Block(nn.Module):
    """Attention and a feed-forward layer, each with its norm and residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden_BTH: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden_BTH.shape
        qkv = self.qkv(self.norm1(hidden_BTH)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden_BTH = hidden_BTH + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return hidden_BTH + self.down(nn.functional.gelu(self.up(self.norm2(hidden_BTH))))


class ByteGPT(nn.Module):
    """Bytes in [B, T], logits out [B, T, 256]."""

    def __init__(self, width: int = 32, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_BYTES, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, NUM_BYTES)

    def forward(self, bytes_BT: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(bytes_BT)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def loss_of(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    """Cross entropy over all positions, in fp32."""
    return nn.functional.cross_entropy(logits_BTV.float().flatten(0, 1), labels_BT.flatten())
