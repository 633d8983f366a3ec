from __future__ import annotations

import warnings

import torch
from state_run import first_difference, recording
from torch import nn


def make_model(sparse=False):
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(16, 4, sparse=sparse), nn.Flatten(), nn.Linear(12, 2))


def run_accumulated(between=None, tokens=None, sparse=False, coalesce=False):
    """Two steps of two micro-batches; `between(step, k, model)` runs before each micro-batch."""
    model = make_model(sparse)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    with recording(model, optimizer) as (guard, run):
        for step in range(2):
            for k in range(2):
                guard.microbatch(k)
                if between is not None:
                    between(step, k, model)
                ids = torch.randint(0, 16, (5, 3), generator=generator)
                model(ids).square().mean().backward()
            if coalesce:
                weight = model[0].weight
                weight.grad = weight.grad.coalesce()
            optimizer.step()
            optimizer.zero_grad()
            guard.step()
    return run


def accumulated(run, **wanted):
    return run.where(phase="accumulate", boundary="2.weight", **wanted)


def test_each_accumulation_is_recorded_before_and_after():
    run = run_accumulated()

    seen = [(e.microbatch, e.moment) for e in accumulated(run, step=1)]
    assert seen == [(0, None), (1, "before"), (1, None)]
    first, before, after = accumulated(run, step=1)
    assert first.h == before.h != after.h
    assert {e.role for e in (first, before, after)} == {"grad"}


def test_the_gradients_a_step_uses_are_those_of_the_last_accumulation():
    run = run_accumulated()

    (used,) = run.where(step=0, phase="clip", boundary="2.weight")
    assert used.h == accumulated(run, step=0)[-1].h
    assert used.microbatch == -1


def test_an_accumulation_belongs_to_the_micro_batch_of_its_forward():
    # A pipeline schedule: both forwards run before the first backward.
    model = make_model()
    with recording(model, ()) as (guard, run):
        losses = []
        for k in range(2):
            guard.microbatch(k)
            losses.append(model(torch.ones(2, 3, dtype=torch.int64)).sum())
        for loss in losses:
            loss.backward()
        guard.step()

    assert [(e.microbatch, e.moment, e.call) for e in accumulated(run)] == [
        (0, None, 0), (1, "before", 0), (1, None, 0),
    ]  # fmt: skip


def test_the_same_run_twice_is_identical():
    assert first_difference(run_accumulated(), run_accumulated()) is None


def test_a_gradient_that_was_cleared_between_micro_batches_is_found_missing():
    # CASES 55
    def fault(step, k, model):
        if (step, k) == (0, 1):
            model.zero_grad(set_to_none=True)

    found = first_difference(run_accumulated(), run_accumulated(fault))

    assert (found.step, found.microbatch, found.phase) == (0, 1, "accumulate")
    assert (found.role, found.moment, found.dtype) == ("grad", "before", "none")
    assert found.boundary == "2.weight" or found.boundary == "2.bias"


def test_a_parameter_without_gradient_is_recorded_as_none_before_the_step():
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(model, optimizer) as (guard, run):
        guard.data("x", torch.ones(1, 2))
        model["used"](torch.ones(1, 2)).sum().backward()
        optimizer.step()
        guard.step()

    dtypes = {e.boundary: e.dtype for e in run.where(phase="clip", role="grad")}
    assert dtypes == {
        "used.weight": "float32", "used.bias": "float32",
        "unused.weight": "none", "unused.bias": "none",
    }  # fmt: skip


def test_a_sparse_gradient_counts_by_its_dense_meaning():
    # CASES 57, second pair: coalesced against uncoalesced; and dense against sparse.
    runs = [run_accumulated(sparse=True, coalesce=coalesce) for coalesce in (False, True)]

    uncoalesced, coalesced = (run.where(step=0, role="grad") for run in runs)
    assert uncoalesced == coalesced
    assert {e.shape for e in uncoalesced if e.boundary == "0.weight"} == {(16, 4)}


def test_a_main_grad_is_recorded_before_the_framework_adds_to_it():
    model = nn.Linear(3, 2)
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros_like(parameter)

        def add(p):
            p.main_grad += p.grad
            p.grad = None

    with recording(model, ()) as (guard, run):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(add)
        for k in range(2):
            guard.microbatch(k)
            model(torch.ones(1, 3)).sum().backward()
        guard.step()

    seen = run.where(phase="accumulate", boundary="weight")
    assert [(e.microbatch, e.role, e.moment) for e in seen] == [
        (0, "grad", None), (0, "main_grad", "before"),
        (1, "grad", None), (1, "main_grad", "before"),
    ]  # fmt: skip
    zero, ones = seen[1].h, seen[3].h
    assert zero == 0 != ones == seen[2].h


def test_a_fused_main_grad_is_recorded_after_and_its_dummy_grad_is_not():
    model = nn.Linear(3, 2, bias=False)
    model.weight.main_grad = torch.ones(2, 3)
    model.weight.grad_added_to_main_grad = True
    with recording(model, ()) as (guard, run):
        model(torch.ones(1, 3)).sum().backward()
        guard.step()

    (seen,) = run.where(phase="accumulate")
    assert (seen.role, seen.moment) == ("main_grad", "after")


def test_frozen_parameters_are_watched_from_the_step_that_thaws_them():
    model = nn.Linear(3, 2).requires_grad_(False)
    model.bias.requires_grad_(True)
    with recording(model, ()) as (guard, run):
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()
            guard.step()
            model.weight.requires_grad_(True)

    seen = [(e.step, e.boundary) for e in run.where(phase="accumulate", moment=None)]
    assert sorted(seen) == [(0, "bias"), (1, "bias"), (1, "weight")]


def test_saving_a_watched_model_gives_no_warning(tmp_path):
    model = make_model()
    with recording(model, ()), warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(list(model.parameters()), tmp_path / "weights.pt")


def test_gradients_asked_for_by_autograd_grad_are_no_accumulation():
    model = nn.Linear(3, 2)
    with recording(model, ()) as (guard, run):
        torch.autograd.grad(model(torch.ones(1, 3)).sum(), model.weight)
        guard.step()

    assert not run.where(phase="accumulate")
