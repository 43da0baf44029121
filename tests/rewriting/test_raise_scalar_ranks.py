"""Scalars beside tensors whose last extents are 1: of the tensors' rank afterwards, with the same results."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import burnish
from burnish.engines.onnxruntime import OnnxRuntimeEngine, engine
from burnish.files.model_file import model_bytes
from burnish.models import residual_network
from burnish.operators.registry import Elementwise, elementwise
from burnish.rewriting.raise_scalar_ranks import raise_scalar_ranks
from oracles.rewritten import rewritten


def parsed(text: str) -> ir.Model:
    return ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))


def raised(nodes: str, inputs: str, outputs: str = "float[2, 3, 1, 1] y", **arrays: np.ndarray) -> ir.Model:
    """A model after the pass, checked to give the same bits as before it."""
    constants = "c = Constant<value = float {0.3}>() v = Constant<value = float[1] {0.7}>()"
    text = f'<ir_version: 10, opset_import: ["" : 18]> g ({inputs}) => ({outputs}) {{ {constants} {nodes} }}'
    expected = burnish.engines.get("reference").run(parsed(text), arrays)
    model = rewritten(raise_scalar_ranks, parsed(text))
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    for name, array in OnnxRuntimeEngine(kernels=False).run(model, arrays).items():
        np.testing.assert_array_equal(array, expected[name])
        assert array.dtype == expected[name].dtype
    return model


def ranks(model: ir.Model, op_type: str) -> list[list[int | None]]:
    shapes = [[value.shape for value in node.inputs if value is not None] for node in model.graph if node.op_type == op_type]
    return [[None if shape is None else len(shape) for shape in operands] for operands in shapes]


X = np.random.default_rng(0).standard_normal((2, 3, 1, 1)).astype(np.float32)


def test_constants_become_constants_of_the_rank():
    model = raised("a = Mul(x, c) b = Sub(v, a) y = Max(b, v, c)", "float[2, 3, 1, 1] x", x=X)
    assert (ranks(model, "Mul"), ranks(model, "Sub"), ranks(model, "Max")) == ([[4, 4]], [[4, 4]], [[4, 4, 4]])
    assert not ranks(model, "Reshape")


def test_what_is_computed_is_reshaped_once_for_each_rank():
    inputs, outputs = "float[2, 3, 1, 1] x, float[3, 1] z, float lr", "float[2, 3, 1, 1] y, float[3, 1] w"
    nodes = "rate = Neg(lr) a = Mul(x, rate) b = Mul(rate, a) y = Add(b, lr) w = Div(z, rate)"
    model = raised(nodes, inputs, outputs, x=X, z=X[0, :, 0], lr=np.array(0.3, np.float32))
    assert ranks(model, "Mul") == [[4, 4], [4, 4]]
    assert ranks(model, "Div") == [[2, 2]]
    reshaped = [node.outputs[0].shape for node in model.graph if node.op_type == "Reshape"]
    assert [len(shape) for shape in reshaped] == [4, 4, 2]


def test_branches_of_where_are_raised():
    model = raised("m = Greater(x, c) y = Where(m, x, c)", "float[2, 3, 1, 1] x", x=X)
    assert ranks(model, "Where") == [[4, 4, 4]]


def test_a_model_is_raised_when_onnx_runtime_opens_it_and_is_left_as_it_was(monkeypatch):
    opened = []
    monkeypatch.setattr(engine, "model_bytes", lambda model: opened.append(model) or model_bytes(model))
    model = parsed(
        '<ir_version: 10, opset_import: ["" : 18]> g (float[2, 3, 1, 1] x, float c) => (float[2, 3, 1, 1] y) { y = Mul(x, c) }'
    )
    results = OnnxRuntimeEngine(kernels=False).run(model, {"x": X, "c": np.array(0.3, np.float32)})
    np.testing.assert_array_equal(results["y"], X * np.float32(0.3))
    assert ranks(model, "Mul") == [[4, 0]]
    assert [ranks(each, "Mul") for each in opened] == [[[4, 4]]]


@pytest.mark.parametrize("inputs", ["float[2, 3, 4, 4] x", "float[N, 3, 4, N] x", "float[1, 1, 1, 1] x", "float x"])
def test_what_is_broadcast_in_one_span_anyway_stays(inputs):
    text = f'<ir_version: 10, opset_import: ["" : 18]> g ({inputs}, float c) => (float y) {{ y = Mul(x, c) }}'
    model = rewritten(raise_scalar_ranks, parsed(text))
    assert [node.op_type for node in model.graph] == ["Mul"]


@pytest.mark.slow
def test_a_program_has_no_scalar_of_a_lower_rank_beside_the_weight_of_a_pointwise_convolution():
    program = burnish.compile(residual_network(), loss="cross_entropy", optimizer=burnish.optim.adamw())
    pointwise = 0
    for node in program.step.graph:
        shapes = [value.shape for value in node.inputs if value is not None and value.shape is not None]
        if elementwise(node) is Elementwise.BROADCAST and any(len(shape) == 4 and shape.dims[2:] == (1, 1) for shape in shapes):
            pointwise += 1
            assert all(len(shape) > 2 for shape in shapes)
    assert pointwise
