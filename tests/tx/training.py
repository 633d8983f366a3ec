"""One training of TX under any mesh: what the rows of tests/tx/README say, and nothing clever.

    train(config, Mesh(tp=2, pp=2), microbatches=2)

The samples of a step are the same in every layout. A rank of dp takes its share of them, and cuts
it into micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import upguard_plugin
from tests.tx.mesh import Mesh
from tests.tx.model import ALONE, BATCH, HIDDEN, LENGTH, VOCABULARY, ExactGPT
from tests.tx.rules import rules_of
from tests.tx.zero import FlatSlice
from upguard_plugin.exact import exact_values, keep_exact

Batch = tuple[Tensor, Tensor]
IN_SEQUENCE = ("embed", "pos", "ln1", "ln2", "ln_f", "gate")  # with sp: of this rank's part


def exact_batches(num: int = 2, length: int = LENGTH, seed: int = 0) -> list[Batch]:
    """(tokens, int64 [B, S]; weights of the logits, float64 [B, S, V]) of each step."""
    draw = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randint(0, VOCABULARY, (BATCH, length), generator=draw),
            exact_values(f"weights {seed} {i}", (BATCH, length, VOCABULARY)),
        )
        for i in range(num)
    ]


def weighted_sum(logits: Tensor, weights: Tensor) -> Tensor:
    """The exact loss."""
    return (logits * weights).sum() / 32


def share_of(batch: Batch, mesh: Mesh, microbatches: int) -> list[Batch]:
    """The micro-batches of this rank."""
    shares = [mesh.part(mesh.part(whole, 0, "dp"), 1, "cp") for whole in batch]
    return list(zip(*(share.chunk(microbatches) for share in shares), strict=True))


def run_microbatch(stage: nn.Module, tokens: Tensor, weights: Tensor, mesh: Mesh = ALONE) -> Any:
    """Forward and backward of one micro-batch; the loss where it is computed, else None."""
    index, last = mesh.index("pp"), mesh.size("pp") - 1
    x = tokens
    if index > 0:
        length = tokens.shape[1] // (mesh.size("tp") if mesh.sp else 1)
        x = torch.empty(len(tokens), length, HIDDEN, dtype=torch.float64)
        dist.recv(x, mesh.rank_at("pp", index - 1))
        x.requires_grad_()
    out = stage(x)
    loss = None
    if index == last:
        loss = weighted_sum(out, weights)
        loss.backward()
    else:
        dist.send(out.detach(), mesh.rank_at("pp", index + 1))
        grad = torch.empty_like(out)
        dist.recv(grad, mesh.rank_at("pp", index + 1))
        out.backward(grad)
    if index > 0:
        dist.send(x.grad, mesh.rank_at("pp", index - 1))
    return loss


def sum_gradients(
    model: nn.Module, mesh: Mesh, wants: Callable[[str], bool] = lambda _: True
) -> None:
    """All-reduce the gradients of the wanted parameters, last parameter first."""
    for name, parameter in reversed(list(model.named_parameters())):
        for axis in ("tp", "cp", "dp", "edp"):
            if mesh.size(axis) > 1 and _is_partial(name, mesh, axis) and wants(name):
                dist.all_reduce(parameter.grad, group=mesh.group(axis))


def _is_partial(name: str, mesh: Mesh, axis: str) -> bool:
    """Whether each rank has the gradient of its own tokens only."""
    if ".experts." in name and mesh.has_expert_mesh:
        return axis == "edp"
    if axis == "tp":
        return mesh.sp and not set(name.split(".")).isdisjoint(IN_SEQUENCE)
    return axis != "edp"


@dataclass(frozen=True)
class Fault:
    """What a faulty training does at one place; nothing by default."""

    model: Callable[[nn.Module, Mesh], None] = lambda model, mesh: None  # after it is built
    batch: Callable[[Batch, Mesh, int], Batch] = lambda batch, mesh, microbatch: batch
    summed: Callable[[str], bool] = lambda name: True  # gradients that are all-reduced
    gradients: Callable[[nn.Module, Mesh], None] = lambda model, mesh: None  # before they are
    slices: Callable[[FlatSlice], None] = lambda flat: None  # before its optimizer steps
    gathered: Callable[[FlatSlice], None] = lambda flat: None  # before the weights are


def train(
    config: Mapping[str, Any],
    mesh: Mesh = ALONE,
    *,
    microbatches: int = 1,
    steps: int = 2,
    moe: bool = False,
    zero: str = "",
    fault: Fault | None = None,
) -> None:
    """Record a training on this rank of a mesh.

    zero: ranks of dp keep slices of the optimizer, of "weights" or of "masters" of them.
    """
    fault = fault or Fault()
    model = ExactGPT(mesh, moe)
    fault.model(model, mesh)
    flat = FlatSlice(model, mesh, has_master=zero == "masters") if zero else None
    held = model.parameters() if flat is None else [flat.own]
    optimizer = torch.optim.SGD(held, lr=1.0, momentum=0.5)
    keep_exact(optimizer)
    placed = {"layout": mesh.layout, "placements": rules_of(mesh)}
    with upguard_plugin.enable(model, optimizer, config, **placed) as guard:
        if flat is not None:
            guard.slices(flat.own, flat.elements)
        for batch in exact_batches(steps):
            model.zero_grad()
            for k, share in enumerate(share_of(batch, mesh, microbatches)):
                guard.microbatch(k)
                tokens, weights = fault.batch(share, mesh, k)
                if mesh.index("pp") == 0:
                    guard.data("tokens", tokens)
                if mesh.index("pp") == mesh.size("pp") - 1:
                    guard.data("weights", weights)
                loss = run_microbatch(model, tokens, weights, mesh)
                if loss is not None:
                    guard.observe("loss", loss, role="scalar", phase="loss", placement="+dp +cp")
            fault.gradients(model, mesh)
            if flat is None:
                sum_gradients(model, mesh, fault.summed)
                optimizer.step()
            else:
                flat.reduce_gradients()
                fault.slices(flat)
                optimizer.step()
                fault.gathered(flat)
                flat.gather_weights()
            guard.step()
