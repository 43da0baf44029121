"""What loops carry has the shape that it keeps from one iteration to the next, and no other."""

from __future__ import annotations

import re

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import burnish
from burnish.errors import ConfigurationError
from burnish.importer import dimensions as loop_shapes
from burnish.importer import load
from oracles.onnxruntime_outputs import onnxruntime_outputs

TEXT = """<ir_version: 10, opset_import: ["": 18]>
g (float[n, 3] x, int64 count) => (float[] y) <bool yes = {1}, int64[1] first = {0},
    float[3, 3] w = {1, 0, 2, 0, 1, 0, 3, 0, 1}> {
    h = Loop (count, yes, x) <body = step (int64 i, bool go, float[] s) => (bool on, float[] t) { on = Identity (go) BODY }>
    y = Relu (h)
}"""


def loaded(body: str) -> ir.Model:
    return load(onnx.parser.parse_model(TEXT.replace("BODY", body)))


def carried(model: ir.Model) -> tuple[str, ...]:
    """The shapes of a state in the body, after the loop, and of what is computed of that."""
    node = next(node for node in model.graph if node.op_type == "Loop")
    entering = node.attributes["body"].as_graph().inputs[2]
    shapes = (entering.shape, node.outputs[0].shape, model.graph.outputs[0].shape)
    return tuple(re.sub(r"unk__\d+|\w+_dim_\d", "None", str(shape)) for shape in shapes)


@pytest.mark.parametrize(
    ("body", "shape"),
    [
        ("t = MatMul (s, w)", "[n,3]"),
        ("t = Concat <axis = 0> (s, s)", "[None,3]"),
        ("u = Unsqueeze (s, first) t = Concat <axis = 0> (u, u)", "None"),
        ("z = Shape (s) f = Cast <to = 7> (i) p = Unsqueeze (f, first) u = Concat <axis = 0> (p, z) t = Reshape (s, z)", "[n,3]"),
    ],
    ids=["kept", "grows along an axis", "gains an axis", "by a shape of its own"],
)
def test_states(body: str, shape: str) -> None:
    assert carried(loaded(body)) == (shape,) * 3


def test_a_state_of_a_loop_in_a_loop() -> None:
    inner = """t = Loop (i, go, s) <body = inner (int64 j, bool h, float[] u) => (bool m, float[] v)
        { m = Identity (h) v = MatMul (u, w) }>"""
    model = loaded(inner)
    assert carried(model) == ("[n,3]",) * 3
    assert {str(output.shape) for node in model.graph.all_nodes() for output in node.outputs if node.op_type == "MatMul"} == {
        "[n,3]"
    }


def test_a_loop_that_no_shape_fits_is_left_to_the_runtime() -> None:
    """The second iteration multiplies another matrix than the first: with the first one's shape, that would be an error."""
    body = "v = Slice (s, first, rows, first) t = Transpose <perm = [1, 0]> (v)"
    text = TEXT.replace("int64[1] first = {0}", "int64[1] first = {0}, int64[1] rows = {2}").replace("[n, 3]", "[2, 3]")
    model = load(onnx.parser.parse_model(text.replace("BODY", body)))
    assert carried(model) == ("[None,None]",) * 3


def test_axes_that_a_body_reads_from_around_it() -> None:
    """The standard's inference sees no constant of the graph around a body."""
    model = loaded("u = Unsqueeze (s, first) t = Squeeze (u, first)")
    assert carried(model) == ("[n,3]",) * 3
    assert [value.name for node in model.graph.all_nodes() for value in node.inputs if node.op_type == "Unsqueeze"] == [
        "s",
        "first",
    ]


@pytest.mark.parametrize("kind", ["input", "output"])
def test_a_sequence_is_not_differentiated(kind: str) -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
g (seq(float[n]) a, float[n] x, int64 i) => (seq(float[n]) b, float[n] y) { b = SequenceInsert (a, x) y = SequenceAt (a, i) }""")
    message = {"input": "wrt: 'a' is .*only tensors have", "output": "of: the output 'b' is .*only tensors are"}[kind]
    with pytest.raises(ConfigurationError, match=message):
        burnish.grad(model, *(("a", "y") if kind == "input" else ("x", "b")))


@pytest.mark.parametrize("trips", [0, 2])
def test_a_gradient_through_a_growing_state(trips: int) -> None:
    """What the backward pass does not read need not be of one shape."""
    proto = onnx.parser.parse_model(
        TEXT.replace("BODY", "t = Concat <axis = 1> (s, s)").replace("y = Relu (h)", "y = ReduceSum <keepdims = 0> (h)")
    )
    model = burnish.grad(proto, "x")
    x = np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32)
    found = onnxruntime_outputs(model, {"x": x, "count": np.array(trips)})
    np.testing.assert_allclose(found["grad:x"], np.full((2, 3), 2**trips), rtol=1e-6)


def chain(length: int, between: str = "Identity (HERE)", first: str = "t0 = MatMul (s0, w)") -> onnx.ModelProto:
    """Loops one after the other, each over what the one before gives, with an operator between them."""
    loops = []
    for i in range(length):
        body = first if i == 0 else f"t{i} = MatMul (s{i}, w)"
        loops.append(f"""
            h{i} = Loop (count, yes, x{i}) <body = b{i} (int64 i{i}, bool go{i}, float[] s{i}) => (bool on{i}, float[] t{i})
                {{ on{i} = Identity (go{i}) {body} }}>
            x{i + 1} = {between.replace("HERE", f"h{i}")}""")
    return onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 18]>
        g (float[n, 3] x0, int64 count) => (float[] y) <bool yes = {{1}}, float[3, 3] w = {{1, 0, 2, 0, 1, 0, 3, 0, 1}}> {{
            {" ".join(loops)} y = Relu (x{length})
        }}""")


@pytest.mark.slow
@pytest.mark.parametrize("between", ["Identity (HERE)", "Tanh (HERE)", "MatMul (HERE, w)"])
def test_a_chain_of_any_length(between: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = []
    infer = loop_shapes.infer_shapes
    monkeypatch.setattr(loop_shapes, "infer_shapes", lambda *given, **named: rounds.append(named) or infer(*given, **named))
    model = load(chain(30, between))
    assert {str(node.outputs[0].shape) for node in model.graph if node.op_type == "Loop"} == {"[n,3]"}
    assert str(model.graph.outputs[0].shape) == "[n,3]"
    assert len(rounds) < 30  # one walk carries the shape along the chain, not each round to the next link


@pytest.mark.slow
def test_a_loop_that_grows_does_not_take_the_shapes_of_the_others() -> None:
    model = load(chain(20, first="t0 = Concat <axis = 0> (s0, s0)"))
    shapes = [re.sub(r"unk__\d+", "None", str(node.outputs[0].shape)) for node in model.graph if node.op_type == "Loop"]
    assert shapes == ["[None,3]"] * 20
