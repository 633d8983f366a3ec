"""Placements resolve to the elements that a rank really holds; wrong ones are refused in words."""

from __future__ import annotations

import json
import re
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from upguard_plugin.errors import PlacementError
from upguard_plugin.placement import parse_placement, replicated, resolve_placement
from upguard_plugin.placement_cover import check_cover
from upguard_plugin.records import Axis, Layout


def layout_of(mesh="dense", **axes):
    """Layout(tp=(size, index), ...)."""
    return Layout(
        tuple(Axis(n, size, index, tuple(range(size)), mesh) for n, (size, index) in axes.items())
    )


def gather(parts, logical_shape):
    """Put each (local array, placement) into place; -1 where nothing was."""
    out = np.full(prod(logical_shape), -1)
    for local, placement in parts:
        flat = local.reshape(-1)
        for piece in placement.pieces:
            for k in np.ndindex(*piece.sizes):
                at = piece.logical_start + sum(np.multiply(k, piece.logical_strides))
                assert out[at] == -1, "two parts hold one element"
                out[at] = flat[piece.local_start + sum(np.multiply(k, piece.local_strides))]
    return out.reshape(logical_shape)


def whole(*shape):
    return np.arange(prod(shape)).reshape(shape)


def check_parts(spec, full, parts, axis="tp", mesh="dense", **options):
    """Rank r of `axis` holds parts[r]; together they must give back the full tensor."""
    size = len(parts)
    placed = [
        resolve_placement(spec, part.shape, layout_of(mesh, **{axis: (size, r)}), **options)
        for r, part in enumerate(parts)
    ]
    assert {p.logical_shape for p in placed} == {full.shape}
    check_cover(placed)
    assert np.array_equal(gather(zip(parts, placed, strict=True), full.shape), full)
    return placed


def test_row_and_column_shards():
    full = whole(8, 6)
    check_parts("o[tp] i", full, np.split(full, 4, 0))
    placed = check_parts("o i[tp]", full, np.split(full, 3, 1))
    assert placed[0].sharded == ("tp",)
    assert len(placed[1].pieces) == 1


def test_uneven_shards():
    full = whole(5, 4)
    check_parts("o[tp:3,2] i", full, [full[:3], full[3:]])
    check_parts("* i[tp:1,0,3]", full, [full[:, :1], full[:, 1:1], full[:, 1:]])


def test_glu_halves_are_each_sharded():
    full = whole(12, 3)
    halves = full.reshape(2, 6, 3)
    check_parts("(2 f[tp]) h", full, [halves[:, :3].reshape(6, 3), halves[:, 3:].reshape(6, 3)])


def test_fused_qkv_by_groups():
    full = whole(4 * 3 * 2, 5)  # 4 groups of (q, k, v) with head dim 2
    check_parts("(g[tp] q d) h", full, np.split(full, 2, 0))


def test_fused_qkv_as_three_stacked_parts_with_uneven_heads():
    full = whole(3 * 5 * 2, 4)
    heads = full.reshape(3, 5, 2, 4)
    parts = [heads[:, :3].reshape(18, 4), heads[:, 3:].reshape(12, 4)]
    check_parts("(3 n[tp:3,2] d) h", full, parts)


def test_context_parallel_zigzag():
    full = whole(16, 3)
    chunks = np.split(full, 8)
    parts = [np.concatenate([chunks[r], chunks[7 - r]]) for r in range(4)]
    check_parts("s[cp:zigzag] h", full, parts, axis="cp")


def test_sequence_over_two_axes_outer_first():
    full = whole(16, 2)
    chunks = np.split(full, 4)
    placed, parts = [], []
    for cp in range(2):
        held = np.concatenate([chunks[cp], chunks[3 - cp]])
        for tp, part in enumerate(np.split(held, 2)):
            layout = layout_of(cp=(2, cp), tp=(2, tp))
            placed.append(resolve_placement("s[cp:zigzag,tp] h", part.shape, layout))
            parts.append(part)
    check_cover(placed)
    assert np.array_equal(gather(zip(parts, placed, strict=True), full.shape), full)


