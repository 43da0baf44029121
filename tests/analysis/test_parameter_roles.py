"""What the parameters of a model are for, told by the graph whatever their names and shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import burnish
from burnish import surgery
from burnish.analysis.parameter_roles import parameter_infos
from burnish.models import residual_network
from burnish.optim import ParameterInfo, ParameterKind
from burnish.program.signature import Role
from burnish.surgery import weight_normalize
from oracles import layers_in_bodies

WEIGHT, BIAS, NORMALIZATION, EMBEDDING = ParameterKind
Node = tuple[str, Sequence[str], str] | tuple[str, Sequence[str], str, dict[str, Any]]


def infos_of(program: burnish.Program) -> dict[str, ParameterInfo]:
    parameters = [
        ParameterInfo(entry.name.removeprefix("param/"), tuple(map(int, entry.extents)), entry.dtype)
        for entry in program.signature["grad"].inputs_of(Role.PARAMETER)
    ]
    return parameter_infos((program.predict.graph, program.evaluate.graph), parameters)


def infos_of_nodes(
    nodes: Sequence[Node], weights: Mapping[str, tuple[int, ...]], x: Sequence[Any], rank: int, dtype: int = TensorProto.FLOAT
) -> dict[str, ParameterInfo]:
    """What the weights ``w0``, ``w1``, ... of a model from ``x`` to ``y`` are for, once it is compiled."""
    generator = np.random.default_rng(0)
    arrays = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in weights.items()}
    graph = helper.make_graph(
        [helper.make_node(node[0], node[1], [node[2]], **(node[3] if len(node) > 3 else {})) for node in nodes],
        "graph",
        [helper.make_tensor_value_info("x", dtype, x)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, rank * [None])],
        [numpy_helper.from_array(array, name) for name, array in (*arrays.items(), ("two", np.array([2])))],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    return infos_of(burnish.compile(model, loss="mse", trainable=list(weights)))


def test_the_parameters_of_a_residual_network() -> None:
    infos = infos_of(burnish.compile(residual_network(width=4, blocks=(1, 1))))
    assert {info.kind for info in infos.values()} == {WEIGHT, BIAS, NORMALIZATION}
    for name, info in infos.items():
        assert info.name == name
        if len(info.shape) == 4:
            assert info.kind is WEIGHT
            assert info.input_axes == (1, 2, 3)
    dense = [info for info in infos.values() if len(info.shape) == 2]
    vectors = [info for info in infos.values() if len(info.shape) == 1]
    assert len(dense) == 1
    assert [info.kind for info in vectors].count(BIAS) == 1
    assert dense[0].depth == max(info.depth for info in infos.values())
    assert min(info.depth for info in infos.values()) == 1
    # A convolution and the normalization behind it are one layer.
    depths = sorted({info.depth for info in infos.values() if info.kind is NORMALIZATION})
    assert depths == sorted({info.depth for info in infos.values() if len(info.shape) == 4})


@pytest.mark.parametrize(
    ("nodes", "weights", "x", "rank", "expected"),
    [
        (
            [("MatMul", ["x", "w0"], "a"), ("Add", ["a", "w1"], "b"), ("Gemm", ["b", "w2", "w3"], "y", {"transB": 1})],
            {"w0": (3, 4), "w1": (4,), "w2": (2, 4), "w3": (2,)},
            ["N", 3],
            2,
            {"w0": (WEIGHT, 1, (0,)), "w1": (BIAS, 1, ()), "w2": (WEIGHT, 2, (1,)), "w3": (BIAS, 2, ())},
        ),
        (
            [("Transpose", ["w0"], "t", {"perm": [1, 0]}), ("MatMul", ["x", "t"], "a"), ("PRelu", ["a", "w1"], "y")],
            {"w0": (4, 3), "w1": (4,)},
            ["N", 3],
            2,
            {"w0": (WEIGHT, 1, (1,)), "w1": (BIAS, 1, ())},
        ),
        (
            [("ConvTranspose", ["x", "w0", "w1"], "a"), ("Mul", ["a", "w2"], "y")],
            {"w0": (3, 2, 2, 2), "w1": (2,), "w2": (2, 1, 1)},
            ["N", 3, 4, 4],
            4,
            {"w0": (WEIGHT, 1, (0, 2, 3)), "w1": (BIAS, 1, ()), "w2": (NORMALIZATION, 1, ())},
        ),
        (
            # A weight of one dimension has no axes to tell apart; one that is the sum of two has those of both.
            [("Add", ["w0", "w1"], "s"), ("MatMul", ["x", "s"], "a"), ("MatMul", ["a", "w2"], "y")],
            {"w0": (3, 4), "w1": (3, 4), "w2": (4,)},
            ["N", 3],
            1,
            {"w0": (WEIGHT, 1, (0,)), "w1": (WEIGHT, 1, (0,)), "w2": (WEIGHT, 2, ())},
        ),
        (
            [("Add", ["x", "w0"], "a"), ("LayerNormalization", ["a", "w1", "w2"], "b"), ("MatMul", ["b", "w3"], "y")],
            {"w0": (5, 3), "w1": (3,), "w2": (3,), "w3": (3, 1)},
            ["N", 5, 3],
            3,
            {"w0": (EMBEDDING, 0, ()), "w1": (NORMALIZATION, 0, ()), "w2": (NORMALIZATION, 0, ()), "w3": (WEIGHT, 1, (0,))},
        ),
        (
            [("MatMul", ["w0", "w1"], "w"), ("MatMul", ["x", "w"], "a"), ("Einsum", ["a", "w2"], "y", {"equation": "ni,oi->no"})],
            {"w0": (3, 2), "w1": (2, 4), "w2": (5, 4)},
            ["N", 3],
            2,
            # Of the factors of a weight each sums over its own rows.
            {"w0": (WEIGHT, 1, (0,)), "w1": (WEIGHT, 1, (0,)), "w2": (WEIGHT, 2, (1,))},
        ),
        (
            [
                ("Unsqueeze", ["w0", "two"], "k"),
                ("Tanh", ["k"], "t"),
                ("Conv", ["x", "t"], "a"),
                ("Flatten", ["a"], "f"),
                ("Concat", ["w1", "w2"], "c", {"axis": 0}),
                ("Gemm", ["f", "c"], "y", {"transB": 1}),
            ],
            {"w0": (2, 3, 3), "w1": (2, 4), "w2": (3, 4)},
            ["N", 3, 1, 4],
            2,
            {"w0": (WEIGHT, 1, (1, 2)), "w1": (WEIGHT, 2, (1,)), "w2": (WEIGHT, 2, (1,))},
        ),
    ],
    ids=["dense", "transposed", "convolution", "computed", "layer-normalization", "factors", "unsqueezed and joined"],
)
def test_what_each_parameter_is_for(
    nodes: Sequence[Node], weights: dict[str, tuple[int, ...]], x: Sequence[Any], rank: int, expected: dict[str, tuple[Any, ...]]
) -> None:
    infos = infos_of_nodes(nodes, weights, x, rank)
    assert {name: (info.kind, info.depth, info.input_axes) for name, info in infos.items()} == expected


def test_an_embedding_is_the_first_layer() -> None:
    infos = infos_of_nodes(
        [("Gather", ["w0", "x"], "a"), ("MatMul", ["a", "w1"], "y")],
        {"w0": (7, 4), "w1": (4, 3)},
        ["N", 5],
        rank=3,
        dtype=TensorProto.INT64,
    )
    assert {name: (info.kind, info.depth) for name, info in infos.items()} == {"w0": (EMBEDDING, 1), "w1": (WEIGHT, 2)}


def test_both_parts_of_a_normalized_weight_are_weights() -> None:
    model = weight_normalize(residual_network(width=4, blocks=(1,)))
    infos = infos_of(burnish.compile(model))
    parts = {name: info for name, info in infos.items() if name.endswith(("_g", "_v"))}
    assert len(parts) >= 4
    assert {info.kind for info in parts.values()} == {WEIGHT}
    for name, info in parts.items():
        # The direction has the axes of the weight; the length has one number for each output.
        assert bool(info.input_axes) == name.endswith("_v"), name


def test_masked_and_quantized_weights_have_the_axes_of_the_layer() -> None:
    model = residual_network(width=4, blocks=(1,))
    plain = infos_of(burnish.compile(model))
    for source, masked in ((surgery.prune(model, 0.5), "fixed"), (surgery.prune(model, 0.5, end=3), "changing")):
        infos = infos_of(burnish.compile(source))
        for name, info in plain.items():
            assert infos[name].input_axes == info.input_axes, name
            assert infos[name].masked == (masked if len(info.shape) > 1 else "no"), name
    for weights in ("int8 per channel", "int4"):
        infos = infos_of(burnish.compile(surgery.quantize(model, weights, activations=None)))
        assert all(infos[name].input_axes == info.input_axes for name, info in plain.items() if name in infos)


@pytest.mark.parametrize("transposed", [0, 1])
def test_blocks_of_a_quantized_weight_lead_back_to_its_axes(transposed: int) -> None:
    shape = (4, 32) if transposed else (32, 4)
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "w"], ["y"], transB=transposed)],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 32])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 4])],
        [numpy_helper.from_array(np.random.default_rng(0).normal(size=shape).astype(np.float32), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    infos = infos_of(burnish.compile(surgery.quantize(model, "int4 blocks of 32", activations=None)))
    assert infos["w"].input_axes == (transposed,)


@pytest.mark.parametrize("kind", ["branches", "scanned"])
def test_weights_that_bodies_read_are_those_of_the_layers_in_them(kind: str) -> None:
    infos = infos_of(burnish.compile(layers_in_bodies.model(kind)))
    assert {name: info.input_axes for name, info in infos.items()} == dict.fromkeys(infos, (0,))
    assert max(infos.values(), key=lambda info: info.depth).name == "head_weight"
