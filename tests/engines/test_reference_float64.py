"""The reference engine in float64 computes in float64: each operator, and a network over thirty steps.

Attributes that the standard stores in float32 are given to the other side with the values that a file holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch.nn import functional

import burnish
from burnish.comparison.single_nodes import single_node_model
from burnish.engines.reference import ReferenceEngine
from burnish.engines.torch.engine import TorchEngine
from burnish.graph import BURNISH_DOMAIN
from oracles.gradient_harness import as_stored, carrying_outputs, cast_inputs, feeds_of, forward_graph, gradient_graph
from oracles.onnxruntime_outputs import NEWEST_RUNTIME, NO_KERNEL, RUNTIME
from oracles.operator_cases import CASES, Case, cases_where, cotangents_of

TOLERANCE = 1e-13
SAMPLES = 2
"""Of each operator, of whose gradients every node is looked at."""
DEFAULTS = {
    "HardSigmoid": {"alpha": 0.2, "beta": 0.5},
    "LRN": {"alpha": 1e-4, "beta": 0.75, "bias": 1.0},
    "LeakyRelu": {"alpha": 0.01},
}
"""Defaults that the functions in PyTorch have in float64, and the standard in float32."""


def assert_as_near_as_float64(actual: np.ndarray, expected: np.ndarray, what: str, tolerance: float = TOLERANCE) -> None:
    assert actual.shape == expected.shape, what
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(actual[~finite], expected[~finite], err_msg=what)
    error, scale = np.linalg.norm((actual - expected)[finite]), np.linalg.norm(expected[finite])
    assert error <= tolerance * scale, f"{what}: relative error {error / scale:.1e}"


def torch_function(case: Case) -> Callable | None:
    return case.sample.torch or case.spec.torch


@cases_where(lambda case: torch_function(case) is not None and case.sample.build is None and case.takes_float64, test=116)
def test_an_operator(case: Case) -> None:
    sample = case.sample
    graph, _, outputs = forward_graph(case.spec, sample, "float64")
    carrying = carrying_outputs(sample, outputs)
    graph.outputs.extend(outputs)
    graph.opset_imports.pop(BURNISH_DOMAIN, None)
    inputs = cast_inputs(sample, "float64")
    names = {value.name for value in graph.inputs}
    feeds = {name: array for name, array in feeds_of(sample, inputs, {}).items() if name in names}
    found = ReferenceEngine().run(ir.Model(graph, ir_version=10), feeds)
    own = sample.torch_attributes
    attributes = as_stored({**DEFAULTS.get(case.spec.op_type, {}), **(sample.attributes if own is None else own)})
    function = torch_function(case)
    assert function is not None
    result = function(*(None if array is None else torch.from_numpy(np.array(array)) for array in inputs), **attributes)
    expected = result if isinstance(result, (tuple, list)) else [result]
    for index in carrying:
        array = found[outputs[index].name or ""]
        # What Cast is told to give, and the statistics of LayerNormalization by its stash_type.
        is_narrow = case.spec.op_type in ("Cast", "LayerNormalization") and outputs[index].dtype == ir.DataType.FLOAT
        assert array.dtype == (np.float32 if is_narrow else np.float64)
        assert_as_near_as_float64(array, expected[index].numpy(), f"output {index}", 1e-7 if is_narrow else TOLERANCE)


@cache
def nodes() -> list[tuple[ir.Node, dict[str, np.ndarray]]]:
    """Nodes of the gradients of some samples of every operator, each kind once, with the values around them."""
    result, kinds, taken = [], set(), Counter[str]()
    for case in CASES.values():
        if case.widest != "float64" or taken[case.spec.op_type] == SAMPLES:
            continue
        taken[case.spec.op_type] += 1
        graph = gradient_graph(case.spec, case.sample, "float64", "symbolic" if "symbolic" in case.spec.shapes else "static")
        try:
            values = _every_value(graph.model, case)
        except NO_KERNEL:
            if RUNTIME < NEWEST_RUNTIME:
                continue
            raise
        for node in graph.model.graph:
            kind = (node.op_type, *sorted((name, str(attribute.value)[:60]) for name, attribute in node.attributes.items()))
            if node.op_type != "Constant" and kind not in kinds:
                kinds.add(kind)
                result.append((node, values))
    return result


def _every_value(model: ir.Model, case: Case) -> dict[str, np.ndarray]:
    graph = model.graph
    outputs = [output for node in graph if node.op_type != "Constant" for output in node.outputs if output.name]
    graph.outputs.extend(output for output in outputs if not output.is_graph_output() and output.dtype is not None)
    feeds = feeds_of(case.sample, cast_inputs(case.sample, "float64"), cotangents_of(case))
    read = {value.name for value in graph.inputs}
    feeds = {name: array for name, array in feeds.items() if name in read}
    return {**ReferenceEngine().run(model, feeds), **feeds}


@pytest.mark.slow
def test_each_node_of_a_gradient() -> None:
    """Against the PyTorch engine, node by node on the same operands, so that no rounding before one counts."""
    assert len({node.op_type for node, _ in nodes()}) > 100
    for node, values in nodes():
        model, feeds = single_node_model(node, values)
        for name, expected in TorchEngine().load(model)(feeds).items():
            array, what = values[name], f"{node.op_type} {node.attributes}"
            assert array.dtype == expected.dtype, what
            if array.dtype == np.float64:
                assert_as_near_as_float64(array, expected, what)
            else:
                np.testing.assert_array_equal(array, expected, err_msg=what)


def test_running_statistics_of_batch_normalization() -> None:
    """What is left of them, 1 - momentum, is not rounded to float32."""
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(4, 3, 5)), *(np.abs(rng.normal(size=3)) + 0.5 for _ in range(4))]
    names = ["x", "scale", "bias", "mean", "variance"]
    node = helper.make_node("BatchNormalization", names, ["y", "m", "v"], training_mode=1, momentum=0.9, epsilon=1e-3)
    inputs = [helper.make_tensor_value_info(name, TensorProto.DOUBLE, a.shape) for name, a in zip(names, arrays, strict=True)]
    outputs = [helper.make_tensor_value_info(name, TensorProto.DOUBLE, None) for name in ("y", "m", "v")]
    proto = helper.make_model(
        helper.make_graph([node], "g", inputs, outputs), opset_imports=[helper.make_opsetid("", 18)], ir_version=9
    )
    found = ReferenceEngine().run(ir.from_proto(proto), dict(zip(names, arrays, strict=True)))
    momentum, epsilon = float(np.float32(0.9)), float(np.float32(1e-3))
    x, scale, bias, mean, variance = arrays
    own_mean, own_variance = x.mean(axis=(0, 2)), x.var(axis=(0, 2))
    normalized = (x - own_mean[:, None]) / np.sqrt(own_variance + epsilon)[:, None] * scale[:, None] + bias[:, None]
    for name, expected in {
        "y": normalized,
        "m": momentum * mean + (1 - momentum) * own_mean,
        "v": momentum * variance + (1 - momentum) * own_variance,
    }.items():
        assert_as_near_as_float64(found[name], expected, name, 1e-15)


class Network(torch.nn.Module):
    """Strided, dilated and grouped convolutions, batch normalization, GELU in both forms, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        # What a file holds of the two numbers.
        settings = {"eps": float(np.float32(1e-5)), "momentum": 1 - float(np.float32(0.9))}
        self.first = torch.nn.Conv2d(2, 4, 3, stride=2, padding=1, bias=False)
        self.first_norm = torch.nn.BatchNorm2d(4, **settings)
        self.second = torch.nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=2, bias=False)
        self.second_norm = torch.nn.BatchNorm2d(4, **settings)
        self.last = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.gelu(self.first_norm(self.first(x)))
        x = functional.gelu(self.second_norm(self.second(x)), approximate="tanh")
        return self.last(x.mean((2, 3)))


