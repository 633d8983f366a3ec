"""One rank of the tests: all jobs in one process, because importing Megatron takes longer.

python -m tests.megatron_adapter.worker RANK NUM_RANKS FOLDER
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.megatron_adapter.jobs import Job
from upguard_plugin.launch.cpu_emulation import emulate_cuda


def run_job(job: Job, folder: Path) -> dict[str, Any]:
    """Train as the job says; every rank calls it."""
    from tests.megatron_adapter.checkpoints import load_weights, save_weights
    from tests.megatron_adapter.gathered import gather
    from tests.megatron_adapter.gathered_activations import Watch
    from tests.megatron_adapter.model import build, train_step
    from tests.megatron_adapter.seams import moved_seams

    trainer = build(job)
    if job.save:
        save_weights(trainer, Path(job.save))
    if job.load:
        load_weights(trainer, Path(job.load))
    said: dict[str, Any] = {"steps": [], "moved": moved_seams(trainer)}
    guard = None if job.level is None else _guard(job, trainer, folder)
    for step in range(job.num_steps):
        undo = _plant(job, trainer) if job.fault and step == job.fault_step else None
        if job.evaluate:
            evaluate(trainer, step)
        watch = Watch(trainer) if job.watch and step == job.num_steps - 1 else None
        success, norm, _ = train_step(trainer, step)
        said["steps"].append([bool(success), norm])
        if undo is not None:
            undo()
        if guard is not None:
            guard.step()
        if watch is not None:
            said["activations"] = watch.gather()
    if job.overlap and job.distributed:
        for chunk in trainer.chunks:
            chunk.start_param_sync(force_sync=True)
    said["end"] = gather(trainer)
    if guard is not None:
        guard.close()
        said["left"] = left_behind(trainer)
    said["weights"] = _digest(trainer)
    return said


def _guard(job: Job, trainer: Any, folder: Path) -> Any:
    from upguard_plugin.integrations.megatron import attach

    settings: dict[str, Any] = {
        "output_dir": str(folder / "runs" / job.name),
        "level": job.level,
        "program": job.program or job.fault or "plain",
        "sketch": job.sketch,
    }
    if job.roles:
        settings["roles"] = job.roles
    groups = None
    if job.explicit_groups:
        from megatron.core.process_groups_config import ProcessGroupCollection  # not in 0.14

        groups = ProcessGroupCollection.use_mpu_process_groups()
    return attach(trainer.chunks, trainer.optimizer, settings, pg_collection=groups)


def _digest(trainer: Any) -> str:
    """Of all weights on this rank."""
    digest = hashlib.sha256()
    for chunk in trainer.chunks:
        for parameter in chunk.parameters():
            whole = parameter.detach()
            wide = whole if whole.dtype.itemsize > 2 else whole.float()
            digest.update(wide.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _plant(job: Job, trainer: Any) -> Callable[[], None]:
    from tests.megatron_adapter import faults, faults_in_movement
    from tests.megatron_adapter.layout_faults import LAYOUT_FAULTS

    return (faults.FAULTS | faults_in_movement.FAULTS | LAYOUT_FAULTS)[job.fault](trainer)


def left_behind(trainer: Any) -> list[str]:
    """What is not as it was before the guard."""
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.timers import Timers

    left = [
        f"{owner.__name__}.{name}"
        for owner, name in (
            (schedules, "forward_step"), (schedules, "backward_step"), (Timers, "write"),
            (schedules, "forward_backward_no_pipelining"), (Timers, "get_all_timers_string"),
        )
        if hasattr(vars(owner)[name], "__wrapped__")
    ]  # fmt: skip
    if trainer.config.finalize_model_grads_func is not finalize_model_grads:
        left.append("finalize_model_grads_func")
    names = {
        "step",
        "get_grad_norm",
        "prepare_grads",
        "start_param_sync",
        "enable_forward_pre_hook",
    }
    groups = [group for chunk in trainer.chunks for group in chunk.bucket_groups]
    optimizers = [trainer.optimizer, *trainer.optimizer.chained_optimizers]
    for thing in (*optimizers, *trainer.chunks, *groups):
        left += sorted(names & vars(thing).keys())
    return left


def evaluate(trainer: Any, step: int) -> None:
    """Forward only, as Megatron's own evaluation does."""
    import torch

    from tests.megatron_adapter.model import train_step

    for chunk in trainer.chunks:
        chunk.eval()
    with torch.no_grad():
        train_step(trainer, 100 + step, forward_only=True)
    for chunk in trainer.chunks:
        chunk.train()


def add_fused_kernel() -> None:
    """In the place of Apex's CUDA extension, before Megatron looks for it."""
    import torch

    def accumulate(taken: torch.Tensor, grad_given: torch.Tensor, main_grad: torch.Tensor) -> None:
        main_grad.add_((grad_given.t() @ taken).to(main_grad.dtype))

    kernel = ModuleType("fused_weight_gradient_mlp_cuda")
    vars(kernel).update(wgrad_gemm_accum_fp32=accumulate, wgrad_gemm_accum_fp16=accumulate)
    sys.modules[kernel.__name__] = kernel


def main(rank: int, num_ranks: int, folder: Path) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
    warnings.simplefilter("ignore")
    add_fused_kernel()
    with emulate_cuda():
        import torch

        torch.set_num_threads(1)
        torch.distributed.init_process_group(
            "nccl", init_method=f"file://{folder / 'store'}", rank=rank, world_size=num_ranks
        )
        jobs = [Job(**entry) for entry in json.loads((folder / "jobs.json").read_text())]
        said = {job.name: run_job(job, folder) for job in jobs}
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    (folder / f"said-{rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
