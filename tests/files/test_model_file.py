"""A model that is written one weight at a time: the bytes are those of protobuf, and only one weight is in memory."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from burnish.errors import ModelError
from burnish.files import model_file
from burnish.graph import model_proto
from burnish.models import residual_network
from burnish.transfer_progress import Transfer

TRANSFER = Transfer("writing", 0)


def written(model: ir.Model, complete=None) -> bytes:
    file = io.BytesIO()
    model_file.write_model(model.clone(), file, TRANSFER, complete)
    return file.getvalue()


def serialized(proto: onnx.ModelProto) -> bytes:
    return proto.SerializeToString(deterministic=True)


@pytest.fixture
def model() -> ir.Model:
    model = residual_network((1, 8, 8), classes=3, width=8, blocks=(1,))
    model.doc_string, model.graph.doc_string = "of the model", "of the graph"
    model.metadata_props["classes"] = "a, b, c"
    tensor = next(iter(model.graph.initializers.values())).const_value
    assert tensor is not None
    tensor.doc_string = "after the data"
    model.graph.register_initializer(
        ir.Value(name="codes", const_value=ir.tensor(np.arange(7, dtype=np.int8), ir.DataType.INT4, name="codes"))
    )
    return model


@pytest.mark.parametrize("smallest", [1, 100, 10**9])
def test_the_bytes_are_those_of_protobuf(model: ir.Model, monkeypatch: pytest.MonkeyPatch, smallest: int) -> None:
    monkeypatch.setattr(model_file, "SMALLEST_APART", smallest)
    assert written(model) == serialized(model_proto(model))


def test_what_completes_the_proto_is_written(model: ir.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_file, "SMALLEST_APART", 1)
    expected = model_proto(model)

    def complete(proto: onnx.ModelProto) -> None:
        proto.producer_name = "another"
        del proto.graph.output[0].type.tensor_type.shape.dim[:]

    complete(expected)
    assert written(model, complete) == serialized(expected)


def test_external_data_stays_where_it_is(model: ir.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_file, "SMALLEST_APART", 1)
    value = next(iter(model.graph.initializers.values()))
    assert value.const_value is not None
    external = ir.ExternalTensor(
        "weights.data", 0, value.const_value.nbytes, value.const_value.dtype, shape=value.const_value.shape, name=value.name or ""
    )
    value.const_value = external
    content = written(model)
    assert content == serialized(model_proto(model))
    assert b"weights.data" in content


def broken(model: ir.Model) -> ir.Model:
    """A copy in which two values have one name."""
    copy = model.clone()
    first, second = list(copy.graph)[:2]
    first.outputs[0].name = second.outputs[0].name = "twice"
    return copy


def test_a_graph_that_is_not_valid_is_not_written(model: ir.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = r"would not be valid ONNX, and is not written: .*'twice'.* defect of burnish"
    for limit in (1 << 30, 1):
        monkeypatch.setattr(model_file, "ONE_FILE_LIMIT", limit)
        with pytest.raises(ModelError, match=rf"^'.*broken\.onnx' {message}"):
            model_file.save_model(broken(model), tmp_path / "broken.onnx")
        model_file.save_model(model, tmp_path / "whole.onnx")
    with pytest.raises(ModelError, match=rf"^the file {message}"):
        written(broken(model))
    assert not (tmp_path / "broken.onnx").exists()