def test_padding_is_not_part_of_the_logical_tensor():
    full = whole(33, 2)
    padded = np.concatenate([full, np.full((7, 2), 99)])
    placed = check_parts("v[tp]~33 h", full, np.split(padded, 4))
    assert placed[0].logical_shape == (33, 2)


def test_rank_that_holds_padding_only_has_no_pieces():
    layout = layout_of(tp=(4, 3))
    assert resolve_placement("v[tp]~5", (2,), layout).pieces == ()


def test_experts_need_the_expert_mesh():
    full = whole(4, 6, 2)
    check_parts("e[ep] o i @expert", full, np.split(full, 2), axis="ep", mesh="expert")
    with pytest.raises(PlacementError) as error:
        resolve_placement("e[ep] o i", (2, 6, 2), layout_of("expert", ep=(2, 0)))
    assert str(error.value) == (
        "placement 'e[ep] o i' does not fit a tensor of shape [2, 6, 2]: "
        "ep is an axis of the expert mesh\n  try  add @expert"
    )


def test_flat_slices_of_a_sharded_weight():
    full = whole(6, 4)
    placed, parts = [], []
    for tp, local in enumerate(np.split(full, 2, 1)):
        for dp, (a, b) in enumerate([(0, 5), (5, 7), (7, 12)]):
            spec = f"o i[tp] | flat[dp@{a}:{b}]"
            layout = layout_of(tp=(2, tp), dp=(3, dp))
            part = local.reshape(-1)[a:b]
            placed.append(resolve_placement(spec, part.shape, layout, whole_shape=local.shape))
            parts.append(part)
    check_cover(placed)
    assert np.array_equal(gather(zip(parts, placed, strict=True), full.shape), full)
    assert placed[0].sharded == ("tp", "dp")


def test_flat_padded_to_equal_slices():
    full = whole(3, 3)
    padded = np.concatenate([full.reshape(-1), [99] * 3])
    check_parts("* | flat[dp]~9", full, np.split(padded, 4), axis="dp", whole_shape=full.shape)


def test_partial_sums_and_axes_of_size_one():
    layout = layout_of(tp=(2, 1), cp=(1, 0))
    placed = resolve_placement("t h +tp+cp", (3, 4), layout)
    assert (placed.partial, placed.sharded, placed.logical_shape) == (("tp",), (), (3, 4))
    assert resolve_placement("+tp", (), layout).logical_shape == ()
    assert resolve_placement("o[dp] i", (3, 4), layout).sharded == ()


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_any_splits_give_back_the_whole(data):
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    full = whole(*sizes)
    dim = data.draw(st.integers(0, len(sizes) - 1))
    cuts = sorted(data.draw(st.lists(st.integers(0, sizes[dim]), max_size=3)))
    parts = np.split(full, cuts, dim)
    terms = [f"d{k}" for k in range(len(sizes))]
    terms[dim] += "[tp:" + ",".join(str(part.shape[dim]) for part in parts) + "]"
    spec = " ".join(terms)
    placed, held = [], []
    for tp, part in enumerate(parts):
        marks = sorted(data.draw(st.lists(st.integers(0, part.size), max_size=2)))
        for a, b in zip([0, *marks], [*marks, part.size], strict=True):
            layout = layout_of(tp=(len(parts), tp), dp=(1, 0))
            text = f"{spec} | flat[dp@{a}:{b}]"
            held.append(part.reshape(-1)[a:b])
            placed.append(resolve_placement(text, (b - a,), layout, whole_shape=part.shape))
    check_cover(placed)
    assert np.array_equal(gather(zip(held, placed, strict=True), full.shape), full)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("o[tp i", "']' is missing\n  at   character 6, after 'o[tp '"),
        ("o[] i", "an axis is missing\n  at   character 3, after 'o['"),
        ("(a b", "')' is missing\n  at   character 5, after '(a b'"),
        ("o[tp:snake]", "unknown order 'snake': write zigzag, or the size of each part"),
        ("a ? b", "'?' has no meaning here\n  at   character 3, after 'a '"),
        ("* *", "only one '*' can stand in a view"),
        ("a @moe", "unknown mesh 'moe': only @expert can be named"),
        ("a[tp] b[tp]", "axis tp is named more than once"),
        ("a[tp] +tp", "axis tp is named more than once"),
        ("a~", "a number is missing"),
    ],
)
def test_a_text_that_cannot_be_read_says_where(text, message):
    with pytest.raises(PlacementError) as error:
        parse_placement(text)
    assert str(error.value).startswith(f"cannot read placement {text!r}: {message}")


