"""The GPT on which the tools for this job have been measured: 4 layers, d=256, 3.7 M parameters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.num_heads, width // self.num_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(width)
        self.attn = Attention(width, num_heads)
        self.ln2 = nn.LayerNorm(width)
        self.mlp = MLP(width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.drop(self.mlp(self.ln2(x)))


class GPT(nn.Module):
    def __init__(
        self,
        num_layers: int = 4,
        width: int = 256,
        num_heads: int = 4,
        vocabulary: int = 1024,
        length: int = 128,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.vocabulary, self.length = vocabulary, length
        self.embed = nn.Embedding(vocabulary, width)
        self.pos = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, num_heads, dropout) for _ in range(num_layers))
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.pos(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self(tokens).flatten(0, 1), labels.flatten())
