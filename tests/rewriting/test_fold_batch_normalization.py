"""Folded batch normalization: the expected graph, and the same outputs on ONNX Runtime."""

from __future__ import annotations

import copy

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from burnish.importer import load
from burnish.rewriting.fold_batch_normalization import fold_batch_normalization
from oracles.onnxruntime_outputs import onnxruntime_outputs
from oracles.rewritten import rewritten

Arrays = dict[str, np.ndarray]
STATISTICS = ["bn.weight", "bn.bias", "bn.running_mean", "bn.running_var"]


def statistics(channels: int) -> Arrays:
    rng = np.random.default_rng(channels)
    arrays = [rng.normal(size=channels) + 1, rng.normal(size=channels), rng.normal(size=channels), rng.uniform(0.3, 2, channels)]
    return {name: array.astype(np.float32) for name, array in zip(STATISTICS, arrays, strict=True)}


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def build(
    nodes: list[onnx.NodeProto], weights: Arrays, shape: list[int | str], outputs: tuple[str, ...] = ("y",)
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def normalization(data: str, output: str = "y", **attributes: object) -> onnx.NodeProto:
    return helper.make_node("BatchNormalization", [data, *STATISTICS], [output], **attributes)


def compare(proto: onnx.ModelProto, x: np.ndarray, operators: list[str]) -> ir.Model:
    """Fold, compare the operators that are left and the outputs, and return the folded model."""
    model = load(proto)
    before = onnxruntime_outputs(model, {"x": x})
    folded = rewritten(fold_batch_normalization, model)
    assert folded is model
    assert [node.op_type for node in folded.graph] == operators
    onnx.checker.check_model(ir.to_proto(folded), full_check=True)
    after = onnxruntime_outputs(folded, {"x": x})
    assert list(before) == list(after)
    for name, array in before.items():
        assert np.abs(after[name] - array).max() <= 1e-5 * np.abs(array).max(), name
    return folded


def array(model: ir.Model, name: str) -> np.ndarray:
    tensor = model.graph.initializers[name].const_value
    assert tensor is not None
    return tensor.numpy()


LAYERS = {
    "Conv": (random(6, 4, 3, 3), {}),
    "grouped Conv": (random(6, 2, 3, 3), {"group": 2}),
    "depthwise Conv": (random(4, 1, 3, 3), {"group": 4}),
    "ConvTranspose": (random(4, 6, 3, 3), {"strides": [2, 2]}),
    "grouped ConvTranspose": (random(4, 3, 2, 2), {"group": 2}),
}


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("layer", LAYERS)
def test_convolutions(layer: str, with_bias: bool) -> None:
    weight, attributes = LAYERS[layer]
    op_type = layer.split()[-1]
    channels = weight.shape[1] * attributes.get("group", 1) if op_type == "ConvTranspose" else weight.shape[0]
    weights = {"conv.weight": weight, **statistics(channels)}
    operands = ["x", "conv.weight"]
    if with_bias:
        weights["conv.bias"] = random(channels)
        operands.append("conv.bias")
    proto = build(
        [helper.make_node(op_type, operands, ["c"], **attributes), normalization("c", epsilon=1e-3)], weights, ["n", 4, 7, 7]
    )
    folded = compare(proto, random(2, 4, 7, 7), [op_type])
    assert set(folded.graph.initializers) == {"conv.weight", "conv.bias"}
    assert folded.graph.outputs[0].name == "y"


@pytest.mark.parametrize("rank", [3, 5])
def test_one_and_three_dimensions(rank: int) -> None:
    weights = {"conv.weight": random(5, 2, *[3] * (rank - 2)), **statistics(5)}
    shape = [2, 2, *[6] * (rank - 2)]
    proto = build([helper.make_node("Conv", ["x", "conv.weight"], ["c"]), normalization("c")], weights, ["n", *shape[1:]])
    compare(proto, random(*shape), ["Conv"])


def test_numbers_are_those_of_float64_rounded_once() -> None:
    weights = {"conv.weight": random(5, 2, 3, 3), "conv.bias": random(5), **statistics(5)}
    nodes = [helper.make_node("Conv", ["x", "conv.weight", "conv.bias"], ["c"]), normalization("c", epsilon=1e-2)]
    folded = rewritten(fold_batch_normalization, load(build(nodes, weights, ["n", 2, 6, 6])))
    scale, bias, mean, variance = (weights[name].astype(np.float64) for name in STATISTICS)
    factor = scale / np.sqrt(variance + float(np.float32(1e-2)))
    expected = (weights["conv.weight"] * factor[:, None, None, None]).astype(np.float32)
    np.testing.assert_array_equal(array(folded, "conv.weight"), expected)
    expected = ((weights["conv.bias"] - mean) * factor + bias).astype(np.float32)
    np.testing.assert_array_max_ulp(array(folded, "conv.bias"), expected, maxulp=1)


@pytest.mark.parametrize("attributes", [{}, {"transB": 1}, {"alpha": 0.5, "beta": 2.0}, {"transB": 1, "beta": 0.0}])
@pytest.mark.parametrize("bias", [None, (5,), (1, 5), ()])
def test_dense(attributes: dict[str, float], bias: tuple[int, ...] | None) -> None:
    weights = {"fc.weight": random(5, 3) if attributes.get("transB") else random(3, 5), **statistics(5)}
    operands = ["x", "fc.weight"]
    if bias is not None:
        weights["fc.bias"] = random(*bias)
        operands.append("fc.bias")
    proto = build([helper.make_node("Gemm", operands, ["c"], **attributes), normalization("c")], weights, ["n", 3])
    folded = compare(proto, random(4, 3), ["Gemm"])
    assert set(folded.graph.initializers) == {"fc.weight", "fc.bias"}


@pytest.mark.parametrize("reverse", [False, True])
def test_dense_as_product_and_sum(reverse: bool) -> None:
    weights = {"weight": random(3, 5), "bias": random(5), **statistics(5)}
    terms = ["bias", "product"] if reverse else ["product", "bias"]
    nodes = [helper.make_node("MatMul", ["x", "weight"], ["product"]), helper.make_node("Add", terms, ["c"]), normalization("c")]
    folded = compare(build(nodes, weights, ["n", 3]), random(4, 3), ["MatMul", "Add"])
    assert set(folded.graph.initializers) == {"weight", "bias"}


def test_product_and_sum_whose_channels_are_not_last_stay() -> None:
    weights = {"weight": random(3, 5), "bias": random(5), **statistics(6)}
    nodes = [
        helper.make_node("MatMul", ["x", "weight"], ["product"]),
        helper.make_node("Add", ["product", "bias"], ["c"]),
        normalization("c"),
    ]
    compare(build(nodes, weights, ["n", 6, 3]), random(2, 6, 3), ["MatMul", "Add", "BatchNormalization"])


def test_bias_takes_the_normalizations_name_where_the_weight_tells_none() -> None:
    weights = {"onnx::Conv_7": random(5, 2, 3, 3), **statistics(5)}
    nodes = [helper.make_node("Conv", ["x", "onnx::Conv_7"], ["c"]), normalization("c")]
    folded = compare(build(nodes, weights, ["n", 2, 6, 6]), random(2, 2, 6, 6), ["Conv"])
    assert set(folded.graph.initializers) == {"onnx::Conv_7", "bn.bias"}


def test_bias_name_that_is_taken_is_not_given_again() -> None:
    weights = {"conv.weight": random(5, 2, 3, 3), "conv.bias": random(5, 1, 1), **statistics(5)}
    nodes = [
        helper.make_node("Conv", ["x", "conv.weight"], ["c"]),
        normalization("c", "z"),
        helper.make_node("Add", ["z", "conv.bias"], ["y"]),
    ]
    folded = compare(build(nodes, weights, ["n", 2, 6, 6]), random(2, 2, 6, 6), ["Conv", "Add"])
    assert set(folded.graph.initializers) == {"conv.weight", "conv.bias", "conv.bias_1"}
    np.testing.assert_array_equal(array(folded, "conv.bias"), weights["conv.bias"])


def test_shared_weight_is_copied_before_it_is_changed() -> None:
    weights = {"conv.weight": random(2, 2, 3, 3), "conv.bias": random(2), **statistics(2)}
    nodes = [
        helper.make_node("Conv", ["x", "conv.weight", "conv.bias"], ["a"], pads=[1, 1, 1, 1]),
        normalization("a", "b"),
        helper.make_node("Conv", ["b", "conv.weight", "conv.bias"], ["y"]),
    ]
    folded = compare(build(nodes, weights, ["n", 2, 6, 6]), random(2, 2, 6, 6), ["Conv", "Conv"])
    for name in ("conv.weight", "conv.bias"):
        np.testing.assert_array_equal(array(folded, name), weights[name])


def test_statistics_shared_by_two_layers() -> None:
    weights = {"a.weight": random(4, 2, 3, 3), "b.weight": random(4, 4, 3, 3), **statistics(4)}
    nodes = [
        helper.make_node("Conv", ["x", "a.weight"], ["a"]),
        normalization("a", "an"),
        helper.make_node("Conv", ["an", "b.weight"], ["b"]),
        normalization("b", "y"),
    ]
    folded = compare(build(nodes, weights, ["n", 2, 7, 7]), random(2, 2, 7, 7), ["Conv", "Conv"])
    assert set(folded.graph.initializers) == {"a.weight", "a.bias", "b.weight", "b.bias"}


def test_output_that_others_read_is_not_changed() -> None:
    weights = {"conv.weight": random(5, 2, 3, 3), **statistics(5)}
    nodes = [
        helper.make_node("Conv", ["x", "conv.weight"], ["c"]),
        normalization("c", "z"),
        helper.make_node("Add", ["z", "c"], ["y"]),
    ]
    compare(build(nodes, weights, ["n", 2, 6, 6]), random(2, 2, 6, 6), ["Conv", "BatchNormalization", "Add"])


def test_layer_whose_output_is_an_output_of_the_model() -> None:
    weights = {"conv.weight": random(5, 2, 3, 3), **statistics(5)}
    nodes = [helper.make_node("Conv", ["x", "conv.weight"], ["c"]), normalization("c")]
    compare(build(nodes, weights, ["n", 2, 6, 6], ("y", "c")), random(2, 2, 6, 6), ["Conv", "BatchNormalization"])


def test_training_mode_is_not_folded() -> None:
    weights = {"conv.weight": random(5, 2, 3, 3), **statistics(5)}
    normalize = helper.make_node("BatchNormalization", ["c", *STATISTICS], ["y", "m", "v"], training_mode=1)
    model = load(build([helper.make_node("Conv", ["x", "conv.weight"], ["c"]), normalize], weights, ["n", 2, 6, 6]))
    fold_batch_normalization(model)
    assert [node.op_type for node in model.graph] == ["Conv", "BatchNormalization"]


def test_statistics_that_cannot_be_folded_stay() -> None:
    weights = {"conv.weight": random(5, 2, 3, 3), **statistics(5)}
    weights["bn.running_var"][2] = -1
    nodes = [helper.make_node("Conv", ["x", "conv.weight"], ["c"]), normalization("c")]
    model = rewritten(fold_batch_normalization, load(build(nodes, weights, ["n", 2, 6, 6])))
    assert [node.op_type for node in model.graph] == ["Conv", "BatchNormalization"]


def test_half_precision_that_would_overflow_stays() -> None:
    weights = {"conv.weight": random(5, 2, 3, 3), **statistics(5)}
    weights["bn.weight"][:] = 6e4
    weights["bn.running_var"][:] = 1e-3
    weights = {name: value.astype(np.float16) for name, value in weights.items()}
    proto = build([helper.make_node("Conv", ["x", "conv.weight"], ["c"]), normalization("c")], weights, ["n", 2, 6, 6])
    for info in (*proto.graph.input, *proto.graph.output):
        info.type.tensor_type.elem_type = TensorProto.FLOAT16
    model = rewritten(fold_batch_normalization, load(proto))
    assert [node.op_type for node in model.graph] == ["Conv", "BatchNormalization"]


def test_weights_given_as_inputs_are_not_folded() -> None:
    weights = {"conv.weight": random(5, 2, 3, 3), **statistics(5)}
    proto = build([helper.make_node("Conv", ["x", "w"], ["c"]), normalization("c")], weights, ["n", 2, 6, 6])
    proto.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [5, 2, 3, 3]))
    before = copy.deepcopy(proto)
    model = rewritten(fold_batch_normalization, load(proto))
    assert [node.op_type for node in model.graph] == [node.op_type for node in before.graph.node]


