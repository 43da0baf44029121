"""Sums of padded parts that tile the whole: one concatenation afterwards, with the same results."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import burnish
from burnish.engines.onnxruntime import OnnxRuntimeEngine
from burnish.rewriting.concatenate_padded_parts import concatenate_padded_parts
from oracles.rewritten import rewritten

PARTS = {name: np.random.default_rng(index).standard_normal((2, extent), np.float32) for index, (name, extent) in enumerate(
    {"a": 2, "b": 3, "c": 1}.items()
)}  # fmt: skip


def parsed(nodes: str, outputs: str = "float[2, 6] y") -> ir.Model:
    """A model of the parts a [2, 2], b [2, 3] and c [2, 1]; ``pads`` constants say where each stands in [2, 6]."""
    constants = " ".join(
        f"{name} = Constant<value = int64[4] {{0, {begin}, 0, {end}}}>()"
        for name, (begin, end) in {"first": (0, 4), "middle": (2, 1), "last": (5, 0), "one_on": (1, 3)}.items()
    )
    filling = "zero = Constant<value = float {0.0}>() one = Constant<value = float {1.0}>()"
    inputs = "float[2, 2] a, float[2, 3] b, float[2, 1] c"
    text = f'<ir_version: 10, opset_import: ["" : 18]> g ({inputs}) => ({outputs}) {{ {constants} {filling} {nodes} }}'
    return ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))


def concatenations(nodes: str, outputs: str = "float[2, 6] y") -> int:
    """How many there are after the pass, which is checked to leave the results as they were."""
    expected = burnish.engines.get("reference").run(parsed(nodes, outputs), PARTS)
    model = rewritten(concatenate_padded_parts, parsed(nodes, outputs))
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    for name, array in OnnxRuntimeEngine(kernels=False).run(model, PARTS).items():
        np.testing.assert_array_equal(array, expected[name])
    return sum(node.op_type == "Concat" for node in model.graph)


PADDED = "p = Pad(a, first) q = Pad(b, middle, zero) r = Pad(c, last)"


@pytest.mark.parametrize("sums", ["s = Add(p, q) y = Add(s, r)", "s = Add(q, p) y = Add(r, s)", "s = Add(r, p) y = Add(s, q)"])
def test_parts_that_tile_the_whole_are_concatenated_in_their_order(sums):
    assert concatenations(f"{PADDED} {sums}") == 1


def test_a_sum_within_another_is_concatenated():
    assert concatenations(f"{PADDED} s = Add(p, q) t = Add(s, r) y = Mul(t, t)") == 1


@pytest.mark.parametrize(
    "nodes",
    {
        "a gap": "p = Pad(a, first) r = Pad(c, last) y = Add(p, r)",
        "an overlap": "p = Pad(a, one_on) q = Pad(b, middle) r = Pad(c, last) s = Add(p, q) y = Add(s, r)",
        "the same place twice": f"{PADDED} s = Add(p, q) t = Add(s, r) u = Add(t, q) y = Identity(u)",
        "other values between": "p = Pad(a, first, one) q = Pad(b, middle) r = Pad(c, last) s = Add(p, q) y = Add(s, r)",
        "another mode": "p = Pad<mode = \"edge\">(a, first) q = Pad(b, middle) r = Pad(c, last) s = Add(p, q) y = Add(s, r)",
        "another term": f"{PADDED} s = Add(p, q) o = Neg(q) t = Add(s, o) y = Add(t, r)",
    }.values(),
)  # fmt: skip
def test_what_does_not_tile_stays(nodes):
    assert concatenations(nodes) == 0


def test_a_part_that_is_read_elsewhere_stays():
    assert concatenations(f"{PADDED} s = Add(p, q) y = Add(s, r) z = Neg(q)", "float[2, 6] y, float[2, 6] z") == 0


def test_parts_that_are_broadcast_stay():
    constants = "one = Constant<value = int64[4] {0, 0, 0, 3}>() other = Constant<value = int64[4] {0, 3, 0, 0}>()"
    text = f"""<ir_version: 10, opset_import: ["" : 18]> g (float[2, 3] a, float[1, 3] b) => (float[2, 6] y)
        {{ {constants} p = Pad(a, one) q = Pad(b, other) y = Add(p, q) }}"""
    model = ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))
    assert [node.op_type for node in rewritten(concatenate_padded_parts, model).graph][-1] == "Add"


@pytest.mark.slow
def test_gates_in_another_order_are_put_back_by_one_concatenation():
    """As PyTorch's exporter orders the gates of a recurrent layer."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 18]>
        network (float[batch, 4] x) => (float[batch, 6] logits) <float[6, 4] w> {
            zero = Constant<value = int64[1] {0}>() two = Constant<value = int64[1] {2}>() end = Constant<value = int64[1] {6}>()
            first = Slice(w, zero, two, zero) second = Slice(w, two, end, zero)
            exchanged = Concat<axis = 0>(second, first)
            turned = Transpose<perm = [1, 0]>(exchanged)
            logits = MatMul(x, turned)
        }"""
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((6, 4), np.float32), "w"))
    program = burnish.compile(model, loss="cross_entropy", optimizer="sgd")
    assert "Pad" not in {node.op_type for node in program.step.graph}
