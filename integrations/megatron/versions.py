"""Which Megatron-Core this adapter knows, and the places of it that it relies on.

In:  megatron-core as it is installed.
Out: a sentence about a version that nobody tried, or a UsageError that names what is missing. A
     place that upstream moves is found here, before the first step, and by a test.
"""

from __future__ import annotations

import inspect
import re
from importlib import import_module

from upguard_plugin.errors import UsageError

MIN_VERSION = (0, 14)
TESTED = "0.16.1"  # newer ones are recorded too, and it is said

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
# Function -> parameters that are read by their names, or by their places.
PARAMETERS = {
    "megatron.core.pipeline_parallel.schedules": {
        "forward_step": ("config", "current_microbatch"),
        "backward_step": ("input_tensor", "output_tensor"),
    }
}


def check_megatron() -> str:
    """The sentence to say of a megatron-core that is newer than any that was tried; else "".

    Raises UsageError where megatron-core is absent, too old, or has moved what we rely on.
    """
    try:
        version = str(import_module("megatron.core").__version__)
    except ImportError:
        raise UsageError(
            "cannot record Megatron: megatron-core is not installed",
            remedy="pip install 'upguard-plugin[megatron]'",
        ) from None
    said = check_version(version)
    for module, names in PLACES.items():
        missing = [name for name in names if not hasattr(import_module(module), name)]
        if missing:
            raise _moved(version, f"{module} has no {', '.join(missing)}")
    for module, functions in PARAMETERS.items():
        for name, parameters in functions.items():
            has = inspect.signature(getattr(import_module(module), name)).parameters
            missing = [parameter for parameter in parameters if parameter not in has]
            if missing:
                raise _moved(version, f"{module}.{name} takes no {', '.join(missing)}")
    return said


def _moved(version: str, what: str) -> UsageError:
    return UsageError(
        f"cannot record Megatron {version}: {what}",
        evidence={"tested": f"megatron-core {TESTED}"},
        remedy=f"pip install megatron-core=={TESTED}",
    )


def check_version(version: str) -> str:
    """The sentence to say of a version that is newer than any that was tried; else "".

    Raises UsageError for a version before 0.14.
    """
    if _numbers(version) < MIN_VERSION:
        raise UsageError(
            f"cannot record megatron-core {version}: UpGuard needs 0.14 or newer",
            remedy='pip install "megatron-core>=0.14"',
        )
    if _numbers(version) > _numbers(TESTED):
        return f"megatron-core {version} is newer than {TESTED}, the newest that was tried"
    return ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version)[:2])
