"""Sources that are not models, each with its named error."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from burnish import engines
from burnish.errors import ConfigurationError, ModelError
from burnish.importer import load


def model(*nodes: onnx.NodeProto, initializers: tuple[onnx.TensorProto, ...] = ()) -> onnx.ModelProto:
    graph = helper.make_graph(
        list(nodes) or [helper.make_node("Relu", ["x"], ["y"], name="activation")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        list(initializers),
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no file '.*absent\.onnx': check the path"):
        load(tmp_path / "absent.onnx")


def test_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"is a folder: give the path of the \.onnx file"):
        load(tmp_path)


def test_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "empty.onnx"
    path.touch()
    with pytest.raises(ModelError, match=r"'.*empty\.onnx': the model is empty"):
        load(path)


def test_file_larger_than_a_proto(tmp_path: Path) -> None:
    path = tmp_path / "large.onnx"
    with path.open("wb") as file:
        file.truncate(2**31)
    with pytest.raises(ModelError, match=r"'.*large\.onnx' is larger than 2 GiB.*external data"):
        load(path)


def test_name_that_is_not_text() -> None:
    content = model().SerializeToString().replace(b"activation", b"activati\xff\xfe")
    with pytest.raises(ModelError, match="the bytes: corrupt, a name in it is not UTF-8 text"):
        load(content)


@pytest.mark.parametrize("content", [b"PK\x03\x04 a zip archive", b"\x89PNG\r\n\x1a\n" * 5, "Ünïcode text".encode()])
def test_another_kind_of_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"'.*other\.onnx': not an ONNX model.*Export the model again"):
        load(path)


def test_another_kind_of_object() -> None:
    with pytest.raises(ModelError, match=r"cannot be loaded from ndarray: give the path.*onnx_ir\.Model"):
        load(np.zeros(3))  # type: ignore[arg-type]


def test_a_module_of_pytorch_needs_examples() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(ConfigurationError, match=r"example_inputs: what does Linear take\? Give inputs to call it with once"):
        load(torch.nn.Linear(2, 3))


def test_proto_without_a_graph() -> None:
    with pytest.raises(ModelError, match="the ModelProto: not an ONNX model"):
        load(onnx.ModelProto())


def test_path_with_a_null_character() -> None:
    with pytest.raises(ModelError, match=r"cannot be read|no file"):
        load("bad\0path.onnx")


def test_failing_check_names_the_node() -> None:
    with pytest.raises(ModelError, match=r"(?s)not valid ONNX: .*name: activation"):
        load(model(helper.make_node("Relu", ["missing"], ["y"], name="activation")))


def test_unknown_operator() -> None:
    with pytest.raises(ModelError, match=r"(?s)not valid ONNX: .*NoSuchOperator"):
        load(model(helper.make_node("NoSuchOperator", ["x"], ["y"])))


def test_shapes_that_contradict_each_other() -> None:
    weight = numpy_helper.from_array(np.zeros((4, 5), np.float32), "w")
    with pytest.raises(ModelError, match=r"(?s)do not fit together: .*MatMul"):
        load(model(helper.make_node("MatMul", ["x", "w"], ["y"], name="dense"), initializers=(weight,)))


def test_custom_operator_without_a_declared_dtype() -> None:
    proto = model(helper.make_node("Mystery", ["x"], ["z"], domain="custom", name="odd"), helper.make_node("Relu", ["z"], ["y"]))
    proto.opset_import.append(helper.make_opsetid("custom", 1))
    with pytest.raises(ModelError, match=r"dtype of 'z', output of custom\.Mystery 'odd'.*value_info"):
        load(proto)


def test_custom_operator_with_a_declared_dtype_loads() -> None:
    proto = model(helper.make_node("Mystery", ["x"], ["z"], domain="custom"), helper.make_node("Relu", ["z"], ["y"]))
    proto.opset_import.append(helper.make_opsetid("custom", 1))
    proto.graph.value_info.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, ["batch", 7]))
    assert load(proto).graph.outputs[0].shape == ir.Shape(["batch", 7])


def _with_tensor(**fields: object) -> onnx.ModelProto:
    tensor = onnx.TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2, 3], **fields)
    return model(helper.make_node("Add", ["x", "w"], ["y"]), initializers=(tensor,))


def test_tensor_with_less_data_than_its_dims() -> None:
    with pytest.raises(ModelError, match=r"tensor 'w' declares dims \[2, 3\] of FLOAT, 24 bytes, and holds 20"):
        load(_with_tensor(raw_data=bytes(20)))


def test_tensor_with_fewer_elements_than_its_dims() -> None:
    with pytest.raises(ModelError, match=r"tensor 'w' declares dims \[2, 3\] of FLOAT, 6 elements, and holds 5"):
        load(_with_tensor(float_data=[1.0] * 5))


def test_absurd_dims_take_no_memory() -> None:
    proto = _with_tensor(raw_data=bytes(24))
    proto.graph.initializer[0].dims[:] = [2**40, 2**20]
    with pytest.raises(ModelError, match=r"declares dims \[1099511627776, 1048576\] of FLOAT, \d+ bytes, and holds 24"):
        load(proto)


def test_absurd_dims_in_a_constant_node() -> None:
    tensor = onnx.TensorProto(data_type=TensorProto.FLOAT, dims=[2**40], raw_data=bytes(4))
    constant = helper.make_node("Constant", [], ["c"], value=tensor)
    with pytest.raises(ModelError, match=r"tensor '\(of a Constant node\)' declares dims \[1099511627776\]"):
        load(model(constant, helper.make_node("Add", ["x", "c"], ["y"])))


def test_negative_dims() -> None:
    proto = _with_tensor(raw_data=bytes(24))
    proto.graph.initializer[0].dims[:] = [-2, -3]
    with pytest.raises(ModelError, match=r"tensor 'w' declares the negative dims \[-2, -3\]"):
        load(proto)


def test_unknown_element_type() -> None:
    proto = _with_tensor(raw_data=bytes(24))
    proto.graph.initializer[0].data_type = 99
    with pytest.raises(ModelError, match="tensor 'w' has the unknown element type 99"):
        load(proto)


def test_tensor_without_element_type() -> None:
    proto = _with_tensor(raw_data=bytes(24))
    proto.graph.initializer[0].data_type = 0
    with pytest.raises(ModelError, match="tensor 'w' has no element type"):
        load(proto)


def test_sparse_initializer() -> None:
    proto = model()
    sparse = proto.graph.sparse_initializer.add()
    sparse.values.CopyFrom(numpy_helper.from_array(np.ones(1, np.float32), "w"))
    sparse.indices.CopyFrom(numpy_helper.from_array(np.zeros(1, np.int64), "w_indices"))
    sparse.dims.extend([3])
    with pytest.raises(ModelError, match="initializer 'w' is sparse: store it as a dense tensor"):
        load(proto)


def test_ir_model_whose_weights_are_not_loaded() -> None:
    source = ir.from_proto(_with_tensor(raw_data=bytes(24)))
    source.graph.initializers["w"].const_value = None
    with pytest.raises(ModelError, match="initializer 'w' has no data"):
        load(source)


def test_two_versions_of_the_standard_operators() -> None:
    proto = model()
    proto.opset_import.append(helper.make_opsetid("ai.onnx", 17))
    with pytest.raises(ModelError, match=r"(?s)two versions|not valid ONNX"):
        load(proto)


def _dictionary(name: str, key: int) -> onnx.ValueInfoProto:
    return helper.make_value_info(name, helper.make_map_type_proto(key, helper.make_tensor_type_proto(TensorProto.FLOAT, [])))


def test_a_model_that_takes_dictionaries() -> None:
    vectorizer = helper.make_node("DictVectorizer", ["d"], ["y"], domain="ai.onnx.ml", string_vocabulary=["a", "b", "c"])
    proto = model(vectorizer)
    del proto.graph.input[:]
    proto.graph.input.append(_dictionary("d", TensorProto.STRING))
    proto.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
    with pytest.raises(ModelError, match=r"'d' is a map \(a dictionary\), .* export the part of the model behind it, of tensors"):
        load(proto)


def test_a_model_that_goes_on_with_dictionaries() -> None:
    """Those that ZipMap writes at the very end are left out."""
    zip_map = helper.make_node("ZipMap", ["x"], ["d"], name="zip", domain="ai.onnx.ml", classlabels_int64s=[0, 1, 2])
    proto = model(zip_map, helper.make_node("Identity", ["d"], ["y"], name="same"))
    del proto.graph.output[:]
    element = _dictionary("y", TensorProto.INT64).type
    proto.graph.output.append(helper.make_value_info("y", helper.make_sequence_type_proto(element)))
    proto.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
    with pytest.raises(
        ModelError, match=r"'y' of Identity 'same' is a map .* burnish knows tensors: export the model without it"
    ):
        load(proto)


UNSORTED = """<ir_version: 9, opset_import: ["": 18, "own": 1]> g (float[N, 2] x, bool flag) => (float[N, 2] y) {
    y = own.twice (h)
    h = If (flag) <then_branch = one () => (float[N, 2] a) { a = Tanh (b) b = Mul (z, z) },
                   else_branch = two () => (float[N, 2] c) { c = Identity (z) }>
    z = Relu (x)
} <domain: "own", opset_import: ["": 18]> twice (a) => (c) { c = Add (b, a) b = Sigmoid (a) }"""


@pytest.mark.parametrize("as_ir", [False, True])
def test_nodes_out_of_order_are_sorted(as_ir: bool) -> None:
    """In the graph, a branch and a function: as runtimes do, which load such a file."""
    proto = onnx.parser.parse_model(UNSORTED)
    before = proto.SerializeToString()
    source = ir.from_proto(proto) if as_ir else proto
    loaded = load(source)
    x = np.array([[1.0, -2.0], [0.5, 3.0]], np.float32)
    h = np.tanh(np.maximum(x, 0) ** 2)
    found = engines.get("onnxruntime").run(loaded, {"x": x, "flag": np.array(True)})["y"]
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-h)) + h, rtol=1e-6)
    assert proto.SerializeToString() == before
    if as_ir:
        assert [node.op_type for node in source.graph] == ["twice", "If", "Relu"]


def test_sorted_nodes_stay_in_their_order() -> None:
    proto = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["": 18]> g (float[N] x) => (float[N] y) {
        c = Cos (x) b = Add (s, c) d = Neg (x) s = Sin (x) y = Mul (b, d) }""")
    assert [node.op_type for node in load(proto).graph] == ["Cos", "Neg", "Sin", "Add", "Mul"]


def test_nodes_that_read_each_other_in_a_circle() -> None:
    proto = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["": 18]> g (float[N] x) => (float[N] y) {
        a = Add (x, b) b = Neg (a) y = Relu (b) }""")
    with pytest.raises(ModelError, match=r"read each other in a circle: (Add|Neg) .* reads (Neg|Add) .* reads .*\. Export the"):
        load(proto)
