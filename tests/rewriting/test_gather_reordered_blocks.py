"""Slices of one tensor in another order: one Gather afterwards, with the same results."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import burnish
from burnish.engines.onnxruntime import OnnxRuntimeEngine
from burnish.rewriting.gather_reordered_blocks import gather_reordered_blocks
from oracles.rewritten import rewritten

ROWS, COLUMNS = 8, 2048
FEEDS = {name: np.random.default_rng(index).standard_normal((ROWS, COLUMNS), np.float32) for index, name in enumerate("xy")}
CONSTANTS = " ".join(f"n{number} = Constant<value = int64[1] {{{number}}}>()" for number in (*range(9), -2, 5000)).replace(
    "n-2", "back"
)
SIZES = "sizes = Constant<value = int64[3] {2, 2, 4}>() "


def parsed(nodes: str, outputs: str) -> ir.Model:
    inputs = f"float[{ROWS}, {COLUMNS}] x, float[{ROWS}, {COLUMNS}] y"
    text = f'<ir_version: 10, opset_import: ["" : 18]> g ({inputs}) => ({outputs}) {{ {CONSTANTS} {SIZES} {nodes} }}'
    return ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))


def operators_after(nodes: str, outputs: str = f"float[{ROWS}, {COLUMNS}] z") -> list[str]:
    """The operators after the pass, which is checked to leave the results as they were."""
    expected = burnish.engines.get("reference").run(parsed(nodes, outputs), FEEDS)
    model = rewritten(gather_reordered_blocks, parsed(nodes, outputs))
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    for name, array in OnnxRuntimeEngine(kernels=False).run(model, FEEDS).items():
        np.testing.assert_array_equal(array, expected[name])
    return [node.op_type for node in model.graph if node.op_type != "Constant"]


SLICES = "a = Slice(x, n0, n2, n0) b = Slice(x, back, n5000, n0, n1) c = Slice(x, n2, n6, n0)"
GATHERED = ["Reshape", "Gather", "Reshape"]


@pytest.mark.parametrize(
    "nodes",
    [
        f"{SLICES} z = Concat<axis = 0>(a, b, c)",
        "c = Slice(x, n2, n6, n0) z = Concat<axis = 0>(c, c)",
        "a, b, c = Split<axis = 0>(x, sizes) z = Concat<axis = 0>(a, c, b)",
        "a, b, c = Split<axis = 0>(x, sizes) d = Slice(x, n2, n4, n0) z = Concat<axis = 0>(c, d, a)",
    ],
    ids=["slices", "one slice twice", "parts of a split", "parts and slices"],
)
def test_blocks_of_one_tensor_are_gathered(nodes):
    assert operators_after(nodes) == GATHERED


def test_what_is_read_elsewhere_stays():
    outputs = f"float[{ROWS}, {COLUMNS}] z, float[2, {COLUMNS}] a"
    assert operators_after(f"{SLICES} z = Concat<axis = 0>(a, b, c)", outputs) == ["Slice", *GATHERED]


@pytest.mark.parametrize(
    "nodes",
    {
        "two tensors": "a = Slice(x, n0, n4, n0) b = Slice(y, n4, n8, n0) z = Concat<axis = 0>(b, a)",
        "the order that was": "a = Slice(x, n0, n4, n0) b = Slice(x, n4, n8, n0) z = Concat<axis = 0>(a, b)",
        "another axis": "a = Slice(x, n0, n1, n1) b = Slice(x, n1, n5000, n1) c = Concat<axis = 1>(b, a) z = Identity(c)",
        "every second row": "a = Slice(x, n0, n8, n0, n2) b = Slice(x, n1, n8, n0, n2) z = Concat<axis = 0>(a, b)",
        "all axes": "a = Slice(x, n4, n8) b = Slice(x, n0, n4) z = Concat<axis = 0>(a, b)",
        "small blocks": "a = Slice(x, n0, n1, n0) b = Slice(x, n1, n8, n0) z = Concat<axis = 0>(b, a)",
        "a part that is none": "a = Slice(x, n0, n4, n0) b = Slice(x, n4, n8, n0) c = Neg(a) z = Concat<axis = 0>(b, c)",
    }.items(),
    ids=lambda case: case[0],
)
def test_others_stay_as_they_are(nodes):
    before = [node.op_type for node in parsed(nodes[1], f"float[{ROWS}, {COLUMNS}] z").graph if node.op_type != "Constant"]
    assert operators_after(nodes[1]) == before


def test_a_weight_in_another_order_and_its_gradient_are_gathered_in_a_step_but_not_in_predictions():
    text = f"""
<ir_version: 10, opset_import: ["" : 18]>
g (float["N", {ROWS}] x) => (float["N", {COLUMNS}] z)
<float[{ROWS}, {COLUMNS}] w>
{{ {CONSTANTS} a = Slice(w, n0, n2, n0) b = Slice(w, n6, n8, n0) c = Slice(w, n2, n6, n0)
   v = Concat<axis = 0>(a, b, c) z = MatMul(x, v) }}
"""
    model = onnx.parser.parse_model(text)
    del model.graph.initializer[:]
    model.graph.initializer.append(onnx.numpy_helper.from_array(FEEDS["x"], "w"))
    program = burnish.compile(model, loss="mse", optimizer="sgd")
    counts = {name: [node.op_type for node in getattr(program, name).graph] for name in ("step", "predict")}
    assert counts["step"].count("Gather") == 2
    assert not {"Concat", "Slice", "Split"} & set(counts["step"])
    assert "Gather" not in counts["predict"]
    batch = {"x": FEEDS["y"][:5, :ROWS], "targets": FEEDS["y"][:5]}
    states = []
    for engine in (OnnxRuntimeEngine(kernels=False), "reference"):
        session = burnish.Session(program, engine=engine)
        session.step(batch)
        states.append(session.state()["param/w"])
    np.testing.assert_allclose(*states, rtol=1e-6, atol=1e-7)
    assert np.abs(states[0] - FEEDS["x"]).max() > 1e-6
