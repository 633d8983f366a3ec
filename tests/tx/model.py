"""TX, a tiny GPT that any layout can share, made exact: what it computes does not depend on that.

    embed, pos, blocks.{0,1}.{ln1, attn.{enter, qkv, core, proj, leave}, ln2,
                              mlp.{enter, fc1, act, fc2, leave}}, ln_f, head

With `moe`, `moe.{gate, experts.{0..3}.{enter, w1, act, w2, leave}}` stands for `mlp`. A pipeline
rank has its modules of these only. Letters: B batch, S sequence, H hidden, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.tx.mesh import Mesh
from tests.tx.regions import Enter, Gather, Leave, from_experts, to_experts
from tests.tx.rules import rules_of
from upguard_plugin.exact import make_exact

HIDDEN, VOCABULARY, LENGTH, BATCH, NUM_BLOCKS, NUM_EXPERTS = 16, 32, 8, 4, 2, 4
ALONE = Mesh()


class Linear(nn.Linear):
    """x @ weight.T, the weight cut by rows (0) or columns (1) where the ranks of axis share it."""

    def __init__(
        self, into: int, out: int, mesh: Mesh = ALONE, dim: int | None = None, axis: str = "tp"
    ) -> None:
        parts = mesh.size(axis)
        super().__init__(
            into // (parts if dim == 1 else 1), out // (parts if dim == 0 else 1), bias=False
        )


class Core(nn.Module):
    """A fixed causal matrix instead of scores; a context-parallel rank has its rows of it."""

    def __init__(self, mesh: Mesh = ALONE) -> None:
        super().__init__()
        self.mesh = mesh

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys = k + v
        if self.mesh.size("cp") > 1:
            keys = Gather.apply(keys, self.mesh, "cp", 1, True)
        length = keys.shape[1]
        causal = torch.ones(length, length, dtype=keys.dtype).tril()
        rows = self.mesh.part(causal, 0, "cp")
        return q + torch.einsum("st,bth->bsh", rows, keys)


class Attention(nn.Module):
    def __init__(self, mesh: Mesh = ALONE) -> None:
        super().__init__()
        self.enter, self.leave = Enter(mesh, sp=mesh.sp), Leave(mesh, sp=mesh.sp)
        self.qkv = Linear(HIDDEN, 3 * HIDDEN, mesh, 0)
        self.core = Core(mesh)
        self.proj = Linear(HIDDEN, HIDDEN, mesh, 1)

    def forward(self, x: Tensor, **more: Tensor) -> Tensor:
        heads = self.qkv(self.enter(x)).unflatten(-1, (-1, 3))
        return self.leave(self.proj(self.core(*heads.unbind(-1), **more)))


class MLP(nn.Module):
    """Also an expert, whose layers have other names and may be cut over an axis of their own."""

    def __init__(self, mesh: Mesh = ALONE, *, is_expert: bool = False) -> None:
        super().__init__()
        axis = mesh.expert_axis if is_expert else "tp"
        region = {"axis": axis, "sp": mesh.sp and axis == "tp"}
        self.names = ("w1", "w2") if is_expert else ("fc1", "fc2")
        self.enter, self.leave, self.act = Enter(mesh, **region), Leave(mesh, **region), nn.ReLU()
        self.add_module(self.names[0], Linear(HIDDEN, 4 * HIDDEN, mesh, 0, axis))
        self.add_module(self.names[1], Linear(4 * HIDDEN, HIDDEN, mesh, 1, axis))

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.get_submodule(name) for name in self.names)
        return self.leave(second(self.act(first(self.enter(x)))))


class MoE(nn.Module):
    """Every token goes to all experts, weighed by the gate; ranks of ep share the experts out."""

    def __init__(self, mesh: Mesh = ALONE) -> None:
        super().__init__()
        self.mesh = mesh
        self.gate = Linear(HIDDEN, NUM_EXPERTS)
        mine = mesh.part(torch.arange(NUM_EXPERTS), 0, "ep")
        self.experts = nn.ModuleDict({str(int(i)): MLP(mesh, is_expert=True) for i in mine})

    def forward(self, x: Tensor) -> Tensor:
        x, scores = (to_experts(part, self.mesh) for part in (x, self.gate(x)))
        # A view for each: the gradient of a tensor that all of them read would be one sum.
        out = sum(
            scores[..., int(i), None] * expert(x.view_as(x)) for i, expert in self.experts.items()
        )
        return from_experts(out, self.mesh)


class Block(nn.Module):
    def __init__(self, mesh: Mesh, moe: bool) -> None:
        super().__init__()
        self.ln1, self.attn = nn.RMSNorm(HIDDEN), Attention(mesh)
        self.ln2 = nn.RMSNorm(HIDDEN)
        self.second = "moe" if moe else "mlp"
        self.add_module(self.second, MoE(mesh) if moe else MLP(mesh))

    def forward(self, x: Tensor, **more: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x), **more)
        return x + self.get_submodule(self.second)(self.ln2(x))


class ExactGPT(nn.Module):
    """tokens, int64 [B, S], to logits, float64 [B, S, V]; a pipeline stage to its part of that."""

    def __init__(self, mesh: Mesh = ALONE, moe: bool = False) -> None:
        super().__init__()
        self.mesh = mesh
        stage, last = mesh.index("pp"), mesh.size("pp") - 1
        if stage == 0:
            self.embed, self.pos = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        blocks = mesh.part(torch.arange(NUM_BLOCKS), 0, "pp").tolist()
        self.blocks = nn.ModuleDict({str(i): Block(mesh, moe) for i in blocks})
        if stage == last:
            self.ln_f, self.head = nn.RMSNorm(HIDDEN), Linear(HIDDEN, VOCABULARY)
        make_exact(self, layout=mesh.layout, placements=rules_of(mesh))

    def forward(self, tokens: Tensor, **more: Tensor) -> Tensor:
        x = tokens  # or what the stage before gave
        if self.mesh.index("pp") == 0:
            length = tokens.shape[1] * self.mesh.size("cp")
            positions = self.mesh.part(torch.arange(length), 0, "cp")
            x = self.embed(tokens) + self.pos(positions)
            x = self.mesh.part(x, 1, "tp") if self.mesh.sp else x
        for block in self.blocks.values():
            x = block(x, **more)
        if not hasattr(self, "head"):
            return x
        x = self.ln_f(x)
        return self.head(Gather.apply(x, self.mesh, "tp", 1, False) if self.mesh.sp else x)
