"""Short runs that follow one another, in any memory order, hash as their contiguous copy."""

from __future__ import annotations

import pytest
import torch

from upguard_plugin.fingerprint import fingerprint
from upguard_plugin.fingerprint.gather import MAX_RUN_BYTES


def check(tensor):
    assert not tensor.is_contiguous()
    assert fingerprint(tensor) == fingerprint(tensor.contiguous())


@pytest.mark.parametrize("width", [64, 65, 100, 127, 200, MAX_RUN_BYTES, MAX_RUN_BYTES + 1])
@pytest.mark.parametrize("rows", [2, 3, 129, 700])
def test_columns_of_bytes(width, rows):
    torch.manual_seed(width)
    check(torch.randint(256, (rows, width + 9), dtype=torch.uint8)[:, 5 : 5 + width])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_heads_of_attention(dtype):
    torch.manual_seed(0)
    values = torch.randn(3, 50, 5, 24).to(dtype)
    check(values.permute(0, 2, 1, 3))
    check(values.permute(2, 0, 1, 3))
    check(values[:, ::2, 1:4, 3:].permute(0, 2, 1, 3))


def test_the_last_byte_of_every_run_counts():
    torch.manual_seed(0)
    values = torch.randint(256, (200, 80), dtype=torch.uint8)
    before = fingerprint(values[:, :70])
    for row in (0, 1, 116, 117, 118, 199):  # 8 KiB blocks end in row 117
        values[row, 69] ^= 1
        assert fingerprint(values[:, :70]) != before
        values[row, 69] ^= 1
    values[:, 70:] = 0  # beside the runs
    assert fingerprint(values[:, :70]) == before
