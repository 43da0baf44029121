"""What the loss reads of a model: endings that are stepped over, those that are not and say so, and outputs by name."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import numpy_helper

import burnish
from burnish.errors import ConfigurationError, ObjectiveWarning
from oracles.combinations import diagonal, spread
from oracles.onnxruntime_outputs import onnxruntime_outputs

N, T, C, WIDTH = 3, 6, 4, 5
INTEGERS = {
    "rows": [-1, C],
    "column": [-1, 1],
    "image": [-1, C, 1, 1],
    "plane": [-1, C],
    "ones": [2, 3],
    "frames": [-1, T, C],
    "one": [1],
    "zero": [0],
    "last": [-1],
    "square": [-1, C, 2, 3],
    "most": [N - 1],
}
NUMBERS = {"low": 0.0, "high": 1.0, "unit": 1.0}


@dataclass(frozen=True)
class Ending:
    """What follows the logits ``z`` of a model, up to the output ``p``: nodes, and the shape that the file declares."""

    nodes: str
    shape: str
    opset: int = 18


WRITTEN_OUT = (
    "m = ReduceMax<keepdims = 0>(z, one) mk = Reshape(m, column) mx = Expand(mk, zs) d = Sub(z, mx) e = Exp(d) "
    "s = ReduceSum<keepdims = 0>(e, one) sk = Reshape(s, column) sx = Expand(sk, zs) p = Div(e, sx)"
)
CLASSES = {
    "Softmax": Ending("p = Softmax<axis = 1>(z)", "n, 4"),
    "Softmax, last axis": Ending("p = Softmax(z)", "n, 4"),
    "LogSoftmax": Ending("l = LogSoftmax<axis = 1>(z) p = Exp(l)", "n, 4"),
    "Identity": Ending("q = Softmax(z) p = Identity(q)", "n, 4"),
    "Reshape": Ending("q = Softmax(z) p = Reshape(q, rows)", "n, 4"),
    "Reshape to an image": Ending("q = Softmax(z) p = Reshape(q, image)", "n, 4, 1, 1"),
    "Reshape from an image": Ending("i = Reshape(z, image) q = Softmax<axis = 1>(i) p = Reshape(q, plane)", "n, 4"),
    "Squeeze": Ending("i = Reshape(z, image) q = Softmax<axis = 1>(i) p = Squeeze(q, ones)", "n, 4"),
    "Flatten": Ending("i = Reshape(z, image) q = Softmax<axis = 1>(i) p = Flatten(q)", "n, 4"),
    "Transpose": Ending("t = Transpose<perm = [1, 0]>(z) q = Softmax<axis = 0>(t) p = Transpose<perm = [1, 0]>(q)", "n, 4"),
    "Slice of samples": Ending("q = Softmax(z) p = Slice(q, zero, most, zero)", "k, 4"),
    "Cast": Ending("q = Softmax(z) h = Cast<to = 11>(q) p = Cast<to = 1>(h)", "n, 4"),
    "written out": Ending("zs = Shape(z) " + WRITTEN_OUT, "n, 4"),
    "written out, short": Ending("e = Exp(z) s = ReduceSum<keepdims = 1>(e, one) p = Div(e, s)", "n, 4"),
    "written out, then Reshape": Ending(
        "zs = Shape(z) " + WRITTEN_OUT.replace("p = Div", "q = Div") + " p = Reshape(q, rows)", "n, 4"
    ),
    "opset 12, all axes": Ending("i = Reshape(z, image) q = Softmax<axis = 1>(i) p = Reshape(q, plane)", "n, 4", opset=12),
    "opset 11": Ending("p = Softmax<axis = 1>(z)", "n, 4", opset=11),
}  # fmt: skip
YES_OR_NO = {
    "Sigmoid": Ending("p = Sigmoid(z)", "n, 4"),
    "Reshape": Ending("q = Sigmoid(z) p = Reshape(q, image)", "n, 4, 1, 1"),
    "Squeeze": Ending("i = Reshape(z, image) q = Sigmoid(i) p = Squeeze(q, ones)", "n, 4"),
    "Transpose": Ending("q = Sigmoid(z) p = Transpose<perm = [1, 0]>(q)", "4, n"),
    "Slice": Ending("q = Sigmoid(z) p = Slice(q, zero, most, one)", "n, 2"),
    "Cast": Ending("q = Sigmoid(z) h = Cast<to = 11>(q) p = Cast<to = 1>(h)", "n, 4"),
    "Flatten": Ending("i = Reshape(z, image) q = Sigmoid(i) p = Flatten(q)", "n, 4"),
    "written out": Ending("m = Neg(z) e = Exp(m) d = Add(e, unit) p = Div(unit, d)", "n, 4"),
}
FRAMES = {
    "Softmax": Ending("f = Reshape(z, frames) p = Softmax<axis = 2>(f)", "n, 6, 4"),
    "Reshape": Ending("q = Softmax(z) p = Reshape(q, frames)", "n, 6, 4"),
    "Transpose": Ending(
        "f = Reshape(z, frames) t = Transpose<perm = [1, 2, 0]>(f) q = Softmax<axis = 1>(t) p = Transpose<perm = [2, 0, 1]>(q)",
        "n, 6, 4",
    ),
    "opset 11, rank unknown": Ending("f = Reshape(z, wanted) p = Softmax<axis = 2>(f)", "n, 6, 4", opset=11),
}


PIXELS = {
    "activation": ("f = Reshape(z, frames) i = Transpose<perm = [0, 2, 1]>(f) p = {}<axis = 1>(i)", "n, 4, 6"),
    "Transpose": ("f = Reshape(z, frames) q = {}<axis = 2>(f) p = Transpose<perm = [0, 2, 1]>(q)", "n, 4, 6"),
    "Reshape and Transpose": ("q = {}<axis = 1>(z) f = Reshape(q, frames) p = Transpose<perm = [0, 2, 1]>(f)", "n, 4, 6"),
    "Unsqueeze": (
        "f = Reshape(z, frames) i = Transpose<perm = [0, 2, 1]>(f) q = {}<axis = 1>(i) p = Unsqueeze(q, last)",
        "n, 4, 6, 1",
    ),
    "Reshape": (
        "f = Reshape(z, frames) i = Transpose<perm = [0, 2, 1]>(f) q = {}<axis = 1>(i) p = Reshape(q, square)",
        "n, 4, 2, 3",
    ),
}


@pytest.fixture
def rng() -> np.random.Generator:
    """Numbers of a test's own: the same ones whichever tests ran before it."""
    return np.random.default_rng(7)


