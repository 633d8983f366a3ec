"""One computation in Megatron-Core's words and in plain PyTorch's, both recorded.

python -m tests.compare.frameworks FOLDER

Values are small dyadic numbers in float64 and the activation is a ReLU, so that both give the same
bits in whatever order they add.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import upguard_plugin
from upguard_plugin.launch.cpu_emulation import emulate_cuda

HIDDEN, INNER, LAYERS, NUM_STEPS = 8, 16, 2, 2


def dyadic(*shape: int, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=draw).double() / 2


class Block(nn.Module):
    """What Megatron calls an MLP."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, INNER, bias=False)
        self.down = nn.Linear(INNER, HIDDEN, bias=False)
        self._activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self._activation(self.up(x)))


class Plain(nn.Module):
    def __init__(self, fault: bool) -> None:
        super().__init__()
        activations = [torch.relu, torch.nn.functional.gelu if fault else torch.relu]
        self.blocks = nn.ModuleList(Block(activation) for activation in activations)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Megatron(nn.Module):
    def __init__(self) -> None:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
        from megatron.core.transformer import TransformerConfig
        from megatron.core.transformer.mlp import MLP, MLPSubmodules

        super().__init__()
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)
        config = TransformerConfig(
            num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=1, ffn_hidden_size=INNER,
            add_bias_linear=False, activation_func=torch.relu, use_cpu_initialization=True,
            params_dtype=torch.float64, gradient_accumulation_fusion=False,
            bias_activation_fusion=False,
        )  # fmt: skip
        parts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        self.layers = nn.ModuleList(MLP(config, parts) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(hidden_states=x)[0]
        return x


def record(model: nn.Module, run: Path) -> None:
    for seed, parameter in enumerate(model.parameters()):
        parameter.data = dyadic(*parameter.shape, seed=seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / 8, foreach=False)
    settings = {"output_dir": str(run), "program": run.name}
    with upguard_plugin.enable(model, optimizer, settings) as guard:
        for step in range(NUM_STEPS):
            loss = model(dyadic(4, 2, HIDDEN, seed=100 + step)).sum() / 64
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            guard.step()


def main(folder: Path) -> None:
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    warnings.simplefilter("ignore")
    record(Plain(fault=False), folder / "plain")
    record(Plain(fault=True), folder / "wrong")
    with emulate_cuda():
        store = f"file://{folder / 'store'}"
        torch.distributed.init_process_group("nccl", init_method=store, rank=0, world_size=1)
        record(Megatron(), folder / "megatron")
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
