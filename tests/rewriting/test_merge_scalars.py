"""Extents and what is counted of them: once for equal names, constants where they are integers, with the same results."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import burnish
from burnish.engines.onnxruntime import OnnxRuntimeEngine
from burnish.models import residual_network
from burnish.rewriting.merge_equal_nodes import merge_scalars
from oracles.rewritten import rewritten


def merged(inputs: str, outputs: str, nodes: str, **arrays: np.ndarray) -> Counter[str]:
    """The operators of a model after the pass, checked to give the same bits as before it."""
    text = f'<ir_version: 10, opset_import: ["" : 18]> g ({inputs}) => ({outputs}) {{ {nodes} }}'
    proto = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))
    engine = OnnxRuntimeEngine(kernels=False)
    expected = engine.run(ir.from_proto(proto), arrays)
    model = rewritten(merge_scalars, ir.from_proto(proto))
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    for name, array in engine.run(model, arrays).items():
        np.testing.assert_array_equal(array, expected[name])
    return Counter(node.op_type for node in model.graph if node.op_type != "Constant")


def mean_of(x: str, y: str) -> str:
    """Nodes that divide the sum over all axes but the second by the number of its elements, as a layer does."""
    axes = f"{y}_axes = Constant<value = int64[2] {{0, 2}}>() {y}_shape = Shape({x}) {y}_extents = Gather({y}_shape, {y}_axes)"
    count = f"{y}_count = ReduceProd<keepdims = 0>({y}_extents) {y}_number = Cast<to = 1>({y}_count)"
    return f"{axes} {count} {y}_sum = ReduceSum<keepdims = 0>({x}, {y}_axes) {y} = Div({y}_sum, {y}_number) "


A, B = (np.random.default_rng(0).standard_normal((4, channels, 5)).astype(np.float32) for channels in (2, 3))
COUNT = {"Shape": 1, "Gather": 1, "ReduceProd": 1, "Cast": 1}


def test_what_is_counted_of_equal_extents_is_counted_once():
    nodes = mean_of("a", "y") + "r = Relu(b) " + mean_of("r", "z")
    counted = merged("float[N, 2, 5] a, float[N, 3, 5] b", "float[2] y, float[3] z", nodes, a=A, b=B)
    assert counted == COUNT | {"ReduceSum": 2, "Div": 2, "Relu": 1}


def test_other_extents_are_counted_apart():
    nodes = mean_of("a", "y") + mean_of("b", "z")
    inputs, outputs = "float[N, 2, 5] a, float[M, 3, 5] b", "float[2] y, float[3] z"
    assert merged(inputs, outputs, nodes, a=A, b=B[:3])["ReduceProd"] == 2
    assert merged(inputs.replace("M", "N").replace("3, 5", "3, 4"), outputs, nodes, a=A, b=B[..., :4])["ReduceProd"] == 2


def test_names_that_no_input_has_stand_for_nothing():
    nodes = "i = NonZero(a) j = NonZero(b) y = Shape(i) z = Shape(j) s = Add(y, z)"
    inputs, outputs = "float[N, 2, 5] a, float[N, 3, 5] b", "int64[2] s"
    assert merged(inputs, outputs, nodes, a=A, b=B)["Shape"] == 2


def test_extents_that_are_integers_are_constants():
    nodes = mean_of("a", "y") + "s = Shape<start = 1, end = -1>(a)"
    counted = merged("float[4, 2, 5] a", "float[2] y, int64[1] s", nodes, a=A)
    assert counted == {"ReduceSum": 1, "Div": 1, "Shape": 1}  # an output keeps its node


def test_equal_constants_and_scalars_are_one_and_larger_ones_stay():
    nodes = (
        "c = Constant<value = float {2.0}>() d = Constant<value = float {2.0}>() n = Neg(s) e = Mul(n, c) f = Mul(n, d) "
        "y = Mul(a, e) z = Mul(y, f) g = Add(a, c) h = Add(a, d) w = Mul(g, h)"
    )
    counted = merged("float[3] a, float s", "float[3] z, float[3] w", nodes, a=A[0, 0, :3], s=np.array(0.7, np.float32))
    assert counted == {"Neg": 1, "Mul": 4, "Add": 2}


@pytest.mark.slow
@pytest.mark.parametrize("batch", ["batch", 4])
def test_a_program_counts_the_elements_of_equal_shapes_once(batch):
    model = burnish.load(residual_network())
    model.graph.inputs[0].shape = ir.Shape([batch, *model.graph.inputs[0].shape.dims[1:]])
    counted = Counter(node.op_type for node in burnish.compile(model, loss="cross_entropy").step.graph)
    layers = sum(node.op_type == "BatchNormalization" for node in model.graph)
    assert counted["ReduceProd"] < layers if batch == "batch" else not counted["ReduceProd"]