def ending_in(ending: Ending, rows: str = "n", double: bool = False) -> onnx.ModelProto:
    """A linear layer over x, followed by an ending; in float64 throughout where ``double``."""
    wanted = "" if "wanted" not in ending.nodes else ", int64[wanted_rank] wanted"
    nodes = ending.nodes
    if ending.opset < 13:
        nodes = nodes.replace("Squeeze(i, ones)", "Squeeze<axes = [2, 3]>(i)")
    dtype, name_of_dtype = (np.float64, "double") if double else (np.float32, "float")
    if double:
        nodes = nodes.replace("Cast<to = 1>", "Cast<to = 11>")
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {ending.opset}]> g ({name_of_dtype}[{rows}, {WIDTH}] x{wanted}) '
        f"=> ({name_of_dtype}[{ending.shape}] p) {{ z = Gemm(x, weight, bias) {nodes} }}"
    )
    read = {name for node in proto.graph.node for name in node.input}
    for name, integers in INTEGERS.items():
        if name in read:
            proto.graph.initializer.append(numpy_helper.from_array(np.array(integers, np.int64), name))
    for name, number in NUMBERS.items():
        if name in read:
            proto.graph.initializer.append(numpy_helper.from_array(dtype(number), name))
    rng = np.random.default_rng(1)
    weight, bias = 2 * rng.standard_normal((WIDTH, C)), rng.standard_normal(C)
    for name, array in (("weight", weight), ("bias", bias)):
        proto.graph.initializer.append(numpy_helper.from_array(array.astype(dtype), name))
    return proto


