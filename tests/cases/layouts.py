"""TX, the exact model, and the parts that split it over the ranks of one gloo job.

Same names as TG. float64; weights and inputs from {-1, -1/2, 0, 1/2, 1}; norms that only weigh,
ReLU, a fixed attention matrix, a loss that is a weighted sum over a power of two: every sum is
exact in any order, so what a layout computes does not depend on the layout.

    tensor parallel     ExactGPT(tp=2): qkv, fc1 by columns, proj, fc2 by rows
    sequence parallel   ExactGPT(tp=2, sp=True): norms on this rank's half of the sequence
    context parallel    ExactGPT(cp=2): everything on this rank's half; the core gathers
    pipeline            stage_of(model, rank) and `Pipeline`

Letters: B batch, S sequence, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

HIDDEN, HEADS, VOCABULARY, LENGTH, BATCH = 16, 2, 32, 8, 4
WORLD = None  # the default process group


def exact(*shape: int, seed: int) -> Tensor:
    """float64 values from {-1, -1/2, 0, 1/2, 1}."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=draw).double() / 2


def rank() -> int:
    """This process's place in the job; 0 where there is none."""
    return dist.get_rank() if dist.is_initialized() else 0


def part_of(whole: Tensor, dim: int, num_parts: int) -> Tensor:
    """This rank's part of a tensor that is cut along a dim."""
    return whole.chunk(num_parts, dim)[rank() % num_parts].clone()


class _SumBackward(torch.autograd.Function):
    """f: the identity whose gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


class _SumForward(torch.autograd.Function):
    """g: the sum over the ranks; its gradient is everybody's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _Gather(torch.autograd.Function):
    """The whole sequence from its parts; the gradients of a part are summed, or its own taken."""

    @staticmethod
    def forward(ctx: Any, x_BSH: Tensor, sums: bool) -> Tensor:
        ctx.sums = sums
        return _gather(x_BSH)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (_scatter(grad) if ctx.sums else part_of(grad, 1, 2)), None


class _Scatter(torch.autograd.Function):
    """The sum over the ranks, of which each keeps its part of the sequence."""

    @staticmethod
    def forward(ctx: Any, x_BSH: Tensor) -> Tensor:
        return _scatter(x_BSH)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _gather(grad)


def _gather(x_BSH: Tensor) -> Tensor:
    parts = [torch.empty_like(x_BSH) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x_BSH.contiguous())
    return torch.cat(parts, 1)


def _scatter(x_BSH: Tensor) -> Tensor:
    parts = [part.contiguous() for part in x_BSH.chunk(dist.get_world_size(), 1)]
    own = torch.empty_like(parts[0])
    dist.reduce_scatter(own, parts)
    return own


class Enter(nn.Module):
    """Into a tensor-parallel region."""

    def __init__(self, tp: int, sp: bool) -> None:
        super().__init__()
        self.tp, self.sp = tp, sp

    def forward(self, x: Tensor) -> Tensor:
        if self.sp:
            return _Gather.apply(x, True)
        return _SumBackward.apply(x) if self.tp > 1 else x


class Leave(Enter):
    """Out of a tensor-parallel region."""

    def forward(self, x: Tensor) -> Tensor:
        if self.sp:
            return _Scatter.apply(x)
        return _SumForward.apply(x) if self.tp > 1 else x


class ExactLinear(nn.Module):
    """x @ weight.T, the weight cut along `dim` where there are several parts."""

    def __init__(self, weight: Tensor, dim: int = 0, parts: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(part_of(weight, dim, parts))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


class ExactEmbedding(ExactLinear):
    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.embedding(tokens, self.weight)


class ExactNorm(ExactLinear):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class ExactCore(nn.Module):
    """A fixed causal matrix instead of scores; a context-parallel rank keeps its rows of it."""

    def __init__(self, cp: int) -> None:
        super().__init__()
        self.cp = cp

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **_: Tensor) -> Tensor:
        keys = k + v
        if self.cp > 1:
            keys = _Gather.apply(keys, True)
        length = keys.shape[1]
        causal = torch.ones(length, length, dtype=keys.dtype).tril()
        rows = part_of(causal, 0, self.cp)
        return q + torch.einsum("st,btd->bsd", rows, keys) / LENGTH


class ExactAttention(nn.Module):
    def __init__(self, seed: int, tp: int, sp: bool, cp: int) -> None:
        super().__init__()
        self.enter, self.leave = Enter(tp, sp), Leave(tp, sp)
        self.qkv = ExactLinear(exact(3 * HIDDEN, HIDDEN, seed=seed), 0, tp)
        self.core = ExactCore(cp)
        self.proj = ExactLinear(exact(HIDDEN, HIDDEN, seed=seed + 1), 1, tp)

    def forward(self, x: Tensor, **more: Tensor) -> Tensor:
        heads = self.qkv(self.enter(x)).unflatten(-1, (-1, 3))
        return self.leave(self.proj(self.core(*heads.unbind(-1), **more)))