def as_model(network: Network) -> onnx.ModelProto:
    weights = {name: tensor.numpy() for name, tensor in network.state_dict().items() if not name.endswith("tracked")}

    def norm(data: str, layer: str, output: str) -> onnx.NodeProto:
        operands = [f"{layer}.{name}" for name in ("weight", "bias", "running_mean", "running_var")]
        return helper.make_node("BatchNormalization", [data, *operands], [output], epsilon=1e-5, momentum=0.9)

    nodes = [
        helper.make_node("Conv", ["x", "first.weight"], ["a"], strides=[2, 2], pads=[1] * 4),
        norm("a", "first_norm", "b"),
        helper.make_node("Gelu", ["b"], ["c"]),
        helper.make_node("Conv", ["c", "second.weight"], ["d"], pads=[2] * 4, dilations=[2, 2], group=2),
        norm("d", "second_norm", "e"),
        helper.make_node("Gelu", ["e"], ["f"], approximate="tanh"),
        helper.make_node("GlobalAveragePool", ["f"], ["g"]),
        helper.make_node("Flatten", ["g"], ["h"]),
        helper.make_node("Gemm", ["h", "last.weight", "last.bias"], ["y"], transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info("x", TensorProto.DOUBLE, ["n", 2, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.DOUBLE, ["n", 3])],
        [numpy_helper.from_array(array.copy(), name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


# The learning rate of a step is float32: these are what both hold.
OPTIMIZERS = {
    "sgd": (
        lambda: burnish.optim.sgd(lr=2**-3, momentum=0.9),
        lambda parameters: torch.optim.SGD(parameters, lr=2**-3, momentum=0.9),
    ),
    "adamw": (
        lambda: burnish.optim.adamw(lr=2**-7, weight_decay=0.01),
        lambda parameters: torch.optim.AdamW(parameters, lr=2**-7, weight_decay=0.01),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_thirty_steps_against_torch_optim(optimizer: str) -> None:
    torch.manual_seed(0)
    network, (own, theirs) = Network().double(), OPTIMIZERS[optimizer]
    program = burnish.compile(as_model(network), loss="cross_entropy", optimizer=own(), running_variance="pytorch")
    session, stepper = burnish.Session(program, engine="reference", seed=0), theirs(network.parameters())
    rng = np.random.default_rng(0)
    for _ in range(30):
        x, labels = rng.normal(size=(5, 2, 8, 8)), rng.integers(0, 3, 5)
        stepper.zero_grad()
        loss = functional.cross_entropy(network(torch.from_numpy(x)), torch.from_numpy(labels))
        loss.backward()
        stepper.step()
        assert session.step({"x": x, "labels": labels})["loss"] == pytest.approx(loss.item(), rel=TOLERANCE)
    expected = {name: tensor.numpy() for name, tensor in network.state_dict().items() if not name.endswith("tracked")}
    state = {name.partition("/")[2]: array for name, array in session.state().items() if name.startswith(("param/", "stat/"))}
    assert state.keys() == expected.keys()
    for name, array in expected.items():
        assert_as_near_as_float64(state[name], array, name)
