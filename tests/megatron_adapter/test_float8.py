"""Transformer Engine's float8 tensors, by stand-ins with their names and attributes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import upguard_plugin
from tests.megatron_adapter.merged import events
from upguard_plugin.fingerprint import fingerprint
from upguard_plugin.trace.reader import open_trace


class Float8Tensor(torch.Tensor):
    """Data of one byte and a scale for all; a transposed copy that comes and goes."""

    @staticmethod
    def __new__(cls, data, scale_inv):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.bfloat16)

    def __init__(self, data, scale_inv):
        self._data, self._scale_inv, self._transpose = data, scale_inv, None

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise AssertionError(f"{func} would work on values that were made for it")


class MXFP8Tensor(Float8Tensor):
    """Scaled by blocks along rows and along columns."""

    def __init__(self, data, scale_inv):
        self._rowwise_data, self._rowwise_scale_inv = data, scale_inv
        self._columnwise_data, self._columnwise_scale_inv = None, None


@pytest.mark.parametrize("cls", [Float8Tensor, MXFP8Tensor])
def test_float8_tensors_are_data_and_scales(cls):
    data, scale = torch.arange(16, dtype=torch.uint8).view(4, 4), torch.tensor([0.5])
    tensor = cls(data, scale)
    found = fingerprint(tensor)

    tensor._transpose = data.t().contiguous()
    assert fingerprint(tensor) == found == fingerprint(cls(data.clone(), scale.clone()))
    assert fingerprint(cls(data, scale * 2)) != found
    assert fingerprint(cls(data + 1, scale)) != found


def test_a_float8_weight_is_recorded_without_a_placement(tmp_path):
    model = nn.Linear(4, 4, bias=False)
    data = torch.arange(16, dtype=torch.uint8).view(4, 4)
    model.weight = nn.Parameter(Float8Tensor(data, torch.tensor([0.5])), requires_grad=False)
    model.forward = lambda x: x * 2

    config = {"output_dir": str(tmp_path / "run")}
    with upguard_plugin.enable(model, None, config, placements={"weight": "o i"}) as guard:
        model(torch.ones(1, 4))
        guard.step()

    weights = [e for e in events(tmp_path / "run") if e.key.role == "param"]
    assert weights and all(e.key.placement is None for e in weights)
    assert {(e.h, e.key.dtype) for e in weights} == {(fingerprint(model.weight).h, "bfloat16")}
    assert open_trace(tmp_path / "run").end(0).notes == ()