class ExactMLP(nn.Module):
    def __init__(self, seed: int, tp: int, sp: bool) -> None:
        super().__init__()
        self.enter, self.leave = Enter(tp, sp), Leave(tp, sp)
        self.fc1 = ExactLinear(exact(4 * HIDDEN, HIDDEN, seed=seed), 0, tp)
        self.act = nn.ReLU()
        self.fc2 = ExactLinear(exact(HIDDEN, 4 * HIDDEN, seed=seed + 1), 1, tp)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.fc2(self.act(self.fc1(self.enter(x)))))


class ExactBlock(nn.Module):
    def __init__(self, seed: int, tp: int, sp: bool, cp: int) -> None:
        super().__init__()
        self.ln1 = ExactNorm(exact(HIDDEN, seed=seed))
        self.attn = ExactAttention(seed + 1, tp, sp, cp)
        self.ln2 = ExactNorm(exact(HIDDEN, seed=seed + 3))
        self.mlp = ExactMLP(seed + 4, tp, sp)

    def forward(self, x: Tensor, **more: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x), **more)
        return x + self.mlp(self.ln2(x))


class ExactGPT(nn.Module):
    """tokens, int64 [B, S], to logits, float64 [B, S, VOCABULARY]."""

    def __init__(self, tp: int = 1, sp: bool = False, cp: int = 1) -> None:
        super().__init__()
        self.sp, self.cp = sp, cp
        self.embed = ExactEmbedding(exact(VOCABULARY, HIDDEN, seed=1))
        self.pos = ExactEmbedding(exact(LENGTH, HIDDEN, seed=2))
        self.blocks = nn.ModuleList(ExactBlock(10 * (i + 1), tp, sp, cp) for i in range(2))
        self.ln_f = ExactNorm(exact(HIDDEN, seed=3))
        self.head = ExactLinear(exact(VOCABULARY, HIDDEN, seed=4))

    def forward(self, tokens: Tensor, **more: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1]) + rank() * tokens.shape[1] * (self.cp > 1)
        x = self.embed(tokens) + self.pos(positions)
        x = part_of(x, 1, 2) if self.sp else x
        for block in self.blocks:
            x = block(x, **more)
        x = self.ln_f(x)
        return self.head(_Gather.apply(x, False) if self.sp else x)


def exact_batches(num: int = 2, length: int = LENGTH, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """(tokens, int64 [B, S]; weights of the logits, float64 [B, S, VOCABULARY])."""
    draw = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randint(0, VOCABULARY, (BATCH, length), generator=draw),
            exact(BATCH, length, VOCABULARY, seed=100 + i + seed),
        )
        for i in range(num)
    ]


def weighted_sum(logits: Tensor, weights: Tensor) -> Tensor:
    """The exact loss."""
    return (logits * weights).sum() / 1024


def sum_gradients(model: nn.Module, wants: Callable[[str], bool] = lambda _: True) -> None:
    """All-reduce the gradients of the wanted parameters, last parameter first."""
    for name, parameter in reversed(list(model.named_parameters())):
        if wants(name) and parameter.grad is not None:
            dist.all_reduce(parameter.grad)


class FirstStage(nn.Module):
    """r0 of a pipeline of two: embed, pos, blocks.0."""

    def __init__(self, model: ExactGPT) -> None:
        super().__init__()
        self.embed, self.pos = model.embed, model.pos
        self.blocks = nn.ModuleDict({"0": model.blocks[0]})

    def forward(self, tokens: Tensor) -> Tensor:
        return self.blocks["0"](self.embed(tokens) + self.pos(torch.arange(tokens.shape[1])))


class LastStage(nn.Module):
    """r1 of a pipeline of two: blocks.1, ln_f, head."""

    def __init__(self, model: ExactGPT) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"1": model.blocks[1]})
        self.ln_f, self.head = model.ln_f, model.head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.ln_f(self.blocks["1"](x)))


def stage_of(model: ExactGPT, index: int) -> nn.Module:
    """What a pipeline rank has of the model."""
    return FirstStage(model) if index == 0 else LastStage(model)


def run_microbatch(stage: nn.Module, tokens: Tensor, weights: Tensor, peer: int) -> None:
    """Forward and backward of one micro-batch on this rank of a pipeline of two.

    peer: the global rank of the other stage.
    """
    if isinstance(stage, FirstStage) or hasattr(stage, "embed"):
        out = stage(tokens)
        dist.send(out.detach(), peer)
        grad = torch.empty_like(out)
        dist.recv(grad, peer)
        out.backward(grad)
        return
    x = torch.empty(*tokens.shape, HIDDEN, dtype=torch.float64)
    dist.recv(x, peer)
    x.requires_grad_()
    weighted_sum(stage(x), weights).backward()
    assert x.grad is not None
    dist.send(x.grad, peer)