def probabilities(ending: Ending, feeds: dict[str, np.ndarray], rows: str = "n") -> np.ndarray:
    """What the file itself puts out, in float64: float32 has few digits left of 1 - p where p is near 1."""
    feeds = {name: array.astype(np.float64) if name == "x" else array for name, array in feeds.items()}
    return onnxruntime_outputs(burnish.load(ending_in(ending, rows, double=True)), feeds)["p"]


def picked(p: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return np.take_along_axis(p, np.expand_dims(labels, 1), axis=1)


def dice(p: np.ndarray, y: np.ndarray) -> float:
    p, y = (array.reshape(*array.shape[:2], -1) for array in (p, y))
    return float(np.mean(1 - (2 * (p * y).sum(-1) + 1) / (p.sum(-1) + y.sum(-1) + 1)))


CLASS_LOSSES: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "cross_entropy": lambda p, labels: float(np.mean(-np.log(picked(p, labels)))),
    "focal": lambda p, labels: float(np.mean(-((1 - picked(p, labels)) ** 2) * np.log(picked(p, labels)))),
}
BINARY_LOSSES: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "bce_with_logits": lambda p, y: float(np.mean(-(y * np.log(p) + (1 - y) * np.log(1 - p)))),
    "binary_focal": lambda p, y: float(np.mean(-(0.25 * y * (1 - p) ** 2 * np.log(p) + 0.75 * (1 - y) * p**2 * np.log(1 - p)))),
}