@pytest.mark.parametrize(
    ("text", "shape", "why"),
    [
        ("o i", (3,), "it has 2 dims, the tensor has 1"),
        ("o[tp:3,3] i", (2, 4), "dim o of this rank should be 3, it is 2"),
        ("o[tp:3,3,3] i", (3, 4), "3 sizes for the 2 ranks of tp"),
        ("(2 f[tp]) h", (7, 4), "dim (2 f) of 7 is not a multiple of 2"),
        ("(a b[tp]) h", (8, 4), "the sizes of a and b cannot be told apart"),
        ("s[tp:zigzag]", (3,), "dim s of 6 does not split into 4 equal parts"),
        ("o[sp] i", (3, 4), "the layout has no axis sp"),
        ("v[tp]~9", (4,), "dim v cannot hold 9 of 8"),
        ("o | flat[dp@0:2]", (2,), "the shape of the tensor before '|' is not known"),
        ("o[tp@0:2]", (2,), "the size of dim o over all ranks is not known"),
        ("5 h", (4, 4), "dim 5 of this rank should be 5, it is 4"),
    ],
)
def test_a_placement_that_does_not_fit_says_both(text, shape, why):
    with pytest.raises(PlacementError) as error:
        resolve_placement(text, shape, layout_of(tp=(2, 0)))
    wanted = f"placement {text!r} does not fit a tensor of shape {list(shape)}: {why}"
    assert error.value.sentence == wanted


def test_sizes_by_name_tell_fused_dims_apart():
    full = whole(6 * 4, 2)
    parts = [
        full.reshape(6, 4, 2)[:, :2].reshape(12, 2),
        full.reshape(6, 4, 2)[:, 2:].reshape(12, 2),
    ]
    check_parts("(a b[tp]) h", full, parts, dims={"b": 2})


def test_overlap_and_gap_are_named():
    parts = [resolve_placement("o[tp] i", (2, 3), layout_of(tp=(2, r))) for r in (0, 1)]
    check_cover(parts)
    with pytest.raises(PlacementError, match=r"^cannot merge w: no part holds element \[2, 0\]"):
        check_cover(parts[:1], "w")
    with pytest.raises(PlacementError, match=r"parts 0 and 1 overlap at element \[0, 0\]"):
        check_cover([parts[0], parts[0], parts[1]])
    with pytest.raises(PlacementError, match="one logical shape is needed"):
        check_cover([parts[0], replicated((2, 2))])


def examples():
    """The rows of the table in docs/placements.md."""
    page = Path(__file__).parents[1].joinpath("docs", "placements.md").read_text()
    for row in re.findall(r"^\| `(.*)$", page, re.M):
        spec, _, ours, logical, _ = re.split(r"(?<!\\)\|", row)
        shapes = [json.loads(text) for text in re.findall(r"\[[\d, ]+\]", ours)]
        sizes = {axis: int(size) for axis, size in re.findall(r"(\w+) = (\d)", ours)}
        wanted = json.loads(logical.strip().strip("`"))
        yield spec.strip().strip("`").replace("\\|", "|"), shapes, sizes, wanted


@pytest.mark.parametrize(("spec", "shapes", "sizes", "wanted"), list(examples()))
def test_the_examples_of_the_documentation_hold(spec, shapes, sizes, wanted):
    mesh = "expert" if "@expert" in spec else "dense"
    axes = {axis: (size, 0) for axis, size in sizes.items() if axis != "index"}
    whole_shape = shapes[1] if len(shapes) > 1 else None

    placed = resolve_placement(spec, shapes[0], layout_of(mesh, **axes), whole_shape=whole_shape)

    assert list(placed.logical_shape) == wanted
