"""Weights of a file need no memory once it was let go: they are read again, and never what somebody wrote there since."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

import burnish
from burnish.errors import ModelError
from burnish.importer import FileTensor, load

pytestmark = pytest.mark.skipif(not hasattr(os, "preadv"), reason="an open file cannot be replaced here: weights stay in memory")

RANDOM = np.random.default_rng(0)
LARGE = RANDOM.normal(size=(256, 100)).astype(np.float32)
HALVES = RANDOM.normal(size=(100, 400)).astype(np.float16)
BIAS = RANDOM.normal(size=100).astype(np.float32)


def write(path: Path, scale: float = 1.0) -> Path:
    """A model of two large weights between others, one of which is stored element by element."""
    elements = LARGE.T[:, :200]
    initializers = [
        numpy_helper.from_array(BIAS, "bias"),
        numpy_helper.from_array(np.float32(scale) * LARGE, "large"),
        helper.make_tensor("elements", TensorProto.FLOAT, elements.shape, elements.ravel()),
        numpy_helper.from_array(HALVES, "halves"),
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "large"], ["product"]),
        helper.make_node("Add", ["product", "bias"], ["hidden"]),
        helper.make_node("MatMul", ["hidden", "elements"], ["y"]),
        helper.make_node("Cast", ["y"], ["half"], to=TensorProto.FLOAT16),
        helper.make_node("Slice", ["half", "starts", "ends", "axes"], ["part"]),
        helper.make_node("MatMul", ["part", "halves"], ["z"]),
    ]
    bounds = [numpy_helper.from_array(np.array([n]), name) for name, n in (("starts", 0), ("ends", 100), ("axes", 1))]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 256])],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT16, ["batch", 400])],
        [*initializers, *bounds],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8, doc_string="a text " * 300)
    path.write_bytes(model.SerializeToString())
    return path


def file_tensors(model: ir.Model) -> dict[str, FileTensor]:
    tensors = {name: value.const_value for name, value in model.graph.initializers.items()}
    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, FileTensor)}


def released(tensor: FileTensor) -> bool:
    """Let the memory of a tensor go, and tell whether it went."""
    array = weakref.ref(tensor.numpy())
    tensor.release()
    return array() is None


def test_large_weights_are_read_again(tmp_path: Path) -> None:
    tensors = file_tensors(load(write(tmp_path / "model.onnx")))
    assert list(tensors) == ["large", "halves"]
    for name, expected in (("large", LARGE), ("halves", HALVES)):
        np.testing.assert_array_equal(tensors[name].numpy(), expected)
        assert released(tensors[name])
        again = tensors[name].numpy()
        assert again.dtype == expected.dtype
        assert not again.flags.writeable
        np.testing.assert_array_equal(again, expected)
        assert tensors[name].tobytes() == expected.tobytes()
        assert tensors[name].numpy() is not again  # nothing is kept a second time


def test_the_model_is_written_from_what_is_read_again(tmp_path: Path) -> None:
    model = load(write(tmp_path / "model.onnx"))
    expected = ir.to_proto(model).SerializeToString(deterministic=True)
    assert all(map(released, file_tensors(model).values()))
    assert ir.to_proto(model).SerializeToString(deterministic=True) == expected


@pytest.mark.parametrize("change", [Path.unlink, lambda path: os.replace(write(path.with_name("new"), 2.0), path)])
def test_a_file_that_is_removed_or_replaced_is_read_all_the_same(tmp_path: Path, change: Callable[[Path], None]) -> None:
    path = write(tmp_path / "model.onnx")
    tensor = file_tensors(load(path))["large"]
    change(path)
    assert released(tensor)
    np.testing.assert_array_equal(tensor.numpy(), LARGE)


def overwrite(path: Path) -> None:
    """Write over a file in place, at another time than it was written first."""
    before = path.stat().st_mtime_ns
    write(path, 2.0)
    os.utime(path, ns=(before, before + 1))


@pytest.mark.parametrize("change", [overwrite, lambda path: os.truncate(path, 1000)])
def test_a_file_that_was_written_to_keeps_the_weights_in_memory(tmp_path: Path, change: Callable[[Path], None]) -> None:
    path = write(tmp_path / "model.onnx")
    tensor = file_tensors(load(path))["large"]
    change(path)
    assert not released(tensor)
    np.testing.assert_array_equal(tensor.numpy(), LARGE)


@pytest.mark.parametrize("change", [overwrite, lambda path: os.truncate(path, 1000)])
def test_weights_of_a_file_that_was_written_to_are_refused(tmp_path: Path, change: Callable[[Path], None]) -> None:
    path = write(tmp_path / "model.onnx")
    tensor = file_tensors(load(path))["large"]
    assert released(tensor)
    change(path)
    message = r"the tensor 'large' is to be read from '.*model.onnx', and that file has been written to since .*: load or compile"
    with pytest.raises(ModelError, match=message):
        tensor.numpy()


def test_models_that_are_no_files_keep_their_weights(tmp_path: Path) -> None:
    path = write(tmp_path / "model.onnx")
    for source in (path.read_bytes(), onnx.load(path)):
        assert not file_tensors(load(source))


@pytest.mark.slow
def test_the_file_is_closed_with_the_model(tmp_path: Path) -> None:
    model = load(write(tmp_path / "model.onnx"))
    closing = file_tensors(model)["large"]._elements.file._close
    assert closing.alive
    del model
    gc.collect()
    assert not closing.alive


def perceptron(path: Path) -> Path:
    initializers = [numpy_helper.from_array(LARGE, "weight"), numpy_helper.from_array(BIAS, "bias")]
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "weight", "bias"], ["logits"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 256])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 100])],
        initializers,
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def test_a_session_lets_go_of_the_weights_that_it_has_taken_over(tmp_path: Path) -> None:
    program = burnish.compile(perceptron(tmp_path / "model.onnx"), optimizer="sgd")
    array = weakref.ref(program.weights["param/weight"])
    session = burnish.Session(program, threads=1)
    assert array() is None
    batch = {"x": np.ones((2, 256), np.float32), "labels": np.array([1, 2])}
    session.step(batch)
    assert not np.array_equal(session.state()["param/weight"], LARGE)
    for weights in (program.weights, program.initial_state(), program.with_optimizer("adam").weights):
        np.testing.assert_array_equal(weights["param/weight"], LARGE)
        np.testing.assert_array_equal(weights["param/bias"], BIAS)


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), MemoryError("Unable to allocate")], ids=["disk", "memory"])
def test_what_cannot_be_read_again_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    model = load(write(tmp_path / "model.onnx"))
    tensor = model.graph.initializers["large"].const_value
    assert isinstance(tensor, FileTensor)
    tensor.release()

    def fail(*arguments: object) -> int:
        raise error

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(ModelError, match=rf"'large' cannot be read from '.*model\.onnx': .*{error.args[-1]}\. Check the disk"):
        tensor.numpy()
