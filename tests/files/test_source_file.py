"""``source.onnx`` of a program: the model as it came, which reads its weights from the state."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import burnish
from burnish.errors import CheckpointError
from burnish.files import folder
from burnish.models import residual_network
from files.stamping import write_manifest


def arrays(model):
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def model_with_everything() -> onnx.ModelProto:
    """A weight in a Constant node, one in sixteen bits, a large constant that is no weight, and notes of the file."""
    rng = np.random.default_rng(0)
    table = rng.normal(size=(1, 400)).astype(np.float32)
    nodes = [
        helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(rng.normal(size=(400, 30)).astype(np.float32))),
        helper.make_node("Add", ["x", "offset"], ["moved"]),
        helper.make_node("MatMul", ["moved", "w"], ["hidden"]),
        helper.make_node("Cast", ["half"], ["v"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["hidden", "v"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 400])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", 30])],
        [
            numpy_helper.from_array(table, "offset"),
            numpy_helper.from_array(rng.normal(size=(30, 30)).astype(np.float16), "half"),
        ],
        doc_string="of the graph",
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8, producer_name="somebody")
    helper.set_model_props(model, {"classes": "chêne, hêtre"})
    return model


def predicted(path_or_bytes, x):
    session = onnxruntime.InferenceSession(path_or_bytes, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x})


@pytest.mark.parametrize("form", ["proto", "file", "ir"])
def test_the_model_as_it_came_is_in_the_folder(tmp_path, form):
    model = model_with_everything()
    onnx.save(model, tmp_path / "model.onnx")
    given = {"proto": model, "file": tmp_path / "model.onnx", "ir": ir.from_proto(model)}[form]
    burnish.compile(given, loss="cross_entropy").save(tmp_path / "program")
    found = onnx.load(tmp_path / "program" / "source.onnx")
    assert [node.op_type for node in found.graph.node] == [node.op_type for node in model.graph.node]
    assert (found.producer_name, found.graph.doc_string, found.opset_import[0].version) == ("somebody", "of the graph", 17)
    assert {entry.key: entry.value for entry in found.metadata_props} == {"classes": "chêne, hêtre"}
    for name, array in arrays(model).items():
        np.testing.assert_array_equal(arrays(found)[name], array, err_msg=name)
    x = np.random.default_rng(1).normal(size=(3, 400)).astype(np.float32)
    np.testing.assert_array_equal(predicted(tmp_path / "program" / "source.onnx", x), predicted(model.SerializeToString(), x))


def test_weights_are_not_written_twice(tmp_path):
    model = residual_network((3, 16, 16), classes=4, width=16, blocks=(1, 1))
    program = burnish.compile(model)
    program.save(tmp_path / "program")
    state = (tmp_path / "program" / "state.safetensors").stat().st_size
    assert (tmp_path / "program" / "source.onnx").stat().st_size < state / 4
    manifest = json.loads((tmp_path / "program" / "program.json").read_text())
    assert "source.onnx" in manifest["files"]


def test_a_program_that_is_read_and_saved_again_keeps_it(tmp_path):
    burnish.compile(model_with_everything()).save(tmp_path / "first")
    burnish.Program.load(tmp_path / "first").save(tmp_path / "second")
    contents = [(tmp_path / name / "source.onnx").read_bytes() for name in ("first", "second")]
    assert contents[0] == contents[1]


def test_large_constants_stand_in_a_file_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "ONE_FILE_LIMIT", 100)
    model = model_with_everything()
    burnish.compile(model).save(tmp_path / "program")
    assert (tmp_path / "program" / "source.data").is_file()
    loaded = burnish.Program.load(tmp_path / "program")
    monkeypatch.undo()
    loaded.save(tmp_path / "again")
    assert not (tmp_path / "again" / "source.data").exists()
    for name, array in arrays(onnx.load(tmp_path / "again" / "source.onnx")).items():
        np.testing.assert_array_equal(array, arrays(model)[name], err_msg=name)


def test_external_data_of_the_source_is_found_without_its_folder(tmp_path):
    model = model_with_everything()
    (tmp_path / "model").mkdir()
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    onnx.save(copy, tmp_path / "model" / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=64)
    burnish.compile(tmp_path / "model" / "m.onnx").save(tmp_path / "program")
    for path in (tmp_path / "model").iterdir():
        path.unlink()
    for name, array in arrays(onnx.load(tmp_path / "program" / "source.onnx")).items():
        np.testing.assert_array_equal(array, arrays(model)[name], err_msg=name)


def test_a_source_that_reads_what_the_state_has_not_is_refused(tmp_path):
    saved = burnish.compile(model_with_everything()).save(tmp_path / "program")
    content = (saved / "source.onnx").read_bytes()
    model = onnx.ModelProto.FromString(content)
    next(node for node in model.graph.node if node.op_type == "Constant").output[0] = "other"
    (saved / "source.onnx").write_bytes(model.SerializeToString())
    manifest = json.loads((saved / "program.json").read_text())
    values = {
        "bytes": (saved / "source.onnx").stat().st_size,
        "sha256": hashlib.sha256((saved / "source.onnx").read_bytes()).hexdigest(),
    }
    manifest["files"]["source.onnx"] = values
    write_manifest(saved / "program.json", manifest)
    with pytest.raises(CheckpointError, match=r"source\.onnx has a weight 'other' that the state has not"):
        burnish.Program.load(saved)
