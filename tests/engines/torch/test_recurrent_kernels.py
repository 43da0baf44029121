"""The kernels of recurrent layers and their gradients: beside PyTorch's autograd in float64, and in programs."""

from __future__ import annotations

import onnx
import pytest
import torch
from onnx import helper

import burnish
from burnish.engines.torch import TorchEngine
from burnish.engines.torch import native as kernels
from burnish.engines.torch.fusion import FUSED, fuse
from burnish.engines.torch.translate.rules import translated_operators
from burnish.graph import BURNISH_DOMAIN
from burnish.kernels.recurrent import FUSED_LSTM_STEPS, FUSED_LSTM_STEPS_GRAD
from burnish.kernels.thresholds import Recurrent
from burnish.operators.recurrent import LSTM_STEPS, LSTM_STEPS_GRAD
from oracles.combinations import diagonal
from oracles.kernel_graphs import kernel_graphs

needs_kernels = pytest.mark.skipif(not kernels.available("lstm"), reason="needs the engine's kernels")

# Frames, sequences and hidden units.
EXTENTS = {
    "a few": (5, 3, 7),
    "one of each": (1, 1, 1),
    "one sequence": (4, 1, 24),
    "more sequences than rows of a block": (3, 17, 20),
    "more gates than a panel holds": (2, 9, 70),
    "no frames": (0, 2, 3),
    "no sequences": (3, 0, 5),
}
ABSENT = [(), (0,), (1, 2), (0, 1, 2)]


