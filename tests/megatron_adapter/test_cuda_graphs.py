"""Modules that Megatron replays as CUDA graphs, by stand-ins: a CPU captures none."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

import upguard_plugin
from tests.bugs.training import compare
from tests.megatron_adapter.merged import events
from upguard_plugin.integrations.megatron.cuda_graphs import GraphProbe, captures
from upguard_plugin.trace.reader import open_trace


class Layer(nn.Module):
    """As Megatron's GraphableMegatronModule: a call goes to a graph where there is one."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.cuda_graphs = []
        self.runner = None

    def __call__(self, *args, **kwargs):
        if self.runner is not None:
            return self.runner.replay_graph_capture(True, args, kwargs)
        if self.cuda_graphs:
            return self._te_cuda_graph_replay(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def _te_cuda_graph_replay(self, *args, **kwargs):
        return self.cuda_graphs[0](*args, is_first_microbatch=False, **kwargs)

    def forward(self, hidden_states):
        return self.linear(hidden_states) * 2

    def graph(self, hidden_states, is_first_microbatch):
        weight, bias = self.linear.weight, self.linear.bias
        return nn.functional.linear(hidden_states, weight, bias) * 2


class Runner(nn.Module):
    """As Megatron's _CudaGraphRunner."""

    def __init__(self, base_module):
        super().__init__()
        self.__dict__["base_module"] = base_module

    def replay_graph_capture(self, is_first_microbatch, args, kwargs):
        return self.base_module.graph(*args, is_first_microbatch=is_first_microbatch, **kwargs)


GRAPHS = ModuleType("cuda_graphs")
GRAPHS._CudaGraphRunner = Runner


def _train(run, kind, factor=1.0):
    """Two steps: without a graph, then with one."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), Layer(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = upguard_plugin.enable(model, optimizer, {"output_dir": str(run), "program": run.name})
    probe = GraphProbe(guard, GRAPHS)
    probe.attach()
    layer = model[1]
    for step in range(2):
        if step and kind == "te":
            layer.cuda_graphs = [lambda *a, **k: layer.graph(*a, **k) * factor]
        elif step and kind == "local":
            layer.runner = Runner(layer)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        guard.step()
    guard.close()
    probe.detach()
    assert "_te_cuda_graph_replay" not in vars(layer)
    assert not hasattr(Runner.replay_graph_capture, "__wrapped__")
    return run


@pytest.mark.parametrize("kind", ["te", "local"])
def test_a_graph_is_recorded_at_its_edge_and_said_so(tmp_path, kind):
    run = _train(tmp_path / "run", kind)

    seen = {(e.step, e.key.boundary, e.key.role) for e in events(run) if e.key.phase == "forward"}
    assert {(1, "1", "input"), (1, "1", "output")} <= seen
    assert (0, "1.linear", "output") in seen
    assert (1, "1.linear", "output") not in seen
    gradients = {(e.step, e.key.boundary) for e in events(run) if e.key.role == "grad_output"}
    assert {(0, "1"), (1, "1")} <= gradients
    notes = open_trace(run).end(0).notes
    assert notes == ("inside 1 nothing was recorded where it ran as a CUDA graph",)


def test_a_fault_inside_a_graph_is_named_by_its_module(tmp_path):
    baseline, twin = _train(tmp_path / "baseline", "te"), _train(tmp_path / "twin", "te")
    target = _train(tmp_path / "target", "te", factor=1.5)

    assert compare(baseline, twin)["verdict"] == "identical"
    first = compare(baseline, target)["first_divergence"]
    assert (first["step"], first["boundary"], first["kind"]) == (1, "1", "forward")


def test_what_captures_graphs_is_found_where_this_megatron_has_it():
    graphs, schedules = ModuleType("cuda_graphs"), ModuleType("schedules")
    graphs.TECudaGraphHelper = type("TECudaGraphHelper", (), {"create_cudagraphs": lambda s: None})
    graphs.create_cudagraphs = schedules.create_cudagraphs = lambda: None

    assert captures(graphs, schedules) == [
        (graphs.TECudaGraphHelper, "create_cudagraphs"),
        (graphs, "create_cudagraphs"),
        (schedules, "create_cudagraphs"),
    ]
    assert captures(None, ModuleType("schedules")) == []


def test_nothing_is_recorded_while_a_graph_is_captured(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "default_generators", (SimpleNamespace(),))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    model = nn.Linear(2, 2)
    guard = upguard_plugin.enable(model, None, {"output_dir": str(tmp_path / "run")})
    model(torch.ones(1, 2))
    monkeypatch.undo()
    guard.step()
    guard.close()

    assert not [e for e in events(tmp_path / "run") if e.key.boundary == "(root)"]
    notes = open_trace(tmp_path / "run").end(0).notes
    assert notes == ("module calls were not recorded while a CUDA graph was captured",)
