"""Sequences whose elements are known: the same results without them, and gradients through what stood behind them."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import burnish
from burnish.errors import ConfigurationError, ObjectiveWarning

X = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
SEQUENCE_OPERATORS = {"SequenceAt", "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceLength"}


def number(name: str, value: int | list[int]) -> onnx.TensorProto:
    return numpy_helper.from_array(np.asarray(value, np.int64), name)


def model(*nodes: onnx.NodeProto, columns: int | str = 5, **numbers: int | list[int]) -> onnx.ModelProto:
    """x [rows, columns] to y, by nodes that read constants by name."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", columns])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [number(name, value) for name, value in numbers.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def node(op_type: str, inputs: str, output: str, **attributes: int) -> onnx.NodeProto:
    return helper.make_node(
        op_type, [name if name != "-" else "" for name in inputs.split()], [output], name=f"{op_type}_{output}", **attributes
    )


def operators(loaded) -> set[str]:
    return {each.op_type for each in loaded.graph}


def check(source: onnx.ModelProto) -> set[str]:
    """Compare what is loaded with its source, and its gradient with differences; returns the operators that are left."""
    loaded = burnish.load(source)
    expected = onnxruntime.InferenceSession(source.SerializeToString()).run(["y"], {"x": X})[0]
    engine = burnish.engines.get("onnxruntime")
    np.testing.assert_array_equal(engine.run(loaded, {"x": X})["y"], expected)
    with_gradient = burnish.grad(source, wrt=["x"])
    cotangent = {"cotangent:y": np.ones_like(expected)} if expected.ndim else {}
    found = engine.run(with_gradient, {"x": X, **cotangent})
    gradient = next(array for name, array in found.items() if "grad" in name and array.shape == X.shape)
    session = onnxruntime.InferenceSession(source.SerializeToString())
    for place in np.ndindex(X.shape):
        moved = X.copy()
        moved[place] += 1
        difference = session.run(["y"], {"x": moved})[0].astype(np.float64).sum() - expected.astype(np.float64).sum()
        assert abs(gradient[place] - difference) < 1e-5
    return operators(loaded)


def pieces(*, split: int | list[int] | None, at: list[int], columns: int | str = 5, **attributes: int) -> onnx.ModelProto:
    """The pieces of x at some positions, added up as their sums."""
    numbers = {f"at{index}": position for index, position in enumerate(at)} | ({} if split is None else {"split": split})
    nodes = [node("SplitToSequence", "x" if split is None else "x split", "s", **attributes)]
    for index in range(len(at)):
        nodes += [
            node("SequenceAt", f"s at{index}", f"p{index}"),
            node("ReduceSum", f"p{index}", f"r{index}", keepdims=0),
        ]
    nodes.append(node("Sum", " ".join(f"r{index}" for index in range(len(at))), "y"))
    return model(*nodes, columns=columns, **numbers)


@pytest.mark.parametrize("at", [[0], [1, 2], [-1, 0, 0]], ids=str)
@pytest.mark.parametrize("split", [2, [2, 2, 1], [0, 4, 1]], ids=str)
def test_pieces_of_known_sizes_are_a_split(split, at):
    left = check(pieces(split=split, at=at, axis=1))
    assert "Split" in left
    assert not left & {"SplitToSequence", "SequenceAt"}


@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("at", [[0, 4], [-2, 1]], ids=str)
def test_rows_and_columns_of_their_own(at, keepdims):
    assert not check(pieces(split=None, at=at, axis=1, keepdims=keepdims)) & {"SplitToSequence", "SequenceAt"}


@pytest.mark.parametrize(("split", "keepdims"), [(2, 1), (None, 0), (None, 1)])
def test_pieces_of_an_axis_of_unknown_extent(split, keepdims):
    source = pieces(split=split, at=[0, 1], axis=0, **({"keepdims": keepdims} if split is None else {}))
    left = check(source)
    assert not left & {"SplitToSequence", "SequenceAt", "Split"}


def test_a_negative_position_in_pieces_of_an_unknown_number_stays():
    loaded = burnish.load(pieces(split=2, at=[-1], axis=0))
    assert {"SplitToSequence", "SequenceAt"} <= operators(loaded)


@pytest.mark.parametrize(("axis", "new_axis"), [(0, 0), (1, 0), (-1, 1), (0, 1)])
def test_a_sequence_that_is_joined_is_a_concatenation(axis, new_axis):
    source = model(
        node("Neg", "x", "a"),
        node("SequenceConstruct", "x a x", "s"),
        node("ConcatFromSequence", "s", "y", axis=axis, new_axis=new_axis),
    )
    left = check(source)
    assert "Concat" in left
    assert not left & SEQUENCE_OPERATORS


def test_a_list_that_was_put_together_one_by_one():
    source = model(
        helper.make_node("SequenceEmpty", [], ["s0"]),
        node("SequenceInsert", "s0 x", "s1"),
        node("Neg", "x", "a"),
        node("SequenceInsert", "s1 a zero", "s2"),
        node("Exp", "x", "b"),
        node("SequenceInsert", "s2 b", "s3"),
        node("SequenceErase", "s3 one", "s4"),
        node("SequenceLength", "s4", "count"),
        node("Cast", "count", "factor", to=TensorProto.FLOAT),
        node("SequenceAt", "s4 zero", "first"),
        node("Mul", "first factor", "y"),
        zero=0,
        one=1,
    )
    assert not check(source) & SEQUENCE_OPERATORS


def computed_position(*nodes: onnx.NodeProto) -> onnx.ModelProto:
    """The element 0 of the sequence s, the position of which is known only when the model runs."""
    return model(
        *nodes,
        node("Shape", "x", "shape"),
        node("Gather", "shape zero", "rows"),
        node("Sub", "rows rows1", "position"),
        node("SequenceAt", "s position", "y"),
        zero=0,
        rows1=3,
    )


def test_a_computed_position_chooses_among_elements_of_one_shape():
    left = check(computed_position(node("Neg", "x", "a"), node("SequenceConstruct", "x a", "s")))
    assert not left & SEQUENCE_OPERATORS


@pytest.mark.parametrize("keepdims", [0, 1])
def test_a_computed_position_chooses_among_the_rows_of_a_split(keepdims):
    left = check(computed_position(node("SplitToSequence", "x", "s", axis=0, keepdims=keepdims)))
    assert not left & SEQUENCE_OPERATORS


def test_a_computed_position_among_elements_of_several_shapes_stays():
    source = computed_position(node("Transpose", "x", "a"), node("SequenceConstruct", "x a", "s"))
    assert {"SequenceConstruct", "SequenceAt"} <= operators(burnish.load(source))


@pytest.mark.parametrize(("axis", "split"), [(0, 1), (-2, 2)])
def test_pieces_that_are_joined_again_are_what_was_split(axis, split):
    source = model(
        node("SplitToSequence", "x split", "s", axis=0),
        node("SequenceLength", "s", "count"),
        node("Cast", "count", "factor", to=TensorProto.FLOAT),
        node("ConcatFromSequence", "s", "joined", axis=axis),
        node("Mul", "joined factor", "y"),
        split=split,
    )
    assert not check(source) & (SEQUENCE_OPERATORS | {"SplitToSequence", "ConcatFromSequence"})


def test_a_map_over_a_sequence_is_a_loop():
    text = """<ir_version: 9, opset_import: ["": 18]> g (float[T,5] x) => (float[T,5] y) {
        s = SplitToSequence <axis = 0, keepdims = 0> (x)
        m = SequenceMap <body = b (float[5] row, float[T,5] all) => (float[5] r) { n = Neg (row) r = Sub (n, row) }> (s, x)
        y = ConcatFromSequence <axis = 0, new_axis = 1> (m) }"""
    source = onnx.parser.parse_model(text)
    assert not {name for name in check(source) if "Sequence" in name}


def test_a_position_that_is_not_there_is_left_to_who_runs_it():
    loaded = burnish.load(pieces(split=[2, 3], at=[2], axis=1))
    assert "SequenceAt" in operators(loaded)


@pytest.mark.parametrize("engine", ["onnxruntime", "torch"])
def test_layers_behind_pieces_train(engine):
    source = model(
        node("MatMul", "x w", "h"),
        node("SplitToSequence", "h split", "s", axis=1),
        node("SequenceAt", "s zero", "a"),
        node("SequenceAt", "s one", "b"),
        node("Sigmoid", "b", "gate"),
        node("Mul", "a gate", "y"),
        zero=0,
        one=1,
        split=2,
    )
    weight = np.random.default_rng(1).normal(size=(5, 4)).astype(np.float32)
    source.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    session = burnish.Session(burnish.compile(source, loss="mse", optimizer=burnish.optim.sgd(lr=0.1)), engine=engine)
    losses = [session.step({"x": X, "targets": np.ones((3, 2), np.float32)})["loss"] for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("engine", ["onnxruntime", "torch", "reference"])
@pytest.mark.parametrize(
    "body",
    [
        "h = MatMul (e, inner) r = Tanh (h)",
        """r = If (yes) <then_branch = one () => (float[n, 1] a) { h = MatMul (e, inner) a = Tanh (h) },
                        else_branch = two () => (float[n, 1] c) { c = Identity (e) }>""",
        """shape = Shape (x) count = ReduceProd <keepdims = 0> (shape) f = Cast <to = 1> (count)
           g = Div (e, f) h = MatMul (g, inner) r = Mul (h, f)""",
    ],
    ids=["weight", "in a branch", "weight and computed"],
)
def test_a_map_reads_what_is_around_it(body, engine):
    """A weight of a map can only be there; it trains."""
    source = onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["": 18]> g (float[rows, 5] x) => (float[rows, 2] y)
        <int64 one = {{1}}, bool yes = {{1}}, float[1, 1] inner = {{0.5}}, float[5, 2] w = {{1, 0, 2, -1, 0, 1, 1, 1, -1, 2}}> {{
        s = SplitToSequence <axis = 1> (x, one)
        m = SequenceMap (s) <body = each (float[n, 1] e) => (float[n, 1] r) {{ {body} }}>
        c = ConcatFromSequence <axis = 1> (m)
        y = MatMul (c, w) }}""")
    expected = onnxruntime.InferenceSession(source.SerializeToString()).run(None, {"x": X})[0]
    optimizer = burnish.optim.sgd(lr=1.0)
    session = burnish.Session(burnish.compile(source, loss="mse", optimizer=optimizer, trainable=["inner"]), engine=engine)
    np.testing.assert_allclose(session.predict({"x": X})["y"], expected, rtol=1e-5, atol=1e-6)
    targets = np.ones((3, 2), np.float32)
    session.step({"x": X, "targets": targets})
    factor, losses = float(0.5 - session.state()["param/inner"].item()), []
    weight = np.array([[1, 0], [2, -1], [0, 1], [1, 1], [-1, 2]])
    for moved in (1e-4, -1e-4):
        inside = X.astype(np.float64) * (0.5 + moved)
        y = (inside if "Div" in body else np.tanh(inside)) @ weight
        losses.append(((y - targets) ** 2).mean())
    assert abs(factor - (losses[0] - losses[1]) / 2e-4) < 1e-4


def test_a_sequence_that_is_an_input_is_refused_by_name():
    text = """<ir_version: 9, opset_import: ["": 18]> g (KIND(float[n, 5]) s, int64 i) => (float[n, 2] y)
        <float[5, 2] w = {1, 0, 2, -1, 0, 1, 1, 1, -1, 2}> { x = SequenceAt (s, i) y = MatMul (x, w) }"""
    with pytest.raises(ConfigurationError, match=r"input 's' is a sequence of tensors, .* an input for each element$"):
        burnish.compile(onnx.parser.parse_model(text.replace("KIND", "seq")), loss="mse")
    remedy = text.replace("KIND(float[n, 5]) s, int64 i", "float[n, 5] one, float[n, 5] two, int64 i").replace(
        "{ x =", "{ s = SequenceConstruct (one, two) x ="
    )
    session = burnish.Session(burnish.compile(onnx.parser.parse_model(remedy), loss="mse"))
    targets = np.zeros((3, 2), np.float32)
    assert session.step({"one": X, "two": 2 * X, "i": np.array(1), "targets": targets})["loss"] > 0


def test_a_sequence_that_is_an_output_is_left_out_with_a_warning():
    source = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["": 18]>
        g (float[n, 5] x) => (float[n, 2] y, seq(float[n, k]) parts)
        <float[5, 2] w = {1, 0, 2, -1, 0, 1, 1, 1, -1, 2}, int64 two = {2}> {
        y = MatMul (x, w) parts = SplitToSequence (x, two) }""")
    with pytest.warns(ObjectiveWarning, match=r"'parts', are left out of predictions .* with a tensor for each"):
        program = burnish.compile(source, loss="mse", outputs="y")
    for engine in ("onnxruntime", "torch", "reference"):
        assert set(burnish.Session(program, engine=engine).predict({"x": X})) == {"y"}