def operands(frames: int, sequences: int, hidden: int) -> list[torch.Tensor]:
    """z, r, and the initial states."""
    generator = torch.Generator().manual_seed(frames + sequences + hidden)
    shapes = [(frames, sequences, 4 * hidden), (4 * hidden, hidden), (sequences, hidden), (sequences, hidden)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def steps(z: torch.Tensor, r: torch.Tensor, h: torch.Tensor, c: torch.Tensor, reverse: bool) -> list[torch.Tensor]:
    """h, the last h and c, and c, written out."""
    hidden, frames = r.shape[1], range(len(z))
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for frame in reversed(frames) if reverse else frames:
        i, o, f, g = (z[frame] + h @ r.t()).split(hidden, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        kept[frame] = h, c
    empty = z.new_zeros(*z.shape[:2], hidden)
    all_h, all_c = (torch.stack([kept[frame][index] for frame in frames]) if kept else empty for index in (0, 1))
    return [all_h, h, c, all_c]


@needs_kernels
@diagonal(("name", list(EXTENTS)), ("reverse", [False, True]), ("absent", ABSENT))
def test_states_and_gradients_are_those_of_float64(name, reverse, absent, threads):
    given = operands(*EXTENTS[name])
    results = torch.ops.burnish.lstm_steps(*given, reverse)
    leaves = [tensor.double().requires_grad_() for tensor in given]
    expected = steps(*leaves, reverse)
    for found, exact in zip(results[:4], expected, strict=True):
        torch.testing.assert_close(found.double(), exact.detach(), rtol=2e-6, atol=2e-6)
    cotangents = [None if index in absent else torch.randn_like(tensor) for index, tensor in enumerate(results[:3])]
    flow = sum((e * d.double()).sum() for e, d in zip(expected[:3], cotangents, strict=True) if d is not None)
    of_z, of_h, of_c = (
        torch.zeros_like(leaf)
        if not isinstance(flow, torch.Tensor) or not flow.requires_grad
        else torch.autograd.grad(flow, leaf, retain_graph=True, materialize_grads=True, allow_unused=True)[0]
        for leaf in (leaves[0], leaves[2], leaves[3])
    )
    gradients = torch.ops.burnish.lstm_steps_gradient(given[1], given[3], *results[3:], *cotangents, reverse)
    for found, exact in zip(gradients, (of_z, of_h, of_c), strict=True):
        size = float(exact.abs().max()) if exact.numel() else 0.0
        torch.testing.assert_close(found.double(), exact, rtol=4e-6, atol=4e-6 * max(1.0, size))


@needs_kernels
def test_operands_are_read_wherever_they_lie():
    z, r, h, c = operands(4, 5, 6)
    strided = [tensor.transpose(0, 1).contiguous().transpose(0, 1) for tensor in (z, r, h, c)]
    results = torch.ops.burnish.lstm_steps(z, r, h, c, False)
    for found, expected in zip(torch.ops.burnish.lstm_steps(*strided, False), results, strict=True):
        assert torch.equal(found, expected)
    dh = torch.randn_like(results[0])
    expected = torch.ops.burnish.lstm_steps_gradient(r, c, *results[3:], dh, None, None, False)
    kept = [tensor.transpose(0, 1).contiguous().transpose(0, 1) for tensor in (r, c, *results[3:], dh)]
    for found, exact in zip(torch.ops.burnish.lstm_steps_gradient(*kept, None, None, False), expected, strict=True):
        assert torch.equal(found, exact)


@needs_kernels
def test_any_number_of_threads_gives_the_same_bits():
    given = operands(3, 13, 20)
    before = torch.get_num_threads()
    try:
        runs = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results = torch.ops.burnish.lstm_steps(*given, False)
            dh = torch.ones_like(results[0])
            runs.append(
                [*results, *torch.ops.burnish.lstm_steps_gradient(given[1], given[3], *results[3:], dh, None, None, False)]
            )
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for run in runs[1:] for one, other in zip(runs[0], run, strict=True))


@needs_kernels
def test_operands_that_do_not_fit_are_refused():
    z, r, h, c = operands(2, 3, 4)
    with pytest.raises(RuntimeError, match=r"z \[T, N, 4 H\] and r \[4 H, H\] expected"):
        torch.ops.burnish.lstm_steps(z[0], r, h, c, False)
    with pytest.raises(RuntimeError, match="z is not float32 of the shape that fits z and r"):
        torch.ops.burnish.lstm_steps(z.double(), r, h, c, False)
    with pytest.raises(RuntimeError, match="initial_c is not float32 of the shape that fits z and r"):
        torch.ops.burnish.lstm_steps(z, r, h, c[:1], False)


def classifier(hidden: int, peepholes: bool = False, lengths: bool = False) -> onnx.ModelProto:
    """A bidirectional LSTM over frames, and a linear layer of its last states."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"w": (2, 4 * hidden, 3), "r": (2, 4 * hidden, hidden), "b": (2, 8 * hidden), "head": (hidden, 2)}
    names = ["x", "w", "r", "b"]
    if lengths or peepholes:
        names += ["lengths" if lengths else "", "", ""]
    if peepholes:
        shapes["p"] = (2, 3 * hidden)
        names.append("p")
    weights = [
        onnx.numpy_helper.from_array(torch.randn(shape, generator=generator).div(2).numpy(), name)
        for name, shape in shapes.items()
    ]
    weights.append(onnx.numpy_helper.from_array(torch.tensor([0]).numpy(), "first"))
    inputs = [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["frames", "batch", 3])]
    if lengths:
        inputs.append(helper.make_tensor_value_info("lengths", onnx.TensorProto.INT32, ["batch"]))
    graph = helper.make_graph(
        [
            helper.make_node("LSTM", names, ["y", "last"], hidden_size=hidden, direction="bidirectional"),
            helper.make_node("ReduceSum", ["last", "first"], ["summed"], keepdims=0),
            helper.make_node("MatMul", ["summed", "head"], ["logits"]),
        ],
        "classifier",
        inputs,
        [helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["batch", 2])],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


@pytest.mark.parametrize(
    ("options", "count"),
    [({}, 2), ({"peepholes": True}, 0), ({"lengths": True}, 0), ({"hidden": Recurrent.MOST_UNITS + 1}, 0)],
)
def test_layers_of_the_usual_form_run_on_kernels(options, count):
    program = burnish.compile(classifier(**{"hidden": 4} | options), optimizer=burnish.optim.sgd(lr=0.1))
    known = translated_operators(BURNISH_DOMAIN) | FUSED
    with_kernels = fuse(kernel_graphs(program, known)["step"], kernels=True).graph
    operators = (FUSED_LSTM_STEPS, FUSED_LSTM_STEPS_GRAD, LSTM_STEPS, LSTM_STEPS_GRAD)
    assert [sum(map(operator.is_of, with_kernels)) for operator in operators] == [count, count, 0, 0]
    assert [node.op_type for node in with_kernels].count("Scan") == 4 - 2 * count
    without = fuse(kernel_graphs(program, known)["step"], kernels=False).graph
    assert [node.op_type for node in without].count("Scan") == 4


@pytest.mark.slow
@needs_kernels
def test_programs_train_as_on_other_engines():
    program = burnish.compile(classifier(5), optimizer=burnish.optim.sgd(lr=0.5))
    sessions = [
        burnish.Session(program, engine, threads=1) for engine in (TorchEngine(), TorchEngine(compile="none"), "reference")
    ]
    generator = torch.Generator().manual_seed(1)
    for frames, batch in ((3, 4), (6, 1), (3, 2)):
        fed = {
            "x": torch.randn(frames, batch, 3, generator=generator).numpy(),
            "labels": torch.arange(batch).remainder(2).numpy(),
        }
        losses = [session.step(fed)["loss"] for session in sessions]
        assert losses == pytest.approx([losses[-1]] * 3, rel=2e-6)
    for name, expected in sessions[-1].state().items():
        for session in sessions[:-1]:
            torch.testing.assert_close(
                torch.as_tensor(session.state()[name]), torch.as_tensor(expected), rtol=1e-5, atol=1e-6, check_dtype=False
            )