def evaluated(proto: onnx.ModelProto, loss: str, batch: dict[str, np.ndarray]) -> float:
    """The loss that a program reports, which must not warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = burnish.compile(proto, loss=loss, metrics=())
        with burnish.Session(program, engine="onnxruntime", threads=1) as session:
            session.step(batch)
            session.load_state(program.initial_state())
            return session.evaluate(batch)["loss"]


@diagonal(("ending", CLASSES), ("loss", CLASS_LOSSES), test=7)
def test_losses_over_classes_read_logits(ending: str, loss: str, rng: np.random.Generator) -> None:
    proto = ending_in(CLASSES[ending])
    x = rng.standard_normal((N, WIDTH)).astype(np.float32)
    p = probabilities(CLASSES[ending], {"x": x})
    labels = rng.integers(0, C, (p.shape[0], *p.shape[2:]))
    expected = CLASS_LOSSES[loss](p, labels)
    np.testing.assert_allclose(evaluated(proto, loss, {"x": x, "labels": labels}), expected, rtol=1e-5)


@pytest.mark.parametrize("loss", BINARY_LOSSES)
@pytest.mark.parametrize("ending", YES_OR_NO)
def test_losses_of_yes_or_no_read_logits(ending: str, loss: str, rng: np.random.Generator) -> None:
    proto = ending_in(YES_OR_NO[ending])
    x = rng.standard_normal((N, WIDTH)).astype(np.float32)
    p = probabilities(YES_OR_NO[ending], {"x": x})
    targets = rng.integers(0, 2, p.shape).astype(np.float32)
    expected = BINARY_LOSSES[loss](p, targets)
    np.testing.assert_allclose(evaluated(proto, loss, {"x": x, "targets": targets}), expected, rtol=1e-5)


@spread("ending", FRAMES, test=3)
def test_ctc_reads_logits(ending: str, rng: np.random.Generator) -> None:
    proto = ending_in(FRAMES[ending], rows="rows")
    x = rng.standard_normal((N * T, WIDTH)).astype(np.float32)
    feeds = {"x": x}
    if "wanted" in FRAMES[ending].nodes:
        feeds["wanted"] = np.array([N, T, C])
    p = probabilities(FRAMES[ending], feeds, rows="rows")
    labels, lengths = rng.integers(1, C, (N, 2)), np.array([2, 1, 2])
    expected = F.ctc_loss(
        torch.from_numpy(p).log().transpose(0, 1),
        torch.from_numpy(labels),
        torch.full((N,), T),
        torch.from_numpy(lengths),
    ).item()
    batch = {**feeds, "labels": labels, "input_lengths": np.full(N, T), "target_lengths": lengths}
    np.testing.assert_allclose(evaluated(proto, "ctc", batch), expected, rtol=1e-5)


@pytest.mark.parametrize("activation", ["Softmax", "Sigmoid"])
@pytest.mark.parametrize("ending", PIXELS)
def test_overlap_is_measured_on_logits(ending: str, activation: str, rng: np.random.Generator) -> None:
    nodes, shape = PIXELS[ending]
    nodes = nodes.format(activation)
    if activation == "Sigmoid":
        nodes = re.sub(r"Sigmoid<axis = \d>", "Sigmoid", nodes)
    whole = Ending(nodes, shape)
    proto = ending_in(whole, rows="rows")
    x = rng.standard_normal((N * T, WIDTH)).astype(np.float32)
    p = probabilities(whole, {"x": x}, rows="rows")
    labels = rng.integers(0, C, (N, *p.shape[2:]))
    target = np.moveaxis(np.eye(C)[labels], -1, 1)
    softmax = activation == "Softmax"
    batch = {"x": x, "labels": labels} if softmax else {"x": x, "targets": target.astype(np.float32)}
    np.testing.assert_allclose(evaluated(proto, "dice" if softmax else "binary_dice", batch), dice(p, target), rtol=1e-5)


PROBABILITIES = {
    "Clip": ("p = Clip(z, low, high)", "Clip"),
    "HardSigmoid": ("p = HardSigmoid(z)", "HardSigmoid"),
    "Softmax before a Concat": ("q = Softmax(z) p = Concat<axis = 0>(q, q)", "Softmax"),
    "Softmax over samples": ("p = Softmax<axis = 0>(z)", "Softmax"),
    "a class of a Softmax": ("q = Softmax(z) p = Slice(q, zero, most, one)", "Softmax"),
    "Sigmoid": ("p = Sigmoid(z)", "Sigmoid"),
    "mean of two": ("q = Softmax(z) r = Sigmoid(z) p = Mean(q, r)", "Softmax"),
    "complement": ("q = Sigmoid(z) p = Sub(unit, q)", "Sigmoid"),
    "shares": ("r = Softplus(z) s = ReduceSum(r, one) p = Div(r, s)", "Div"),
    "twice": ("q = Sigmoid(z) p = Softmax(q)", "Sigmoid"),
    "inside a branch": (
        "b = Greater(unit, low) p = If(b) <then_branch = t () => (float[n, 4] pt) { pt = Softmax(z) }, "
        "else_branch = e () => (float[n, 4] pe) { pe = Sigmoid(z) }>",
        "If",
    ),
}


@pytest.mark.parametrize("ending", PROBABILITIES)
def test_probabilities_that_are_not_stepped_over_are_named(ending: str) -> None:
    nodes, operator = PROBABILITIES[ending]
    proto = ending_in(Ending(nodes, "k, c"))
    message = rf"cross_entropy applies an activation itself.*{operator}.*bounds to \[0, 1\]"
    with pytest.warns(ObjectiveWarning, match=message):
        burnish.compile(proto, metrics=())


def test_the_remedy_that_a_warning_names_works() -> None:
    proto = ending_in(Ending("p = Clip(z, low, high)", "n, 4"))
    with pytest.warns(ObjectiveWarning, match=r"outputs='z'; any value of the model will do"):
        burnish.compile(proto, metrics=())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = burnish.compile(proto, outputs="z", metrics=())
    assert program.options["predictions"] == [{"output": "z", "reads": "z"}]


OPEN = {
    "linear": "p = Identity(z)",
    "ReLU": "p = Relu(z)",
    "a scaled Sigmoid": "q = Sigmoid(z) two = Add(unit, unit) p = Mul(q, two)",
    "clipped to another range": "up = Add(unit, unit) p = Clip(z, low, up)",
}


@pytest.mark.parametrize("ending", OPEN)
def test_other_endings_are_read_as_they_are(ending: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = burnish.compile(ending_in(Ending(OPEN[ending], "n, 4")), metrics=())
    assert program.options["predictions"][0]["reads"] == "p"


def test_a_loss_that_takes_probabilities_reads_them() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = burnish.compile(ending_in(YES_OR_NO["Sigmoid"]), loss="binary_cross_entropy", metrics=())
    assert program.options["predictions"][0]["reads"] == "p"


def test_numbers_that_prove_to_be_probabilities_draw_the_warning_at_the_first_step(rng: np.random.Generator) -> None:
    """A softmax whose exponentials are scaled first is no form that is recognized."""
    nodes = "two = Add(unit, unit) e = Exp(z) f = Mul(e, two) s = ReduceSum<keepdims = 1>(f, one) p = Div(f, s)"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = burnish.compile(ending_in(Ending(nodes, "n, 4")), metrics=())
    assert program.options["predictions"] == [{"output": "p", "reads": "p", "class_axis": 1}]
    batch = {"x": rng.standard_normal((N, WIDTH)).astype(np.float32), "labels": np.array([0, 1, 2])}
    with burnish.Session(program, engine="onnxruntime", threads=1) as session:
        with pytest.warns(ObjectiveWarning, match=r"the output 'p' that it reads lies in \[0, 1\] and sums to 1 along axis 1"):
            session.step(batch)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            session.step(batch)


def test_a_class_label_beside_the_scores_leaves_one_choice() -> None:
    proto = ending_in(CLASSES["Softmax"])
    proto.graph.node.append(onnx.helper.make_node("ArgMax", ["p"], ["label"], axis=1, keepdims=0))
    proto.graph.output.insert(0, onnx.helper.make_tensor_value_info("label", onnx.TensorProto.INT64, ["n"]))
    program = burnish.compile(proto, metrics=())
    assert program.options["predictions"] == [{"output": "p", "reads": "z"}]


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"no output 'zz'; it has 'p'; did you mean the value 'z'\?"):
        burnish.compile(ending_in(CLASSES["Softmax"]), outputs="zz")


PAIRS = {
    "one minus": "q = Slice(z, zero, one, one) s = Sigmoid(q) r = Sub(unit, s) p = Concat<axis = 1>(r, s)",
    "one minus, last axis": "q = Slice(z, zero, one, one) s = Sigmoid(q) r = Sub(unit, s) p = Concat<axis = -1>(r, s)",
    "of both signs": "q = Slice(z, zero, one, one) n = Neg(q) b = Concat<axis = 1>(n, q) p = Sigmoid(b)",
    "moved": "q = Slice(z, zero, one, one) s = Sigmoid(q) r = Sub(unit, s) b = Concat<axis = 1>(r, s) p = Identity(b)",
    "cast": "q = Slice(z, zero, one, one) s = Sigmoid(q) r = Sub(unit, s) b = Concat<axis = 1>(r, s) p = Cast<to = 1>(b)",
}


@diagonal(("ending", PAIRS), ("loss", CLASS_LOSSES), test=7)
def test_two_classes_of_one_logit_are_read_as_logits(ending: str, loss: str, rng: np.random.Generator) -> None:
    """As classical toolkits write the probabilities of no and yes."""
    whole = Ending(PAIRS[ending], "n, 2")
    x = rng.standard_normal((N, WIDTH)).astype(np.float32)
    labels = rng.integers(0, 2, N)
    p = probabilities(whole, {"x": x})
    expected = CLASS_LOSSES[loss](p, labels)
    np.testing.assert_allclose(evaluated(ending_in(whole), loss, {"x": x, "labels": labels}), expected, rtol=1e-5)


@pytest.mark.parametrize(
    "nodes",
    [
        "q = Slice(z, zero, one, one) s = Sigmoid(q) r = Sub(unit, s) p = Concat<axis = 1>(s, r)",  # yes before no
        "s = Sigmoid(z) r = Sub(unit, s) p = Concat<axis = 1>(r, s)",  # of four questions
        "q = Slice(z, zero, one, one) s = Sigmoid(q) u = Slice(z, one, most, one) t = Sigmoid(u) r = Sub(unit, t) "
        "p = Concat<axis = 1>(r, s)",  # of two logits
    ],
)
def test_what_looks_like_two_classes_of_one_logit(nodes: str) -> None:
    with pytest.warns(ObjectiveWarning, match=r"applies an activation itself.*Sigmoid.*bounds to \[0, 1\]"):
        burnish.compile(ending_in(Ending(nodes, "n, c")), metrics=())
