"""Forms of operators that a canonical model does not have."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import burnish
from burnish import engines
from burnish.engines.reference import ReferenceEngine
from burnish.engines.torch.engine import TorchEngine
from burnish.errors import ModelError, UnsupportedOperatorError
from burnish.importer import load
from oracles.onnxruntime_outputs import onnxruntime_outputs

ENGINES = ["onnxruntime", "torch", "reference"]
RNG = np.random.default_rng(0)


def parsed(text: str, opset: int = 28) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 13, opset_import: ["": {opset}]> {text}')


def run(source: onnx.ModelProto, engine: str, **feeds: np.ndarray) -> np.ndarray:
    program = burnish.compile(source, loss="mse", outputs="y")
    assert max(graph.opset_imports[""] for graph in program.graphs.values()) <= 26
    return burnish.Session(program, engine=engine).predict(feeds)["y"]


def blocks(x: np.ndarray, mode: str) -> np.ndarray:
    n, c, h, w = x.shape
    apart = x.reshape(n, c, h // 2, 2, w // 2, 2)
    order = (0, 3, 5, 1, 2, 4) if mode == "DCR" else (0, 1, 3, 5, 2, 4)
    return apart.transpose(order).reshape(n, c * 4, h // 2, w // 2)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("extents", ["N, 3, 4, 6", "N, C, H, W"])
@pytest.mark.parametrize("mode", ["DCR", "CRD"])
def test_blocks_whose_channel_comes_first_or_last(mode: str, extents: str, engine: str) -> None:
    x = RNG.normal(size=(2, 3, 4, 6)).astype(np.float32)
    source = parsed(f"""g (float[{extents}] x) => (float[N, k, l, m] y) <float[1] w = {{2}}> {{
        z = SpaceToDepth <blocksize = 2, mode = "{mode}"> (x) y = Mul (z, w) }}""")
    np.testing.assert_allclose(run(source, engine, x=x), 2 * blocks(x, mode), rtol=1e-6)
    cotangent = RNG.normal(size=(2, 12, 2, 3)).astype(np.float32)
    found = engines.get(engine).run(burnish.grad(source, "x"), {"x": x, "cotangent:y": cotangent})["grad:x"]
    # The blocks only change places: each element of the gradient is the cotangent at its place.
    places = blocks(np.arange(x.size).reshape(x.shape), mode)
    expected = np.zeros(x.size, np.float32)
    expected[places.reshape(-1)] = 2 * cotangent.reshape(-1)
    np.testing.assert_allclose(found, expected.reshape(x.shape), rtol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_remainder_of_fractions_has_the_sign_of_the_divisor(engine: str) -> None:
    x = np.array([[5.3, -5.3, 5.3, -5.3, 6.0, -6.0, 0.0]], np.float32)
    source = parsed("""g (float[N, 7] x) => (float[N, 7] y) <float[7] b = {3, 3, -3, -3, 3, -3, 3}, float[1] w = {1}> {
        z = Mod (x, b) y = Mul (z, w) }""")
    b = np.array([3, 3, -3, -3, 3, -3, 3], np.float32)
    np.testing.assert_allclose(run(source, engine, x=x), np.mod(x, b), rtol=1e-6)
    ones = np.ones((1, 5), np.float32)
    source = parsed("g (float[N, 5] x, float[5] b) => (float[N, 5] y) { y = Mod (x, b) }")
    feeds = {"x": x[:, :5] + 0.1, "b": b[:5], "cotangent:y": ones}
    gradient = engines.get(engine).run(burnish.grad(source, ["x", "b"]), feeds)
    np.testing.assert_array_equal(gradient["grad:x"], ones)
    np.testing.assert_array_equal(gradient["grad:b"], -np.floor(feeds["x"][0] / b[:5]))


@pytest.mark.parametrize("engine", ["onnxruntime", "torch"])
@pytest.mark.parametrize("stash", ["", "<stash_type = 1>"])
def test_a_range_of_sixteen_bits_is_computed_in_float32(stash: str, engine: str) -> None:
    """In its own type steps of 0.1 add up to another number of elements."""
    source = parsed(f"""g (float[N, 1] x, float16 start, float16 end, float16 by) => (float[N, k] y) <float[1] w = {{1}}> {{
        r = Range {stash} (start, end, by) f = Cast <to = 1> (r) s = Mul (x, w) y = Add (s, f) }}""")
    bounds = {name: np.array(number, np.float16) for name, number in {"start": 0, "end": 30, "by": 0.1}.items()}
    found = run(source, engine, x=np.zeros((1, 1), np.float32), **bounds)
    step = np.float32(np.float16(0.1))
    np.testing.assert_array_equal(found[0], (np.arange(len(found[0]), dtype=np.float32) * step).astype(np.float16))
    assert len(found[0]) == np.ceil(np.float32(30) / step)


def test_a_mode_that_is_not_known_is_named() -> None:
    source = parsed('g (float[N, 3, 4, 6] x) => (float[N, 12, 2, 3] y) { y = SpaceToDepth <blocksize = 2, mode = "RCD"> (x) }')
    with pytest.raises((UnsupportedOperatorError, ModelError), match=r"SpaceToDepth .*RCD"):
        burnish.load(source)


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


EVERY_ENGINE = {"reference": ReferenceEngine().run, "torch": lambda model, feeds: TorchEngine().load(model)(feeds)}
WINDOW = {"kernel_shape": [2, 2], "strides": [2, 2]}
ODD = np.random.default_rng(0).permutation(150).reshape(2, 3, 5, 5).astype(np.float32) / 10


def build(nodes: list[onnx.NodeProto], shape: tuple[int | str, ...], **constants: np.ndarray) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def check(model: onnx.ModelProto, x: np.ndarray, expected: np.ndarray, expected_gradient: np.ndarray, cotangent: np.ndarray):
    graph = burnish.grad(model, wrt="x", of="y")
    for run in (onnxruntime_outputs, *EVERY_ENGINE.values()):
        outputs = run(graph, {"x": x, "cotangent:y": cotangent})
        np.testing.assert_array_equal(outputs["y"], expected)
        np.testing.assert_array_equal(outputs["grad:x"], expected_gradient)


@pytest.mark.parametrize(("opset", "size"), [(9, 4), (11, 5), (22, 5)])
def test_indices_from_outside_count_positions_of_the_size_that_the_attributes_give(opset: int, size: int) -> None:
    """As in the standard's own case, test_maxunpool_export_with_output_shape."""
    x, indices = np.array([[[[5, 6], [7, 8]]]], np.float32), np.array([[[[5, 7], [13, 15]]]])
    cotangent = np.random.default_rng(1).normal(size=(1, 1, size, size)).astype(np.float32)
    expected = np.zeros_like(cotangent)
    expected[..., 1:4:2, 1:4:2] = x
    unpool = helper.make_node("MaxUnpool", ["x", "i", "s"], ["y"], **WINDOW)
    model = build([unpool], (1, 1, 2, 2), i=indices, s=np.array([1, 1, size, size]))
    model.opset_import[0].version = opset
    check(model, x, expected, cotangent[..., 1:4:2, 1:4:2], cotangent)


