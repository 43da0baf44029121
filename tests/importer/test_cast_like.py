"""CastLike of a known dtype becomes Cast, with the same results."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime

import burnish

X = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)


def test_cast_like_becomes_a_cast_in_bodies_too():
    source = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["" : 18]>
        g (float[rows, 5] x, bool choice) => (float y) {
            half = Cast<to = 10>(x)
            close = CastLike(x, half)
            far = If (choice) <
                then_branch = then () => (float16[rows, 5] a) { a = CastLike(x, close) },
                else_branch = otherwise () => (float16[rows, 5] b) { b = Identity(close) }
            >
            y = CastLike(far, x)
        }
    """)
    loaded = burnish.load(source)
    assert [node.op_type for node in loaded.graph.all_nodes() if "Cast" in node.op_type] == ["Cast"] * 4
    for choice in (True, False):
        inputs = {"x": X, "choice": np.asarray(choice)}
        expected = onnxruntime.InferenceSession(source.SerializeToString()).run(["y"], inputs)[0]
        np.testing.assert_array_equal(burnish.engines.get("onnxruntime").run(loaded, inputs)["y"], expected)
