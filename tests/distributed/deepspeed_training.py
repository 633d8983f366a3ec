"""A small real DeepSpeed training, run on each rank, in one process again and again."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

import upguard_plugin

OPTIMIZER = {"type": "AdamW", "params": {"lr": 0.05, "torch_adam": True}}


@dataclass(frozen=True)
class Training:
    """One training; everything in it is the same on both ranks."""

    stage: int = 0
    dtype: str = "fp32"
    accumulation: int = 1
    steps: int = 2
    done: int = 0  # steps that were made before: their batches are left out
    config: dict[str, Any] = field(default_factory=dict)  # merged into DeepSpeed's
    zero: dict[str, Any] = field(default_factory=dict)
    upguard: dict[str, Any] | None = None  # the block; None: not recorded
    model: Callable[[], nn.Module] | None = None
    keep_gradients: bool = False  # of the last step, as DeepSpeed puts them together
    fault: Callable[[Any], None] | None = None  # called with the engine before the first step


def tiny() -> nn.Module:
    """Odd sizes, so that partitions cross parameters and need padding; a frozen parameter."""
    model = nn.Sequential(nn.Linear(4, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 3))
    model[1].bias.requires_grad_(False)
    return model


def ds_config(training: Training) -> dict[str, Any]:
    """DeepSpeed's config of a training."""
    zero = {"stage": training.stage, "stage3_param_persistence_threshold": 0} | training.zero
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": training.accumulation,
        "gradient_clipping": 0.05,
        "optimizer": OPTIMIZER,
        "zero_optimization": zero,
        "steps_per_print": 10**9,
    } | training.config
    if training.dtype != "fp32":
        config[training.dtype] = {"enabled": True} | config.get(training.dtype, {})
    if training.upguard is not None:
        config["upguard"] = training.upguard
    return config


def prepare() -> Any:
    """DeepSpeed in this rank, patched as `import torch` would have it patched."""
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
    import deepspeed

    from upguard_plugin.integrations.deepspeed import patch

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    patch(deepspeed)
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed("gloo", dist_init_required=False, auto_mpi_discovery=False)
    return deepspeed


def allow_fp16(allowed: bool) -> None:
    """Have DeepSpeed's accelerator say that this CPU can do fp16, or what it says by itself."""
    prepare()
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    vars(accelerator).pop("is_fp16_supported", None)
    if allowed:
        accelerator.is_fp16_supported = lambda: True


def make_engine(training: Training) -> Any:
    """The engine, its model from seed 0."""
    deepspeed = prepare()
    # A pipeline leaves its mesh behind; here one process stands for many.
    deepspeed.utils.groups.mpu = None
    torch.manual_seed(0)
    model = (training.model or tiny)()
    parameters = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=parameters, config=ds_config(training)
    )
    return engine


def run_steps(engine: Any, training: Training) -> dict[str, torch.Tensor]:
    """The steps; each rank has its own data. The last reduced gradients, where they are kept."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[training.dtype]
    torch.randn(training.done * training.accumulation, 2, 4, generator=generator)
    kept: dict[str, torch.Tensor] = {}
    number = training.steps * training.accumulation
    for forward in range(number):
        x = torch.randn(2, 4, generator=generator).to(dtype)
        engine.backward(engine(x).square().mean())
        if training.keep_gradients and forward == number - 1:
            kept = whole_gradients(engine)
        engine.step()
    return kept


def whole_gradients(engine: Any) -> dict[str, torch.Tensor]:
    """The reduced gradients as DeepSpeed itself puts them together, on every rank."""
    from deepspeed.utils import safe_get_full_grad

    named = engine.module.named_parameters()
    return {name: safe_get_full_grad(p).detach().clone() for name, p in named if p.requires_grad}


class Token(nn.Module):
    """An embedding at the first stage; at the last its weight is tied to the output."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(11, 6) * 0.3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(tokens, self.weight)


