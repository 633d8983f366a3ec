"""`torch.cuda` as a client sees it: one GPU per local process, one stream, the CPU's generator.

Questions (`is_available`, `device_count`, ...) are answered by who asks: torch itself keeps the
truth, so that the data loader does not pin memory and checkpoints take their CPU paths. Requests
(`synchronize`, `set_device`, ...) do nothing for anybody: everything on the CPU is done when the
call returns.
"""

from __future__ import annotations

import functools
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from upguard_plugin.launch.cpu_emulation.patches import Patches, caller_wants_truth

_NO_OPS = (
    "empty_cache init ipc_collect set_per_process_memory_fraction set_stream set_sync_debug_mode "
    "synchronize _lazy_init reset_peak_memory_stats reset_accumulated_memory_stats "
    "reset_max_memory_allocated reset_max_memory_cached"
)
_BYTE_COUNTS = (
    "memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_cached "
    "max_memory_cached device_memory_used memory_usage utilization temperature power_draw "
    "clock_rate"
)
_CAPABILITY = (8, 0)  # the oldest GPU with bfloat16


class Stream:
    """The only queue of the CPU: whatever was started is finished."""

    device = torch.device("cpu")
    stream_id = cuda_stream = priority = 0

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None: ...


class ExternalStream(Stream):
    """A queue made elsewhere: the same one."""


class Event:
    """A moment in time."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self._recorded_s: float | None = None

    def record(self, stream: object = None) -> None:
        self._recorded_s = time.perf_counter()

    def wait(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds between two recorded events. Raises ValueError if one was not recorded."""
        if self._recorded_s is None or end._recorded_s is None:
            raise ValueError("both events must be recorded before their distance can be taken")
        return (end._recorded_s - self._recorded_s) * 1000


class _NoContext(nullcontext[None]):
    """Instead of `torch.cuda.device` and kin: takes any arguments, changes nothing."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()


def _no_context(name: str) -> type[_NoContext]:
    # A class of its own for each name: `restore` tells replacements apart by identity.
    return type(name, (_NoContext,), {})


class _DefaultGenerators(Sequence[torch.Generator]):
    """The CPU's generator under every device index; for UpGuard, which reads it anyway, nothing."""

    def __getitem__(self, index: Any) -> Any:
        return torch.default_generator

    def __len__(self) -> int:
        return 0 if caller_wants_truth() else _local_world_size()

    def __iter__(self) -> Iterator[torch.Generator]:
        num_generators = 0 if caller_wants_truth() else _local_world_size()
        return iter([torch.default_generator] * num_generators)


def emulate_cuda_api(patches: Patches) -> None:
    """Replace the functions and classes of `torch.cuda` that CUDA-only training programs use."""
    answers: dict[str, Callable[..., object]] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "device_count": _local_world_size,
    }
    for name, answer in answers.items():
        patches.set(torch.cuda, name, _truth_for_torch(getattr(torch.cuda, name), answer))
    for name in _NO_OPS.split():
        _set_where_present(patches, name, _returning(None))
    for name in _BYTE_COUNTS.split():
        _set_where_present(patches, name, _returning(0))
    for name, value in (_device_functions() | _memory_functions() | _stream_names()).items():
        _set_where_present(patches, name, value)
    for name, value in _generator_functions().items():
        _set_where_present(patches, name, value)
    patches.set(torch.cuda, "default_generators", _DefaultGenerators())
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        patches.set(torch.cuda.nvtx, name, _returning(None))
    patches.set(torch.cuda.nvtx, "range", contextmanager(_yield_once))
    for name in ("start", "stop"):
        patches.set(torch.cuda.profiler, name, _returning(None))


def _set_where_present(patches: Patches, name: str, value: object) -> None:
    # torch.cuda re-exports what these define, and clients reach for both.
    homes = (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.streams)
    for module in homes:
        if name in vars(module) and not (name.startswith("_") and module is not torch.cuda):
            patches.set(module, name, value)


def _truth_for_torch(
    real: Callable[..., object], answer: Callable[..., object]
) -> Callable[..., object]:
    @functools.wraps(real)
    def question(*args: object, **kwargs: object) -> object:
        return (real if caller_wants_truth() else answer)(*args, **kwargs)

    return question


def _returning(value: object) -> Callable[..., object]:
    return lambda *args, **kwargs: value


def _yield_once(*args: object, **kwargs: object) -> Any:
    yield


def _local_world_size() -> int:
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "WORLD_SIZE"):
        if os.environ.get(name, "").isdigit():
            return max(1, int(os.environ[name]))
    return 1


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _device_functions() -> dict[str, object]:
    chosen = {"index": 0}

    def set_device(device: Any) -> None:
        index = getattr(device, "index", device)
        if isinstance(index, str):
            index = int(index.partition(":")[2] or 0)
        chosen["index"] = index or 0

    def run_now(call: Callable[[], object], **kwargs: object) -> None:
        call()

    properties = SimpleNamespace(
        name="CPU in the place of a GPU",
        major=_CAPABILITY[0],
        minor=_CAPABILITY[1],
        total_memory=_memory_bytes(),
        multi_processor_count=os.cpu_count() or 1,
        warp_size=32,
        gcnArchName="",
    )
    return {
        "set_device": set_device,
        "current_device": lambda: chosen["index"],
        "device": _no_context("device"),
        "device_of": _no_context("device_of"),
        "get_device_properties": _returning(properties),
        "get_device_name": _returning(properties.name),
        "get_device_capability": _returning(_CAPABILITY),
        "can_device_access_peer": _returning(True),
        "cudart": _returning(
            SimpleNamespace(cudaProfilerStart=_returning(0), cudaProfilerStop=_returning(0))
        ),
        "_lazy_call": run_now,
    }


def _memory_functions() -> dict[str, object]:
    return {
        "memory_stats": lambda device=None: defaultdict(int),
        "memory_snapshot": lambda *args, **kwargs: [],
        "memory_summary": _returning("no GPU memory: the CPU stands in for CUDA"),
        "mem_get_info": lambda device=None: (_memory_bytes(), _memory_bytes()),
    }


def _stream_names() -> dict[str, object]:
    only = Stream()
    return {
        "Stream": Stream,
        "ExternalStream": ExternalStream,
        "Event": Event,
        "StreamContext": _no_context("StreamContext"),
        "stream": _no_context("stream"),
        "current_stream": _returning(only),
        "default_stream": _returning(only),
        "is_current_stream_capturing": _returning(False),
    }


def _generator_functions() -> dict[str, object]:
    def seed() -> None:
        torch.default_generator.seed()

    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(int(seed))

    def manual_seed_all(seed: int) -> None:
        torch.default_generator.manual_seed(int(seed))

    def set_state(new_state: torch.Tensor, device: object = "cuda") -> None:
        torch.set_rng_state(new_state)

    def set_states(new_states: Sequence[torch.Tensor]) -> None:
        for state in new_states[:1]:
            torch.set_rng_state(state)

    return {
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed_all,
        # Functions of their own: dynamo refuses one torch object under two names.
        "seed": seed,
        "seed_all": lambda: seed(),
        "initial_seed": lambda: torch.default_generator.initial_seed(),
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "set_rng_state": set_state,
        "set_rng_state_all": set_states,
    }
