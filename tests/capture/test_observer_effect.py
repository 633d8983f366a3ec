"""Recording changes no bit, and two equal runs have equal digests, for many kinds of training."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from recorded import Recorded, guarded
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

STEPS = 3


class Block(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.ln = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.fc1 = nn.Linear(width, 4 * width)
        self.act = nn.ReLU(inplace=True)
        self.fc2 = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, scale=1.0, mask=None):
        q, k, v = self.qkv(self.ln(x)).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True) * scale
        return x + self.dropout(self.fc2(self.act(self.fc1(x))))


class Gpt(nn.Module):
    """Two layers, tied embeddings, dropout, a buffer, a parameter that is frozen and one unused."""

    def __init__(self, run_block=None, width=8, vocabulary=11):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, 0.1) for _ in range(2))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.ones(width), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(width))
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.run_block = run_block or (lambda block, x: block(x, scale=0.5, mask=None))

    def forward(self, tokens):
        self.seen += 1
        x = self.embed(tokens) * self.frozen
        for block in self.blocks:
            x = self.run_block(block, x)
        return self.head(x)


def seed():
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def batches(num, generator=None):
    for _ in range(num):
        yield torch.randint(11, (2, 6), generator=generator)


def loss_of(model, tokens):
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())


class Silent:
    """Takes what a loop says to its guard, for the runs without one."""

    def step(self): ...
    def microbatch(self, k): ...
    def scalar(self, name, value): ...


def plain(model, optimizer, guard):
    for tokens in batches(STEPS):
        loss = loss_of(model, tokens)
        guard.scalar("loss", loss)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        guard.step()


def accumulation(model, optimizer, guard):
    for _ in range(STEPS):
        for k, tokens in enumerate(batches(3)):
            guard.microbatch(k)
            (loss_of(model, tokens) / 3).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        guard.step()


def autocast(model, optimizer, guard):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for tokens in batches(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, tokens)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        guard.step()


def evaluating(model, optimizer, guard):
    for tokens in batches(STEPS):
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        guard.step()
        model.eval()
        with torch.inference_mode():
            loss_of(model, tokens)
        model.train()


def adversaries(models, optimizers, guard):
    """Two models, each trained by its own optimizer; one runs on the other's output."""
    one, two = models
    for tokens in batches(STEPS):
        loss_of(one, tokens).backward(retain_graph=True)
        optimizers[0].step()
        optimizers[0].zero_grad()
        with torch.no_grad():
            guessed = one(tokens).argmax(-1)
        loss_of(two, guessed).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        guard.step()


def penalty(model, optimizer, guard):
    """A gradient of a gradient: backward runs inside backward's graph."""
    for tokens in batches(STEPS):
        x = model.embed(tokens).detach().requires_grad_()
        y = model.blocks[0](x)
        (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        (loss_of(model, tokens) + gradient.square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        guard.step()


def one_model(**settings):
    model = Gpt(**settings)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def two_models():
    models = [Gpt(), Gpt()]
    return models, [
        torch.optim.AdamW(models[0].parameters()),
        torch.optim.SGD(models[1].parameters(), lr=0.1),
    ]


def checkpointed(reentrant):
    return one_model(run_block=lambda block, x: checkpoint(block, x, use_reentrant=reentrant))


SCENARIOS = {
    "plain": (one_model, plain),
    "accumulation": (one_model, accumulation),
    "autocast": (one_model, autocast),
    "evaluation in between": (one_model, evaluating),
    "two models and optimizers": (two_models, adversaries),
    "gradient penalty": (one_model, penalty),
    "checkpoint": (lambda: checkpointed(False), plain),
    "reentrant checkpoint": (lambda: checkpointed(True), plain),
}

SETTINGS = {
    "level module": {},
    "level op": {"level": "op"},
    "level op, outputs": {"level": "op", "roles": "output"},
}


def weights_of(models):
    models = models if isinstance(models, list) else [models]
    return [
        tensor.clone() for model in models for tensor in (*model.parameters(), *model.buffers())
    ]


def assert_bit_equal(ones, others):
    for one, other in zip(ones, others, strict=True):
        assert torch.equal(
            one.view(torch.uint8) if one.dim() else one,
            other.view(torch.uint8) if other.dim() else other,
        )


@pytest.mark.parametrize(
    ("name", "setting"),
    [*product(SCENARIOS, ["level module", "level op"]), ("plain", "level op, outputs")],
)
def test_recording_changes_no_bit_and_twins_are_equal(tmp_path, name, setting):
    build, train = SCENARIOS[name]
    seed()
    models, optimizers = build()
    train(models, optimizers, Silent())
    expected = weights_of(models)

    runs = []
    for twin in ("one", "two"):
        seed()
        models, optimizers = build()
        with guarded(tmp_path / twin, models, optimizers, **SETTINGS[setting]) as guard:
            train(models, optimizers, guard)
        runs.append(Recorded(tmp_path / twin))
        assert_bit_equal(weights_of(models), expected)

    assert runs[0].end.complete and runs[0].end.notes == ()
    assert len(runs[0].digests) == STEPS
    assert runs[0].digests == runs[1].digests
    assert len(set(runs[0].digests)) == STEPS


def test_one_other_weight_bit_gives_other_digests(tmp_path):
    runs = []
    for flips in (0, 1):
        seed()
        model, optimizer = one_model()
        bits = model.blocks[1].fc1.weight.data.view(torch.int32)
        bits[0, 0] ^= flips
        with guarded(tmp_path / str(flips), model, optimizer) as guard:
            plain(model, optimizer, guard)
        runs.append(Recorded(tmp_path / str(flips)))
    assert all(a != b for a, b in zip(runs[0].digests, runs[1].digests, strict=True))


def _ddp_rank(rank, folder):
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.set_num_threads(1)
    finals = []
    for run in (None, "one", "two"):
        seed()
        model = Gpt()
        model.unused.requires_grad_(False)
        wrapped = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
        torch.manual_seed(rank)
        if run is None:
            plain(wrapped, optimizer, Silent())
        else:
            with guarded(f"{folder}/{run}", wrapped, optimizer) as guard:
                plain(wrapped, optimizer, guard)
        finals.append(weights_of(model))
        torch.distributed.barrier()
    assert_bit_equal(finals[1], finals[0])
    assert_bit_equal(finals[2], finals[0])
    torch.distributed.destroy_process_group()


def test_ddp_on_two_ranks_changes_no_bit_and_twins_are_equal(tmp_path):
    mp.spawn(_ddp_rank, (str(tmp_path),), nprocs=2)

    for rank in (0, 1):
        one, two = (Recorded(tmp_path / run, rank) for run in ("one", "two"))
        assert one.end.complete
        assert one.digests == two.digests
        assert {e.boundary for e in one.find(role="output")} >= {"(root)", "blocks.0.fc1"}
    assert Recorded(tmp_path / "one", 0).digests != Recorded(tmp_path / "one", 1).digests
