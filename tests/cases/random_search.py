"""Faults drawn at random, with the answer known by construction.

In:  a seed.
Out: a `Fault`: a family, a place, a pattern of corruption; `train` plants it in a tiny GPT, and
     `answer` says what the tool must name.

Families: forward, backward, data, rng, init, optimizer, structure, collective, and timing, which
is no fault: memory is used differently, and the runs are identical.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import upguard_plugin
from tests.cases.case import seed_all
from tests.cases.models import VOCABULARY, TinyGPT, batches, next_token_loss

NUM_STEPS, NUM_MICROBATCHES = 3, 2
FAMILIES = ("forward", "backward", "data", "rng", "init", "optimizer", "structure", "timing")
PATTERNS = ("bit", "bits", "stride", "finite")
# Modules whose input nothing else reads: its gradient is theirs alone.
_INNER = ("attn.qkv", "attn.core", "attn.proj", "mlp.fc1", "mlp.act", "mlp.fc2")
_OF_BLOCK = (*_INNER, "ln1", "ln2")
BACKWARD_PLACES = (*(f"blocks.{i}.{name}" for i in range(2) for name in _INNER), "head")
FORWARD_PLACES = (
    *(f"blocks.{i}.{n}" for i in range(2) for n in _OF_BLOCK),
    "embed",
    "ln_f",
    "head",
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault in one place."""

    family: str
    variant: str  # of the family; "" where it has one only
    place: str  # module or parameter
    pattern: str
    step: int
    microbatch: int
    rank: int
    num_ranks: int
    draw: int  # seed of the elements and bits that are hit

    def hits(self, step: int, microbatch: int) -> bool:
        return (step, microbatch, self.rank) == (self.step, self.microbatch, _rank())


def draw_fault(seed: int, num_ranks: int = 1) -> Fault:
    """The fault of a seed."""
    draw = random.Random(seed)
    family = draw.choice(FAMILIES if num_ranks == 1 else ("forward", "backward", "collective"))
    variants = {
        "optimizer": ("state", "lr", "update"),
        "collective": ("missing", "sum", "result", "input"),
    }
    parameters = [name for name, _ in TinyGPT().named_parameters()]
    places = {
        "forward": FORWARD_PLACES,
        "backward": BACKWARD_PLACES,
        "structure": ("blocks.0", "blocks.1"),
    }
    variant = draw.choice(variants.get(family, ("",)))
    first = 1 if family == "rng" or variant in ("state", "lr") else 0
    return Fault(
        family=family,
        variant=variant,
        place=draw.choice(places.get(family, parameters)),
        pattern=draw.choice(PATTERNS),
        step=0 if family == "init" else draw.randrange(first, NUM_STEPS),
        microbatch=draw.randrange(NUM_MICROBATCHES),
        rank=draw.randrange(num_ranks),
        num_ranks=num_ranks,
        draw=draw.randrange(1 << 30),
    )


def answer(fault: Fault) -> Mapping[str, Any] | None:
    """The fields that the first divergence must have; None: the runs are identical."""
    place = fault.place
    at = {"step": fault.step, "ranks": [fault.rank]}
    inside = at | {"microbatch": fault.microbatch}
    if fault.family == "timing":
        return None
    if fault.family == "forward":
        named = {"boundary": place, "role": "output", "phase": "forward", "kind": "forward"}
        return inside | named | {"inputs_equal": True}
    if fault.family == "backward":
        named = {"boundary": place, "role": "grad_input", "phase": "backward", "kind": "backward"}
        return inside | named | {"inputs_equal": True}
    if fault.family == "data":
        return inside | {"boundary": "tokens", "role": "data", "kind": "data"}
    if fault.family == "rng":
        return at | {"boundary": "rng.torch_cpu", "phase": "start", "kind": "rng"}
    if fault.family == "init":
        return at | {"boundary": place, "role": "param", "phase": "start", "kind": "init"}
    if fault.family == "structure":
        return {"boundary": f"{place}.extra", "phase": "forward", "kind": "structure", "step": 0}
    if fault.family == "collective":
        return at | _collective_answer(fault)
    named = {
        "state": {"boundary": place, "slot": "exp_avg", "phase": "start"},
        "lr": {"boundary": "optimizer.group0.lr", "phase": "start"},
        "update": {"boundary": place, "role": "param", "phase": "optimizer"},
    }
    return at | {"kind": "optimizer"} | named[fault.variant]


def _collective_answer(fault: Fault) -> dict[str, Any]:
    boundary, both = f"all_reduce[dp] {fault.place}.grad", {"ranks": [0, 1]}
    named = {
        "missing": both | {"boundary": boundary, "role": "input", "target": None},
        "sum": both | {"boundary": boundary, "role": "input"},
        "result": {"boundary": fault.place, "role": "grad", "ranks": [fault.rank]},
        "input": {"boundary": boundary, "role": "input", "ranks": [fault.rank]},
    }
    return {"kind": "collective", "phase": "grad_sync"} | named[fault.variant]


