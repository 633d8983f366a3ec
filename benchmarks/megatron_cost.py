"""What levels stage and module cost a Megatron-Core training with TP2 on two processes, as ratios.

    python benchmarks/megatron_cost.py [--rounds 10]

A GPT of 4 layers, 256 hidden units, sequence parallel, fp32, 2 micro-batches of 4 x 128 tokens, one
thread per process, CUDA emulated. In each round a few steps are taken without a guard, at level
stage and at level module, in turns that change from round to round. A ratio is the median over the
rounds of rank 0: by the clock, and by the CPU time of all threads, which neighbours on the machine
disturb less. Attaching and the first two steps of each turn are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.multiprocessing as multiprocessing

from upguard_plugin.launch.cpu_emulation import emulate_cuda

LEVELS = (None, "stage", "module")
LAYERS, HIDDEN, HEADS, SEQUENCE, BATCH, VOCABULARY = 4, 256, 4, 128, 4, 4096
MICROBATCHES, WARM_UP, STEPS = 2, 2, 4


class Training:
    """A model in tensor parallel halves, and its optimizer."""

    def __init__(self):
        # Megatron is imported under the emulation only.
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.distributed import DistributedDataParallel as Ddp
        from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.transformer import TransformerConfig

        parallel_state.initialize_model_parallel(2)
        tensor_parallel.model_parallel_cuda_manual_seed(7)
        off = ("gradient_accumulation", "masked_softmax", "bias_activation", "bias_dropout")
        config = TransformerConfig(
            num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS,
            tensor_model_parallel_size=2, sequence_parallel=True, use_cpu_initialization=True,
            apply_rope_fusion=False, persist_layer_norm=False,
            **{f"{name}_fusion": False for name in off},
        )  # fmt: skip
        spec = get_gpt_layer_local_spec()
        model = GPTModel(config, spec, VOCABULARY, SEQUENCE, position_embedding_type="rope").cuda()
        self.model = Ddp(config, DistributedDataParallelConfig(), model)
        self.optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-4), [self.model])
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.optimizer.scale_loss
        self.schedule = get_forward_backward_func()

    def step(self):
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.schedule(
            forward_step_func=_forward_step, data_iterator=iter(_batches()), model=self.model,
            num_microbatches=MICROBATCHES, seq_length=SEQUENCE, micro_batch_size=BATCH,
            forward_only=False,
        )  # fmt: skip
        self.optimizer.step()


def _batches():
    draws = torch.Generator().manual_seed(1)
    for _ in range(MICROBATCHES):
        yield torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=draws)


def _forward_step(batches, model):
    batch = next(batches)
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    causal = torch.ones(1, 1, SEQUENCE, SEQUENCE).tril() < 0.5
    losses = model(batch[:, :-1], positions, causal, labels=batch[:, 1:].contiguous())
    return losses, lambda losses: (losses.mean(), {})


def _turn(training, level, folder):
    """Seconds of a step, by the clock and of CPU time."""
    from upguard_plugin.integrations.megatron import attach

    guard = None
    if level is not None:
        settings = {"output_dir": str(folder), "level": level}
        guard = attach(training.model, training.optimizer, settings)
    taken = []
    for _ in range(WARM_UP + STEPS):
        torch.distributed.barrier()
        start = time.perf_counter(), time.process_time()
        training.step()
        if guard is not None:
            guard.step()
        taken.append((time.perf_counter() - start[0], time.process_time() - start[1]))
    if guard is not None:
        guard.close()
    return [statistics.median(times) for times in zip(*taken[WARM_UP:], strict=True)]


def measure(rank, folder, rounds):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with emulate_cuda():
        store = torch.distributed.FileStore(str(Path(folder) / "store"), 2)
        torch.distributed.init_process_group("nccl", rank=rank, world_size=2, store=store)
        training = Training()
        ratios = {level: ([], []) for level in LEVELS[1:]}
        for number in range(rounds):
            order = LEVELS[number % 3 :] + LEVELS[: number % 3]
            taken = {n: _turn(training, n, Path(folder) / f"{n}-{number}") for n in order}
            for level, both in ratios.items():
                for kind in range(2):
                    both[kind].append(taken[level][kind] / taken[None][kind])
        if rank == 0:
            for level, (clock, cpu) in ratios.items():
                line = {"level": level, "rounds": rounds, "plain_s": round(taken[None][0], 3)}
                line |= {"clock": round(statistics.median(clock), 3)}
                print(json.dumps(line | {"cpu": round(statistics.median(cpu), 3)}))
        torch.distributed.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(measure, (folder, options.rounds), nprocs=2)


if __name__ == "__main__":
    main()
