"""Where UpGuard meets Megatron-LM: `megatron.training`, unedited.

In:  its modules `arguments` and `training`, just imported, before anybody has copied a name.
Out: a parser that knows `--upguard`; where a flag or UPGUARD=1 says so, a guard on the model and
     optimizer that `setup_model_and_optimizer` made, told of every `train_step`.

Functions are found by name and called with whatever arguments they are given: their signatures
differ from version to version.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from upguard_plugin.errors import UsageError
from upguard_plugin.integrations.attach import attach as attach_or_say
from upguard_plugin.integrations.attach import say
from upguard_plugin.integrations.megatron.arguments import add_upguard_args, settings_of
from upguard_plugin.integrations.megatron.attach import attach
from upguard_plugin.integrations.wraps import wrap

if TYPE_CHECKING:
    from upguard_plugin.capture.guard import Guard

ARGUMENTS = "megatron.training.arguments"
TRAINING = "megatron.training.training"

# Names in `megatron.training.training` that the adapter relies on.
PLACES = ("get_args", "setup_model_and_optimizer", "train_step")
PAUSES = ("training_log",)  # its calls exchange clocks: nothing in them is compared


def patch(module: ModuleType) -> Callable[[], None]:
    """Stand around the functions of one of Megatron-LM's modules. Returns what undoes it.

    Raises UsageError where a function is not there: Megatron-LM has moved it.
    """
    if module.__name__ == ARGUMENTS:
        return wrap(module, "add_megatron_arguments", _add_megatron_arguments)
    missing = [name for name in PLACES if not hasattr(module, name)]
    if missing:
        raise UsageError(f"cannot record Megatron-LM: {module.__name__} has no {missing[0]}")
    return _Seam(module).install()


def _add_megatron_arguments(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return add_upguard_args(original(*args, **kwargs))


class _Seam:
    def __init__(self, module: ModuleType) -> None:
        self._training = module
        self._guard: Guard | None = None

    def install(self) -> Callable[[], None]:
        undo = [
            wrap(self._training, "setup_model_and_optimizer", self._setup),
            wrap(self._training, "train_step", self._train_step),
        ]

        def remove() -> None:
            for each in undo:
                each()

        return remove

    def _setup(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        settings = settings_of(self._training.get_args())
        if settings is None:
            return result
        model, optimizer = result[0], result[1]
        if optimizer is None:
            say("not recorded: this Megatron program has no optimizer")
        elif self._guard is not None:
            say("not recorded: a second Megatron model in one process; the first one is")
        else:
            self._guard = attach_or_say(
                lambda: attach(model, optimizer, settings), "this Megatron training"
            )
            if self._guard is not None and self._guard.probes:
                self._add_pauses(self._guard)
        return result

    def _add_pauses(self, guard: Guard) -> None:
        # They load capture, and this module is imported with every Megatron program.
        from upguard_plugin.integrations.megatron.checkpoints import CheckpointProbe
        from upguard_plugin.integrations.megatron.pauses import PauseProbe

        names = [name for name in PAUSES if name in vars(self._training)]
        checkpoints = CheckpointProbe(guard, self._training)
        pauses = PauseProbe(guard, [(self._training, name) for name in names])
        for probe in (checkpoints, pauses):
            probe.attach()
            guard.probes.append(probe)
        checkpoints.resumed()

    def _train_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        guard = self._guard
        if guard is None or not guard.probes:
            return original(*args, **kwargs)
        iteration = getattr(self._training.get_args(), "curr_iteration", None)
        guard.position.iteration = iteration
        result = original(*args, **kwargs)
        self._end_step(guard, result, iteration)
        return result

    def _end_step(self, guard: Guard, result: Any, iteration: int | None) -> None:
        from upguard_plugin.capture.arguments import is_scalar  # slow to load, but for a guard

        losses = result[0] if isinstance(result, tuple) and result else None
        for name, loss in losses.items() if isinstance(losses, dict) else ():
            if is_scalar(loss):
                guard.scalar(f"{name} (reduced)", loss)
            else:
                guard.recorder.note(f"{name}: a {type(loss).__name__} is no loss and not recorded")
        guard.step(iteration=iteration)
