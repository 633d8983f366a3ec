"""TX: a tiny GPT whose sums are exact in any order, whole or split over two ranks.

float64, weights and inputs from {-1, -1/2, 0, 1/2, 1}, ReLU, norms that only scale, attention by a
fixed lower-triangular matrix, a loss divided by a power of two, SGD with lr 1/8: every value is a
small dyadic number, so a clean pair of layouts is bit-equal and only a planted fault differs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

HIDDEN, HEADS, VOCABULARY, LENGTH, BATCH = 16, 2, 32, 8, 4


def dyadic(*shape: int, draw: torch.Generator) -> Tensor:
    """Values from {-1, -1/2, 0, 1/2, 1}."""
    return torch.randint(-2, 3, shape, generator=draw).double() / 2


class _Copy(torch.autograd.Function):
    """Into the tensor-parallel region: the identity, whose gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class _Reduce(torch.autograd.Function):
    """Out of the tensor-parallel region: a sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Scale(nn.Module):
    def __init__(self, draw: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(dyadic(HIDDEN, draw=draw))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Linear(nn.Module):
    """x @ weight.T; `part` cuts the whole weight down to this rank's."""

    def __init__(self, out: int, into: int, draw: torch.Generator, part: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(part(dyadic(out, into, draw=draw)).clone())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


class Region(nn.Module):
    """A column-parallel layer, something in the middle, a row-parallel layer."""

    def __init__(
        self, first: str, middle: nn.Module, second: str, layers: dict[str, nn.Module], split: bool
    ):
        super().__init__()
        self.add_module(first, layers[first])
        self.add_module("core" if first == "qkv" else "act", middle)
        self.add_module(second, layers[second])
        self.first, self.second, self.split = first, second, split
        self.reduces = True

    def forward(self, x: Tensor) -> Tensor:
        if self.split:
            x = _Copy.apply(x)
        x = self._modules[self.first](x)
        x = (self._modules.get("core") or self._modules["act"])(x)
        x = self._modules[self.second](x)
        return _Reduce.apply(x) if self.split and self.reduces else x


class Core(nn.Module):
    """Fixed attention: position t gets the sum over positions <= t of v."""

    def forward(self, qkv: Tensor) -> Tensor:
        batch, length, _ = qkv.shape
        v = qkv.view(batch, length, -1, 3, HIDDEN // HEADS)[:, :, :, 2]
        mask = torch.ones(length, length, dtype=qkv.dtype).tril()
        return torch.einsum("ts,bshd->bthd", mask, v).reshape(batch, length, -1)


class Block(nn.Module):
    def __init__(self, draw: torch.Generator, rank: int, tp: int) -> None:
        super().__init__()
        rows = lambda w: w.chunk(tp, 0)[rank]  # noqa: E731
        columns = lambda w: w.chunk(tp, 1)[rank]  # noqa: E731
        self.ln1 = Scale(draw)
        attn = {
            "qkv": Linear(3 * HIDDEN, HIDDEN, draw, rows),
            "proj": Linear(HIDDEN, HIDDEN, draw, columns),
        }
        self.attn = Region("qkv", Core(), "proj", attn, tp > 1)
        self.ln2 = Scale(draw)
        mlp = {
            "fc1": Linear(4 * HIDDEN, HIDDEN, draw, rows),
            "fc2": Linear(HIDDEN, 4 * HIDDEN, draw, columns),
        }
        self.mlp = Region("fc1", nn.ReLU(), "fc2", mlp, tp > 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Exact(nn.Module):
    """The whole model, or rank `rank` of `tp`."""

    def __init__(self, rank: int = 0, tp: int = 1, num_blocks: int = 2) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(5)
        self.embed = nn.Embedding(VOCABULARY, HIDDEN, dtype=torch.float64)
        self.embed.weight.data.copy_(dyadic(VOCABULARY, HIDDEN, draw=draw))
        self.blocks = nn.ModuleList(Block(draw, rank, tp) for _ in range(num_blocks))
        self.ln_f = Scale(draw)
        self.head = Linear(VOCABULARY, HIDDEN, draw, lambda w: w)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """A weighted sum of the logits over a power of two."""
    return logits.gather(-1, labels[..., None]).sum() / 1024


def batches(num: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(6)
    texts = torch.randint(0, VOCABULARY, (num, BATCH, LENGTH + 1), generator=draw)
    return [(text[:, :-1], text[:, 1:]) for text in texts]


TP_PLACEMENTS = {
    "blocks.*.attn.qkv.weight": "o[tp] i",
    "blocks.*.mlp.fc1.weight": "o[tp] i",
    "blocks.*.attn.proj.weight": "o i[tp]",
    "blocks.*.mlp.fc2.weight": "o i[tp]",
    "*.weight": "*",
    "blocks.*.attn.qkv": {
        "input": "b s h",
        "output": "b s o[tp]",
        "grad_output": "b s o[tp]",
        "grad_input": "b s h +tp",
    },
    "blocks.*.mlp.fc1": {
        "input": "b s h",
        "output": "b s o[tp]",
        "grad_output": "b s o[tp]",
        "grad_input": "b s h +tp",
    },
    "blocks.*.attn.core": {
        "input": "b s o[tp]",
        "output": "b s o[tp]",
        "grad_output": "b s o[tp]",
        "grad_input": "b s o[tp]",
    },
    "blocks.*.mlp.act": {
        "input": "b s o[tp]",
        "output": "b s o[tp]",
        "grad_output": "b s o[tp]",
        "grad_input": "b s o[tp]",
    },
    "blocks.*.attn.proj": {
        "input": "b s i[tp]",
        "output": "b s h +tp",
        "grad_output": "b s h",
        "grad_input": "b s i[tp]",
    },
    "blocks.*.mlp.fc2": {
        "input": "b s i[tp]",
        "output": "b s h +tp",
        "grad_output": "b s h",
        "grad_input": "b s i[tp]",
    },
    "*": {"input": "*", "output": "*", "grad_output": "*", "grad_input": "*"},
}
