"""Kernels of recurrent layers on ONNX Runtime: gradients beside float64, and what they leave to standard operators."""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

import burnish
from burnish.engines.onnxruntime import OnnxRuntimeEngine, kernels
from burnish.errors import EngineError
from burnish.kernels.compiling import find_compiler

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler for the engine's kernels")

FEATURES = 5
GATES = {"LSTM": 4, "GRU": 3}
LAYERS = {
    # name: (operator, hidden units, direction, attributes)
    "LSTM": ("LSTM", 7, "bidirectional", ""),
    "LSTM, more units than a panel holds": ("LSTM", 41, "reverse", ""),
    "LSTM, units divided among threads": ("LSTM", 192, "forward", ""),
    "GRU": ("GRU", 7, "bidirectional", ", linear_before_reset = 1"),
    "GRU, units divided among threads": ("GRU", 224, "forward", ", linear_before_reset = 1"),
    "GRU, reset before its product": ("GRU", 20, "bidirectional", ""),
}
DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}


@cache
def engine() -> OnnxRuntimeEngine:
    return OnnxRuntimeEngine(kernels=True)


def parameters_of(layer: str) -> dict[str, np.ndarray]:
    kind, hidden, direction, _ = LAYERS[layer]
    count, wide = len(DIRECTIONS[direction]), GATES[kind] * hidden
    shapes = {"w": (count, wide, FEATURES), "r": (count, wide, hidden), "b": (count, 2 * wide)}
    random = np.random.default_rng(len(layer))
    return {name: random.normal(0, hidden**-0.5, shape).astype(np.float32) for name, shape in shapes.items()}


def model_of(layer: str, extra: str = "", lengths: str = "") -> onnx.ModelProto:
    """Frames [T, N, I] to all states [T, N, H] of each direction, with those after the last frame added to all of them."""
    kind, hidden, direction, attributes = LAYERS[layer]
    count = len(DIRECTIONS[direction])
    last = "hidden, cell" if kind == "LSTM" else "hidden"
    text = f"""
<ir_version: 10, opset_import: ["" : 21]>
g (float["T", "N", {FEATURES}] x{extra}) => (float["T", {count}, "N", {hidden}] y)
{{
    all, {last} = {kind}<hidden_size = {hidden}, direction = "{direction}"{attributes}>(x, w, r, b{lengths})
    {"ends = Mul(hidden, cell)" if kind == "LSTM" else "ends = Mul(hidden, hidden)"}
    y = Add(all, ends)
}}
"""
    model = onnx.parser.parse_model(text)
    for name, array in parameters_of(layer).items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


@cache
def gradients(layer: str):
    """The program, and the graph of its gradients."""
    program = burnish.compile(model_of(layer), loss="mse", optimizer="sgd")
    return program, program.graphs.lowered_to(engine().target)["grad"]


def called(graph) -> Counter[str]:
    copy = graph.clone()
    kernels.call_kernels(copy)
    return Counter(node.op_type for node in copy.graph.all_nodes())


def feeds_of(layer: str, frames: int, sequences: int) -> dict[str, np.ndarray]:
    _, hidden, direction, _ = LAYERS[layer]
    random = np.random.default_rng(frames + sequences)
    x = random.normal(size=(frames, sequences, FEATURES)).astype(np.float32)
    targets = random.normal(size=(frames, len(DIRECTIONS[direction]), sequences, hidden)).astype(np.float32)
    return {"x": x, "targets": targets}


def run(layer: str, feeds: dict[str, np.ndarray], threads: int) -> dict[str, np.ndarray]:
    program, graph = gradients(layer)
    inputs = {**program.initial_state(0), **feeds}
    return engine().load(graph, threads)({value.name: inputs[value.name] for value in graph.graph.inputs})