@pytest.mark.parametrize("shape", [(2, 3, 5, 5), ("n", 3, 5, 5), ("n", 3, "h", "w")])
@pytest.mark.parametrize("target", [5, 7])
def test_maxima_go_back_to_where_they_were(shape: tuple[int | str, ...], target: int) -> None:
    """Indices of a MaxPool over odd sizes count positions of what it read, not of the size that the attributes give."""
    pool = helper.make_node("MaxPool", ["x"], ["p", "i"], **WINDOW)
    if target == 5:
        sizes, constants = [helper.make_node("Shape", ["x"], ["s"])], {}
    else:
        sizes, constants = [], {"s": np.array([2, 3, target, target])}
    model = build([pool, *sizes, helper.make_node("MaxUnpool", ["p", "i", "s"], ["y"], **WINDOW)], shape, **constants)
    blocks = ODD[..., :4, :4].reshape(2, 3, 2, 2, 2, 2).transpose(0, 1, 2, 4, 3, 5).reshape(2, 3, 4, 4)
    kept = np.isin(ODD, blocks.max(-1))
    padding = [(0, 0), (0, 0), (0, target - 5), (0, target - 5)]
    cotangent = np.random.default_rng(1).normal(size=(2, 3, target, target)).astype(np.float32)
    check(model, ODD, np.pad(np.where(kept, ODD, 0), padding), np.where(kept, cotangent[..., :5, :5], 0), cotangent)


def test_an_output_shape_that_says_nothing_new_is_left_out() -> None:
    indices = np.array([[[[5, 7], [13, 15]]]])
    node = helper.make_node("MaxUnpool", ["x", "i", "s"], ["y"], **WINDOW)
    model = load(build([node], (1, 1, 2, 2), i=indices, s=np.array([1, 1, 4, 4])))
    assert [(node.op_type, len(node.inputs)) for node in model.graph if node.op_type != "Constant"] == [("MaxUnpool", 2)]


def test_of_elements_that_share_a_place_the_last_has_the_gradient() -> None:
    indices = np.array([[[[5, 7], [7, 15]]]])
    x, cotangent = np.arange(1, 5, dtype=np.float32).reshape(1, 1, 2, 2), np.arange(16, dtype=np.float32).reshape(1, 1, 4, 4)
    expected = np.zeros(16, np.float32)
    expected[[5, 7, 15]] = 1, 3, 4
    gradient = np.array([[[[5, 0], [7, 15]]]], np.float32)
    model = build([helper.make_node("MaxUnpool", ["x", "i"], ["y"], **WINDOW)], (1, 1, 2, 2), i=indices)
    check(model, x, expected.reshape(1, 1, 4, 4), gradient, cotangent)


ERRORS: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "no_shape": (
        {},
        ["p", "i"],
        r"has no output_shape, so that its output is 4×4, and its indices count .* 'x', which is 5×5",
    ),
    "too_small": ({}, ["p", "i", "s"], r"has output_shape 4×4, and its indices count positions of 5×5, which does not fit"),
    "by_column": ({"storage_order": 1}, ["p", "i", "s"], r"the indices of MaxPool 'pool' .*storage_order=1, and takes row-major"),
}


@pytest.mark.parametrize(("attributes", "operands", "match"), ERRORS.values(), ids=list(ERRORS))
def test_what_has_no_meaning_is_a_named_error(attributes: dict[str, Any], operands: list[str], match: str) -> None:
    pool = helper.make_node("MaxPool", ["x"], ["p", "i"], name="pool", **WINDOW, **attributes)
    unpool = helper.make_node("MaxUnpool", operands, ["y"], name="unpool", **WINDOW)
    with pytest.raises(ModelError, match=rf"MaxUnpool 'unpool' .*{match}"):
        load(build([pool, unpool], (2, 3, 5, 5), s=np.array([2, 3, 4, 4])))
