"""Weights, statistics and constants are told by where they are used."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from burnish.importer import InitializerKind, classify_initializers, load
from torch_models import MobileNetV2, ResNet, export_onnx

WEIGHT, STATISTIC, CONSTANT = InitializerKind.WEIGHT, InitializerKind.STATISTIC, InitializerKind.CONSTANT


def kinds(
    *nodes: onnx.NodeProto, inputs: dict[str, list[int | str]] | None = None, output: str = "y", **initializers: np.ndarray
) -> dict[str, InitializerKind]:
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in (inputs or {"x": ["n", 3]}).items()],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in initializers.items()],
    )
    return classify_initializers(load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)))


def floats(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


IMAGE: dict[str, list[int | str]] = {"x": ["n", 3, 8, 8]}


def test_every_parameter_of_a_residual_network() -> None:
    module = ResNet((1, 1), 8, 10)
    found = classify_initializers(load(export_onnx(module, torch.randn(2, 3, 32, 32))))
    expected = {name: WEIGHT for name, _ in module.named_parameters()}
    expected |= {name: STATISTIC for name, buffer in module.named_buffers() if buffer.ndim}
    assert found == expected


def test_every_parameter_of_a_mobile_network() -> None:
    module = MobileNetV2(((1, 16, 1, 1), (6, 24, 2, 2)), classes=10)
    found = classify_initializers(load(export_onnx(module, torch.randn(2, 3, 32, 32))))
    assert {name for name, kind in found.items() if kind is WEIGHT} == {name for name, _ in module.named_parameters()}


def test_names_say_nothing() -> None:
    found = kinds(
        helper.make_node("BatchNormalization", ["x", "running_mean", "running_var", "weight", "bias"], ["y"]),
        inputs=IMAGE,
        running_mean=floats(3),
        running_var=floats(3),
        weight=floats(3),
        bias=floats(3),
    )
    assert found == {"running_mean": WEIGHT, "running_var": WEIGHT, "weight": STATISTIC, "bias": STATISTIC}


def test_statistics_that_are_also_read_elsewhere_are_statistics() -> None:
    found = kinds(
        helper.make_node("BatchNormalization", ["x", "s", "b", "m", "v"], ["normal"]),
        helper.make_node("Reshape", ["m", "shape"], ["column"]),
        helper.make_node("Add", ["normal", "column"], ["y"]),
        inputs=IMAGE,
        s=floats(3),
        b=floats(3),
        m=floats(3),
        v=floats(3),
        shape=np.array([3, 1, 1]),
    )
    assert found == {"s": WEIGHT, "b": WEIGHT, "m": STATISTIC, "v": STATISTIC, "shape": CONSTANT}


CONFIGURATION = {
    "Clip": (["x", "c", "c"], {"c": np.float32(1)}),
    "Pow": (["x", "c"], {"c": floats(3)}),
    "Pad": (["x", "i", "c"], {"i": np.zeros(8, np.int64), "c": np.float32(1)}),
    "Resize": (["x", "", "c"], {"c": floats(4)}),
    "Dropout": (["x", "c"], {"c": np.float32(0.5)}),
    "QuantizeLinear": (["x", "c", "i"], {"c": floats(3), "i": np.zeros(3, np.uint8)}),
}


@pytest.mark.parametrize("op_type", CONFIGURATION)
def test_operands_that_configure_are_constants(op_type: str) -> None:
    operands, initializers = CONFIGURATION[op_type]
    nodes = [helper.make_node(op_type, operands, ["z"], **({"axis": 3} if op_type == "QuantizeLinear" else {}))]
    if op_type == "QuantizeLinear":
        nodes.append(helper.make_node("DequantizeLinear", ["z", "c", "i"], ["y"], axis=3))
    else:
        nodes.append(helper.make_node("Relu", ["z"], ["y"]))
    found = kinds(*nodes, inputs={"x": ["n", 1, 2, 3]}, **initializers)
    assert set(found.values()) == {CONSTANT}


def test_scalars_are_constants_and_vectors_weights() -> None:
    found = kinds(
        helper.make_node("Add", ["x", "epsilon"], ["a"]),
        helper.make_node("Mul", ["a", "scale"], ["y"]),
        epsilon=np.float32(1e-5),
        scale=floats(1),
    )
    assert found == {"epsilon": CONSTANT, "scale": WEIGHT}


def test_embedding_and_its_indices() -> None:
    found = kinds(
        helper.make_node("Gather", ["table", "indices"], ["rows"]),
        helper.make_node("Add", ["x", "rows"], ["y"]),
        table=floats(10, 3),
        indices=np.array([4]),
    )
    assert found == {"table": WEIGHT, "indices": CONSTANT}


def test_weight_behind_operators_that_pass_it_on() -> None:
    found = kinds(
        helper.make_node("Transpose", ["w"], ["wt"]),
        helper.make_node("Cast", ["wt"], ["wide"], to=TensorProto.DOUBLE),
        helper.make_node("Cast", ["wide"], ["narrow"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["x", "narrow"], ["y"]),
        w=floats(2, 3),
    )
    assert found == {"w": WEIGHT}


def test_what_reaches_only_integers_or_nothing_is_constant() -> None:
    found = kinds(
        helper.make_node("Greater", ["x", "threshold"], ["above"]),
        helper.make_node("Cast", ["above"], ["y"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["x", "aside"], ["unused"]),
        threshold=floats(3),
        aside=floats(3),
    )
    assert found == {"threshold": CONSTANT, "aside": CONSTANT}


def test_weights_that_a_branch_reads() -> None:
    branches = {}
    for name, op_type in (("then_branch", "MatMul"), ("else_branch", "Identity")):
        operands = ["x", "w"] if op_type == "MatMul" else ["x"]
        output = helper.make_tensor_value_info(name + "_y", TensorProto.FLOAT, ["n", 3])
        branches[name] = helper.make_graph([helper.make_node(op_type, operands, [output.name])], name, [], [output])
    found = kinds(
        helper.make_node("ReduceSum", ["x"], ["total"], keepdims=0),
        helper.make_node("Greater", ["total", "zero"], ["condition"]),
        helper.make_node("If", ["condition"], ["y"], **branches),
        w=floats(3, 3),
        zero=np.float32(0),
    )
    assert found == {"w": WEIGHT, "zero": CONSTANT}
