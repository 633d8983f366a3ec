"""What can move a run's bits besides its program: versions, switches, variables, devices.

In:  this process, as it is when recording begins.
Out: plain text for the manifest, secrets redacted; equal texts mean equal environments.

Looks at torch only where the training program has loaded it, asks nothing that would initialise a
device or run an operator, and changes no switch. The program itself is in `program.py`.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from types import ModuleType

from upguard_plugin.program import (
    REDACTED,
    collect_sources,
    is_secret,
    program_digest,
    redact_command,
    redact_text,
)

__all__ = [
    "collect_sources",
    "collect_variables",
    "collect_versions",
    "device_name",
    "program_digest",
    "redact_command",
]

_DISTRIBUTIONS = (
    "numpy",
    "megatron-core",
    "deepspeed",
    "transformer-engine",
    "transformer-engine-torch",
    "triton",
    "flash-attn",
    "apex",
    "transformers",
    "accelerate",
    "mpi4py",
    "intel-openmp",
    "mkl",
    "nvidia-cublas-cu12",
    "nvidia-cudnn-cu12",
    "nvidia-nccl-cu12",
    "nvidia-cublas",
    "nvidia-cudnn-cu13",
    "nvidia-nccl-cu13",
)
# CPU features by which libraries choose a kernel.
_CPU_FEATURES = ("avx", "avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "neon", "asimd", "sve")

_VARIABLES = re.compile(
    r"(NCCL|CUBLAS|CUDNN|CUDA|MKL|OMP|KMP|GOMP|OPENBLAS|BLIS|DNNL|ONEDNN|TORCH|PYTORCH|ATEN|NVTE"
    r"|NVIDIA_TF32|TRITON|FLASH_ATTENTION|GLOO|RCCL|HIP|MIOPEN|DS|DEEPSPEED|NUMEXPR)(_.*|$)"
    r"|TORCHINDUCTOR_.*|TORCHDYNAMO_.*|PYTHONHASHSEED|VECLIB_MAXIMUM_THREADS"
)
# Where something lies or who runs it does not move bits, and differs between equal runs.
_NOT_VARIABLES = re.compile(
    r".*(_DIR|_PATH|_HOME|_FILE|_PORT|_ADDR|_HOST|_ID|_IFNAME|_LOGS?|_DEBUG|_DEBUG_SUBSYS|_BIN)$"
    r"|CUDA_VISIBLE_DEVICES|NCCL_DEBUG.*|TORCH_SHOW_CPP_STACKTRACES|TORCH_CPP_LOG_LEVEL"
)


def collect_versions() -> dict[str, str]:
    """Versions, build flags and switches of everything that moves bits, as far as loaded."""
    found = {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "python compiler": platform.python_compiler(),
        "libc": " ".join(platform.libc_ver()),
        "machine": platform.machine(),
        "cpu": _cpu_model(),
        "cpu features": " ".join(_cpu_features()),
    }
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    found |= _nvidia_driver()
    torch = sys.modules.get("torch")
    if torch is not None:
        found |= _torch_versions(torch)
        found |= {f"torch switch {name}": value for name, value in _torch_switches(torch).items()}
    return {name: text for name, text in found.items() if text}


def collect_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of the environment that can move bits, secrets redacted, by name."""
    environ = os.environ if environ is None else environ
    return {
        name: REDACTED if is_secret(name) else redact_text(environ[name])
        for name in sorted(environ)
        if _VARIABLES.fullmatch(name) and not _NOT_VARIABLES.fullmatch(name)
    }


def device_name() -> str:
    """The device that this process computes on. Initialises none."""
    torch = sys.modules.get("torch")
    if torch is not None and _ask(torch.cuda.is_initialized) == "True":
        name = _ask(torch.cuda.get_device_name)
        capability = _ask(lambda: "sm_{}{}".format(*torch.cuda.get_device_capability()))
        if name:
            return f"{name} {capability}".rstrip()
    return f"cpu: {_cpu_model()}"


