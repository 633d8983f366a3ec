"""A layer runs before its bucket of updated weights has arrived."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import upguard_plugin
from tests.cases.case import Case
from tests.cases.models import TinyGPT, batches, next_token_loss


class LateGather:
    """An asynchronous all-gather of a weight's two halves; they arrive when it is waited for."""

    def __init__(self, weight: Tensor) -> None:
        self._weight: Tensor | None = weight
        own = weight.detach().view(-1).chunk(2)[dist.get_rank()].clone()
        self._halves = [torch.empty_like(own), torch.empty_like(own)]
        dist.all_gather(self._halves, own)

    def wait(self) -> None:
        if self._weight is not None:
            # Backward must not notice, as it does not in the report.
            self._weight.data.view(-1).copy_(torch.cat(self._halves))
        self._weight = None


class HalvedSGD:
    """Each rank updates its half of every weight; the other half comes by an all-gather."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = dict(model.named_parameters())
        self.handles: dict[str, LateGather] = {}

    @torch.no_grad()
    def step(self) -> None:
        for name, parameter in self._parameters.items():
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
            own = parameter.view(-1).chunk(2)[dist.get_rank()]
            own.sub_(parameter.grad.view(-1).chunk(2)[dist.get_rank()], alpha=0.1)
            parameter.grad = None
            self.handles[name] = LateGather(parameter)


def train(variant: str, config: Mapping[str, Any]) -> None:
    model = TinyGPT()
    optimizer = HalvedSGD(model)
    late = "blocks.1.mlp.fc1" if variant == "target" else None

    def gather(name: str, module: nn.Module, _args: Any) -> None:
        wanted = "blocks.0.mlp.fc1" if name == late else name  # the wrong handle
        for part, _ in module.named_parameters(recurse=False):
            if handle := optimizer.handles.get(f"{wanted}.{part}"):
                handle.wait()

    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda m, a, name=name: gather(name, m, a))
    with upguard_plugin.enable(model, None, config) as guard:
        for tokens, labels in batches(seed=dist.get_rank(), num=2):
            guard.microbatch(0)
            loss = next_token_loss(model(tokens), labels)
            for handle in optimizer.handles.values():  # what is late arrives before backward
                handle.wait()
            loss.backward()
            optimizer.step()
            guard.step()


CASE = Case(
    number=35,
    report="NVIDIA/Megatron-LM#950",
    symptom="with overlapped parameter all-gather the loss does not fall as it should",
    train=train,
    num_ranks=2,
    answer={
        "step": 1, "microbatch": 0, "phase": "forward", "kind": "collective", "ranks": [0, 1],
        "boundary": "blocks.1.mlp.fc1.weight", "role": "param",
    },
    settings={"dump": {"boundary": "blocks.1.mlp.fc1.weight", "steps": "1"}},
    also={
        "concurrent": [],
        "per_rank": [  # what the other rank owns is stale
            {"ranks": [0], "elements": {"pattern": "the tail, from row 32 on"}},
            {"ranks": [1], "elements": {"pattern": "rows 0-31"}},
        ],
    },
    equal=(("--steps", "0"),),
)  # fmt: skip
