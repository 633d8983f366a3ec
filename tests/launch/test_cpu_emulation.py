"""Each place where a CUDA-only program would stumble on a CPU; restoring leaves no trace."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.utils._device
from torch.distributed import device_mesh

from upguard_plugin.errors import UsageError
from upguard_plugin.launch.cpu_emulation import emulate_cuda
from upguard_plugin.launch.cpu_emulation.distributed import _kept_until_sent, _on_gloo
from upguard_plugin.launch.cpu_emulation.megatron import triton_stub_if_missing

PATCHED_CLASSES = (
    torch.amp.GradScaler,
    torch.autocast,
    torch.nn.Module,
    torch.Tensor,
    torch.utils._device.DeviceContext,
    device_mesh.DeviceMesh,
)


@pytest.fixture
def emulation():
    with emulate_cuda() as handle:
        yield handle


def as_module(name: str, expression: str) -> object:
    """What code of the module `name` gets for an expression."""
    return eval(expression, {"__name__": name, "torch": torch})


def all_attributes() -> dict[str, dict[str, int]]:
    """The identity of every attribute of every module, and of the classes that are patched.

    But for those of the test runner's own modules: they keep counts and clocks in theirs.
    """
    modules = {
        name: module
        for name, module in sys.modules.items()
        if hasattr(module, "__dict__")
        and name.partition(".")[0] not in ("hypothesis", "_pytest", "pytest")
    }
    owners = modules | {str(cls): cls for cls in PATCHED_CLASSES}
    return {
        name: {key: id(value) for key, value in list(vars(owner).items())}
        for name, owner in owners.items()
    }


def test_restore_leaves_no_trace():
    emulate_cuda().restore()  # loads what the emulation itself is made of
    builtins = torch.jit._builtins._get_builtin_table()
    attributes = all_attributes()
    others = dict(builtins), list(sys.meta_path), dict(os.environ)

    emulation = emulate_cuda()
    assert all_attributes() != attributes
    emulation.restore()

    assert all_attributes() == attributes
    assert (dict(builtins), list(sys.meta_path), dict(os.environ)) == others


def test_a_name_copied_before_or_during_is_followed_both_ways():
    client = type(sys)("client")
    sys.modules["client"] = client
    try:
        client.seeded_before = real = torch.cuda.manual_seed
        with emulate_cuda():
            assert client.seeded_before is torch.cuda.manual_seed is not real
            client.seeded_during = torch.cuda.manual_seed_all
        assert client.seeded_before is real
        assert client.seeded_during is torch.cuda.manual_seed_all
    finally:
        del sys.modules["client"]


def test_an_inner_emulation_leaves_the_outer_one_alone(emulation):
    emulate_cuda().restore()

    assert torch.cuda.is_available()


def test_a_real_gpu_is_not_replaced(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    attributes = all_attributes()

    with pytest.raises(UsageError, match="sees a real GPU"):
        emulate_cuda()

    assert all_attributes() == attributes


def test_clients_see_a_gpu_and_torch_does_not(emulation, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")

    for question, answer in (("is_available", True), ("device_count", 2), ("is_initialized", True)):
        call = f"torch.cuda.{question}()"
        assert as_module("megatron.core.utils", call) == answer
        assert not as_module("torch.utils.data.dataloader", call)
        assert not as_module("upguard_plugin.capture.guard", call)


def test_a_pinning_data_loader_takes_its_cpu_path(emulation):
    loader = torch.utils.data.DataLoader(torch.arange(4), batch_size=2, pin_memory=True)

    with pytest.warns(UserWarning, match="pin_memory"):
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("device", ["cuda", "cuda:1", 0, torch.device("cuda", 1)])
def test_device_arguments_mean_the_cpu(emulation, device):
    tensors = [
        torch.empty(2, device=device),
        torch.ones(2).to(device),
        torch.ones(2).to(device=device, dtype=torch.float64),
        torch.ones(2).cuda(device),
        torch.ones(2).new_zeros(2, device=device),
        torch.tensor([1.0], device=device, pin_memory=True).pin_memory(),
        torch.nn.Linear(2, 2, device=device).cuda(device).to(device).weight,
    ]
    with torch.device("cuda"):
        tensors.append(torch.zeros(1))

    assert {tensor.device.type for tensor in tensors} == {"cpu"}


def test_other_devices_are_left_alone(emulation):
    assert torch.empty(2, device="meta").device.type == "meta"
    assert torch.ones(2, device="cpu").to("meta").device.type == "meta"


def test_scripted_functions_still_find_their_factories(emulation):
    @torch.jit.script
    def add_zeros(x):
        return x + torch.zeros(2, device=x.device)

    assert add_zeros(torch.ones(2)).tolist() == [1.0, 1.0]


def test_autocast_for_cuda_is_autocast_for_the_cpu(emulation):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        product = torch.ones(2, 2) @ torch.ones(2, 2)
        assert torch.is_autocast_enabled("cuda")

    assert product.dtype == torch.bfloat16


def test_no_torch_function_mode_is_pushed(emulation):
    assert torch._C._len_torch_function_stack() == 0


def test_tensor_type_names_cuda_to_clients_only(emulation):
    for dtype, name in ((torch.float32, "Float"), (torch.bfloat16, "BFloat16")):
        tensor = torch.ones(1, dtype=dtype)
        type_for = {"__name__": "megatron.core.optimizer", "tensor": tensor}
        assert eval("tensor.type()", type_for) == f"torch.cuda.{name}Tensor"
        type_for["__name__"] = "torch.nn.modules.module"
        assert eval("tensor.type()", type_for) == f"torch.{name}Tensor"
    assert torch.ones(1).type("torch.cuda.HalfTensor").dtype == torch.float16
    assert isinstance(torch.ones(1), torch.cuda.FloatTensor)
    assert torch.cuda.LongTensor([1]).tolist() == [1]


def test_streams_and_events_exist_and_are_always_done(emulation):
    stream = torch.cuda.Stream()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    with torch.cuda.stream(stream):
        begin.record()
        end.record(torch.cuda.current_stream())
    stream.wait_stream(torch.cuda.default_stream())
    torch.ones(1).record_stream(stream)
    torch.cuda.synchronize()

    assert stream.query() and end.query()
    assert begin.elapsed_time(end) >= 0


def test_an_event_that_was_not_recorded_has_no_time(emulation):
    with pytest.raises(ValueError, match="recorded"):
        torch.cuda.Event().elapsed_time(torch.cuda.Event())


def test_cuda_and_cpu_share_one_generator(emulation):
    torch.cuda.manual_seed(7)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3, device="cuda")
    torch.cuda.set_rng_state(state)
    second = torch.rand(3)
    torch.cuda.default_generators[0].set_state(state)
    third = torch.rand(3)

    assert torch.equal(first, second) and torch.equal(first, third)
    assert torch.cuda.initial_seed() == 7


def test_the_list_of_generators_ends_and_is_empty_for_upguard(emulation, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    ask = "len(torch.cuda.default_generators), len(list(torch.cuda.default_generators))"

    assert as_module("megatron.core", ask) == (2, 2)
    assert as_module("upguard_plugin.capture.rng", ask) == (0, 0)


def test_lazy_calls_run_at_once(emulation):
    ran = []

    torch.cuda._lazy_call(lambda: ran.append(1))

    assert ran == [1]


def test_memory_and_device_questions_have_answers(emulation):
    torch.cuda.set_device(1)

    assert torch.cuda.current_device() == 1
    assert torch.cuda.memory_stats()["allocation.all.current"] == 0
    assert torch.cuda.get_device_properties(0).total_memory > 0
    assert torch.cuda.get_device_capability() == (8, 0)


def test_nccl_groups_are_started_on_gloo(emulation, tmp_path):
    dist.init_process_group(
        "nccl",
        init_method=f"file://{tmp_path / 'store'}",
        rank=0,
        world_size=1,
        device_id=torch.device("cuda", 0),
    )
    try:
        group = dist.new_group([0], backend="nccl")
        dist.barrier(device_ids=[0])

        assert (dist.get_backend(), dist.get_backend(group)) == ("gloo", "gloo")
    finally:
        dist.destroy_process_group()


def test_gpu_only_options_of_groups_are_dropped():
    def new_group(ranks=None, backend=None, pg_options=None, device_id=None):
        return ranks, backend, pg_options, device_id

    assert _on_gloo(new_group)([0, 1], "cpu:gloo,cuda:nccl", object()) == (
        [0, 1],
        "gloo",
        None,
        None,
    )
    assert _on_gloo(new_group)([0], backend="mpi") == ([0], "mpi", None, None)


class FakeSend:
    """A gloo send: complete once somebody waited."""

    def __init__(self) -> None:
        self.done = False

    def is_completed(self) -> bool:
        return self.done


def test_a_sent_storage_lives_until_the_send_is_complete():
    work = FakeSend()
    isend = _kept_until_sent(lambda tensor, dst: work)
    tensor = torch.ones(4)
    storage = weakref.ref(tensor.untyped_storage())

    isend(tensor, dst=1)
    tensor.data = torch.empty(1)  # what Megatron's schedules do right after
    isend(torch.ones(1), dst=1)
    assert storage() is not None

    work.done = True
    isend(torch.ones(1), dst=1)
    assert storage() is None


def test_a_missing_triton_is_stubbed_only_while_its_user_is_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "triton.language", raising=False)

    with triton_stub_if_missing():
        import triton
        import triton.language as tl

        @triton.jit
        def plain(x):
            return x

        @triton.autotune(configs=[], key=[])
        def tuned(x: tl.constexpr):
            return x

    assert (plain(1), tuned(2)) == (1, 2)
    assert sys.modules["triton"] is None
    assert "triton.language" not in sys.modules


INSTALL_FIRST = """
import sys
from upguard_plugin.launch.cpu_emulation import install

install()
install()
assert "torch" not in sys.modules
assert len([f for f in sys.meta_path if type(f).__name__ == "TritonStubFinder"]) == 1

import torch

assert torch.cuda.is_available()
assert torch.empty(1, device="cuda").type() == "torch.cuda.FloatTensor"
"""


def test_install_waits_for_torch():
    subprocess.run([sys.executable, "-c", INSTALL_FIRST], check=True, timeout=60)
