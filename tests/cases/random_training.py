"""One training of any layout, in which a fault of the random search can be planted."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import upguard_plugin
from tests.cases.case import seed_all
from tests.cases.models import VOCABULARY, TinyGPT, batches, next_token_loss
from tests.cases.random_search import NUM_MICROBATCHES, NUM_STEPS, Fault
from tests.tx.mesh import Mesh
from tests.tx.model import ExactGPT
from tests.tx.training import exact_batches, run_microbatch, share_of, sum_gradients

_MESHES: Mapping[str, Mapping[str, Any]] = {
    "alone": {}, "dp": {"dp": 2}, "tp": {"tp": 2}, "sp": {"tp": 2, "sp": True}, "cp": {"cp": 2},
    "pp": {"pp": 2}, "ep": {"dp": 2, "ep": True},
}  # fmt: skip
_NO_FAULT = Fault("", "none", "", "", "bit", 0, 0, 0, 0)


def corrupt(tensor: Tensor, fault: Fault) -> None:
    """Change some elements in place, whatever the memory layout; at least one bit of it changes."""
    draw = random.Random(fault.draw)
    flat = tensor.detach().reshape(-1).clone()
    whole, mantissa = (torch.int64, 52) if flat.itemsize == 8 else (torch.int32, 23)
    bits = flat.view(whole)
    index = draw.randrange(len(bits))
    if fault.pattern == "bit":
        bits[index] ^= 1 << draw.randrange(mantissa)
    elif fault.pattern == "bits":
        for _ in range(3):  # an odd number: no two cancel all others
            bits[draw.randrange(len(bits))] ^= 1 << draw.randrange(mantissa)
    elif fault.pattern == "stride":
        bits[index % 7 :: 7] ^= 1 << 5
    else:
        flat[index] += 1 + flat[index].abs()
    tensor.detach().copy_(flat.view(tensor.shape))


class _CorruptForward(torch.autograd.Function):
    """A corrupted copy, whose gradient goes on as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: Fault) -> Tensor:
        x = x.clone()
        corrupt(x, fault)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _CorruptBackward(torch.autograd.Function):
    """The identity; its gradient is corrupted when `hit` says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: Fault, hit: bool) -> Tensor:
        ctx.fault, ctx.hit = fault, hit
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.hit:
            grad = grad.contiguous().clone()
            corrupt(grad, ctx.fault)
        return grad, None, None


class _Summed(torch.autograd.Function):
    """The sum of a tensor-parallel region as a fault leaves it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: Fault) -> Tensor:
        x = x.clone()
        if fault.variant == "input" and fault.rank == _rank():
            corrupt(x, fault)
        if fault.variant == "result":
            dist.all_reduce(x.clone())
        elif fault.variant != "missing":
            wrong = fault.variant == "operation"
            dist.all_reduce(x, dist.ReduceOp.MAX if wrong else dist.ReduceOp.SUM)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Now:
    """Where the training is."""

    step = microbatch = 0


class _DroppingReLU(nn.Module):
    """Makes TX draw random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x.relu(), 0.1)


class _AdamW(torch.optim.AdamW):
    """Whose update may write other weights than it should."""

    fault: tuple[Tensor, Fault] | None = None

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        if self.fault is not None:
            corrupt(*self.fault)
            self.fault = None


def _model_of(layout: str, mesh: Mesh) -> nn.Module:
    if layout == "alone":
        model: nn.Module = TinyGPT(dropout=0.1)
    else:
        model = ExactGPT(mesh, moe=layout == "ep")
        for name in [name for name, _ in model.named_modules()]:
            if name.endswith(".act"):
                model.set_submodule(name, _DroppingReLU())
    for name, module in list(model.named_modules()):
        if name.startswith("blocks.") and name.count(".") == 1:
            module.extra = nn.Identity()  # there for nothing
    return model


def _plant(model: nn.Module, fault: Fault, now: _Now) -> None:
    """Put a fault of a module into its forward; every other family is the loop's."""
    in_module = ("forward", "backward", "structure")
    if fault.family not in in_module and (fault.family, fault.layout) != ("collective", "tp"):
        return
    try:
        module = model.get_submodule(fault.place)
    except AttributeError:  # another stage has it
        return
    original: Callable[..., Tensor] = module.forward

    def forward(self: nn.Module, *args: Tensor) -> Tensor:
        hit = fault.hits(now.step, now.microbatch, _rank())
        if fault.family == "structure":
            module.extra(args[0])
        if fault.family == "backward":
            return original(_CorruptBackward.apply(args[0], fault, hit), *args[1:])
        if fault.family == "collective" and fault.hits(now.step, now.microbatch, fault.rank):
            return _Summed.apply(args[0], fault)
        out = original(*args)
        return _CorruptForward.apply(out, fault) if fault.family == "forward" and hit else out

    module.forward = MethodType(forward, module)  # type: ignore[method-assign]


