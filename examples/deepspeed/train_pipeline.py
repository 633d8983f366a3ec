"""A pipeline of two stages. Nothing here knows UpGuard.

deepspeed --num_gpus 2 train_pipeline.py --deepspeed_config pipeline.json
"""

from __future__ import annotations

import argparse

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from model import NUM_BYTES, Block, loss_of
from text import batches
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
parser.add_argument("--steps", type=int, default=3)
arguments = deepspeed.add_config_arguments(parser).parse_args()

deepspeed.init_distributed()
torch.manual_seed(0)
layers = [
    LayerSpec(nn.Embedding, NUM_BYTES, 32),
    LayerSpec(Block, 32, 4),
    LayerSpec(Block, 32, 4),
    LayerSpec(nn.Linear, 32, NUM_BYTES),
]
model = PipelineModule(layers, num_stages=2, loss_fn=loss_of, partition_method="uniform")
engine, *_ = deepspeed.initialize(arguments, model, model_parameters=model.parameters())
data = batches(0)
for _ in range(arguments.steps):
    loss = engine.train_batch(data)
    if engine.global_rank == 0:
        print(f"loss {loss.item():.6f}", flush=True)
engine.destroy()