def _cpu_model() -> str:
    names = re.findall(r"^(?:model name|CPU part)\s*:\s*(.*)$", _cpuinfo(), re.MULTILINE)
    return names[0] if names else platform.processor()


def _cpu_features() -> list[str]:
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", _cpuinfo(), re.MULTILINE)
    present = set(flags[1].split()) if flags else set()
    return [feature for feature in _CPU_FEATURES if feature in present]


def _cpuinfo() -> str:
    return _text_of(Path("/proc/cpuinfo"))


def _nvidia_driver() -> dict[str, str]:
    version = re.search(r"Module\s+([\d.]+)", _text_of(Path("/proc/driver/nvidia/version")))
    return {"nvidia driver": version[1]} if version else {}


def _text_of(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _torch_versions(torch: ModuleType) -> dict[str, str]:
    gloo = _ask(lambda: torch.distributed.is_gloo_available())
    return {
        "torch": str(torch.__version__),
        "torch source": _ask(lambda: torch.version.git_version),
        "torch build": " ".join(_ask(torch.__config__.show).split()),
        "cuda": _ask(lambda: torch.version.cuda),
        "hip": _ask(lambda: torch.version.hip),
        "cudnn": _ask(lambda: torch.backends.cudnn.version()),
        "nccl": _ask(lambda: ".".join(map(str, torch.cuda.nccl.version()))),
        "gloo": "that of torch" if gloo == "True" else "",
        "torch cpu kernels": _ask(lambda: torch.backends.cpu.get_cpu_capability()),
    }


def _torch_switches(torch: ModuleType) -> dict[str, str]:
    backends = torch.backends
    questions: dict[str, Callable[[], object]] = {
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
        "deterministic warn only": torch.is_deterministic_algorithms_warn_only_enabled,
        "fill uninitialized memory": lambda: torch.utils.deterministic.fill_uninitialized_memory,
        "float32 matmul precision": torch.get_float32_matmul_precision,
        "cuda matmul tf32": lambda: backends.cuda.matmul.allow_tf32,
        "cuda matmul fp32 precision": lambda: backends.cuda.matmul.fp32_precision,
        "mkldnn matmul fp32 precision": lambda: backends.mkldnn.matmul.fp32_precision,
        "cuda bf16 reduced precision": (
            lambda: backends.cuda.matmul.allow_bf16_reduced_precision_reduction
        ),
        "cuda fp16 reduced precision": (
            lambda: backends.cuda.matmul.allow_fp16_reduced_precision_reduction
        ),
        "cudnn enabled": lambda: backends.cudnn.enabled,
        "cudnn benchmark": lambda: backends.cudnn.benchmark,
        "cudnn deterministic": lambda: backends.cudnn.deterministic,
        "cudnn tf32": lambda: backends.cudnn.allow_tf32,
        "mkldnn enabled": lambda: backends.mkldnn.enabled,
        "flash attention": lambda: backends.cuda.flash_sdp_enabled(),
        "memory-efficient attention": lambda: backends.cuda.mem_efficient_sdp_enabled(),
        "math attention": lambda: backends.cuda.math_sdp_enabled(),
        "threads": torch.get_num_threads,
        "interop threads": torch.get_num_interop_threads,
        "default dtype": torch.get_default_dtype,
        "autocast cpu": lambda: _autocast(torch, "cpu"),
        "autocast cuda": lambda: _autocast(torch, "cuda"),
        "flush denormal": _flushes_denormals,
    }
    return {name: _ask(question) for name, question in questions.items()}


def _autocast(torch: ModuleType, device: str) -> str:
    return str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else "off"


def _flushes_denormals() -> bool:
    # The switch is a bit of this thread's processor state, so Python's own floats show it.
    smallest_normal = sys.float_info.min
    return smallest_normal / 2 == 0.0


def _ask(question: Callable[[], object]) -> str:
    # Builds of torch lack some of these, each in its own way; what is not there moves no bit.
    try:
        answer = question()
    except (AttributeError, ImportError, OSError, RuntimeError, TypeError, AssertionError):
        return ""
    return "" if answer is None else str(answer)