def written_out(layer: str, feeds: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """The loss and the gradients in float64, by PyTorch's autograd over the equations of the standard."""
    kind, hidden, direction, attributes = LAYERS[layer]
    leaves = {name: torch.tensor(array, dtype=torch.float64, requires_grad=True) for name, array in parameters_of(layer).items()}
    x, targets = (torch.tensor(feeds[name], dtype=torch.float64) for name in ("x", "targets"))
    results = []
    for place, reverse in enumerate(DIRECTIONS[direction]):
        w, r = leaves["w"][place], leaves["r"][place]
        of_input, of_state = leaves["b"][place].split(GATES[kind] * hidden)
        h = c = x.new_zeros(x.shape[1], hidden)
        states = [h] * len(x)
        for frame in reversed(range(len(x))) if reverse else range(len(x)):
            if kind == "LSTM":
                i, o, f, g = (x[frame] @ w.t() + of_input + h @ r.t() + of_state).split(hidden, 1)
                c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
                h = torch.sigmoid(o) * torch.tanh(c)
            else:
                (u, s, n), (v, t, m) = (
                    (a + b).split(hidden, 1) for a, b in ((x[frame] @ w.t(), of_input), (h @ r.t(), of_state))
                )
                update, reset = torch.sigmoid(u + v), torch.sigmoid(s + t)
                if not attributes:
                    m = (reset * h) @ r[2 * hidden :].t() + of_state[2 * hidden :]
                candidate = torch.tanh(n + (reset * m if attributes else m))
                h = (1 - update) * candidate + update * h
            states[frame] = h
        results.append(torch.stack(states) + h * (c if kind == "LSTM" else h))
    loss = torch.nn.functional.mse_loss(torch.stack(results, 1), targets)
    loss.backward()
    return {"loss": loss.detach(), **{f"grad:{name}": leaf.grad for name, leaf in leaves.items()}}


@pytest.mark.parametrize(("frames", "sequences"), [(5, 3), (1, 1), (2, 2), (2, 17)])
@pytest.mark.parametrize("layer", LAYERS)
def test_gradients_beside_float64(layer, frames, sequences):
    counts = called(gradients(layer)[1])
    kind, count = LAYERS[layer][0], len(DIRECTIONS[LAYERS[layer][2]])
    assert counts["Scan"] == 0
    assert counts[f"Fused{kind.title()}Steps"] == counts[f"Fused{kind.title()}StepsGrad"] == count
    feeds = feeds_of(layer, frames, sequences)
    exact = written_out(layer, feeds)
    actual = run(layer, feeds, 2)
    for name, expected in exact.items():
        wanted = expected.numpy()
        assert np.linalg.norm(actual[name] - wanted) <= 2e-6 * np.linalg.norm(wanted) + 1e-9, name


@pytest.mark.slow
@pytest.mark.parametrize("layer", [name for name in LAYERS if "units" in name])
def test_the_same_bits_on_any_number_of_threads(layer):
    feeds = feeds_of(layer, 3, 9)
    first = run(layer, feeds, 1)
    for threads in (2, 3, 16, 2):  # more than there are cores wait for each other too
        for name, array in run(layer, feeds, threads).items():
            np.testing.assert_array_equal(array, first[name], err_msg=name)


@pytest.mark.parametrize("layer", [name for name in LAYERS if "divided" in name])
def test_the_same_bits_where_threads_never_come(layer):
    """What kernels divide among four threads, one does by itself."""
    program, graph = gradients(layer)
    feeds = feeds_of(layer, 3, 2)
    copy = graph.clone()
    kernels.call_kernels(copy, 4)
    inputs = {**program.initial_state(0), **feeds}
    session = engine().inference_session(copy, threads=1)
    names = [output.name for output in session.get_outputs()]
    results = session.run(names, {value.name: inputs[value.name] for value in copy.graph.inputs})
    expected = run(layer, feeds, 1)
    for name, array in zip(names, results, strict=True):
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


@pytest.mark.parametrize("layer", ["LSTM", "GRU"])
def test_no_sequences(layer):
    feeds = feeds_of(layer, 2, 0)
    for name, array in run(layer, feeds, 1).items():
        if name.startswith("grad:"):
            assert array.shape == parameters_of(layer)[name.removeprefix("grad:")].shape


@pytest.mark.parametrize("layer", ["LSTM", "GRU"])
def test_lengths_of_sequences_are_left_to_standard_operators(layer):
    program = burnish.compile(model_of(layer, ', int32["N"] lengths', ", lengths"), loss="mse", optimizer="sgd")
    counts = called(program.graphs.lowered_to(engine().target)["grad"])
    assert counts["Scan"] == 4
    assert not any(name.startswith("Fused") and name.endswith(("Steps", "StepsGrad")) for name in counts)


def test_states_that_do_not_fit_are_an_error_of_the_run():
    _, graph = gradients("LSTM")
    copy = graph.clone()
    kernels.call_kernels(copy)
    for node in copy.graph:
        if node.op_type == "FusedLstmSteps":
            node.attributes["hidden_size"] = ir.AttrInt64("hidden_size", 8)
    copy.opset_imports["burnish"] = 1
    plain = OnnxRuntimeEngine("none", kernels=False, custom_op_library=engine().kernels)
    program, _ = gradients("LSTM")
    inputs = {**program.initial_state(0), **feeds_of("LSTM", 2, 3)}
    run_plain = plain.load(copy, 1)
    with pytest.raises(EngineError, match=r"frames \[T, N, 4 H\] of 8 hidden units expected"):
        run_plain({value.name: inputs[value.name] for value in copy.graph.inputs})
