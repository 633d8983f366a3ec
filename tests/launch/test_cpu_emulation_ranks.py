"""A tensor whose storage is freed right after `isend` still arrives whole, over real gloo."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

from upguard_plugin.launch.cpu_emulation import emulate_cuda

NUM_ELEMENTS = 1 << 20
NUM_SENDS = 8


def exchange(rank: int, store: str) -> None:
    with emulate_cuda():
        dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=2)
        if rank == 0:
            send_and_free()
        else:
            receive_and_check()
        dist.barrier(device_ids=[rank])
        dist.destroy_process_group()


def send_and_free() -> None:
    works = []
    for k in range(NUM_SENDS):
        sent = torch.full((NUM_ELEMENTS,), float(k), device="cuda")
        works.append(dist.isend(sent, dst=1))
        sent.data = torch.empty(1)
        torch.full((NUM_ELEMENTS,), -1.0)  # takes the memory that was freed, if it was
    for work in works:
        work.wait()


def receive_and_check() -> None:
    for k in range(NUM_SENDS):
        received = torch.empty(NUM_ELEMENTS)
        dist.recv(received, src=0)
        if not torch.equal(received, torch.full((NUM_ELEMENTS,), float(k))):
            sys.exit(f"message {k} was overwritten while it was sent")


def test_what_is_freed_after_isend_arrives_whole(tmp_path: Path):
    torch.multiprocessing.spawn(exchange, args=(str(tmp_path / "store"),), nprocs=2)
