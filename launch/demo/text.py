"""The demo's training text: bytes of the Python standard library, which is on every machine.

In:  nothing but the interpreter that runs.
Out: batches of token numbers below 256, chosen by step, micro-batch and replica alone.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

VOCABULARY_SIZE = 256
# In every Python since long, and long enough together for any demo.
_FILES = ("argparse.py", "ast.py", "calendar.py", "difflib.py", "fractions.py", "textwrap.py")


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch; both are int64 [samples, tokens]."""

    tokens: torch.Tensor
    labels: torch.Tensor  # the token that follows each of `tokens`


class Text:
    """The standard library, cut into samples of equal length that do not overlap."""

    def __init__(self, sequence_length: int) -> None:
        """sequence_length: in tokens, which are bytes. Raises OSError if a file cannot be read."""
        folder = Path(sysconfig.get_paths()["stdlib"])
        text = b"".join((folder / name).read_bytes() for name in _FILES)
        num_samples = len(text) // (sequence_length + 1)
        usable = bytearray(text[: num_samples * (sequence_length + 1)])
        self._samples = torch.frombuffer(usable, dtype=torch.uint8).view(num_samples, -1)

    def batch(self, index: int, num_samples: int) -> Batch:
        """The `index`-th batch of that many samples, from the beginning again at the end."""
        first = index * num_samples
        rows = [(first + k) % len(self._samples) for k in range(num_samples)]
        samples = self._samples[rows].long()
        return Batch(samples[:, :-1].contiguous(), samples[:, 1:].contiguous())
