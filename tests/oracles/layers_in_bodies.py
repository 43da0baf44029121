"""Models whose layers stand in the branches of an If or in the body of a Scan, with a head after it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
import onnx.parser

BRANCHES = """<ir_version: 8, opset_import: ["": 18]>
g (float[N, 8] x, int64 mode) => (float[N, 3] logits) <int64 one = {1}> {
    c = Equal (mode, one)
    h = If (c) <
        then_branch = a () => (float[N, 8] wide_y) {wide_x = MatMul (x, wide_weight) wide_y = Tanh (wide_x)},
        else_branch = b () => (float[N, 8] narrow_y) {narrow_y = MatMul (x, narrow_weight)}
    >
    logits = MatMul (h, head_weight)
}"""
SCANNED = """<ir_version: 8, opset_import: ["": 18]>
g (float[N, 4, 8] x, float[N, 8] start) => (float[N, 3] logits) {
    f = MatMul (x, first_weight)
    xt = Transpose <perm = [1, 0, 2]> (f)
    last, all = Scan <num_scan_inputs = 1, body = step (float[N, 8] before, float[N, 8] now)
        => (float[N, 8] after, float[N, 8] given) {
        i = MatMul (now, input_weight)
        r = MatMul (before, hidden_weight)
        s = Add (i, r)
        after = Tanh (s)
        given = Identity (after)
    }> (start, xt)
    logits = MatMul (last, head_weight)
}"""
INSIDE = {"branches": ("wide_weight", "narrow_weight"), "scanned": ("input_weight", "hidden_weight")}
"""The weights that bodies alone read."""
OUTSIDE = {"branches": ("head_weight",), "scanned": ("first_weight", "head_weight")}


def model(kind: str, dtype: type = np.float32) -> onnx.ModelProto:
    """``branches`` or ``scanned``; layers are called as their weights, without ``_weight``."""
    text = {"branches": BRANCHES, "scanned": SCANNED}[kind]
    text = text if dtype is np.float32 else text.replace("float[", "double[")
    proto, generator = onnx.parser.parse_model(text), np.random.default_rng(4)
    for graph in _graphs(proto.graph):
        for node in graph.node:
            node.name = node.input[1].removesuffix("_weight") if node.op_type == "MatMul" else node.output[0]
    for name in (*OUTSIDE[kind], *INSIDE[kind]):
        array = generator.normal(size=(8, 3 if name == "head_weight" else 8)) * 0.4
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(dtype), name))
    return proto


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for attribute in (attribute for node in graph.node for attribute in node.attribute if attribute.HasField("g")):
        yield from _graphs(attribute.g)


def batch(kind: str, samples: int = 12) -> dict[str, np.ndarray]:
    """A batch with its labels; of ``branches`` the first is taken."""
    generator = np.random.default_rng(5)
    shape = (samples, 8) if kind == "branches" else (samples, 4, 8)
    own = {"mode": np.array(1)} if kind == "branches" else {"start": np.zeros((samples, 8), np.float32)}
    return {"x": generator.normal(size=shape).astype(np.float32), **own, "labels": np.arange(samples) % 3}
