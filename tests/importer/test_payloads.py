"""Weights that are read past the parser: the same model, and the same refusals, as from the bytes of the file."""

from __future__ import annotations

import io

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import burnish
from burnish.errors import BurnishError, ModelError
from burnish.importer.file_tensors import LARGE, Payload, take_payloads

ROWS = LARGE // 4 // 8


def linear_model(weight: TensorProto | None = None, *more: TensorProto) -> onnx.ModelProto:
    """x [B, ROWS] times a weight of exactly so many bytes that it is large."""
    generator = np.random.default_rng(0)
    weight = weight or numpy_helper.from_array(generator.normal(size=(ROWS, 8)).astype(np.float32), "weight")
    small = numpy_helper.from_array(np.arange(8, dtype=np.float32), "bias")
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "weight", "bias"], ["y"])],
        "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", ROWS])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["B", 8])],
        [weight, small, *more],
        doc_string="words",
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9, producer_name="test")
    helper.set_model_props(model, {"kept": "yes"})
    return model


def take(content: bytes):
    return take_payloads(io.BytesIO(content), len(content))


def written(tmp_path, model: onnx.ModelProto | bytes):
    path = tmp_path / "model.onnx"
    path.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
    return path


def weights(model: ir.Model) -> dict[str, np.ndarray]:
    return {name: value.const_value.numpy() for name, value in model.graph.initializers.items()}


def test_large_data_is_taken_and_all_else_is_left_as_it_is():
    model = linear_model()
    content, data = model.SerializeToString(), model.graph.initializer[0].raw_data
    light, payloads = take(content)
    assert payloads == {"weight": Payload(data, content.index(data))}
    assert len(light) < LARGE
    parsed = onnx.ModelProto.FromString(light)
    assert not parsed.graph.initializer[0].HasField("raw_data")
    parsed.graph.initializer[0].raw_data = payloads["weight"].data
    assert parsed == model


@pytest.mark.parametrize("name", ["float32", "float16", "float64", "int64", "bool", "bfloat16"])
def test_a_file_gives_the_tensors_that_its_bytes_give(tmp_path, name):
    dtype = ir.DataType.BFLOAT16.numpy() if name == "bfloat16" else np.dtype(name)
    generator = np.random.default_rng(1)
    array = (
        generator.integers(0, 2, size=(2 * ROWS, 8)).astype(dtype)
        if name == "bool"
        else generator.normal(size=(2 * ROWS, 8)).astype(dtype)
    )
    more = ir.to_proto(ir.tensor(array, name="more"))
    path = written(tmp_path, linear_model(None, more))
    assert take(path.read_bytes())[1].keys() >= {"weight"}
    found, expected = weights(burnish.load(path)), weights(burnish.load(path.read_bytes()))
    assert found.keys() == expected.keys()
    for key, array in expected.items():
        assert found[key].dtype == array.dtype
        assert found[key].tobytes() == array.tobytes()


def test_data_that_does_not_fit_is_refused_as_ever(tmp_path):
    model = linear_model()
    model.graph.initializer[0].dims[0] -= 1
    message = rf"tensor 'weight' declares dims \[{ROWS - 1}, 8\] of FLOAT, {LARGE - 32} bytes, and holds {LARGE}"
    for source in (written(tmp_path, model), model.SerializeToString()):
        with pytest.raises(ModelError, match=message):
            burnish.load(source)


def test_tensors_of_one_name_are_left_to_the_parser(tmp_path):
    model = linear_model()
    model.graph.initializer.append(model.graph.initializer[0])
    assert take(model.SerializeToString()) is None
    outcomes = []
    for source in (written(tmp_path, model), model.SerializeToString()):
        with pytest.raises(ModelError) as caught:
            burnish.load(source)
        outcomes.append(str(caught.value).partition(": ")[2])
    assert outcomes[0] == outcomes[1]


def test_a_model_in_two_pieces_is_left_to_the_parser(tmp_path):
    # Protobuf merges what stands in a file twice.
    model = linear_model()
    extra = onnx.ModelProto()
    extra.graph.doc_string = "other words"
    content = model.SerializeToString() + extra.SerializeToString()
    assert take(content) is None
    np.testing.assert_array_equal(
        weights(burnish.load(written(tmp_path, content)))["weight"], numpy_helper.to_array(model.graph.initializer[0])
    )


def test_what_is_loaded_does_not_change_with_the_file(tmp_path):
    path = written(tmp_path, linear_model())
    model = burnish.load(path)
    before = weights(model)["weight"].copy()
    path.write_bytes(b"")
    np.testing.assert_array_equal(weights(model)["weight"], before)


CONTENT = linear_model().SerializeToString()
HEAD = CONTENT.index(linear_model().graph.initializer[0].raw_data[:64])


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.one_of(st.integers(0, HEAD), st.integers(HEAD + LARGE, len(CONTENT) - 1)), st.integers(0, 255)), max_size=3
    ),
    st.integers(0, 40),
)
def test_a_damaged_file_is_read_or_refused_as_its_bytes_are(tmp_path_factory, changes, cut):
    damaged = bytearray(CONTENT)
    for position, byte in changes:
        damaged[position] = byte
    content = bytes(damaged[: len(damaged) - cut])
    path = tmp_path_factory.mktemp("damaged") / "model.onnx"
    path.write_bytes(content)
    outcomes = []
    for source in (path, content):
        try:
            model = burnish.load(source)
        except BurnishError as error:
            outcomes.append((type(error), str(error).replace(f"'{path}'", "the bytes")))
        else:
            outcomes.append({name: array.tobytes() for name, array in weights(model).items()})
    assert outcomes[0] == outcomes[1]
