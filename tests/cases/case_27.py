"""A gradient that is a partial sum is declared a replica, and never reduced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

import upguard_plugin
from tests.cases.case import Case


class Gate(nn.Module):
    """A replicated router; each rank scores its own slice of the tokens."""

    def __init__(self, mesh: Any, grad_placements: list[Any] | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(torch.ones(4, 16), mesh, [Replicate()]))
        self._grad_placements = grad_placements

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.weight, DTensor)
        return x @ self.weight.to_local(grad_placements=self._grad_placements).T


class Model(nn.Module):
    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.moe = nn.ModuleDict({"gate": gate})

    def forward(self, x: Tensor) -> Tensor:
        return self.moe["gate"](x)


def train(variant: str, config: Mapping[str, Any]) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = Model(Gate(mesh, None if variant == "target" else [Partial()]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / 8)
    x = torch.ones(4, 16).chunk(2)[dist.get_rank()]
    with upguard_plugin.enable(model, optimizer, config, layout={"tp": 2}) as guard:
        (model(x) * (dist.get_rank() + 1)).sum().backward()
        optimizer.step()
        guard.step()


CASE = Case(
    number=27,
    report="pytorch/torchtitan#2387",
    symptom="router weights drift apart over the tensor-parallel ranks",
    train=train,
    num_ranks=2,
    answer={
        "step": 0, "microbatch": None, "phase": "accumulate", "kind": "collective", "ranks": [0, 1],
        "boundary": "moe.gate.weight", "role": "grad",
    },
    broken={
        "invariant": "replicas-agree", "step": 0, "phase": "grad_sync", "ranks": [0, 1],
        "boundary": "moe.gate.weight", "role": "grad",
    },
    also={"concurrent": []},
)  # fmt: skip
