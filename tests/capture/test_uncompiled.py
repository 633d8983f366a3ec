"""Level `op` beside torch.compile: the compiler leaves our code alone, and the user's as it is."""

from __future__ import annotations

import pytest
import torch

import upguard_plugin
from upguard_plugin.capture.operators.probe import OperatorProbe
from upguard_plugin.capture.uncompiled import can_be_told

needs_seams = pytest.mark.skipif(not can_be_told(), reason="this torch has its own wrapper")


@needs_seams
def test_torchs_wrapper_is_not_there():
    assert not hasattr(OperatorProbe.__torch_dispatch__, "__wrapped__")


def train(folder=None):
    """Graphs that a function with breaks is compiled to, and the code the compiler looked at."""
    from torch._dynamo.convert_frame import input_codes

    torch._dynamo.reset()
    graphs = []

    def backend(graph, _inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    @torch.compile(backend=backend)
    def scaled(x):
        y = x * 2
        torch._dynamo.graph_break()
        first = x.tolist()[0][0]  # runs between two graphs, where the compiler is listening
        return y.sin() * first

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = None
    if folder is not None:
        settings = {"level": "op", "output_dir": str(folder)}
        guard = upguard_plugin.enable(model, optimizer, settings)
    for _ in range(2):
        optimizer.zero_grad()
        scaled(model(torch.ones(2, 4))).sum().backward()
        optimizer.step()
        if guard is not None:
            guard.step()
    if guard is not None:
        guard.close()
        assert not guard.recorder.failure
    names = {code.co_filename for ref in input_codes.seen if (code := ref()) is not None}
    return graphs, names, [p.detach().clone() for p in model.parameters()]


def test_the_compiler_sees_the_users_code_and_none_of_ours(tmp_path):
    plain_graphs, _, plain = train()
    graphs, files, weights = train(tmp_path / "run")
    assert len(graphs) > 1
    assert graphs == plain_graphs
    assert all(torch.equal(a, b) for a, b in zip(weights, plain, strict=True))
    assert not [name for name in files if "upguard_plugin" in name]


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.fc2(self.fc1(x).sin())


@pytest.mark.parametrize("in_place", [False, True])
def test_modules_that_are_compiled_later_share_their_graphs_as_without_us(tmp_path, in_place):
    """Each a graph of its own: from the ninth on, the compiler would leave them uncompiled."""
    graphs = {}
    for folder in (None, tmp_path / "run"):
        torch._dynamo.reset()
        made = graphs[folder] = []

        def backend(graph, _inputs, made=made):
            made.append([str(node.target) for node in graph.graph.nodes if node.op[:4] == "call"])
            return graph.forward

        model = torch.nn.Sequential(*(Block() for _ in range(10)))
        guard = None
        if folder is not None:
            guard = upguard_plugin.enable(model, None, {"level": "op", "output_dir": str(folder)})
        for i, block in enumerate(model):
            if in_place:
                block.compile(backend=backend)
            else:
                model[i] = torch.compile(block, backend=backend)
        model(torch.ones(2, 4)).sum().backward()
        if guard is not None:
            guard.close()
    assert graphs[None] == graphs[tmp_path / "run"]
    assert len(graphs[None]) == 2  # the first input has no gradient