def to_logits(token: Token, hidden: torch.Tensor) -> torch.Tensor:
    """The output layer of tied weights."""
    return hidden @ token.weight.t()


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss over all positions, in fp32."""
    return nn.functional.cross_entropy(logits.float().flatten(0, -2), labels.flatten())


def train_pipeline(training: Training) -> dict[str, Any]:
    """Train a pipeline of two stages with tied first and last layers; each rank's weights."""
    prepare()
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    torch.manual_seed(0)
    tied = {"tied_weight_attr": ["weight"]}
    layers = [
        TiedLayerSpec("token", Token, **tied),
        LayerSpec(nn.Linear, 6, 6),
        nn.Tanh(),
        LayerSpec(nn.Linear, 6, 6),
        TiedLayerSpec("token", Token, forward_fn=to_logits, **tied),
    ]
    model = PipelineModule(
        layers, num_stages=2, loss_fn=cross_entropy, partition_method="uniform",
        activation_checkpoint_interval=0,
    )  # fmt: skip
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=[p for p in model.parameters() if p.requires_grad],
        config=ds_config(training),
    )
    generator = torch.Generator().manual_seed(engine.grid.get_data_parallel_id())
    batches = iter(
        [
            tuple(torch.randint(0, 11, (2, 5), generator=generator) for _ in range(2))
            for _ in range(training.steps * training.accumulation)
        ]
    )
    try:
        if training.fault is not None:
            training.fault(engine)
        for _ in range(training.steps):
            engine.train_batch(batches)
        left = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    finally:
        getattr(engine, "undo", lambda: None)()
        engine.destroy()
    return {"weights": left}


def train_ddp(training: Training) -> None:
    """The same training by hand: DDP, torch's AdamW, torch's clipping."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(tiny())
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=OPTIMIZER["params"]["lr"])
    generator = torch.Generator().manual_seed(dist.get_rank())
    guard = upguard_plugin.enable(model, optimizer, training.upguard, layout={"dp": 2})
    for _ in range(training.steps):
        for microbatch in range(training.accumulation):
            if training.accumulation > 1:
                guard.microbatch(microbatch)
            is_last = microbatch == training.accumulation - 1
            with nullcontext() if is_last else model.no_sync():
                loss = model(torch.randn(2, 4, generator=generator)).square().mean()
                guard.scalar("loss", loss.detach())
                (loss / training.accumulation).backward()
        nn.utils.clip_grad_norm_(weights, 0.05)
        optimizer.step()
        optimizer.zero_grad()
        guard.step()
    guard.close()


def whole(parameter: torch.Tensor, key: str | None = None) -> torch.Tensor | None:
    """A master or state as DeepSpeed itself puts it together, on every rank."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if key is None:
        found = safe_get_full_fp32_param(parameter)
    else:
        found = safe_get_full_optimizer_state(parameter, key)
    return None if found is None else found.detach().clone()


def weights(engine: Any) -> dict[str, torch.Tensor]:
    """All weights, gathered."""
    import deepspeed

    named = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(named.values())):
        return {name: p.detach().clone() for name, p in named.items()}


def train(training: Training) -> dict[str, Any]:
    """Train, and return what is left: weights, masters and moments by name."""
    engine = make_engine(training)
    try:
        if training.fault is not None:
            training.fault(engine)
        kept = run_steps(engine, training)
        left = {"weights": weights(engine), "gradients": kept} | states(engine, training)
    finally:
        getattr(engine, "undo", lambda: None)()
        engine.destroy()
    return left


def states(engine: Any, training: Training) -> dict[str, Any]:
    """Masters and moments by name, where DeepSpeed can put them together."""
    left: dict[str, Any] = {"masters": {}, "moments": {}}
    if training.stage and training.upguard is not None:
        for name, parameter in engine.module.named_parameters():
            if parameter.requires_grad:
                left["masters"][name] = whole(parameter)
                for key in ("exp_avg", "exp_avg_sq"):
                    left["moments"][name, key] = whole(parameter, key)
    return left


def block(folder: Path | str, **settings: Any) -> dict[str, Any]:
    """The config block that records into a folder."""
    return {"enabled": True, "output_dir": str(folder), **settings}


def train_without_sync(training: Training) -> dict[str, Any]:
    """Two backwards a step, the first under `no_sync`; the weights that are left."""
    engine = make_engine(training)
    generator = torch.Generator().manual_seed(dist.get_rank())
    try:
        for _ in range(training.steps):
            with engine.no_sync():
                engine.backward(engine(torch.randn(2, 4, generator=generator)).square().mean())
            engine.backward(engine(torch.randn(2, 4, generator=generator)).square().mean())
            engine.step()
        return {"weights": weights(engine)}
    finally:
        engine.destroy()


def record_pipeline(
    ranks: Any, run: Path | None, fault: Any = None, program: str = "clean", **changes: Any
) -> Any:
    """Train the pipeline of two micro-batches on these ranks, recorded where a folder is given."""
    upguard = None if run is None else block(run, program=program)
    training = Training(accumulation=2, upguard=upguard, fault=fault, **changes)
    return ranks.run(train_pipeline, training)
