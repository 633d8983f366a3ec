"""Of two ping-pong buffers one is filled again while it is still being reduced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import upguard_plugin
from tests.cases.case import Case
from tests.cases.models import TinyGPT, batches, next_token_loss

BUCKETS = (("head.weight",), ("blocks.1.mlp.fc2.weight",))


class LateWork:
    """An asynchronous all-reduce that happens when it is waited for."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer

    def wait(self) -> None:
        dist.all_reduce(self._buffer)


class OverlappedReducer:
    """Copies a bucket's gradients into a flat buffer, and has it reduced behind their back."""

    def __init__(self, model: TinyGPT, alternates: bool) -> None:
        named = dict(model.named_parameters())
        self._buckets = [[named[name] for name in names] for names in BUCKETS]
        self._buffers = [torch.zeros(1024), torch.zeros(1024)]
        self._alternates = alternates

    def reduce(self) -> None:
        launched = []
        for index, bucket in enumerate(self._buckets):
            buffer = self._buffers[index % 2 if self._alternates else 0]
            flat = torch.cat([parameter.grad.flatten() for parameter in bucket])
            buffer[: len(flat)] = flat
            launched.append((LateWork(buffer), buffer, bucket))
        for work, buffer, bucket in launched:
            work.wait()
            sizes = [parameter.numel() for parameter in bucket]
            parts = buffer[: sum(sizes)].split(sizes)
            for parameter, part in zip(bucket, parts, strict=True):
                parameter.grad = part.view_as(parameter) / 2


def train(variant: str, config: Mapping[str, Any]) -> None:
    model = TinyGPT()
    optimizer = torch.optim.AdamW(model.parameters())
    reducer = OverlappedReducer(model, alternates=variant != "target")
    with upguard_plugin.enable(model, optimizer, config) as guard:
        for tokens, labels in batches(seed=dist.get_rank(), num=1):
            next_token_loss(model(tokens), labels).backward()
            reducer.reduce()
            optimizer.step()
            guard.step()


CASE = Case(
    number=5,
    report="deepspeedai/DeepSpeed#7188",
    symptom="with overlapped reduction the gradient norm differs",
    train=train,
    num_ranks=2,
    level="op",
    answer={
        "step": 0, "microbatch": None, "phase": "grad_sync", "kind": "collective", "ranks": [0, 1],
        "call": 0, "boundary": "all_reduce[world]", "role": "input", "moment": "launch",
        "operator": "c10d.allreduce_",
        "baseline": {"holds": [{"start": 0, "stop": 512, "name": "head.weight.grad"}]},
        "target": {
            "holds": [{"start": 0, "stop": 1024, "name": "blocks.1.mlp.fc2.weight.grad"}],
        },
        "explanation": "The all_reduce sum: input 0 of all_reduce[world] differs at launch: its "
        "buffer holds head.weight.grad in the baseline, and was overwritten by "
        "blocks.1.mlp.fc2.weight.grad in the target.",
    },
    also={"concurrent": []},
)  # fmt: skip
