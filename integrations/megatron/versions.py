"""Which Megatron-Core this adapter knows, and the places of it that it relies on.

In:  megatron-core as it is installed.
Out: nothing, or a UsageError that names what is missing. A place that upstream moves is found here,
     before the first step, and by a test.
"""

from __future__ import annotations

import re
from importlib import import_module

from upguard_plugin.errors import UsageError

MIN_VERSION = (0, 14)
TESTED = "0.16.1"

# Module -> names in it that are replaced or read. Public ones first; of the distributed optimizer's
# data only attributes without an underscore are read.
PLACES = {
    "megatron.core.pipeline_parallel.schedules": ("forward_step", "backward_step"),
    "megatron.core.parallel_state": (
        "get_tensor_model_parallel_group",
        "get_data_parallel_group",
        "get_context_parallel_group",
        "get_pipeline_model_parallel_group",
        "get_expert_model_parallel_group",
        "get_expert_tensor_parallel_group",
        "get_expert_data_parallel_group",
    ),
    "megatron.core.timers": ("Timers",),
    "megatron.core.tensor_parallel": ("get_cuda_rng_tracker",),
    "megatron.core.optimizer": ("MegatronOptimizer", "ChainedOptimizer", "DistributedOptimizer"),
}


def check_megatron() -> None:
    """Raises UsageError where megatron-core is absent, too old, or has moved what we rely on."""
    try:
        version = str(import_module("megatron.core").__version__)
    except ImportError:
        raise UsageError(
            "cannot record Megatron: megatron-core is not installed",
            remedy="pip install 'upguard-plugin[megatron]'",
        ) from None
    check_version(version)
    for module, names in PLACES.items():
        missing = [name for name in names if not hasattr(import_module(module), name)]
        if missing:
            raise UsageError(
                f"cannot record Megatron {version}: {module} has no {', '.join(missing)}",
                evidence={"tested": f"megatron-core {TESTED}"},
                remedy=f"pip install megatron-core=={TESTED}",
            )


def check_version(version: str) -> None:
    """Raises UsageError for a version before 0.14."""
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    if numbers < MIN_VERSION:
        raise UsageError(
            f"cannot record megatron-core {version}: UpGuard needs 0.14 or newer",
            remedy='pip install "megatron-core>=0.14"',
        )
