"""Faults drawn at random, each with the answer that is right by construction.

    fault = draw_fault(7)              # where, when, what
    train(None, fault.layout, output)  # the baseline, in random_training.py
    train(fault, fault.layout, output)
    answer(fault)                      # fields of the first divergence; None: identical

A fault is a family (what kind of thing goes wrong), a place, a moment, a rank and, where values are
corrupted, a pattern: one bit, several bits, a stripe, or a finite change. Trials go through all
pairs of layout and family in turn; the rest is drawn. Where the answer would not be certain, it is
not drawn: a module's input that others read too, say, has a gradient of several makers.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

NUM_STEPS, NUM_MICROBATCHES, NUM_BLOCKS = 3, 2, 2
# One process trains TG; two ranks share TX, with experts under ep.
LAYOUTS = ("alone", "dp", "tp", "sp", "cp", "pp", "ep")
FAMILIES = (
    "forward", "backward", "collective", "data", "rng", "init", "optimizer", "structure", "timing",
)  # fmt: skip
PATTERNS = ("bit", "bits", "stride", "finite")
# A pipeline exchanges messages only: where a wrong one was made is not certain.
PAIRS = tuple(
    (layout, family)
    for family, layout in product(FAMILIES, LAYOUTS)
    if not (family == "collective" and layout in ("alone", "pp"))
)
VARIANTS = {
    "optimizer": ("state", "lr", "update"),
    "collective": ("missing", "operation", "result", "input"),
}
_IN_SEQUENCE = ("ln1", "ln2")  # of a block; their gradients are summed over tp under sp


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault in one place."""

    layout: str
    family: str
    variant: str  # of the family; "" where it has one only
    place: str  # module or parameter
    pattern: str
    step: int
    microbatch: int
    rank: int
    draw: int  # seed of the elements and bits that are hit

    def hits(self, step: int, microbatch: int, rank: int) -> bool:
        return (step, microbatch, rank) == (self.step, self.microbatch, self.rank)


def draw_fault(number: int) -> Fault:
    """The fault of a trial."""
    draw = random.Random(number)
    layout, family = PAIRS[number % len(PAIRS)]
    variant = draw.choice(VARIANTS.get(family, ("",)))
    rank = draw.randrange(1 if layout == "alone" else 2)
    if family == "data" and layout == "pp":
        rank = 0  # the last stage gets no batch but its weights
    first = 1 if family == "rng" or variant in ("state", "lr") else 0
    return Fault(
        layout=layout,
        family=family,
        variant=variant,
        place=draw.choice(places(layout, family, rank)),
        pattern=draw.choice(PATTERNS),
        step=0 if family == "init" else draw.randrange(first, NUM_STEPS),
        microbatch=draw.randrange(NUM_MICROBATCHES),
        rank=rank,
        draw=draw.randrange(1 << 30),
    )


def places(layout: str, family: str, rank: int) -> list[str]:
    """Where a family can strike on a rank: modules, else parameters."""
    if family == "structure":
        return [f"blocks.{i}" for i in _blocks(layout, rank)]
    if family == "collective":
        return _summed(layout)
    if family == "backward":  # modules whose input nothing else reads
        return [name for name in _leaves(layout, rank) if name.count(".") > 2 or name == "head"]
    modules = _leaves(layout, rank)
    if family == "forward":
        return modules
    return [f"{name}.weight" for name in modules if not name.endswith((".core", ".act"))]


def _blocks(layout: str, rank: int) -> list[int]:
    """The blocks that a rank has."""
    return [rank] if layout == "pp" else list(range(NUM_BLOCKS))


def _leaves(layout: str, rank: int) -> list[str]:
    """The modules of a rank that compute something, those of experts among them."""
    second = ["mlp.fc1", "mlp.act", "mlp.fc2"]
    if layout == "ep":
        mine = (0, 1) if rank == 0 else (2, 3)
        second = [f"moe.experts.{i}.{part}" for i in mine for part in ("w1", "act", "w2")]
    inside = ["ln1", "attn.qkv", "attn.core", "attn.proj", "ln2", *second]
    names = [f"blocks.{i}.{name}" for i in _blocks(layout, rank) for name in inside]
    begins, ends = (layout != "pp" or rank == stage for stage in (0, 1))
    return ["embed"] * begins + names + ["ln_f", "head"] * ends


def _summed(layout: str) -> list[str]:
    """Whose values the ranks of a layout sum: parameters, or under tp modules."""
    both = range(NUM_BLOCKS)
    if layout == "tp":
        return [f"blocks.{i}.{name}.leave" for i in both for name in ("attn", "mlp")]
    if layout == "sp":
        return [f"blocks.{i}.{name}.weight" for i in both for name in _IN_SEQUENCE]
    names = [name for name in _leaves(layout, 0) if ".experts." not in name]
    return [f"{name}.weight" for name in names if not name.endswith((".core", ".act"))]


def answer(fault: Fault) -> Mapping[str, Any] | None:
    """The fields that the first divergence must have; None: the runs are identical."""
    place = fault.place
    at = {"step": fault.step, "ranks": [fault.rank]}
    inside = at | {"microbatch": fault.microbatch}
    ranks = [0] if fault.layout == "alone" else [fault.rank] if fault.layout == "pp" else [0, 1]
    named: dict[str, Mapping[str, Any] | None] = {
        "timing": None,
        "forward": inside
        | {"boundary": place, "role": "output", "phase": "forward", "inputs_equal": True},
        "backward": inside
        | {"boundary": place, "role": "grad_input", "phase": "backward", "inputs_equal": True},
        "data": inside | {"boundary": "tokens", "role": "data"},
        "rng": at | {"boundary": "rng.torch_cpu", "phase": "start"},
        "init": at | {"boundary": place, "role": "param", "phase": "start"},
        "structure": {"step": 0, "boundary": f"{place}.extra", "phase": "forward", "ranks": ranks},
        "collective": {"step": fault.step} | _collective_answer(fault),
        "optimizer": at | _optimizer_answer(fault),
    }  # fmt: skip
    found = named[fault.family]
    return found if found is None else {"kind": fault.family} | found


def _optimizer_answer(fault: Fault) -> dict[str, Any]:
    named = {
        "state": {"boundary": fault.place, "slot": "exp_avg", "phase": "start"},
        "lr": {"boundary": "optimizer.group0.lr", "phase": "start"},
        "update": {"boundary": fault.place, "role": "param", "phase": "optimizer"},
    }
    return named.get(fault.variant, {})


def _collective_answer(fault: Fault) -> dict[str, Any]:
    both, here = {"ranks": [0, 1]}, {"ranks": [fault.rank]}
    if fault.layout == "tp":  # in a module's forward, on tensors without a name
        inside = {"microbatch": fault.microbatch, "phase": "forward"}
        summed = {"boundary": "all_reduce[tp]", "role": "input"}
        named = {
            "missing": both | summed | {"target": None},
            "operation": both | summed,
            "result": both | {"boundary": fault.place, "role": "output"},
            # What a collective of forward is given was made in forward, inside of its module.
            "input": here | summed | {"kind": "forward"},
        }
        return inside | named.get(fault.variant, {})
    axis = {"sp": "tp", "ep": "dp"}.get(fault.layout, fault.layout)
    summed = {"boundary": f"all_reduce[{axis}] {fault.place}.grad", "role": "input"}
    named = {
        "missing": both | summed | {"target": None},
        "operation": both | summed,
        "result": here | {"boundary": fault.place, "role": "grad"},
        "input": here | summed,
    }
    return {"phase": "grad_sync"} | named.get(fault.variant, {})