def corrupt(tensor: Tensor, fault: Fault) -> None:
    """Change some elements of a float32 tensor in place; at least one bit of it changes."""
    draw = random.Random(fault.draw)
    flat = tensor.detach().view(-1) if tensor.is_contiguous() else tensor.detach().reshape(-1)
    bits = flat.view(torch.int32)
    index = draw.randrange(len(bits))
    if fault.pattern == "bit":
        bits[index] ^= 1 << draw.randrange(23)
    elif fault.pattern == "bits":
        for _ in range(3):  # an odd number: no two cancel all others
            bits[draw.randrange(len(bits))] ^= 1 << draw.randrange(23)
    elif fault.pattern == "stride":
        bits[index % 7 :: 7] ^= 1 << 5
    else:
        flat[index] += 1 + flat[index].abs()
    if not tensor.is_contiguous():
        tensor.detach().copy_(flat.view(tensor.shape))


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


class _Now:
    """Where the training is."""

    step = microbatch = 0


def _plant(model: TinyGPT, fault: Fault, now: _Now) -> None:
    """Put a fault of a module into its forward; every other family is the loop's."""
    module = model.get_submodule(fault.place) if fault.family in ("forward", "backward") else None
    if module is None:
        return
    original: Callable[..., Tensor] = module.forward

    def forward(*args: Tensor) -> Tensor:
        hit = fault.hits(now.step, now.microbatch)
        if fault.family == "backward":
            return original(_CorruptBackward.apply(args[0], fault, hit), *args[1:])
        out = original(*args)
        if hit:
            with torch.no_grad():
                corrupt(out, fault)
        return out

    module.forward = forward  # type: ignore[method-assign]


class _Model(TinyGPT):
    """With a module in each block that is there for nothing."""

    calls_extra_of = ""  # a block

    def __init__(self) -> None:
        super().__init__(dropout=0.1)
        for block in self.blocks:
            block.extra = nn.Identity()

    def run_block(self, block: nn.Module, x: Tensor) -> Tensor:
        if self.calls_extra_of and block is self.get_submodule(self.calls_extra_of):
            block.extra(x)
        return block(x)


class _AdamW(torch.optim.AdamW):
    """Whose update may write other weights than it should."""

    fault: tuple[Tensor, Fault] | None = None

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        if self.fault is not None:
            corrupt(*self.fault)
            self.fault = None


def train(fault: Fault | None, num_ranks: int, output: str) -> None:
    """Record one training on this rank; without a fault it is the baseline."""
    fault = fault or Fault("none", "", "head.weight", "bit", 0, 0, 0, num_ranks, 0)
    seed_all()
    model, now = _Model(), _Now()
    named = dict(model.named_parameters())
    optimizer = _AdamW(model.parameters())
    _plant(model, fault, now)
    if fault.family == "init":
        corrupt(named[fault.place], fault)
    if fault.family == "structure":
        model.calls_extra_of = fault.place
    program = "clean" if fault.family == "none" else "faulty"
    config = {"output_dir": output, "program": program}
    layout = {"dp": num_ranks} if num_ranks > 1 else None
    texts = iter(batches(seed=_rank(), num=NUM_STEPS * NUM_MICROBATCHES))
    with upguard_plugin.enable(model, optimizer, config, layout=layout) as guard:
        for now.step in range(NUM_STEPS):
            _before_step(fault, now.step, named, optimizer)
            for now.microbatch in range(NUM_MICROBATCHES):
                guard.microbatch(now.microbatch)
                tokens, labels = next(texts)
                if fault.family == "data" and fault.hits(now.step, now.microbatch):
                    tokens[0, fault.draw % 8] = (tokens[0, fault.draw % 8] + 1) % VOCABULARY
                next_token_loss(model(tokens), labels).backward()
            if num_ranks > 1:
                _reduce(fault, now.step, named)
            if fault.variant == "update" and now.step == fault.step:
                optimizer.fault = (named[fault.place], fault)
            optimizer.step()
            optimizer.zero_grad()
            guard.step()


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


def _reduce(fault: Fault, step: int, named: Mapping[str, Tensor]) -> None:
    """Average the gradients over the ranks, last parameter first."""
    for name, parameter in reversed(list(named.items())):
        hit = fault.family == "collective" and (name, step) == (fault.place, fault.step)
        variant = fault.variant if hit else ""
        here = fault.rank == _rank()
        assert parameter.grad is not None
        if variant == "input" and here:
            corrupt(parameter.grad, fault)
        if variant != "missing":
            op = dist.ReduceOp.SUM if variant == "sum" else dist.ReduceOp.AVG
            dist.all_reduce(parameter.grad, op)
        if variant == "result" and here:
            corrupt(parameter.grad, fault)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
