"""Real text to train on: the sources of Python's own standard library, byte by byte."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch

MODULES = ("argparse.py", "ast.py", "csv.py", "dataclasses.py", "inspect.py", "typing.py")


def read_text() -> torch.Tensor:
    """The bytes of a few modules, one after the other. Shape [bytes], int64."""
    folder = Path(sysconfig.get_path("stdlib"))
    return torch.frombuffer(
        bytearray(b"".join((folder / name).read_bytes() for name in MODULES)), dtype=torch.uint8
    ).long()


def batches(
    rank: int, *, batch_size: int = 4, length: int = 32
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (input, label) batches [batch_size, length]; each rank has its own."""
    text = read_text()
    generator = torch.Generator().manual_seed(rank)
    while True:
        starts = torch.randint(0, len(text) - length - 1, (batch_size,), generator=generator)
        rows = torch.stack([text[s : s + length + 1] for s in starts.tolist()])
        yield rows[:, :-1], rows[:, 1:]
