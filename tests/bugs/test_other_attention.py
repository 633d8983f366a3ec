"""The GPT with another attention, activation or order of its parts: level `op` names what it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.bugs import gpt
from tests.bugs.training import compare, record

SMALL = {"num_layers": 2, "width": 32, "num_heads": 2, "vocabulary": 64, "length": 16}
SDPA = "aten._scaled_dot_product_flash_attention_for_cpu"


def attention(mix: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def forward(self: gpt.Attention, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.num_heads, width // self.num_heads)
        mixed = mix(*heads.permute(2, 0, 3, 1, 4))
        return self.proj(mixed.transpose(1, 2).reshape(batch, length, width))

    return forward


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
    visible = torch.ones(scores.shape[-2:]).tril() > 0
    return scores.masked_fill(~visible, -math.inf).softmax(-1) @ v


def of_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(k, q, v, is_causal=True)


def of_all_tokens(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def without_module(self: gpt.MLP, x: Tensor) -> Tensor:
    return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


def without_residual(self: gpt.Block, x: Tensor) -> Tensor:
    x = self.attn(self.ln1(x))
    return x + self.drop(self.mlp(self.ln2(x)))


def cut_in_backward(self: gpt.Block, x: Tensor) -> Tensor:
    x = x + self.attn(self.ln1(x))
    return x + self.drop(self.mlp(self.ln2(x.detach())))


@pytest.fixture(scope="module")
def clean(tmp_path_factory) -> Path:
    return record(tmp_path_factory.mktemp("clean") / "clean", level="op", **SMALL)


@pytest.mark.parametrize(
    ("owner", "forward", "answer"),
    [
        ("Attention", attention(by_hand), ("replaced", "blocks.0.attn", SDPA, "output")),
        ("Attention", attention(of_keys), ("rewired", "blocks.0.attn", SDPA, "input")),
        ("Attention", attention(of_all_tokens), (None, "blocks.0.attn", SDPA, "output")),
        ("MLP", without_module, ("replaced", "blocks.0.mlp.act", "aten.gelu", "output")),
        ("Block", without_residual, ("missing", "blocks.0", "aten.add", "output")),
        (
            "Block", cut_in_backward,
            ("missing", "blocks.1.ln2", "aten.native_layer_norm_backward", "output"),
        ),
    ],
)  # fmt: skip
def test_what_is_other_is_named(clean, tmp_path, monkeypatch, owner, forward, answer):
    monkeypatch.setattr(getattr(gpt, owner), "forward", forward)

    first = compare(clean, record(tmp_path / "other", level="op", **SMALL))["first_divergence"]

    how = None if first["change"] is None else first["change"]["how"]
    assert (how, first["boundary"], first["operator"], first["role"]) == answer
    assert first["kind"] == first["phase"] == ("backward" if "backward" in answer[2] else "forward")
    assert "overwritten" not in first["explanation"]


def test_the_same_attention_is_identical(clean, tmp_path):
    assert compare(clean, record(tmp_path / "again", level="op", **SMALL))["verdict"] == "identical"