def train(fault: Fault | None, layout: str, output: str) -> None:
    """Record one training on this rank; without a fault it is the baseline."""
    faulty, fault = fault is not None, fault or _NO_FAULT
    seed_all()
    mesh, now = Mesh(**_MESHES[layout]), _Now()
    model = _model_of(layout, mesh)
    named = dict(model.named_parameters())
    optimizer = _AdamW(model.parameters())
    _plant(model, fault, now)
    if fault.family == "init" and fault.rank == _rank():
        corrupt(named[fault.place], fault)
    config = {"output_dir": output, "program": "faulty" if faulty else "clean"}
    with upguard_plugin.enable(model, optimizer, config, layout=mesh.layout or None) as guard:
        microbatches = _microbatches(layout, mesh)
        for now.step in range(NUM_STEPS):
            if fault.rank == _rank():
                _before_step(fault, now.step, named, optimizer)
            for now.microbatch in range(NUM_MICROBATCHES):
                guard.microbatch(now.microbatch)
                tokens, other = next(microbatches)
                if fault.family == "data" and fault.hits(now.step, now.microbatch, _rank()):
                    tokens = tokens.clone()
                    column = fault.draw % tokens.shape[1]
                    tokens[0, column] = (tokens[0, column] + 1) % VOCABULARY
                if layout == "alone":
                    next_token_loss(model(tokens), other).backward()
                    continue
                if mesh.index("pp") == 0:
                    guard.data("tokens", tokens)
                run_microbatch(model, tokens, other, mesh)
            _reduce(fault, now.step, model, mesh)
            hit = (fault.variant, fault.step, fault.rank) == ("update", now.step, _rank())
            optimizer.fault = (named[fault.place], fault) if hit else None
            optimizer.step()
            optimizer.zero_grad()
            guard.step()


def _microbatches(layout: str, mesh: Mesh) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and labels of TG, tokens and weights of TX."""
    if layout == "alone":
        yield from batches(num=NUM_STEPS * NUM_MICROBATCHES)
    for batch in exact_batches(NUM_STEPS):
        yield from share_of(batch, mesh, NUM_MICROBATCHES)


def _before_step(
    fault: Fault, step: int, named: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
) -> None:
    if step != fault.step:
        return
    if fault.family == "rng":
        torch.manual_seed(fault.draw)
    elif fault.variant == "state":
        corrupt(optimizer.state[named[fault.place]]["exp_avg"], fault)
    elif fault.variant == "lr":
        optimizer.param_groups[0]["lr"] *= 1.5
    elif fault.family == "timing":  # other addresses, other garbage
        model_sized = [torch.full((fault.draw % 4096 + i,), float("nan")) for i in range(64)]
        del model_sized[::2]


def _reduce(fault: Fault, step: int, model: nn.Module, mesh: Mesh) -> None:
    """Sum the gradients over the ranks, where the layout has partial ones."""
    hit = fault.family == "collective" and fault.layout != "tp" and step == fault.step
    variant, place = (fault.variant, fault.place) if hit else ("", "")
    if not place:
        sum_gradients(model, mesh)
        return
    parameter = model.get_parameter(place)
    here = fault.rank == _rank()
    # The places behind it are summed first, as in every other step.
    names = [name for name, _ in reversed(list(model.named_parameters()))]
    before = set(names[: names.index(place)])
    sum_gradients(model, mesh, before.__contains__)
    if variant == "input" and here:
        corrupt(parameter.grad, fault)
    if variant == "operation":
        axis = next(axis for axis in ("tp", "cp", "dp") if mesh.size(axis) > 1)
        dist.all_reduce(parameter.grad, dist.ReduceOp.AVG, mesh.group(axis))
    elif variant != "missing":
        sum_gradients(model, mesh, {place}.__contains__)
    if variant == "result" and here:
        corrupt(parameter.grad, fault)
    sum_gradients(model, mesh, (set(names) - before - {place}).__contains__)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
