"""TG, the tiny GPT that the cases train: hidden 16, 2 heads, vocabulary 32, sequence 8, batch 4.

    embed, pos, drop, blocks.{0,1}.{ln1, attn.{qkv, core, proj}, ln2, mlp.{fc1, act, fc2}, drop},
    ln_f, head

Parts that a case replaces are arguments: the attention core, the activation, the norm.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN, HEADS, VOCABULARY, LENGTH, BATCH = 16, 2, 32, 8, 4

Core = Callable[[Tensor, Tensor, Tensor], Tensor]


class CausalCore(nn.Module):
    """Softmax attention; q, k, v are [batch, heads, length, width of a head]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        future = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
        return scores.masked_fill(future, float("-inf")).softmax(-1) @ v


class Attention(nn.Module):
    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.core = core
        self.proj = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        return self.proj(self.core(*heads).transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.fc1 = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.act = act
        self.fc2 = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, core: nn.Module, dropout: float) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(HIDDEN)
        self.attn = Attention(core)
        self.ln2 = nn.LayerNorm(HIDDEN)
        self.mlp = MLP(nn.GELU())
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.drop(self.mlp(self.ln2(x)))


class TinyGPT(nn.Module):
    def __init__(self, core: Callable[[], nn.Module] = CausalCore, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.pos = nn.Embedding(LENGTH, HIDDEN)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(core(), dropout) for _ in range(2))
        self.ln_f = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.embed(tokens) + self.pos(torch.arange(tokens.shape[1])))
        for block in self.blocks:
            x = self.run_block(block, x)
        return self.head(self.ln_f(x))

    def run_block(self, block: nn.Module, x: Tensor) -> Tensor:
        """How a block is called; cases override it."""
        return block(x)


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy; labels of -100 do not count."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batches(seed: int = 0, num: int = 100) -> list[tuple[Tensor, Tensor]]:
    """(tokens, labels), int64 [batch, length]: the same for every run."""
    draw = torch.Generator().manual_seed(seed)
    texts = torch.randint(0, VOCABULARY, (num, BATCH, LENGTH + 1), generator=draw)
    return [(text[:, :-1], text[:, 1:]) for text in texts]
