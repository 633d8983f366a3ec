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
    rows = _grads(f"{inside} h", f"{inside} o[tp]", f"{inside} h +tp", f"{inside} o[tp]")
    columns = _grads(f"{inside} o[tp]", f"{inside} h +tp", f"{inside} o[tp]", f"{inside} h")
    rules: dict[str, Any] = {"tokens": {"data": inside}, "weights": {"data": f"{inside} v"}}
    for first, second in (("*.qkv", "*.proj"), ("*.fc1", "*.fc2"), ("*.w1", "*.w2")):
        rules |= {f"{first}.weight": "o[tp] i", f"{second}.weight": "o i[tp]"}
        rules |= {first: rows, second: columns}
    rules |= {
        "*ln?.weight": "h",
        "*ln_f.weight": "h",
        "*.weight": "o i",
        "*.core": _same(f"{inside} o[tp]"),
        "*.act": _same(f"{inside} o[tp]"),
        "*.enter": _grads(f"{outside} h", f"{inside} h", f"{outside} h", f"{inside} h +tp"),
        "*.leave": _grads(f"{inside} h +tp", f"{outside} h", f"{inside} h", f"{outside} h"),
        "embed": _embedding(f"{inside} h", mesh.sp),
        "pos": {"input": positions, "output": f"{positions} h"},
        "head": _same(f"{inside} h"),
        "(root)": {"input": root, "output": root} if root else _root(mesh, f"{inside} h"),
        "*": whole,
    }
    # Experts see the samples of all ranks: theirs are no samples of the micro-batch.
    experts = {
        f"*.experts.{name}": {role: spec.replace(batch, "t") for role, spec in rules[name].items()}
        for name in ("*.w1", "*.w2", "*.act", "*.enter", "*.leave")
    }
    return experts | {"*.experts.?": _same(f"{outside} h".replace(batch, "t"))} | rules


def samples_of(mesh: Mesh) -> str:
    """The dim that counts samples."""
    return "b[dp]" if mesh.size("dp") > 1 else "b"


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
