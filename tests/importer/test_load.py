"""What ``load`` accepts, and the canonical form it returns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from burnish.errors import ModelError
from burnish.importer import file_tensors as lightweight
from burnish.importer import load
from oracles.onnxruntime_outputs import onnxruntime_outputs

WEIGHT = np.arange(12, dtype=np.float32).reshape(3, 4) / 10
X = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)


def dense(**changes: object) -> onnx.ModelProto:
    """x @ weight + bias, then Relu."""
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "weight"], ["product"]),
            helper.make_node("Add", ["product", "bias"], ["sum"]),
            helper.make_node("Relu", ["sum"], ["y"]),
        ],
        "dense",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])],
        [numpy_helper.from_array(WEIGHT, "weight"), numpy_helper.from_array(np.ones(4, np.float32), "bias")],
    )
    settings: dict[str, object] = {"opset_imports": [helper.make_opsetid("", 17)], "ir_version": 8}
    return helper.make_model(graph, **(settings | changes))


def test_every_kind_of_source_gives_the_same_model(tmp_path: Path) -> None:
    proto = dense()
    path = tmp_path / "dense.onnx"
    path.write_bytes(proto.SerializeToString())
    sources = [path, str(path), proto.SerializeToString(), bytearray(proto.SerializeToString()), proto, ir.from_proto(proto)]
    texts = {ir.to_proto(load(source)).SerializeToString(deterministic=True) for source in sources}
    assert len(texts) == 1


def test_the_proto_is_left_as_it_is() -> None:
    proto = dense()
    before = proto.SerializeToString(deterministic=True)
    model = load(proto)
    model.graph.initializers["weight"].name = "renamed"
    assert proto.SerializeToString(deterministic=True) == before
    proto.graph.initializer[0].raw_data = bytes(48)
    np.testing.assert_array_equal(model.graph.initializers["renamed"].const_value.numpy(), WEIGHT)  # type: ignore[union-attr]


def test_the_ir_model_is_left_as_it_is() -> None:
    source = ir.from_proto(dense())
    before = ir.to_proto(source).SerializeToString(deterministic=True)
    model = load(source)
    assert model is not source
    model.graph.initializers["weight"].name = "renamed"
    assert ir.to_proto(source).SerializeToString(deterministic=True) == before


def test_loading_twice_changes_nothing() -> None:
    once = load(dense())
    twice = load(once)
    assert ir.to_proto(once).SerializeToString(deterministic=True) == ir.to_proto(twice).SerializeToString(deterministic=True)


def test_ir_version_and_producer_are_kept() -> None:
    model = load(dense(ir_version=9, producer_name="pytorch", producer_version="2.13"))
    assert (model.ir_version, model.producer_name, model.producer_version) == (9, "pytorch", "2.13")


@pytest.mark.parametrize("opset", [2**31, -(2**40), 2**62])
def test_an_opset_that_no_library_counts_to_is_refused(opset: int) -> None:
    proto = helper.make_model(
        helper.make_graph(
            [helper.make_node("SimplifiedLayerNormalization", ["x", "scale"], ["y"])],
            "g",
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("x", "scale")],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])],
        ),
        opset_imports=[helper.make_opsetid("", opset)],
    )
    with pytest.raises(ModelError, match=f"{opset} is out of supported range"):
        load(proto)


def test_newer_opset_is_kept() -> None:
    assert load(dense(opset_imports=[helper.make_opsetid("", 21)], ir_version=10)).opset_imports == {"": 21}


def test_the_domain_has_one_spelling() -> None:
    proto = dense(opset_imports=[helper.make_opsetid("ai.onnx", 17)])
    for node in proto.graph.node:
        node.domain = "ai.onnx"
    model = load(proto)
    assert model.opset_imports == {"": 18}
    assert {node.domain for node in model.graph} == {""}


def test_initializers_are_not_inputs() -> None:
    proto = dense()
    proto.graph.input.extend([helper.make_tensor_value_info("weight", TensorProto.FLOAT, [3, 4])])
    model = load(proto)
    assert [value.name for value in model.graph.inputs] == ["x"]
    assert list(model.graph.initializers) == ["weight", "bias"]


def test_nodes_and_values_have_unique_names() -> None:
    proto = dense()
    for node in proto.graph.node:
        node.name = "same"
    model = load(proto)
    names = [node.name for node in model.graph]
    assert all(names)
    assert len(set(names)) == len(names)


def test_weights_in_constant_nodes_become_initializers() -> None:
    proto = dense()
    constants = [helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in proto.graph.initializer]
    nodes = [*constants, *proto.graph.node]
    del proto.graph.node[:]
    del proto.graph.initializer[:]
    proto.graph.node.extend(nodes)
    model = load(proto)
    assert set(model.graph.initializers) == {"weight", "bias"}
    assert [node.op_type for node in model.graph] == ["MatMul", "Add", "Relu"]
    expected, found = onnxruntime_outputs(proto, {"x": X}), onnxruntime_outputs(model, {"x": X})
    np.testing.assert_array_equal(found["y"], expected["y"])


def test_a_bias_written_as_a_list_of_numbers_becomes_an_initializer() -> None:
    proto = dense()
    bias = next(tensor for tensor in proto.graph.initializer if tensor.name == "bias")
    nodes = [helper.make_node("Constant", [], ["bias"], value_floats=numpy_helper.to_array(bias).tolist()), *proto.graph.node]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    proto.graph.initializer.remove(bias)
    model = load(proto)
    assert set(model.graph.initializers) == {"weight", "bias"}
    np.testing.assert_array_equal(onnxruntime_outputs(model, {"x": X})["y"], onnxruntime_outputs(proto, {"x": X})["y"])


def test_constants_that_are_no_weights_stay_constants() -> None:
    proto = dense()
    third = helper.make_node("Constant", [], ["third"], value=numpy_helper.from_array(np.full(4, 3, np.float32)))
    nodes = [third, *proto.graph.node[:2], helper.make_node("Div", ["sum", "third"], ["y"])]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    assert set(load(proto).graph.initializers) == {"weight", "bias"}


@pytest.mark.parametrize(("fill", "trains"), [((1, 0), False), ((2, 0.5), True)])
@pytest.mark.parametrize("weights_in_nodes", [False, True])
def test_the_scale_and_bias_that_a_layer_does_not_have_stay_constants(
    fill: tuple[float, float], trains: bool, weights_in_nodes: bool
) -> None:
    """PyTorch writes affine=False as Constant nodes of ones and zeros beside weights that are initializers."""
    proto = dense()
    names = ["scale", "shift"]
    constants = [
        helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.full(4, number, np.float32)))
        for name, number in zip(names, fill, strict=True)
    ]
    if weights_in_nodes:
        constants += [helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in proto.graph.initializer]
        del proto.graph.initializer[:]
    nodes = [*constants, *proto.graph.node[:2], helper.make_node("LayerNormalization", ["sum", *names], ["y"])]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    assert set(load(proto).graph.initializers) == {"weight", "bias", *(names if trains or weights_in_nodes else [])}


def _with_function(function_opset: int = 17) -> onnx.ModelProto:
    function = helper.make_function(
        "local",
        "Scaled",
        ["a"],
        ["b"],
        [
            helper.make_node("Constant", [], ["two"], value=numpy_helper.from_array(np.float32(2))),
            helper.make_node("Mul", ["a", "two"], ["scaled"]),
            helper.make_node("Softmax", ["scaled"], ["share"], axis=1),
            helper.make_node("Sub", ["scaled", "share"], ["b"]),
        ],
        [helper.make_opsetid("", function_opset)],
    )
    proto = dense(
        functions=[function], opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("local", 1)], ir_version=9
    )
    proto.graph.node[2].CopyFrom(helper.make_node("Scaled", ["sum"], ["first"], domain="local"))
    proto.graph.node.append(helper.make_node("Scaled", ["first"], ["y"], domain="local"))
    return proto


@pytest.mark.parametrize("function_opset", [15, 17, 18])
def test_functions_are_inlined(function_opset: int) -> None:
    proto = _with_function(function_opset)
    model = load(proto)
    assert not model.functions
    assert {node.domain for node in model.graph} == {""}
    assert len({output.name for node in model.graph for output in node.outputs}) == sum(1 for _ in model.graph)
    expected = onnxruntime_outputs(_with_function(17), {"x": X})
    np.testing.assert_allclose(onnxruntime_outputs(model, {"x": X})["y"], expected["y"], rtol=1e-6)


def test_a_function_of_an_older_operator_version_is_refused() -> None:
    with pytest.raises(ModelError, match=r"(?s)not valid ONNX: .*not compatible with the version imported by model"):
        load(_with_function(12))


def test_functions_in_a_circle_are_a_named_error() -> None:
    proto = _with_function()
    proto.functions[0].node[1].CopyFrom(helper.make_node("Scaled", ["a"], ["scaled"], domain="local"))
    with pytest.raises(ModelError, match="Cycle detected in model-local function"):
        load(proto)


def test_weights_in_branches_become_initializers_of_the_graph() -> None:
    branches = {}
    for name, factor in (("then_branch", 1.0), ("else_branch", -1.0)):
        branches[name] = helper.make_graph(
            [helper.make_node("Mul", ["x", "w"], [f"{name}_y"])],
            name,
            [],
            [helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT, ["batch", 3])],
            [numpy_helper.from_array(np.full(3, factor, np.float32), "w")],
        )
    graph = helper.make_graph(
        [helper.make_node("If", ["condition"], ["y"], **branches)],
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3]),
            helper.make_tensor_value_info("condition", TensorProto.BOOL, []),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    model = load(proto)
    assert set(model.graph.initializers) == {"w", "w_1"}
    for condition in (True, False):
        inputs = {"x": X, "condition": np.asarray(condition)}
        np.testing.assert_array_equal(onnxruntime_outputs(model, inputs)["y"], onnxruntime_outputs(proto, inputs)["y"])


def test_weights_are_never_serialized_while_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lightweight, "SMALL", 8)
    sizes: list[int] = []
    infer, check = onnx.shape_inference.infer_shapes, onnx.checker.check_model

    def record(proto: onnx.ModelProto) -> onnx.ModelProto:
        sizes.append(proto.ByteSize())
        assert b"weight" in proto.SerializeToString()
        assert WEIGHT.tobytes() not in proto.SerializeToString()
        return proto

    monkeypatch.setattr(onnx.shape_inference, "infer_shapes", lambda proto, **options: infer(record(proto), **options))
    monkeypatch.setattr(onnx.checker, "check_model", lambda proto: check(record(proto)))
    for source in (dense(), ir.from_proto(dense())):
        assert load(source).graph.outputs[0].shape == ir.Shape(["batch", 4])
    assert len(sizes) >= 4


def test_more_than_a_proto_holds_beside_the_initializers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lightweight, "SERIALIZABLE", 100)
    with pytest.raises(ModelError, match="Constant nodes as initializers, with external data"):
        load(dense())
