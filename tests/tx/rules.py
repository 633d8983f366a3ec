"""Which part of each logical tensor a rank of a mesh holds, in the grammar of placements."""

from __future__ import annotations

from typing import Any

from tests.tx.mesh import Mesh


def rules_of(mesh: Mesh) -> dict[str, Any]:
    """The placements of everything in TX."""
    cp = ("cp:zigzag" if mesh.zigzag else "cp") if mesh.size("cp") > 1 else ""
    inside = f"b s[{cp}]" if cp else "b s"  # of a tensor-parallel region
    outside = inside
    if mesh.sp:
        outside = f"b s[{cp},tp]" if cp else "b s[tp]"
    whole = _same(f"{outside} h")
    rows = _grads(f"{inside} h", f"{inside} o[tp]", f"{inside} h +tp", f"{inside} o[tp]")
    columns = _grads(f"{inside} o[tp]", f"{inside} h +tp", f"{inside} o[tp]", f"{inside} h")
    rules: dict[str, Any] = {"tokens": {"data": inside}, "weights": {"data": f"{inside} v"}}
    for first, second in (("*.qkv", "*.proj"), ("*.fc1", "*.fc2"), ("*.w1", "*.w2")):
        rules |= {f"{first}.weight": "o[tp] i", f"{second}.weight": "o i[tp]"}
        rules |= {first: rows, second: columns}
    rules |= {
        "*.weight": "*",
        "*.core": _same(f"{inside} o[tp]"),
        "*.act": _same(f"{inside} o[tp]"),
        "*.enter": _grads(f"{outside} h", f"{inside} h", f"{outside} h", f"{inside} h +tp"),
        "*.leave": _grads(f"{inside} h +tp", f"{outside} h", f"{inside} h", f"{outside} h"),
        "embed": _embedding(f"{inside} h", mesh.sp),
        "pos": {"input": inside.removeprefix("b "), "output": inside.removeprefix("b ") + " h"},
        "head": _same(f"{inside} h"),
        "(root)": _root(mesh, f"{inside} h", whole),
        "*": whole,
    }
    # Experts see the samples of all ranks: theirs are no samples of the micro-batch.
    experts = {
        name.replace("*", "*.experts.*"): {
            role: spec.replace("b ", "t ") for role, spec in r.items()
        }
        for name, r in rules.items()
        if name in ("*.w1", "*.w2", "*.act", "*.enter", "*.leave")
    }
    return experts | {"*.experts.?": _same("t" + outside[1:] + " h")} | rules


def _same(spec: str) -> dict[str, str]:
    return _grads(spec, spec, spec, spec)


def _grads(into: str, out: str, grad_into: str, grad_out: str) -> dict[str, str]:
    return {"input": into, "output": out, "grad_input": grad_into, "grad_output": grad_out}


def _embedding(spec: str, sp: bool) -> dict[str, str]:
    return {"input": spec.removesuffix(" h"), "output": spec, "grad_output": spec + " +tp" * sp}


def _root(mesh: Mesh, inside: str, whole: dict[str, str]) -> dict[str, str]:
    """Tokens go in and logits come out; between stages, activations."""
    first = mesh.index("pp") == 0
    last = mesh.index("pp") == mesh.size("pp") - 1
    return {
        **({"input": inside.removesuffix(" h")} if first else {}),
        **(dict.fromkeys(("output", "grad_output"), inside) if last else {}),
    }