def test_the_arrays_of_the_source_are_not_written_to() -> None:
    weights = {"conv.weight": random(5, 2, 3, 3), **statistics(5)}
    nodes = [helper.make_node("Conv", ["x", "conv.weight"], ["c"]), normalization("c")]
    source = load(build(nodes, weights, ["n", 2, 6, 6]))
    fold_batch_normalization(source.clone())
    np.testing.assert_array_equal(array(source, "conv.weight"), weights["conv.weight"])
    assert [node.op_type for node in source.graph] == ["Conv", "BatchNormalization"]


def following(op_type: str, weight: np.ndarray, with_bias: bool, **attributes: object) -> tuple[list[onnx.NodeProto], Arrays]:
    """A normalization with nothing before it that it could fold into, and a layer behind it."""
    channels = weight.shape[1] * attributes.get("group", 1) if op_type == "Conv" else 4  # type: ignore[operator]
    weights = {"layer.weight": weight, **statistics(channels)}
    operands = ["b", "layer.weight"]
    if with_bias:
        out = weight.shape[0] if op_type == "Conv" or attributes.get("transB") else weight.shape[1]
        weights["layer.bias"] = random(out)
        operands.append("layer.bias")
    nodes = [helper.make_node("Relu", ["x"], ["a"]), normalization("a", "b", epsilon=1e-3)]
    return [*nodes, helper.make_node(op_type, operands, ["y"], **attributes)], weights


