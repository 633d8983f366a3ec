"""A training script that knows nothing of UpGuard, as Megatron-LM's `pretrain_gpt.py`.

Run with the stand-in on PYTHONPATH; CUDA is emulated as `upguard run --cpu` does.
"""

from __future__ import annotations

import itertools
import warnings

from upguard_plugin.launch.cpu_emulation import install

install()
warnings.simplefilter("ignore")

import torch  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.training import pretrain  # noqa: E402

from tests.megatron_adapter.jobs import Job  # noqa: E402
from tests.megatron_adapter.model import _batches, _forward_step, build  # noqa: E402

JOB = Job("pretrain", layers=1)


def model_provider():
    trainer = build(JOB)
    return trainer.chunks, trainer.optimizer


def batches(_):
    return itertools.chain.from_iterable(_batches(JOB, step) for step in range(100))


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "nccl", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    pretrain(batches, model_provider, ModelType.encoder_or_decoder, _forward_step)
    torch.distributed.destroy_process_group()
