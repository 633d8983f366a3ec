"""Small models, and what the module probe alone records of them."""

from __future__ import annotations

import torch
from recorded import record_steps
from torch import nn

from upguard_plugin.fingerprint.reference import fingerprint_array


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.fc2(torch.relu(self.fc1(x)))


class Stack(nn.Module):
    def __init__(self, run_block=lambda block, x: block(x)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.run_block = run_block

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = self.run_block(block, x)
        return x


def train(model, *inputs, **named):
    def step(guard):
        model(*inputs, **named).sum().backward()

    return step


def hash_of(tensor):
    return fingerprint_array(tensor.detach().numpy()).h


MODULE_ROLES = ["input", "output", "grad_input", "grad_output"]


def recorded_modules(run, model, step, steps=1, **settings):
    """Only what the module probe records."""
    return record_steps(run, model, step, steps, roles=MODULE_ROLES, **settings)


def places(events):
    return [(e.phase, e.boundary, e.role, e.slot, e.call) for e in events]