FOLLOWING_CONVOLUTIONS = {
    "plain": (random(6, 4, 3, 3), {}),
    "strided, dilated": (random(6, 4, 2, 2), {"strides": [2, 2], "dilations": [2, 2]}),
    "grouped": (random(6, 2, 3, 3), {"group": 2}),
    "depthwise": (random(8, 1, 3, 3), {"group": 4}),
    "valid": (random(6, 4, 3, 3), {"auto_pad": "VALID"}),
    "zero pads": (random(6, 4, 3, 3), {"pads": [0, 0, 0, 0]}),
}


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("layer", FOLLOWING_CONVOLUTIONS)
def test_into_the_convolution_behind(layer: str, with_bias: bool) -> None:
    nodes, weights = following("Conv", FOLLOWING_CONVOLUTIONS[layer][0], with_bias, **FOLLOWING_CONVOLUTIONS[layer][1])
    folded = compare(build(nodes, weights, ["n", 4, 7, 7]), random(2, 4, 7, 7), ["Relu", "Conv"])
    assert set(folded.graph.initializers) == {"layer.weight", "layer.bias"}


@pytest.mark.parametrize("attributes", [{"pads": [1, 1, 1, 1]}, {"auto_pad": "SAME_UPPER"}, {"pads": [0, 0, 0, 1]}])
def test_a_convolution_that_pads_is_not_changed(attributes: dict[str, object]) -> None:
    nodes, weights = following("Conv", random(6, 4, 3, 3), True, **attributes)
    compare(build(nodes, weights, ["n", 4, 7, 7]), random(2, 4, 7, 7), ["Relu", "BatchNormalization", "Conv"])


