"""ZeRO 1, 2 or 3: a DeepSpeed program as one writes it. Nothing here knows UpGuard.

deepspeed --num_gpus 2 train_zero.py --deepspeed_config zero2.json
"""

from __future__ import annotations

import argparse
import itertools

import deepspeed
import torch
from model import ByteGPT, loss_of
from text import batches

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
parser.add_argument("--steps", type=int, default=3)
arguments = deepspeed.add_config_arguments(parser).parse_args()

torch.manual_seed(0)
model = ByteGPT()
engine, *_ = deepspeed.initialize(arguments, model, model_parameters=model.parameters())
num_forwards = arguments.steps * engine.gradient_accumulation_steps()
for inputs, labels in itertools.islice(batches(engine.global_rank), num_forwards):
    loss = loss_of(engine(inputs.to(engine.device)), labels.to(engine.device))
    engine.backward(loss)
    engine.step()
    if engine.global_rank == 0:
        print(f"loss {loss.item():.6f}", flush=True)
engine.destroy()
