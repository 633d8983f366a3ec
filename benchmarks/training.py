"""The training that the cost benchmarks share, and steps that take turns.

The model is a GPT of 4 layers, d = 256, 4 heads, sequence 128, batch 4, vocabulary 1024, 3.7 M fp32
parameters, with AdamW(foreach=False). Every subject trains its own copy; their steps take turns in
one process, so that a noisy machine is noisy for all. A ratio is the median, over the rounds, of a
subject's step by the plain step of the same round: once by the clock, once by the CPU time of all
threads, which neighbours on the machine disturb less.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

LAYERS, WIDTH, HEADS, SEQUENCE, BATCH, VOCABULARY = 4, 256, 4, 128, 4, 1024


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, length, WIDTH))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, 4 * WIDTH)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1 = nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.ln2 = nn.LayerNorm(WIDTH)
        self.mlp = Mlp()

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


class Plain:
    """One copy of the training, without a tool."""

    name = "plain"

    def __init__(self, folder):
        torch.manual_seed(0)
        self.model = Gpt()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=False)
        self.data = torch.Generator().manual_seed(1)

    def train(self):
        tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=self.data)
        logits = self.model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self):
        self.train()

    def close(self):
        pass


def measure(subjects, rounds):
    """(wall, CPU) seconds of each step, by subject, after two rounds of warm-up."""
    times = {subject.name: [] for subject in subjects}
    for round_ in range(rounds + 2):
        for subject in subjects:
            wall, cpu = time.perf_counter(), time.process_time()
            subject.step()
            if round_ >= 2:
                spent = (time.perf_counter() - wall, time.process_time() - cpu)
                times[subject.name].append(spent)
    return times


def rows_of(times):
    """Medians of each subject, and medians of its ratios to the plain step of the same round."""
    rows = []
    for name, own in times.items():
        pairs = list(zip(own, times["plain"], strict=True))
        rows.append(
            {
                "subject": name,
                "step_ms": round(1e3 * statistics.median(wall for wall, _ in own), 1),
                "wall_ratio": round(statistics.median(t[0] / p[0] for t, p in pairs), 3),
                "cpu_ratio": round(statistics.median(t[1] / p[1] for t, p in pairs), 3),
            }
        )
    return rows


def print_rows(rows):
    """A table for people."""
    print(f"{'subject':<36} {'step':>10} {'wall':>8} {'CPU':>8}")
    for row in rows:
        ratios = f"{row['wall_ratio']:7.3f}x {row['cpu_ratio']:7.3f}x"
        print(f"{row['subject']:<36} {row['step_ms']:7.1f} ms {ratios}")
