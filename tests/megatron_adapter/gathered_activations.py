"""Whole activations, put together from all ranks by what Megatron's modules are known to give.

Uses nothing of the adapter: it is what the adapter's placements are checked against.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state

from tests.megatron_adapter.model import BATCH, Trainer, whole_name
from upguard_plugin.fingerprint import fingerprint

# How the outputs of the tensor-parallel ranks make up a whole, by the last parts of the name.
BY_COLUMNS = ("linear_qkv", "core_attention", "mlp.linear_fc1", "output_layer")
BETWEEN_LAYERS = (
    "embedding", "input_layernorm", "pre_mlp_layernorm", "final_layernorm", "linear_proj",
    "mlp.linear_fc2", "mlp", "self_attention", "layers.0", "layers.1", "mlp.router",
)  # fmt: skip


class Watch:
    """Keeps what the modules give in their first call."""

    def __init__(self, trainer: Trainer) -> None:
        self._job = trainer.job
        self._given: dict[str, torch.Tensor] = {}
        self._handles: list[Any] = []
        for gpt in trainer.gpts:
            for name, module in gpt.named_modules():
                if name.endswith(BY_COLUMNS + BETWEEN_LAYERS) and ".experts." not in name:
                    key = whole_name(gpt, name)
                    self._handles.append(module.register_forward_hook(self._keep(key)))

    def gather(self) -> dict[str, list[Any]]:
        """Module -> [h, s, dtype, shape] of its first whole output; the same on all ranks."""
        while self._handles:
            self._handles.pop().remove()
        mine = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_data_parallel_rank(),
            self._given,
        )
        everyone: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, mine)
        facts = {}
        for name in dict.fromkeys(name for _, _, given in everyone for name in given):
            parts = {(dp, tp): given[name] for tp, dp, given in everyone if name in given}
            found = fingerprint(self._whole(name, parts))
            facts[name] = [found.h, found.s, found.dtype, list(found.shape)]
        return facts

    def _keep(self, key: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            self._given.setdefault(key, tensor.detach().clone())

        return hook

    def _whole(self, name: str, parts: dict[tuple[int, int], torch.Tensor]) -> torch.Tensor:
        replicas: dict[int, list[torch.Tensor]] = {}
        for (dp, _), part in sorted(parts.items(), key=lambda item: item[0]):
            replicas.setdefault(dp, []).append(part)
        whole = [self._join(name, tensors) for _, tensors in sorted(replicas.items())]
        if name.endswith("router"):  # tokens are sequence and batch in one dim
            samples = [t.unflatten(0, (-1, BATCH)) for t in whole]
            return torch.cat(samples, 1).flatten(0, 1)
        return torch.cat(whole, 1)

    def _join(self, name: str, parts: list[torch.Tensor]) -> torch.Tensor:
        if name.endswith(BY_COLUMNS):
            if self._job.gated and name.endswith("linear_fc1"):
                halves = [part.chunk(2, -1) for part in parts]
                return torch.cat([half[k] for k in range(2) for half in halves], -1)
            return torch.cat(parts, -1)
        return torch.cat(parts, 0) if self._job.sequence_parallel else parts[0]
