"""Dimensions that the standard's inference leaves open."""

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
from burnish.importer.dimensions import name_reshaped_dimensions
from burnish.operators.attention import ATTENTION
from burnish.rewriting.recognize_attention import recognize_attention
from oracles.onnxruntime_outputs import onnxruntime_outputs
from oracles.rewritten import rewritten
from oracles.runtime_operators import Case, cases

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


MASKED = [case for case in cases() if case.op_type == "Attention" and case.name in ("unidirectional", "keys_causal", "ends")]


@pytest.mark.parametrize(
    ("length", "extent"),
    [
        ("n = Gather (s, one)", "M"),
        ("v = Slice (s, at, behind)\n n = Squeeze (v)", "M"),
        ("t = Shape <start = 1, end = 2> (x)\n i = Cast <to = 7> (t)\n n = Reshape (i, none)", "M"),
        ("g = Gather (s, one)\n n = Add (g, one)", None),
        ("n = ReduceProd <keepdims = 0> (s)", None),
    ],
    ids=["gather", "slice", "shape", "longer", "product"],
)
def test_what_counts_along_an_axis_has_its_extent(length: str, extent: str | None) -> None:
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18]> g (float[N, M] x) => (int64[K] y, int64[L] z)
    <int64 zero = {{0}}, int64 one = {{1}}, int64[1] at = {{1}}, int64[1] behind = {{2}}, int64[0] none = {{}}> {{
        s = Shape (x)
        {length}
        counted = Range (zero, n, one)
        later = Range (one, n, one)
        y = Neg (counted)
        z = Neg (later)
    }}""")
    graph = burnish.load(model).graph
    made = {output.name: output.shape for node in graph for output in node.outputs}
    assert (str(made["counted"]) == "[M]") == (extent is not None)
    assert str(made["later"]) != "[M]"


@pytest.mark.parametrize("case", MASKED, ids=str)
def test_attention_with_an_open_length_is_recognized(case: Case) -> None:
    file = case.model(symbolic=True)
    file.graph.input[0].type.tensor_type.shape.dim[1].ClearField("dim_value")
    model = rewritten(recognize_attention, burnish.load(file))
    assert any(ATTENTION.is_of(node) for node in model.graph)


HEADER = '<ir_version: 10, opset_import: ["": 18]>\n'


def loaded_with(graph: str):
    return burnish.load(onnx.parser.parse_model(f"{HEADER}{graph}"))


def shapes(model) -> dict[str, list]:
    values = (output for node in model.graph for output in node.outputs)
    return {value.name: [dim if isinstance(dim, int) else dim.value for dim in value.shape.dims] for value in values}


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("[batch, 6, 4]", "-1, 4", ["6*batch", 4]),
        ("[batch, 6, 4]", "-1, 24", ["batch", 24]),
        ("[batch, 6, 4]", "-1, 48", ["1/2*batch", 48]),
        ("[batch, 6, 4]", "4, -1, 3", [4, "2*batch", 3]),
    ],
)
def test_a_reshape_keeps_the_number_of_elements(source, target, expected):
    model = loaded_with(
        f"g (float{source} x) => (float y) <int64[{target.count(',') + 1}] s = {{{target}}}> {{ y = Reshape (x, s) }}"
    )
    assert shapes(model)["y"] == expected


def test_rows_are_put_back_to_the_batch_and_added():
    model = loaded_with("""
    g (float[batch, 6, 4] x) => (float y) <int64[2] rows = {-1, 4}, int64[3] back = {-1, 6, 4}> {
        r = Reshape (x, rows)
        a = Relu (r)
        b = Reshape (a, back)
        y = Add (x, b)
    }""")
    found = shapes(model)
    assert found["r"] == found["a"] == ["6*batch", 4]
    assert found["b"] == found["y"] == ["batch", 6, 4]


@pytest.mark.parametrize(
    ("source", "target"),
    [("[batch, length, 4]", "-1, 4"), ("[batch, 6, 4]", "-1, 0, 4")],
    ids=["two names", "an extent that is copied"],
)
def test_what_does_not_follow_keeps_a_name_of_its_own(source, target):
    model = loaded_with(
        f"g (float{source} x) => (float y) <int64[{target.count(',') + 1}] s = {{{target}}}> {{ y = Reshape (x, s) }}"
    )
    first = shapes(model)["y"][0]
    assert first == "batch" if target == "-1, 0, 4" else first.startswith("unk__")


def test_the_gradient_of_a_residual_around_rows_looks_for_no_shape_at_run_time():
    """As of GPT-2, whose dense layers take the rows of all sequences: what is added has one shape, and nothing is summed back."""
    numbers = ", ".join(f"{value:.2f}" for value in np.linspace(-1, 1, 16))
    source = onnx.parser.parse_model(f"""{HEADER}
    g (float[batch, 3, 4] x) => (float[batch, 3, 4] logits)
      <float[4, 4] w = {{{numbers}}}, float[3, 4] places = {{{"0.5, " * 11}0.5}},
       int64[2] rows = {{-1, 4}}, int64[3] back = {{-1, 3, 4}}>
    {{
        placed = Add (x, places)
        r = Reshape (placed, rows)
        product = MatMul (r, w)
        b = Reshape (product, back)
        logits = Add (placed, b)
    }}""")
    program = burnish.compile(source, loss="cross_entropy:class_axis=-1", optimizer="sgd", metrics=())
    kinds = {node.op_type for node in program.step.graph}
    assert "NonZero" not in kinds
    batch = {"x": np.ones((2, 3, 4), np.float32), "labels": np.ones((2, 3), np.int64)}
    with burnish.Session(program, engine="reference") as session:
        first = session.step(batch)["loss"]
        assert session.step(batch)["loss"] < first


def test_a_dimension_that_comes_back_under_its_own_name_stays():
    """Exporters write names such as unk__0 themselves, which look made up."""
    graph = "g (float[unk__0, 64] x, int64[1] flat, int64[2] back) => (float[unk__0, 64] y)"
    model = onnx.parser.parse_model(f"{HEADER}{graph} <float[unk__1] r> {{ r = Reshape (x, flat) y = Reshape (r, back) }}")
    read = ir.from_proto(model)
    name_reshaped_dimensions(read)
    assert shapes(read) == {"r": ["64*unk__0"], "y": ["unk__0", 64]}
