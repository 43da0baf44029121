"""Heads replaced, models cut and joined and renamed: what stays, what is new, and what is refused by name."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

import burnish
from burnish import surgery
from burnish.errors import ConfigurationError
from burnish.importer import load
from burnish.models import residual_network
from oracles.small_networks import CLASSES, Network, perceptron

FEATURES = 12


def array(model, name):
    return model.graph.initializers[name].const_value.numpy()


def gemm(transposed: bool) -> ir.Model:
    network = Network("gemm", [FEATURES])
    shape = (CLASSES, FEATURES) if transposed else (FEATURES, CLASSES)
    logits = network.builder.op(
        "Gemm",
        network.input,
        network.drawn("head.weight", *shape, fan_in=FEATURES),
        network.drawn("head.bias", CLASSES, fan_in=FEATURES),
        transB=int(transposed),
    )
    return network.model(network.builder.op("Softmax", logits, axis=1))


def convolution(reshaped: bool) -> ir.Model:
    network = Network("convolution", [FEATURES, 4, 4])
    builder = network.builder
    y = builder.op(
        "Conv",
        network.input,
        network.drawn("head.weight", CLASSES, FEATURES, 1, 1, fan_in=FEATURES),
        network.drawn("head.bias", CLASSES, fan_in=FEATURES),
    )
    y = builder.op("GlobalAveragePool", builder.op("Relu", y))
    y = builder.op("Reshape", y, builder.integers([-1, CLASSES])) if reshaped else builder.op("Flatten", y)
    return network.model(y)


def without_bias() -> ir.Model:
    network = Network("matrix", [FEATURES])
    return network.model(network.builder.op("MatMul", network.input, network.drawn("head.weight", FEATURES, CLASSES, fan_in=4)))


def turned() -> ir.Model:
    network = Network("turned", [FEATURES])
    weight = network.builder.op("Transpose", network.drawn("head.weight", CLASSES, FEATURES, fan_in=4), perm=[1, 0])
    bias = network.drawn("head.bias", CLASSES, fan_in=FEATURES)
    return network.model(network.builder.op("MatMul", network.input, weight) + bias)


HEADS = {
    "MatMul and Add": perceptron,
    "MatMul": without_bias,
    "MatMul of a transposed weight": turned,
    "Gemm": lambda: gemm(False),
    "transposed Gemm": lambda: gemm(True),
    "Conv and Flatten": lambda: convolution(False),
    "Conv and Reshape": lambda: convolution(True),
    "a residual network": lambda: residual_network(input_shape=(3, 8, 8), classes=CLASSES, width=4, blocks=(1, 1)),
}


@pytest.mark.parametrize("classes", [1, 3, CLASSES, 11])
@pytest.mark.parametrize("name", HEADS)
def test_a_head_of_another_size_runs_and_everything_else_keeps_its_bits(name, classes):
    source = load(HEADS[name]())
    changed = surgery.replace_head(source, classes)
    head = surgery.find_head(changed)
    assert head.classes == classes
    for other, value in changed.graph.initializers.items():
        if other not in head.initializers and other in source.graph.initializers:
            np.testing.assert_array_equal(value.const_value.numpy(), array(source, other))
    for initializer in head.initializers:
        drawn = array(changed, initializer)
        assert np.abs(drawn).max() <= 1 / np.sqrt(array(changed, head.initializers[0]).size // classes)
        assert len(np.unique(drawn)) == drawn.size
    entry = changed.graph.inputs[0]
    x = np.random.default_rng(0).standard_normal([3, *entry.shape.dims[1:]]).astype(np.float32)
    (result,) = ReferenceEvaluator(ir.to_proto(changed)).run(None, {entry.name: x})
    assert result.shape == (3, classes)
    assert changed.graph.outputs[0].shape.dims[1] == classes


@pytest.mark.parametrize(
    ("axes", "sizes"), [(None, [CLASSES, CLASSES, CLASSES, 6]), ([2, 3], [6, CLASSES]), ([3, 1], [CLASSES, CLASSES])]
)
def test_a_resize_behind_the_head_keeps_its_other_extents(axes, sizes):
    """The number of classes may be that of the samples, the rows or the columns too."""
    network = Network("segmentation", [FEATURES, 3, 3])
    builder = network.builder
    y = builder.op("Conv", network.input, network.drawn("head.weight", CLASSES, FEATURES, 1, 1, fan_in=FEATURES))
    options = {} if axes is None else {"axes": axes}
    y = builder.op("Resize", y, None, None, builder.integers(sizes), mode="nearest", **options)
    source = network.model(y)
    before, model = ReferenceEvaluator(ir.to_proto(source)), surgery.replace_head(source, 2)
    x = np.ones((CLASSES, FEATURES, 3, 3), np.float32)
    (expected,), (actual,) = before.run(None, {"x": x}), ReferenceEvaluator(ir.to_proto(model)).run(None, {"x": x})
    assert actual.shape == (CLASSES, 2, *expected.shape[2:])


def test_the_head_is_drawn_from_the_seed():
    weights = [array(surgery.replace_head(perceptron(), 7, seed=seed), "head.weight") for seed in (0, 0, 1)]
    np.testing.assert_array_equal(weights[0], weights[1])
    assert (weights[0] != weights[2]).any()


def test_a_model_with_a_new_head_trains():
    program = burnish.compile(surgery.replace_head(perceptron(), 3), optimizer="sgd:lr=0.1")
    rng = np.random.default_rng(0)
    batch = {"x": rng.standard_normal((6, FEATURES)).astype(np.float32), "labels": rng.integers(0, 3, 6)}
    with burnish.Session(program) as session:
        losses = [session.step(batch)["loss"] for _ in range(5)]
    assert losses[-1] < losses[0]


def tied() -> ir.Model:
    network = Network("tied", [CLASSES])
    weight = network.drawn("shared", CLASSES, CLASSES, fan_in=CLASSES)
    y = network.builder.op("MatMul", network.input, weight)
    return network.model(network.builder.op("MatMul", y, weight))


def computed() -> ir.Model:
    network = Network("computed", [FEATURES])
    y = network.builder.op("Concat", network.input, network.input, axis=1)
    return network.model(y)


def of_two_outputs() -> ir.Model:
    network = Network("two", [FEATURES])
    network.graph.outputs.append(network.builder.op("Relu", network.input).value)
    network.graph.outputs[0].name = "features"
    return network.model(network.dense("head", network.input, FEATURES, CLASSES))


REFUSED = {
    "no head": (lambda: surgery.replace_head(computed(), 3), r"stands .*Concat.* no Gemm, MatMul or 1 x 1 Conv"),
    "tied": (lambda: surgery.replace_head(tied(), 3), r"'shared' is not the head's alone: .*MatMul.* reads it too"),
    "two outputs": (lambda: surgery.replace_head(of_two_outputs(), 3), r"outputs 'features', 'logits': say which one"),
    "no such output": (lambda: surgery.replace_head(perceptron(), 3, output="logit"), r"no output 'logit' .did you mean"),
    "no classes": (lambda: surgery.replace_head(perceptron(), 0), r"classes=0"),
    "no weights": (lambda: surgery.replace_head(of_two_outputs(), 3, output="features"), r"nothing before the output 'features'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    make, message = REFUSED[name]
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_the_head_of_one_of_two_outputs():
    assert surgery.find_head(surgery.replace_head(of_two_outputs(), 3, output="logits"), "logits").classes == 3


def test_a_model_cut_at_a_value_or_a_node_computes_the_same_so_far():
    source = load(perceptron())
    tanh = next(node for node in source.graph if node.op_type == "Tanh")
    for at in (tanh.name, tanh.outputs[0].name):
        cut = surgery.truncate(source, at)
        assert sorted(cut.graph.initializers) == ["first.bias", "first.weight"]
        x = np.ones((2, FEATURES), np.float32)
        (result,) = ReferenceEvaluator(ir.to_proto(cut)).run(None, {"x": x})
        expected = np.tanh(x @ array(source, "first.weight") + array(source, "first.bias"))
        np.testing.assert_allclose(result, expected, rtol=1e-6)
    with pytest.raises(ConfigurationError, match=r"computes no value 'nowhere', nor has it a node"):
        surgery.truncate(source, "nowhere")


def test_a_cut_model_and_its_rest_are_the_whole():
    source = load(perceptron())
    relu = next(node for node in source.graph if node.op_type == "Relu")
    backbone = surgery.truncate(source, relu.name)
    network = Network("rest", [16], input_name="features")
    rest = network.model(network.dense("head", network.input, 16, CLASSES))
    joined = surgery.append(backbone, rest)
    x = np.random.default_rng(0).standard_normal((2, FEATURES)).astype(np.float32)
    (features,) = ReferenceEvaluator(ir.to_proto(backbone)).run(None, {"x": x})
    (logits,) = ReferenceEvaluator(ir.to_proto(joined)).run(None, {"x": x})
    np.testing.assert_allclose(logits, features @ array(rest, "head.weight") + array(rest, "head.bias"), rtol=1e-5)
    program = burnish.compile(joined, optimizer="sgd:lr=0.1")
    assert {"param/first.weight", "param/head.weight"} <= set(program.weights)


def test_names_that_both_models_have_are_told_apart():
    def part(name, features, classes):
        network = Network(name, [features])
        return network.model(network.dense("dense", network.input, features, classes))

    joined = surgery.append(part("one", 6, 4), part("two", 4, 3), {"x": "logits"})
    assert {"dense.weight", "two.dense.weight"} <= set(joined.graph.initializers)
    (result,) = ReferenceEvaluator(ir.to_proto(joined)).run(None, {"x": np.ones((2, 6), np.float32)})
    assert result.shape == (2, 3)
    with pytest.raises(ConfigurationError, match=r"'x' has shape .*, and 'logits' has"):
        surgery.append(part("one", 6, 4), part("two", 5, 3), {"x": "logits"})
    with pytest.raises(ConfigurationError, match=r"the first model has no output 'y'"):
        surgery.append(part("one", 6, 4), part("two", 4, 3), {"x": "y"})


def test_names_change_and_may_change_places():
    model = surgery.rename(perceptron(), {"x": "pixels", "first.bias": "second.bias", "second.bias": "first.bias"})
    source = load(perceptron())
    assert model.graph.inputs[0].name == "pixels"
    np.testing.assert_array_equal(array(model, "first.bias"), array(source, "second.bias"))
    for names, message in (({"y": "z"}, "has no 'y'"), ({"x": "logits"}, "'logits' is taken"), ({"x": ""}, "cannot become ''")):
        with pytest.raises(ConfigurationError, match=message):
            surgery.rename(perceptron(), names)


def of_opset(opset: int, body: str, name: str = "x", to: str = "y") -> onnx.ModelProto:
    signature = f"g{opset} (float[n, 4, h, w] {name}) => (float[n, 4, k, l] {to})"
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> {signature} {{ {body} }}')


OLD_POOL = "y = AveragePool <kernel_shape = [2, 2], strides = [2, 2], pads = [0, 0, 0, 0], ceil_mode = 1> (x)"
"""A node that means something else from opset 19 on."""


@pytest.mark.parametrize(
    ("first", "second", "opset"),
    [
        (of_opset(13, "y = Relu (x)"), of_opset(21, "z = Gelu (y)", "y", "z"), 21),
        (of_opset(21, "y = Gelu (x)"), of_opset(18, "z = Relu (y)", "y", "z"), 21),
        (of_opset(22, "y = Relu (x)"), of_opset(18, OLD_POOL.replace("y =", "z =").replace("(x)", "(y)"), "y", "z"), 18),
    ],
    ids=["raised", "the second raised", "lowered"],
)
def test_models_of_different_opsets_are_joined_in_one_that_both_keep_their_meaning_in(first, second, opset) -> None:
    joined = surgery.append(first, second)
    assert joined.opset_imports[""] == opset
    x = np.random.default_rng(0).normal(size=(2, 4, 6, 6)).astype(np.float32)
    y = ReferenceEvaluator(first).run(None, {"x": x})[0]
    expected = ReferenceEvaluator(second).run(None, {"y": y})[0]
    np.testing.assert_allclose(ReferenceEvaluator(ir.to_proto(joined)).run(None, {"x": x})[0], expected, rtol=1e-6)


def test_models_that_mean_something_else_in_each_others_opset_are_not_joined() -> None:
    gelu = of_opset(21, "z = Gelu (y)", "y", "z")
    with pytest.raises(ConfigurationError, match=r"of opset 18 and the second of 21, and AveragePool .* something else in the"):
        surgery.append(of_opset(18, OLD_POOL), gelu)
