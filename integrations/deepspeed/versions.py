"""Which DeepSpeed this adapter knows, and the places inside it that it relies on.

In:  the version of the installed DeepSpeed; the modules of it that are loaded.
Out: an error for a version that is too old; a sentence for each place that is not there any more.

Only `deepspeed.initialize` and the engine's own calls are public. The rest may move in any release:
what is then not recorded must be said, never be missing in silence.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

from upguard_plugin.errors import UsageError
from upguard_plugin.integrations.deepspeed.block import KEY

MIN_VERSION = (0, 15)


@dataclass(frozen=True, slots=True)
class Place:
    """An attribute of a module, or of a class in it, by whose name something is found."""

    module: str  # below "deepspeed."
    attribute: str  # dotted
    gives: str  # what is not recorded without it


_ENGINE, _PIPE = "runtime.engine", "runtime.pipe.engine"
_ZERO12, _ZERO3 = "runtime.zero.stage_1_and_2", "runtime.zero.stage3"
_STAGE3 = "DeepSpeedZeroOptimizer_Stage3"
_REDUCE3 = f"{_STAGE3}._{_STAGE3}__reduce_and_partition_ipg_grads"
_NOT_OURS = "which messages are none of the training"
PLACES = (
    Place(_ENGINE, "DeepSpeedEngine._take_model_step", "reduced gradients, overflow and the norm"),
    Place(_ENGINE, "DeepSpeedEngine.allreduce_bucket", "what is in ZeRO 0's buckets"),
    Place(_ENGINE, "clip_grad_norm_", "the norm and the clipping of ZeRO 0"),
    Place(_PIPE, "PipelineEngine._INSTRUCTION_MAP", "the micro-batches of a pipeline"),
    Place(_PIPE, "PipelineEngine._send_tensor_meta", _NOT_OURS),
    Place(_PIPE, "PipelineEngine._recv_tensor_meta", _NOT_OURS),
    Place(_ZERO12, "DeepSpeedZeroOptimizer.reduce_ipg_grads", "what is in ZeRO's buckets"),
    Place(_ZERO12, "all_gather_dp_groups", "weights before and after they are gathered"),
    Place(_ZERO3, f"{_STAGE3}.get_local_fp32_grad_for_param", "reduced gradients of ZeRO 3"),
    Place(_ZERO3, _REDUCE3, "what is in ZeRO 3's buckets"),
    Place(_ZERO3, f"{_STAGE3}._post_step", "the phase in which ZeRO 3 gathers small weights"),
    Place(
        "utils.tensor_fragment", "tensor_fragment.get_lp_grad_fragment", "ZeRO 1's and 2's shards"
    ),
)


def check_version(version: str) -> None:
    """Raises UsageError for a DeepSpeed that is older than this adapter knows."""
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    if numbers < MIN_VERSION:
        raise UsageError(
            f"cannot record DeepSpeed {version}: UpGuard needs 0.15 or newer",
            remedy=f'pip install "deepspeed>=0.15", or take the block "{KEY}" out of its config',
        )


def moved_places(version: str, loaded: Mapping[str, ModuleType] = sys.modules) -> list[str]:
    """A sentence for each place of a loaded module that is not where this adapter looks for it."""
    sentences = []
    for place in PLACES:
        module = loaded.get(f"deepspeed.{place.module}")
        if module is not None and not _has(module, place.attribute):
            sentences.append(
                f"DeepSpeed {version} has no {place.module}.{place.attribute}: "
                f"not recorded is {place.gives}"
            )
    return sentences


def _has(owner: object, attribute: str) -> bool:
    for name in attribute.split("."):
        if not hasattr(owner, name):
            return False
        owner = getattr(owner, name)
    return True
