"""A training whose activation is a Triton kernel: `python -m tests.bugs.triton_run OUTPUT [FAULT]`.

FAULT is added to one element of what the kernel writes in step 1. Without a GPU the kernel runs in
Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import sys

import torch
import triton
from torch import nn
from triton import language as tl

import upguard_plugin

SIZE = 32


@triton.jit
def square(x, out, fault, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    value = tl.load(x + at)
    tl.store(out + at, value * value + tl.where(at == 3, fault, 0.0))


class Squares(nn.Module):
    """x * x, in place of an activation; no gradient goes through it."""

    fault = 0.0

    def forward(self, x):
        out = torch.zeros_like(x)
        square[(1,)](x, out, self.fault, SIZE)
        return out


def main(output: str, fault: float) -> None:
    torch.manual_seed(0)
    squares = Squares()
    model = nn.Sequential(nn.Linear(8, 8), squares, nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with upguard_plugin.enable(model, optimizer, {"level": "op", "output_dir": output}) as guard:
        for step in range(2):
            squares.fault = fault if step == 1 else 0.0
            optimizer.zero_grad()
            model(torch.linspace(0, 1, SIZE).view(4, 8)).sum().backward()
            optimizer.step()
            guard.step()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
