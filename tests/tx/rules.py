"""Which part of each logical tensor a rank of a mesh holds, in the grammar of placements."""

from __future__ import annotations

from typing import Any

from tests.tx.mesh import Mesh


def rules_of(mesh: Mesh, *, root: str = "") -> dict[str, Any]:
    """The placements of everything in TX.

    root: what goes in and out of a model that is only a part of it.
    """
    batch = samples_of(mesh)
    cp = ("cp:zigzag" if mesh.zigzag else "cp") if mesh.size("cp") > 1 else ""
    positions = f"s[{cp}]" if cp else "s"
    inside = f"{batch} {positions}"  # of a tensor-parallel region
    outside = inside
    if mesh.sp:
        outside = f"{batch} s[{cp},tp]" if cp else f"{batch} s[tp]"
    whole = _same(f"{outside} h")
    rules: dict[str, Any] = {"tokens": {"data": inside}, "weights": {"data": f"{inside} v"}}
    for first, second in (("*.qkv", "*.proj"), ("*.fc1", "*.fc2")):
        rules |= {f"{first}.weight": "o[tp] i", f"{second}.weight": "o i[tp]"}
        rules |= _region(outside, inside, "tp", (first, second))
    rules |= {
        "*ln?.weight": "h",
        "*ln_f.weight": "h",
        "*.weight": "o i",
        "*.core": _same(f"{inside} o[tp]"),
        "embed": _embedding(f"{inside} h", mesh.sp),
        "pos": {"input": positions, "output": f"{positions} h"},
        "head": _same(f"{inside} h"),
        "(root)": {"input": root, "output": root} if root else _root(mesh, f"{inside} h"),
        "*": whole,
    }
    return _of_experts(mesh, outside, inside) | rules


def _of_experts(mesh: Mesh, outside: str, inside: str) -> dict[str, Any]:
    """Experts see tokens of several ranks, which are no samples of a micro-batch: dim t."""
    if mesh.has_expert_mesh:
        edp = "[edp]" if mesh.size("edp") > 1 else ""
        tokens = f"t{edp}" if mesh.size("dp") > 1 and not mesh.gathers_samples else "t"
        inside = outside = (
            f"{tokens} s{edp}" if mesh.sp and not mesh.gathers_sequence else f"{tokens} s"
        )
    else:
        batch = samples_of(mesh)
        outside, inside = (one.replace(batch, "t" + batch[1:]) for one in (outside, inside))
    axis, rules = mesh.expert_axis, {}
    rules |= {"*.w1.weight": f"o[{axis}] i", "*.w2.weight": f"o i[{axis}]"}
    rules |= _region(outside, inside, axis, ("*.w1", "*.w2"))
    rules |= {"?": _same(f"{outside} h")}
    at = " @expert" if mesh.has_expert_mesh else ""
    return {
        f"*.experts.{name}": rule + at
        if isinstance(rule, str)
        else {role: spec + at for role, spec in rule.items()}
        for name, rule in rules.items()
    }


def samples_of(mesh: Mesh) -> str:
    """The dim that counts samples."""
    return "b[dp]" if mesh.size("dp") > 1 else "b"


def _region(outside: str, inside: str, axis: str, layers: tuple[str, str]) -> dict[str, Any]:
    """What lies in a region that is cut over an axis: by rows first, then by columns."""
    cut, partial = f"{inside} o[{axis}]", f"{inside} h +{axis}"
    return {
        layers[0]: _grads(f"{inside} h", cut, partial, cut),
        layers[1]: _grads(cut, partial, cut, f"{inside} h"),
        "*.act": _same(cut),
        "*.enter": _grads(f"{outside} h", f"{inside} h", f"{outside} h", partial),
        "*.leave": _grads(partial, f"{outside} h", f"{inside} h", f"{outside} h"),
    }


def _same(spec: str) -> dict[str, str]:
    return _grads(spec, spec, spec, spec)


def _grads(into: str, out: str, grad_into: str, grad_out: str) -> dict[str, str]:
    return {"input": into, "output": out, "grad_input": grad_into, "grad_output": grad_out}


def _embedding(spec: str, sp: bool) -> dict[str, str]:
    return {"input": spec.removesuffix(" h"), "output": spec, "grad_output": spec + " +tp" * sp}


def _root(mesh: Mesh, inside: str) -> dict[str, str]:
    """Tokens go in and logits come out; between stages, activations."""
    first = mesh.index("pp") == 0
    last = mesh.index("pp") == mesh.size("pp") - 1
    return {
        **({"input": inside.removesuffix(" h")} if first else {}),
        **(dict.fromkeys(("output", "grad_output"), inside) if last else {}),
    }