def test_a_normalization_that_only_scales_folds_into_a_convolution_that_pads() -> None:
    nodes, weights = following("Conv", random(6, 4, 3, 3), False, pads=[1, 1, 1, 1])
    weights["bn.bias"][:] = weights["bn.running_mean"][:] = 0
    folded = compare(build(nodes, weights, ["n", 4, 7, 7]), random(2, 4, 7, 7), ["Relu", "Conv"])
    assert set(folded.graph.initializers) == {"layer.weight"}


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("transposed", [0, 1])
def test_into_the_dense_layer_behind(transposed: int, with_bias: bool) -> None:
    weight = random(6, 4) if transposed else random(4, 6)
    attributes = {"transB": transposed, "alpha": 0.5, "beta": 2.0}
    nodes, weights = following("Gemm", weight, with_bias, **attributes)
    folded = compare(build(nodes, weights, ["n", 4]), random(5, 4), ["Relu", "Gemm"])
    assert set(folded.graph.initializers) == {"layer.weight", "layer.bias"}


def test_a_transposed_operand_is_not_changed() -> None:
    weights = {"layer.weight": random(5, 6), **statistics(4)}
    nodes = [helper.make_node("Relu", ["x"], ["a"]), normalization("a", "b")]
    nodes.append(helper.make_node("Gemm", ["b", "layer.weight"], ["y"], transA=1))
    compare(build(nodes, weights, [5, 4]), random(5, 4), ["Relu", "BatchNormalization", "Gemm"])


@pytest.mark.parametrize("flatten", ["Flatten", "Reshape"])
def test_through_a_flatten(flatten: str) -> None:
    weights = {"layer.weight": random(6, 4 * 9), "layer.bias": random(6), **statistics(4)}
    nodes = [helper.make_node("Relu", ["x"], ["a"]), normalization("a", "b")]
    if flatten == "Reshape":
        weights["shape"] = np.asarray([-1, 36])
        nodes.append(helper.make_node("Reshape", ["b", "shape"], ["f"]))
    else:
        nodes.append(helper.make_node("Flatten", ["b"], ["f"]))
    nodes.append(helper.make_node("Gemm", ["f", "layer.weight", "layer.bias"], ["y"], transB=1))
    between = ["Flatten"] if flatten == "Flatten" else ["Constant", "Reshape"]  # the importer makes the shape a constant
    compare(build(nodes, weights, ["n", 4, 3, 3]), random(2, 4, 3, 3), ["Relu", *between, "Gemm"])


