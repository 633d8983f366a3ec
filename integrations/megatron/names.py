"""Names in the whole model: layers and experts are counted over all ranks.

In:  the model chunks of this rank, whose layers and experts count from 0 on every rank.
Out: a function from such a name to the one that a run on one rank has. A chunk of a virtual
     pipeline loses its number: "model1.decoder.layers.0.mlp" becomes "decoder.layers.4.mlp". The
     chunk itself keeps it: "model1" is the second chunk of this rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from upguard_plugin.capture.names import Models, ParameterNames

_CHUNK = re.compile(r"^model\d+\.")
_LAYER = re.compile(r"(^|\.)layers\.\d+$")
_GROUPED = re.compile(r"^(weight|bias)(\d+)$")  # of Transformer Engine's grouped linear


class GlobalNames:
    """Renames modules, parameters and data of this rank's chunks."""

    def __init__(self, models: Models) -> None:
        """models: (prefix, chunk), as `enable` names them."""
        self._last_parts: dict[str, str] = {}  # name on this rank -> its last part in the whole
        for name, module in ParameterNames(models).walk():
            self._last_parts.update(_renamed_parts(name, module))

    def __call__(self, name: str) -> str:
        """The name in the whole model."""
        here, parts = "", []
        for part in name.split("."):
            here = f"{here}.{part}" if here else part
            parts.append(self._last_parts.get(here, part))
        return _CHUNK.sub("", ".".join(parts))


def _renamed_parts(name: str, module: Any) -> Iterator[tuple[str, str]]:
    number = getattr(module, "layer_number", None)  # counts from 1, over all stages and chunks
    if _LAYER.search(name) and isinstance(number, int):
        yield name, str(number - 1)
    indices = getattr(module, "local_expert_indices", None)  # of a layer of experts
    experts = getattr(module, "experts", None)
    if indices is None or experts is None:
        return
    if hasattr(experts, "local_experts"):
        for local, number in enumerate(indices):
            yield f"{name}.experts.local_experts.{local}", str(number)
    for linear in ("linear_fc1", "linear_fc2"):
        for leaf, _ in getattr(experts, linear, module).named_parameters(recurse=False):
            match = _GROUPED.match(leaf)
            if match and int(match[2]) < len(indices):
                yield f"{name}.experts.{linear}.{leaf}", f"{match[1]}{indices[int(match[2])]}"
