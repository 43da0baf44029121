"""Sparse constants become dense; sparse weights, and what is no valid sparse tensor, are named errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from burnish.errors import ModelError
from burnish.importer import load
from oracles.onnxruntime_outputs import onnxruntime_outputs

DENSE = np.array([[0, 5, 0], [7, 0, -2]])


def sparse(values: np.ndarray, indices: np.ndarray, dims: tuple[int, ...] = DENSE.shape) -> onnx.SparseTensorProto:
    return helper.make_sparse_tensor(numpy_helper.from_array(values, "s"), numpy_helper.from_array(indices, "places"), dims)


def model(tensor: onnx.SparseTensorProto, where: str) -> onnx.ModelProto:
    """x + s, with s as an initializer, in a Constant node, or either of them in a branch."""
    nodes = [helper.make_node("Cast", ["s"], ["wide"], to=TensorProto.FLOAT), helper.make_node("Add", ["x", "wide"], ["y"])]
    initializers = [tensor] if "initializer" in where else []
    if not initializers:
        nodes.insert(0, helper.make_node("Constant", [], ["s"], sparse_value=tensor, name="held"))
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", *DENSE.shape])]
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", *DENSE.shape])
    if "branch" in where:
        branch = helper.make_graph(nodes, "branch", [], [result], sparse_initializer=initializers)
        other = helper.make_graph([helper.make_node("Identity", ["x"], ["same"])], "other", [], [result])
        other.output[0].name = "same"
        nodes, initializers = [helper.make_node("If", ["flag"], ["z"], then_branch=branch, else_branch=other)], []
        inputs.append(helper.make_tensor_value_info("flag", TensorProto.BOOL, []))
        result = helper.make_tensor_value_info("z", TensorProto.FLOAT, ["batch", *DENSE.shape])
    graph = helper.make_graph(nodes, "g", inputs, [result], sparse_initializer=initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


PLACES = [np.array([1, 3, 5]), np.array([[0, 1], [1, 0], [1, 2]])]


@pytest.mark.parametrize("indices", PLACES, ids=["linear", "by axis"])
@pytest.mark.parametrize("where", ["initializer", "constant", "initializer in a branch", "constant in a branch"])
def test_integers_become_dense(indices: np.ndarray, where: str) -> None:
    source = model(sparse(np.array([5, 7, -2]), indices), where)
    before = source.SerializeToString()
    inputs = {"x": np.ones((2, *DENSE.shape), np.float32)} | ({"flag": np.array(True)} if "branch" in where else {})
    (result,) = onnxruntime_outputs(load(source), inputs).values()
    np.testing.assert_array_equal(result, 1.0 + np.broadcast_to(DENSE, result.shape))
    assert source.SerializeToString() == before


def test_external_data(tmp_path: Path) -> None:
    tensor = sparse(np.array([5, 7, -2]), PLACES[0])
    content = b""
    for part in (tensor.values, tensor.indices):
        for key, entry in (("location", "parts.data"), ("offset", len(content)), ("length", len(part.raw_data))):
            part.external_data.add(key=key, value=str(entry))
        content += part.raw_data
        part.ClearField("raw_data")
        part.data_location = TensorProto.EXTERNAL
    (tmp_path / "parts.data").write_bytes(content)
    path = tmp_path / "model.onnx"
    path.write_bytes(model(tensor, "constant").SerializeToString())
    (result,) = onnxruntime_outputs(load(path), {"x": np.zeros((1, *DENSE.shape), np.float32)}).values()
    np.testing.assert_array_equal(result[0], DENSE)
    (tmp_path / "parts.data").write_bytes(content[:-1])
    with pytest.raises(ModelError, match=r"tensor 'places' needs 'parts\.data' to have 48 bytes, and it has 47"):
        load(path)


@pytest.mark.parametrize(
    ("where", "what"), [("initializer", "initializer 's'"), ("constant", "the Constant with the output 's'")]
)
def test_floating_point_elements_may_be_weights(where: str, what: str) -> None:
    tensor = sparse(np.ones(3, np.float32), PLACES[0])
    with pytest.raises(ModelError, match=f"{what} is sparse: store it as a dense tensor, which is what training needs"):
        load(model(tensor, where))


@pytest.mark.parametrize("indices", [np.array([1, 3, 6]), np.array([3, 1, 5]), np.array([1, 3])])
def test_places_outside_or_out_of_order(indices: np.ndarray) -> None:
    with pytest.raises(ModelError, match="initializer 's' is no valid sparse tensor"):
        load(model(sparse(np.array([5, 7, -2]), indices), "initializer"))


def test_absurd_dims_take_no_memory() -> None:
    with pytest.raises(ModelError, match=r"initializer 's' is sparse, of the dims \[1099511627776\], and too large"):
        load(model(sparse(np.array([5]), np.array([1]), (2**40,)), "initializer"))


def test_a_constant_that_only_says_that_it_is_sparse() -> None:
    source = model(sparse(np.array([5]), np.array([1])), "constant")
    (attribute,) = (attribute for node in source.graph.node for attribute in node.attribute if node.op_type == "Constant")
    attribute.ClearField("sparse_tensor")
    with pytest.raises(ModelError, match="the Constant with the output 's' is sparse, with elements of the type UNDEFINED"):
        load(source)