def test_a_reshape_that_mixes_channels_is_not_stepped_over() -> None:
    weights = {"layer.weight": random(18, 6), "shape": np.asarray([-1, 18]), **statistics(4)}
    nodes = [helper.make_node("Relu", ["x"], ["a"]), normalization("a", "b"), helper.make_node("Reshape", ["b", "shape"], ["f"])]
    nodes.append(helper.make_node("Gemm", ["f", "layer.weight"], ["y"]))
    compare(build(nodes, weights, ["n", 4, 3, 3]), random(2, 4, 3, 3), ["Relu", "BatchNormalization", "Reshape", "Gemm"])


def test_into_the_product_behind() -> None:
    nodes, weights = following("MatMul", random(4, 6), False)
    folded = compare(build(nodes, weights, ["n", 4]), random(5, 4), ["Relu", "MatMul", "Add"])
    assert set(folded.graph.initializers) == {"layer.weight", "layer.bias"}
    assert folded.graph.outputs[0].name == "y"


def test_into_the_product_and_sum_behind() -> None:
    nodes, weights = following("MatMul", random(4, 6), False)
    nodes[-1].output[0] = "m"
    nodes.append(helper.make_node("Add", ["layer.bias", "m"], ["y"]))
    weights["layer.bias"] = random(6)
    folded = compare(build(nodes, weights, ["n", 4]), random(5, 4), ["Relu", "MatMul", "Add"])
    assert set(folded.graph.initializers) == {"layer.weight", "layer.bias"}


def test_a_product_over_positions_is_not_changed() -> None:
    """Of [N, C, L] a product sums over L, and the channels are another axis."""
    nodes, weights = following("MatMul", random(4, 6), False)
    compare(build(nodes, weights, ["n", 4, 4]), random(2, 4, 4), ["Relu", "BatchNormalization", "MatMul"])


def test_a_normalization_that_several_layers_read_is_not_folded_forward() -> None:
    nodes, weights = following("Conv", random(4, 4, 1, 1), False)
    nodes[-1].output[0] = "c"
    nodes.append(helper.make_node("Add", ["b", "c"], ["y"]))
    compare(build(nodes, weights, ["n", 4, 7, 7]), random(2, 4, 7, 7), ["Relu", "BatchNormalization", "Conv", "Add"])


def test_a_nonlinearity_between_stops_folding() -> None:
    nodes, weights = following("Conv", random(6, 4, 1, 1), False)
    nodes[-1].input[0] = "r"
    nodes.insert(2, helper.make_node("Relu", ["b"], ["r"]))
    compare(build(nodes, weights, ["n", 4, 7, 7]), random(2, 4, 7, 7), ["Relu", "BatchNormalization", "Relu", "Conv"])


def test_a_weight_that_others_read_is_copied_before_it_is_folded_into() -> None:
    nodes, weights = following("Conv", random(4, 4, 1, 1), False)
    nodes[-1].output[0] = "c"
    nodes.append(helper.make_node("Conv", ["c", "layer.weight"], ["y"]))
    folded = compare(build(nodes, weights, ["n", 4, 7, 7]), random(2, 4, 7, 7), ["Relu", "Conv", "Conv"])
    np.testing.assert_array_equal(array(folded, "layer.weight"), weights["layer.weight"])


def test_the_layer_before_is_preferred() -> None:
    weights = {"first.weight": random(4, 4, 1, 1), "second.weight": random(5, 4, 1, 1), **statistics(4)}
    nodes = [
        helper.make_node("Conv", ["x", "first.weight"], ["c"]),
        normalization("c", "b"),
        helper.make_node("Conv", ["b", "second.weight"], ["y"]),
    ]
    folded = compare(build(nodes, weights, ["n", 4, 7, 7]), random(2, 4, 7, 7), ["Conv", "Conv"])
    np.testing.assert_array_equal(array(folded, "second.weight"), weights["second.weight"])


def test_one_behind_the_other() -> None:
    nodes, weights = following("Conv", random(6, 4, 3, 3), True)
    nodes[1].output[0] = "between"
    nodes.insert(2, normalization("between", "b"))
    compare(build(nodes, weights, ["n", 4, 7, 7]), random(2, 4, 7, 7), ["Relu", "Conv"])


def test_a_bias_that_does_not_fit_its_convolution_is_left_alone() -> None:
    """Such a file runs nowhere; it is not made one that runs."""
    nodes = [helper.make_node("Conv", ["x", "conv.weight", "conv.bias"], ["c"]), normalization("c")]
    weights = {"conv.weight": random(3, 2, 1, 1), "conv.bias": random(1), **statistics(3)}
    folded = rewritten(fold_batch_normalization, load(build(nodes, weights, [1, 2, 4, 4])))
    assert [node.op_type for node in folded.graph] == ["Conv", "BatchNormalization"]
