"""Real DeepSpeed trainings with experts, Ulysses, AutoTP and a Megatron-style mpu, on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from deepspeed_training import Training, ds_config, prepare, states, weights
from torch import distributed as dist
from torch import nn


@dataclass(frozen=True)
class Case:
    """A way to be parallel: what makes the model, and what else `initialize` is given."""

    build: Callable[[], tuple[nn.Module, dict[str, Any]]]
    batch: Callable[[torch.Generator], tuple[Any, ...]]
    same_data: bool = False  # ranks of a tensor-parallel group are given the same batches


def train_parallel(case: Case, training: Training) -> dict[str, Any]:
    """Train, and return what is left on this rank: weights, masters and moments by name."""
    deepspeed = prepare()
    deepspeed.utils.groups.mpu = deepspeed.utils.groups.mesh_device = None
    torch.manual_seed(0)
    model, more = case.build()
    parameters = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=parameters, config=ds_config(training), **more
    )
    generator = torch.Generator().manual_seed(dist.get_rank() // (2 if case.same_data else 1))
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[training.dtype]
    try:
        if training.fault is not None:
            training.fault(engine)
        for _ in range(training.steps * training.accumulation):
            batch = (
                one.to(dtype) if one.is_floating_point() else one for one in case.batch(generator)
            )
            engine.backward(engine(*batch).float().square().mean())
            engine.step()
        if (
            engine.has_moe_layers and training.stage
        ):  # DeepSpeed links before the experts' optimizer has any state
            engine.optimizer._hp_optimizer_states_linked = False
            engine.optimizer._lazy_init_hp_params_optimizer_state()
        left = {"weights": weights(engine)} | states(engine, training)
    finally:
        getattr(engine, "undo", lambda: None)()
        engine.destroy()
    return left


class Experts(nn.Module):
    """A layer of four experts between two dense ones."""

    def __init__(self, ep_size: int) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.first = nn.Linear(6, 8)
        expert = nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 8))
        self.moe = MoE(8, expert, num_experts=4, ep_size=ep_size, k=1, min_capacity=2)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, balance, _ = self.moe(self.first(x))
        return self.last(hidden) + 0.01 * balance


def _experts(ep_size: int) -> Case:
    return Case(lambda: (Experts(ep_size), {}), lambda g: (torch.randn(2, 4, 6, generator=g),))


class Ulysses(nn.Module):
    """Attention over a sequence that two ranks share, by DeepSpeed's all-to-alls."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        from deepspeed.sequence.layer import DistributedAttention

        self.qkv = nn.Linear(8, 24)
        self.attention = DistributedAttention(_attend, group, 2, 1)
        self.out = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).unbind(2)  # batch, positions, heads, dims
        return self.out(self.attention(q, k, v, 0).flatten(2))


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    heads = [one.transpose(1, 2) for one in (q, k, v)]
    return nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2)


def _ulysses() -> tuple[nn.Module, dict[str, Any]]:
    from deepspeed.runtime.sequence_parallel import parallel_state_sp as mpu

    if mpu._SEQUENCE_PARALLEL_GROUP is None:
        mpu.initialize_sequence_parallel(2)
    return Ulysses(mpu.get_sequence_parallel_group()), {"mpu": mpu}


def _ulysses_by_mesh() -> tuple[nn.Module, dict[str, Any]]:
    return Ulysses(dist.new_group([0, 1])), {"mesh_param": (1, 2)}


class TensorMpu:
    """A Megatron-style mpu: two ranks share every split weight; the pairs are replicas."""

    def __init__(self) -> None:
        ranks = list(range(dist.get_world_size()))
        tensor = [dist.new_group(ranks[first : first + 2]) for first in ranks[::2]]
        data = [dist.new_group(ranks[first::2]) for first in (0, 1)]
        self._tensor, self._data = tensor[dist.get_rank() // 2], data[dist.get_rank() % 2]

    def get_model_parallel_group(self) -> Any:
        return self._tensor

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self._tensor)

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank(self._tensor)

    def get_data_parallel_group(self) -> Any:
        return self._data

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self._data)

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self._data)


class _Sum(torch.autograd.Function):
    """Partial sums in, their sum out; backward hands the gradient on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _Copy(torch.autograd.Function):
    """The other way round."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class TensorParallel(nn.Module):
    """A norm, a column-parallel and a row-parallel linear layer, marked as Megatron marks them."""

    def __init__(self, mpu: TensorMpu) -> None:
        super().__init__()
        self._group = mpu.get_model_parallel_group()
        self.norm = nn.LayerNorm(6)
        whole = nn.Linear(6, 8), nn.Linear(8, 6)
        rank, half = mpu.get_model_parallel_rank(), 4
        mine = slice(rank * half, (rank + 1) * half)
        self.column = nn.Parameter(whole[0].weight.detach()[mine].clone())
        self.row = nn.Parameter(whole[1].weight.detach()[:, mine].clone())
        for weight, dim in ((self.column, 0), (self.row, 1)):
            weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = 1, dim, 1
        self.bias = nn.Parameter(whole[1].bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(_Copy.apply(self.norm(x), self._group) @ self.column.t())
        return _Sum.apply(hidden @ self.row.t(), self._group) + self.bias


def _tensor_parallel() -> tuple[nn.Module, dict[str, Any]]:
    mpu = TensorMpu()
    return TensorParallel(mpu), {"mpu": mpu}


class Recomputed(nn.Module):
    """Two blocks under DeepSpeed's own activation checkpointing, each with two inputs."""

    def __init__(self, mpu: Any = None) -> None:
        super().__init__()
        from deepspeed import checkpointing

        checkpointing.configure(mpu, partition_activations=mpu is not None)
        self._checkpoint, self._is_partitioned = checkpointing.checkpoint, mpu is not None
        self.embed = nn.Linear(6, 6)  # what goes into a checkpoint must have a gradient
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        residual = (x * 2.0,)
        if self._is_partitioned:  # DeepSpeed 0.19.8 fails with two inputs here
            residual = ()
        for layer in (self.first, self.second):
            x = self._checkpoint(partial(_block, layer), x, *residual)
        return x


def _block(layer: nn.Module, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    return torch.tanh(layer(x)) + (x if residual is None else residual)


def _partitioned() -> tuple[nn.Module, dict[str, Any]]:
    mpu = TensorMpu()
    return Recomputed(mpu), {"mpu": mpu}


def _llama() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    class Logits(LlamaForCausalLM):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens).logits

    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    return Logits(config), {}


CASES = {
    "experts-2": _experts(2),  # each rank has two of the four experts
    "experts-1": _experts(1),  # each rank has all
    "ulysses": Case(_ulysses, lambda g: (torch.randn(2, 4, 8, generator=g),)),
    "ulysses-mesh": Case(_ulysses_by_mesh, lambda g: (torch.randn(2, 4, 8, generator=g),)),
    "mpu": Case(
        _tensor_parallel, lambda g: (torch.randn(2, 6, generator=g),), same_data=True
    ),
    "recompute": Case(lambda: (Recomputed(), {}), lambda g: (torch.randn(2, 6, generator=g),)),
    "recompute-partitioned": Case(
        _partitioned, lambda g: (torch.randn(2, 6, generator=g),), same_data=True
    ),
    "autotp": Case(
        _llama, lambda g: (torch.randint(0, 16, (2, 5), generator=g),), same_data=True
    ),
}  # fmt: skip


def train_case(name: str, training: Training) -> dict[str, Any]:
    """The case of that name."""
    return train_parallel(CASES[name], training)
