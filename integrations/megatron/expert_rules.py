"""How Megatron-Core splits what enters and leaves its experts: one rule for each module.

In:  a module inside a mixture-of-experts layer, its name, the layout.
Out: placements as in `rules.py`. Axes are those of the expert mesh: etp, ep, edp.

What newcomers get wrong: which tokens an expert gets, and in which order, is the data's choice. A
rank's tokens are the whole, in the order of a run on one rank, only where all ranks share the same
samples; else the placement stays unknown.
"""

from __future__ import annotations

from typing import Any

from upguard_plugin.integrations.megatron.rules import Activations, is_gated
from upguard_plugin.records import Layout

# Dispatchers that keep an expert's tokens in the order of the sequence.
_ORDERLY = ("alltoall", "allgather")


def is_inside_experts(name: str) -> bool:
    """Whether a module is what holds a layer's routed experts, or is inside it."""
    return ".experts." in f"{name}."


def expert_activations(name: str, module: Any, layout: Layout, config: Any) -> Activations:
    """The rule of a module for which `is_inside_experts`; empty where nothing can be said."""
    if not _share_samples(layout) or not _keep_order(config):
        return Activations()
    inner = name.rpartition(".experts")[2].split(".")[1:]
    if inner[:1] == ["local_experts"]:  # one expert: its rank has all of its tokens
        return _of_one(inner[2:], name, module)
    if _size(layout, "ep", "expert") > 1:
        return Activations()  # how many tokens the other ranks' experts have is not known here
    return _of_all(inner, name, module)


def _of_one(inner: list[str], name: str, module: Any) -> Activations:
    """inner: what follows the expert's number in the name."""
    if not inner:
        taken = {"hidden_states": "t h", "per_token_scale": "t"}
        return _expert(taken, "t h +etp")
    return _linear(inner, name, module)


def _of_all(inner: list[str], name: str, module: Any) -> Activations:
    """All experts in one module, their tokens one after the other."""
    if not inner:
        taken = {"permuted_local_hidden_states": "t h", "permuted_probs": "t"}
        return _expert(taken | {"tokens_per_expert": "e"}, "t h +etp")
    return _linear(inner, name, module)


def _linear(inner: list[str], name: str, module: Any) -> Activations:
    if inner == ["linear_fc1"]:
        out = "(2 o[etp])" if is_gated(name, module) else "o[etp]"
        return _expert(dict.fromkeys(("input_", "x"), "t i"), f"t {out}", out)
    if inner == ["linear_fc2"]:
        taken = dict.fromkeys(("input_", "x"), "t i[etp]")
        return _expert(taken, "t o +etp", "o")
    return Activations()


def _expert(taken: dict[str, str], given: str, bias: str = "h") -> Activations:
    """Nothing is added up inside: what is whole going in has partial sums as its gradient."""
    grad_taken = {
        argument: f"{spec} @expert" if "[etp]" in spec else f"{spec} +etp @expert"
        for argument, spec in taken.items()
    }
    return Activations(
        {argument: f"{spec} @expert" for argument, spec in taken.items()},
        (f"{given} @expert", f"{bias} @expert"),
        grad_taken,
        (f"{given.removesuffix(' +etp')} @expert",),
    )


def _share_samples(layout: Layout) -> bool:
    sizes = (_size(layout, axis, mesh) for axis, mesh in (("dp", "dense"), ("cp", "dense")))
    return all(size == 1 for size in sizes) and _size(layout, "edp", "expert") == 1


def _keep_order(config: Any) -> bool:
    dispatcher = getattr(config, "moe_token_dispatcher_type", "alltoall")
    drops = getattr(config, "moe_expert_capacity_factor", None) is not None
    return dispatcher in _ORDERLY and not drops


def _size(layout: Layout, name: str, mesh: str) -> int:
    axis = layout.axis(name, mesh)
    return 1 if axis is None else axis.size
