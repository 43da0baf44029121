"""Networks with weights in loops and branches, as PyTorch's exporters write them, against PyTorch: five steps on each engine."""

from __future__ import annotations

import io

import numpy as np
import onnx
import pytest
import torch

import burnish
from oracles.combinations import spread

ENGINES = ("onnxruntime", "torch", "reference")
STEPS = 5


class Layers(torch.nn.Module):
    """Three layers that the networks below put together; their batches are [words, samples, 3]."""

    def __init__(self):
        super().__init__()
        self.read, self.again, self.head = torch.nn.Linear(3, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)


class Recurrent(Layers):
    """A loop over as many words as there are."""

    def forward(self, x):
        h = torch.zeros(x.size(1), 4)
        for i in range(x.size(0)):
            h = torch.tanh(self.read(x[i]) + self.again(h))
        return self.head(h)


class Collecting(Layers):
    """A loop that appends to a list, which is stacked after it."""

    def forward(self, x):
        h = torch.zeros(x.size(1), 4)
        states = []
        for i in range(x.size(0)):
            h = torch.tanh(self.read(x[i]) + self.again(h))
            states.append(h)
        return self.head(torch.stack(states).mean(0))


class Branching(Layers):
    """A branch that the data decide; one layer is read in both."""

    def forward(self, x):
        h = self.read(x[0])
        if h.sum() > 0:  # noqa: SIM108  # TorchScript reads it
            h = torch.tanh(self.again(h))
        else:
            h = self.again(torch.relu(h)) * 2
        return self.head(h)


class Settling(Layers):
    """A loop that the data end, with a branch in it."""

    def forward(self, x):
        h = self.read(x[0])
        count = 0
        while bool(h.abs().sum() > 0.5) and count < 5:
            if count % 2 == 0:  # noqa: SIM108
                h = self.again(torch.tanh(h)) * 0.5
            else:
                h = self.again(h) * 0.5
            count += 1
        return self.head(h)


class Conditional(Layers):
    """``torch.cond``."""

    def forward(self, x):
        h = self.read(x[0])
        h = torch.cond(h.sum() > 0, lambda h: torch.tanh(self.again(h)), lambda h: self.again(torch.relu(h)) * 2, (h,))
        return self.head(h)


class Scanning(Layers):
    """PyTorch's ``scan``, which becomes Scan."""

    def forward(self, x):
        from torch._higher_order_ops.scan import scan

        def step(h, word):
            h = torch.tanh(self.read(word) + self.again(h))
            return h, h * 1.0

        h, rows = scan(step, torch.zeros(x.size(1), 4), x, dim=0)
        return self.head(h + rows.mean(0))


def scripted(kind: type[Layers]) -> onnx.ModelProto:
    file = io.BytesIO()
    torch.onnx.export(
        torch.jit.script(seeded(kind)),
        (torch.randn(5, 6, 3),),
        file,
        input_names=["x"],
        output_names=["y"],
        dynamo=False,
        dynamic_axes={"x": {0: "words", 1: "samples"}},
        do_constant_folding=False,
        opset_version=17,
    )
    return onnx.load_from_string(file.getvalue())


def exported(kind: type[Layers]) -> onnx.ModelProto:
    program = torch.onnx.export(
        seeded(kind),
        (torch.randn(5, 6, 3),),
        input_names=["x"],
        output_names=["y"],
        dynamo=True,
        optimize=False,
        dynamic_shapes=({0: "words", 1: "samples"},),
        verbose=False,
    )
    assert program is not None
    return program.model_proto


def seeded(kind: type[Layers]) -> Layers:
    torch.manual_seed(0)
    return kind()


CASES = [
    pytest.param(scripted, Recurrent, "Loop", id="recurrent"),
    pytest.param(scripted, Collecting, "Loop", id="collecting"),
    pytest.param(scripted, Branching, "If", id="branching"),
    pytest.param(scripted, Settling, "Loop", id="settling"),
    pytest.param(exported, Conditional, "If", id="conditional", marks=pytest.mark.slow),
    pytest.param(exported, Scanning, "Scan", id="scanning", marks=pytest.mark.slow),
]


@pytest.mark.filterwarnings("ignore")
@spread(("export", "kind", "operator"), CASES, test=1)
def test_five_steps(export, kind: type[Layers], operator: str) -> None:
    proto = export(kind)
    assert operator in {node.op_type for node in proto.graph.node}
    program = burnish.compile(proto, loss="mse", optimizer="sgd:lr=0.1")
    assert len(program.options["trainable"]) == 6
    sessions = [burnish.Session(program, engine=engine) for engine in ENGINES]
    module = seeded(kind)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x, targets = torch.randn(3 + step, 6, 3, generator=generator), torch.randn(6, 2, generator=generator)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(module(x), targets)
        loss.backward()
        optimizer.step()
        for session in sessions:
            reported = session.step({"x": x.numpy(), "targets": targets.numpy()})["loss"]
            np.testing.assert_allclose(reported, loss.item(), rtol=1e-5)
    for session in sessions:
        state = session.state()
        for name, parameter in module.named_parameters():
            np.testing.assert_allclose(state[f"param/{name}"], parameter.detach().numpy(), rtol=1e-4, atol=1e-6)
