"""The models as the user passes them, checked and given their prefixes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn.parameter import is_lazy

from upguard_plugin.capture.names import Models
from upguard_plugin.errors import ConfigError


def named_models(model: nn.Module | Sequence[nn.Module]) -> Models:
    """(prefix, model) of each: no prefix for a single one, `model0.`, `model1.`, ... for several.

    Raises ConfigError for anything but modules that are ready to run.
    """
    models = tuple(model) if isinstance(model, (list, tuple)) else (model,)
    for given in models:
        if not isinstance(given, nn.Module):
            raise ConfigError(
                f"cannot record a {type(given).__name__}: enable() takes an nn.Module or a list"
            )
        if any(is_lazy(parameter) for parameter in given.parameters()):
            raise ConfigError(
                f"cannot record a {type(given).__name__}: it has parameters without a shape",
                remedy="run one forward before enable()",
            )
        for part in given.modules():
            if isinstance(part, nn.DataParallel) and len(part.device_ids) > 1:
                raise ConfigError(
                    "cannot record nn.DataParallel: its threads have no program order",
                    remedy="use DistributedDataParallel",
                )
    if len(models) == 1:
        return (("", models[0]),)
    return tuple((f"model{i}.", m) for i, m in enumerate(models))
