"""Names in the whole model: experts are counted over all ranks of their group.

In:  an engine, whose layers of experts count from 0 on every rank.
Out: a function from such a name to the one that a run on one rank has.
"""

from __future__ import annotations

from typing import Any

from upguard_plugin.capture.names import Models, ParameterNames


class GlobalNames:
    """Renames the experts of this rank."""

    def __init__(self, engine: Any, models: Models) -> None:
        """models: (prefix, model), as `enable` names them."""
        self._numbers: dict[str, str] = {}  # name of an expert here -> its number among all
        groups = getattr(engine, "expert_parallel_group", None) or {}
        for name, module in ParameterNames(models).walk():
            experts = getattr(module, "deepspeed_experts", None)
            if experts is None:
                continue
            group = groups.get(_group_of(experts))
            first = group.rank() * len(experts) if group is not None else 0
            for local in range(len(experts)):
                self._numbers[f"{name}.deepspeed_experts.{local}"] = str(first + local)

    def __call__(self, name: str) -> str:
        """The name in the whole model."""
        for local, number in self._numbers.items():
            if name == local or name.startswith(f"{local}."):
                return f"{local.rpartition('.')[0]}.{number}{name[len(local) :]}"
        return name


def _group_of(experts: Any) -> str | None:
    """The name that DeepSpeed gives to the group over which these experts are spread."""
    return next((getattr(p, "group_name", None) for p in experts.parameters()), None)
