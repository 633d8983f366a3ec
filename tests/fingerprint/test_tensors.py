"""Tensors that are more than bytes in a row: lazy bits, parts, subclasses, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
from torch.distributed.tensor.placement_types import _StridedShard

from tests.fingerprint.tensors import random_tensor
from upguard_plugin.errors import PlacementError, UnsupportedTensorError
from upguard_plugin.fingerprint import (
    FingerprintQueue,
    fingerprint,
    fingerprint_array,
    fingerprint_many,
    placement_of,
)
from upguard_plugin.fingerprint.queue import _plain_address
from upguard_plugin.fingerprint.sweeps import plan_sweeps
from upguard_plugin.placement import resolve_placement
from upguard_plugin.records import Axis, Layout, Piece, Placement


def test_lazy_bits_are_resolved():
    tensor = random_tensor(torch.complex64, (5, 3))

    assert fingerprint(tensor.conj()) == fingerprint(tensor.conj().resolve_conj())
    assert fingerprint(tensor.conj()) != fingerprint(tensor)
    assert fingerprint(tensor.conj().imag) == fingerprint(tensor.conj().imag.resolve_neg())


def test_negative_strides_of_numpy():
    array = np.arange(60, dtype=np.int16).reshape(5, 12)[::-1, ::-3]

    assert fingerprint_array(array) == fingerprint(torch.from_numpy(array.copy()))


def test_expanded_and_overlapping_views():
    tensor = torch.arange(4.0)

    expanded = tensor.expand(3, 4)
    assert fingerprint(expanded) == fingerprint(expanded.contiguous())
    windows = tensor.unfold(0, 2, 1)
    assert fingerprint(windows) == fingerprint(windows.contiguous())
    assert fingerprint(tensor[1].expand(5)) == fingerprint(torch.ones(5))


def test_memory_formats_do_not_matter():
    tensor = random_tensor(torch.float32, (2, 3, 4, 5))

    assert fingerprint(tensor.to(memory_format=torch.channels_last)) == fingerprint(tensor)


@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr"])
def test_sparse_tensors_are_hashed_as_their_parts(layout):
    def make(dense):
        if layout == "bsr":
            return dense.to_sparse_bsr((2, 2))
        return dense.to_sparse(layout=getattr(torch, f"sparse_{layout}"))

    dense = torch.zeros(6, 8)
    dense[1, 2], dense[3, 4], dense[3, 5] = 1.0, 2.0, 3.0
    found = fingerprint(make(dense))
    moved = dense.clone()
    moved[1, 2], moved[1, 3] = 0.0, 1.0
    changed = dense.clone()
    changed[3, 4] = 2.5

    assert (found.dtype, found.shape) == ("float32", (6, 8))
    assert fingerprint(make(dense.clone())) == found
    assert fingerprint(make(moved)) != found
    assert fingerprint(make(changed)) != found


def test_a_subclass_made_of_tensors_is_hashed_as_its_parts():
    class Scaled(torch.Tensor):
        @staticmethod
        def __new__(cls, data, scale):
            return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)

        def __init__(self, data, scale):
            self.data_part, self.scale = data, scale

        def __tensor_flatten__(self):
            return ["scale", "data_part"], None

        __torch_dispatch__ = None

    data, scale = random_tensor(torch.int8, (4, 4)), torch.tensor([2.0])
    found = fingerprint(Scaled(data, scale))

    assert found == fingerprint(Scaled(data.clone(), scale.clone()))
    assert found != fingerprint(Scaled(data, scale * 2))
    assert found != fingerprint(Scaled(data + 1, scale))


def test_packed_types_are_their_bytes():
    raw = random_tensor(torch.uint8, (9,))

    for dtype in (torch.float4_e2m1fn_x2, torch.uint4, torch.bits8):
        if dtype.itemsize == 1:
            found = fingerprint(raw.view(dtype))
            assert found.h == fingerprint(raw).h
            assert found != fingerprint(raw)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "it is quantised"),
        (lambda: torch.ones(3, device="meta"), "it has no data (device meta)"),
        (lambda: FakeTensorMode().from_tensor(torch.ones(3)), "it has no data (a fake tensor)"),
    ],
)
def test_tensors_without_bytes_are_refused(make, why):
    queue = FingerprintQueue()
    with pytest.raises(UnsupportedTensorError) as error:
        queue.put(make())
    assert error.value.sentence.startswith("cannot fingerprint a tensor of ")
    assert why in error.value.sentence
    assert len(queue) == 0


def test_a_small_tensor_takes_the_short_way_wherever_the_heap_lies():
    # A program at a low address has its heap there: such an address is no sign of freed storage.
    assert all(_plain_address(tensor) == tensor.data_ptr() for tensor in torch.ones(8, 64).unbind())


def test_a_view_of_freed_storage_is_refused():
    flat = torch.ones(1000)
    view = flat[500:600]
    flat.untyped_storage().resize_(0)

    with pytest.raises(UnsupportedTensorError, match="its storage was freed"):
        fingerprint_many([torch.ones(2), view])


def test_a_refused_tensor_leaves_the_queue_as_it_was():
    queue = FingerprintQueue()
    queue.put(torch.ones(3))
    with pytest.raises(UnsupportedTensorError):
        queue.put_many([torch.ones(4), torch.ones(5, device="meta")])

    queue.put(torch.ones(6))
    expected = [fingerprint(torch.ones(n)).h for n in (3, 6)]
    assert queue.take().h.tolist() == expected


def test_a_placement_that_does_not_fit_names_both():
    layout = Layout((Axis("tp", 2, 1, (0, 1)),))
    placement = resolve_placement("o[tp] i", (4, 3), layout)
    with pytest.raises(
        PlacementError, match=r"'o\[tp\] i' does not fit a tensor of shape \[2, 3\]"
    ):
        fingerprint(torch.ones(2, 3), placement=placement)
    with pytest.raises(PlacementError, match=r"'o\[tp\] i' reaches outside a tensor of shape"):
        fingerprint_array(np.ones((2, 3)), placement=placement)


def test_offsets_beyond_two_to_the_31_elements():
    """A row of a tensor that no machine could hold: only its offsets are large."""
    row = random_tensor(torch.bfloat16, (4096,))
    shape, start = (1 << 30, 4096), (1 << 29) + 3
    piece = Piece((4096,), 0, (1,), start * 4096, (1,))
    placement = Placement("row", shape, (piece,))
    bits = row.view(torch.int16).numpy().view(np.uint16)

    expected = fingerprint_array(bits, placement=placement, dtype="bfloat16")
    assert fingerprint(row, placement=placement) == expected
    assert expected.h != fingerprint(row).h


def test_far_views_are_planned_without_overflow():
    sweeps = plan_sweeps((3, 1 << 33), (1 << 34, 1), 2, None)

    assert sweeps[0].dims[0].memory == 1 << 35
    assert sweeps[0].dims[0].logical == 1 << 34
    with pytest.raises(PlacementError, match=r"beyond 2\*\*63 bytes"):
        plan_sweeps((1 << 31, 1 << 31), (1 << 31, 1), 2, None)


@pytest.fixture(scope="module")
def mesh():
    """A mesh of 4 ranks in one process, none of which is ever spoken to."""
    torch.distributed.init_process_group("fake", rank=0, world_size=4)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.distributed.destroy_process_group()


def on_rank(mesh, monkeypatch, coordinate, local, placements, shape):
    monkeypatch.setattr(type(mesh), "get_coordinate", lambda self: list(coordinate))
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides
    )


@pytest.mark.parametrize(
    "placements",
    [
        (Shard(0), Shard(1)),
        (Shard(0), Shard(0)),
        (_StridedShard(0, split_factor=2), Shard(0)),
        (Shard(1), Replicate()),
    ],
    ids=str,
)
def test_dtensors_are_hashed_at_their_place(mesh, monkeypatch, placements):
    whole = random_tensor(torch.float32, (8, 6))
    total = None
    for dp in range(2):
        for tp in range(2):
            if placements[1].is_replicate() and tp:
                continue
            local = whole
            ranks = {0: dp, 1: tp}
            order = [0, 1] if not isinstance(placements[0], _StridedShard) else [1, 0]
            for axis in order:
                if not placements[axis].is_replicate():
                    local = local.chunk(2, placements[axis].dim)[ranks[axis]]
            tensor = on_rank(mesh, monkeypatch, (dp, tp), local, placements, whole.shape)
            found = fingerprint(tensor)
            assert found.shape == (8, 6)
            total = found if total is None else total + found

    assert total == fingerprint(whole)


def test_a_dtensor_says_over_which_axes_it_is_split_and_summed(mesh, monkeypatch):
    local = torch.ones(2, 6)
    tensor = on_rank(mesh, monkeypatch, (1, 0), local, (Shard(0), Partial()), (4, 6))

    placement = placement_of(tensor)
    assert (placement.sharded, placement.partial) == (("dp",), ("tp",))
    assert placement.logical_shape == (4, 6)
    assert placement_of(local) is None


def test_an_uneven_dtensor(mesh, monkeypatch):
    whole = random_tensor(torch.float32, (5, 3))
    parts = [whole[:3], whole[3:]]
    placements = (Shard(0), Replicate())
    found = [
        fingerprint(on_rank(mesh, monkeypatch, (k, 0), part, placements, (5, 3)))
        for k, part in enumerate(parts)
    ]

    assert found[0] + found[1] == fingerprint(whole)
