"""The demo's faults: what each does to one training, and what a comparison should say of it.

A fault is planted in the target only, for one step, below the places that capture watches. Expected
answers are those that level `module` can give: where it does not see the culprit itself, the answer
is the tensor in which its effect first shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from upguard_plugin.errors import UsageError

if TYPE_CHECKING:
    from upguard_plugin.launch.demo.training import Training

FAULT_STEP = 2
_LAST_LAYER = "decoder.layers.1"
_FIRST_NORM = "decoder.layers.0.input_layernorm"
# The one bucket that holds all gradients, last parameter first.
_GRADIENTS = (
    "all_reduce[dp] 28 parameters from output_layer.weight to embedding.word_embeddings.weight"
    ".main_grad"
)


@dataclass(frozen=True, slots=True)
class Expected:
    """The first divergence that a comparison must name."""

    step: int
    boundary: str
    kind: str


@dataclass(frozen=True, slots=True)
class Fault:
    """One way in which a training can be silently wrong."""

    story: str  # one sentence for people
    plant: Callable[[Training], AbstractContextManager[None]]  # active while the context is
    expected: Expected | None  # None: the runs are identical
    layout: str = "tp2"


@contextmanager
def _nothing(training: Training) -> Iterator[None]:
    yield


@contextmanager
def _flipped_bit(training: Training) -> Iterator[None]:
    layer = _module(training, f"{_LAST_LAYER}.mlp.linear_fc2")
    real = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        import torch  # slow to load

        output, bias = real(*args, **kwargs)
        # As a broken memory cell would: autograd does not see it.
        output.data.view(torch.int16)[0, 0, 0] ^= 1 << 6  # the highest bit of the mantissa
        return output, bias

    if training.rank == 1:
        layer.forward = forward
    yield
    vars(layer).pop("forward", None)


@contextmanager
def _layernorm_grad(training: Training) -> Iterator[None]:
    weight = _module(training, _FIRST_NORM).weight
    weight.sequence_parallel = False
    yield
    weight.sequence_parallel = True


@contextmanager
def _token(training: Training) -> Iterator[None]:
    tokens = training.batches[1].tokens
    tokens[0, 5] = (tokens[0, 5] + 1) % 256
    yield


@contextmanager
def _rng_draw(training: Training) -> Iterator[None]:
    import torch  # slow to load

    torch.rand(1)
    yield


@contextmanager
def _weight_decay(training: Training) -> Iterator[None]:
    decayed = [group for group in training.trainer.optimizer.param_groups if group["weight_decay"]]
    before = [group["weight_decay"] for group in decayed]
    for group in decayed:
        group["weight_decay"] = 0.0
    yield
    # The scheduler sets every group anew after each step; this is for the step's own record.
    for group, weight_decay in zip(decayed, before, strict=True):
        group["weight_decay"] = weight_decay


@contextmanager
def _stale_master(training: Training) -> Iterator[None]:
    optimizer = _mixed_precision_optimizer(training)
    master = _module(training, f"{_LAST_LAYER}.mlp.linear_fc1").weight.main_param
    stale = master.detach().clone()
    real = optimizer._copy_main_params_to_model_params

    def copy_and_lose_the_master() -> None:
        real()
        master.copy_(stale)

    optimizer._copy_main_params_to_model_params = copy_and_lose_the_master
    yield
    del optimizer._copy_main_params_to_model_params


@contextmanager
def _swapped_microbatches(training: Training) -> Iterator[None]:
    training.batches.reverse()
    yield


@contextmanager
def _missing_all_reduce(training: Training) -> Iterator[None]:
    groups = training.trainer.model.bucket_groups
    for group in groups:
        group.start_grad_sync = _scale_only(group.buckets)
    yield
    for group in groups:
        del group.start_grad_sync


def _scale_only(buckets: list[Any]) -> Callable[..., None]:
    def start_grad_sync(force_all_reduce: bool | None = False) -> None:
        for bucket in buckets:
            bucket.grad_data *= bucket.gradient_scaling_factor

    return start_grad_sync


def _module(training: Training, name: str) -> Any:
    return training.trainer.gpt.get_submodule(name)


def _mixed_precision_optimizer(training: Training) -> Any:
    optimizer = training.trainer.optimizer
    return getattr(optimizer, "chained_optimizers", [optimizer])[0]


FAULTS = {
    "none": Fault("nothing: the same training again", _nothing, None),
    "flipped-bit": Fault(
        "one mantissa bit of one layer's output is flipped on rank 1",
        _flipped_bit,
        Expected(FAULT_STEP, f"{_LAST_LAYER}.mlp.linear_fc2", "forward"),
    ),
    "layernorm-grad": Fault(
        "the gradient of one layernorm is not summed over the tensor-parallel ranks",
        _layernorm_grad,
        Expected(FAULT_STEP, f"all_reduce[tp] {_FIRST_NORM}.weight.main_grad", "collective"),
        layout="tp2-sp",
    ),
    "token": Fault(
        "one token of one sample is another",
        _token,
        Expected(FAULT_STEP, "tokens", "data"),
    ),
    "rng-draw": Fault(
        "somebody draws one random number more",
        _rng_draw,
        Expected(FAULT_STEP, "rng.torch_cpu", "rng"),
    ),
    "weight-decay": Fault(
        "the optimizer forgets the weight decay of one parameter group",
        _weight_decay,
        Expected(FAULT_STEP, "optimizer.group0.weight_decay", "optimizer"),
    ),
    "stale-master": Fault(
        "a weight is updated but its fp32 master keeps the old value",
        _stale_master,
        # The master is read at the start of the next step.
        Expected(FAULT_STEP + 1, f"{_LAST_LAYER}.mlp.linear_fc1.weight", "optimizer"),
    ),
    "swapped-microbatches": Fault(
        "two micro-batches of a step are taken in the other order",
        _swapped_microbatches,
        Expected(FAULT_STEP, "tokens", "data"),
    ),
    "missing-all-reduce": Fault(
        "the data-parallel ranks do not sum their gradients",
        _missing_all_reduce,
        Expected(FAULT_STEP, _GRADIENTS, "collective"),
        layout="dp2",
    ),
}


def fault_lines() -> list[str]:
    """One line of text per fault."""
    width = max(map(len, FAULTS))
    return [f"{name:<{width}}  {fault.story}" for name, fault in FAULTS.items()]


def faults_named(name: str) -> list[str]:
    """The fault of that name, or every fault for "all". Raises UsageError for another name."""
    if name == "all":
        return list(FAULTS)
    if name in FAULTS:
        return [name]
    nearest = get_close_matches(name, FAULTS, n=1)
    raise UsageError(
        f"there is no fault {name!r}",
        evidence={"faults": ", ".join([*FAULTS, "all"])},
        remedy=f"--fault {nearest[0]}" if nearest else "upguard demo --list",
    )
