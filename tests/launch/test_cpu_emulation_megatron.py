"""The emulation under the real Megatron-Core: what its modules need on a CPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from upguard_plugin.launch.cpu_emulation import emulate_cuda

pytestmark = pytest.mark.megatron
pytest.importorskip("megatron.core")


@pytest.fixture(scope="module", autouse=True)
def emulation():
    with emulate_cuda() as handle:
        yield handle


def norm_config(sequence_parallel: bool) -> SimpleNamespace:
    return SimpleNamespace(
        sequence_parallel=sequence_parallel,
        layernorm_zero_centered_gamma=False,
        persist_layer_norm=False,
        memory_efficient_layer_norm=False,
        normalization="LayerNorm",
    )


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_torch_norms_are_marked_as_those_of_transformer_engine_are(sequence_parallel):
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    norm = WrappedTorchNorm(norm_config(sequence_parallel), hidden_size=4)

    assert isinstance(norm, torch.nn.LayerNorm)
    assert norm.weight.sequence_parallel is norm.bias.sequence_parallel is sequence_parallel


def test_the_router_works_without_transformer_engine():
    from megatron.core.transformer.moe.moe_utils import router_gating_linear

    inputs = torch.ones(2, 4, requires_grad=True)
    weight = torch.ones(3, 4, requires_grad=True)
    router_gating_linear(inputs, weight, None, torch.float32).sum().backward()

    assert inputs.grad.tolist() == [[3.0] * 4] * 2


def test_split_sizes_become_numpy_arrays():
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    sizes = token_dispatcher.maybe_move_tensor_to_cpu(torch.tensor([1, 2]), as_numpy=True)

    assert type(sizes).__module__ == "numpy"
    assert moe_utils.maybe_move_tensor_to_cpu(torch.tensor([1])).tolist() == [1]


def test_the_module_that_wants_triton_is_imported_without_it(monkeypatch):
    name = "megatron.core.transformer.custom_layers.batch_invariant_kernels"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "triton.language", raising=False)

    __import__(name)

    assert sys.modules["triton"] is None
    monkeypatch.delitem(sys.modules, name)


def test_the_generator_of_a_rank_can_be_forked():
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    torch.manual_seed(1)
    tracker.add("model-parallel-rng", 2)
    outside = torch.get_rng_state()
    with tracker.fork():
        inside = torch.rand(2, device="cuda")

    assert torch.equal(inside, torch.rand(2, generator=torch.Generator().manual_seed(2)))
    assert torch.equal(torch.get_rng_state(), outside)


def test_names_that_megatron_copied_are_put_back(emulation):
    from megatron.core.tensor_parallel import random

    assert random._lazy_call is torch.cuda._lazy_call
    emulated = torch.cuda._lazy_call
    emulation.restore()
    try:
        assert random._lazy_call is torch.cuda._lazy_call is not emulated
    finally:
        emulation._start()
