"""What hangs on constants alone is folded, bit for bit; what is drawn, too large or rounded otherwise elsewhere stays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import burnish
from burnish.importer import load
from burnish.rewriting.fold_constants import fold_constants
from oracles.kernel_graphs import kernel_graphs
from oracles.onnxruntime_outputs import onnxruntime_outputs
from oracles.rewritten import rewritten

HEADER = '<ir_version: 10, opset_import: ["": 18]>\n'


def loaded(text: str, **initializers: np.ndarray) -> ir.Model:
    model = onnx.parser.parse_model(HEADER + text)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in initializers.items())
    return load(model)


def kinds(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph if node.op_type != "Constant"]


TABLE = np.random.default_rng(0).normal(size=(48, 32)).astype(np.float32)


@pytest.mark.slow
def test_a_causal_mask_and_a_table_are_computed_once() -> None:
    model = loaded(
        """g (float[N, 32, 32] x) => (float[N, 32, 32] y) {
    steps = Range (zero, extent, one)
    rows = Unsqueeze (steps, one_axis)
    columns = Unsqueeze (steps, zero_axis)
    later = Less (rows, columns)
    mask = Where (later, low, high)
    turned = Transpose <perm = [1, 0]> (table)
    part = Slice (turned, zero_axis, extents, one_axis)
    scaled = Mul (part, third)
    added = Add (x, mask)
    y = Add (added, scaled)
}""",
        zero=np.int64(0),
        extent=np.int64(32),
        one=np.int64(1),
        zero_axis=np.array([0]),
        one_axis=np.array([1]),
        extents=np.array([32]),
        low=np.float32(-1e4),
        high=np.float32(0),
        third=np.float32(1 / 3),
        table=TABLE,
    )
    x = np.random.default_rng(1).normal(size=(2, 32, 32)).astype(np.float32)
    before = onnxruntime_outputs(model, {"x": x})["y"]
    folded = rewritten(fold_constants, model.clone())
    assert kinds(folded) == ["Add", "Add"]
    assert {"mask", "scaled"} <= {output.name for node in folded.graph for output in node.outputs}
    np.testing.assert_array_equal(onnxruntime_outputs(folded, {"x": x})["y"], before)
    np.testing.assert_array_equal(burnish.engines.get("torch").run(folded, {"x": x})["y"], before)


@pytest.mark.parametrize(
    ("nodes", "stays"),
    [
        ("c = RandomNormal <shape = [4]> ()", "RandomNormal"),
        ("c = RandomUniformLike (v)", "RandomUniformLike"),
        ("c = Bernoulli (v)", "Bernoulli"),
        ("d, m = Dropout (v, half, yes) c = Abs (d)", "Dropout"),
        ("c = Exp (v)", "Exp"),
        ("n = Size (v) c = HannWindow (n)", "HannWindow"),
        ("s = ReduceSum <keepdims = 1> (v) c = Abs (s)", "ReduceSum"),
        ("big = ConstantOfShape (large) c = ReduceMax <keepdims = 0> (big)", "ConstantOfShape"),
        ("wide = Expand (v, wider) c = ReduceMax <keepdims = 0> (wide)", "Expand"),
        ("i = Cast <to = 7> (beyond) c = Cast <to = 1> (i)", "Cast"),
        ("q = Div (negative, three) f = Cast <to = 1> (q) c = ReduceMax <keepdims = 0> (f)", "Div"),
    ],
)
def test_what_stays(nodes: str, stays: str) -> None:
    model = loaded(
        f"g (float[N, 4] x) => (float[N, M] y) {{ {nodes} y = Add (x, c) }}",
        v=np.float32([0.1, 0.2, 0.3, 0.4]),
        half=np.float32(0.5),
        yes=np.array(True),
        large=np.array([2000]),
        wider=np.array([2000, 4]),
        beyond=np.float32([1e30, 1, 2, 3]),
        negative=np.array([-7, 1, 2, 3] * 20),
        three=np.array([3]),
    )
    assert stays in kinds(rewritten(fold_constants, model))


def test_outputs_and_bodies_stay() -> None:
    model = loaded(
        """g (bool c) => (float[4] y, float[4] z) {
    y = Neg (v)
    z = If (c) <then_branch = a () => (p) { p = Neg (v) }, else_branch = b () => (q) { q = Abs (v) }>
}""",
        v=np.float32([1, 2, 3, 4]),
    )
    assert kinds(rewritten(fold_constants, model)) == ["Neg", "If"]


@pytest.mark.slow
def test_training_graphs_are_folded_and_exports_are_not(tmp_path: Path) -> None:
    """A file keeps its own form: what it computes of constants is no constant when it is read again, and no weight."""
    proto = ir.to_proto(
        loaded(
            """g (float[N, 32] x) => (float[N, 48] y) {
    turned = Transpose <perm = [1, 0]> (ids)
    rows = Gather (weight, turned)
    flat = Reshape (rows, shape)
    y = MatMul (x, flat)
}""",
            ids=np.arange(48 * 2).reshape(48, 2) % 7,
            weight=np.random.default_rng(0).normal(size=(7, 16)).astype(np.float32),
            shape=np.array([32, 48]),
        )
    )
    program = burnish.compile(proto, loss="mse")
    for name in ("grad", "evaluate", "step"):
        assert "Transpose" not in {
            node.op_type for node in program.graphs[name].graph if node.inputs and node.inputs[0].name == "ids"
        }
    predicting = kernel_graphs(program, ("ReluGrad",), ("predict",))["predict"]
    assert kinds(predicting) == ["Gather", "Reshape", "MatMul"]
    session = burnish.Session(program)
    batch = {"x": np.ones((2, 32), np.float32), "targets": np.zeros((2, 48), np.float32)}
    session.step(batch)
    exported = ir.load(session.export(tmp_path / "tuned.onnx"))
    assert "Transpose" in kinds(exported)
