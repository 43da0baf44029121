"""External data is read from inside the model's folder, whole, or not at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

import burnish
from burnish.errors import ModelError
from burnish.importer import load
from oracles.onnxruntime_outputs import onnxruntime_outputs

WEIGHT = np.random.default_rng(0).normal(size=(3, 500)).astype(np.float32)


def write(folder: Path, location: str = "weights.bin", offset: int | None = 0, length: int | None = WEIGHT.nbytes) -> Path:
    """A model whose weight says that its data lies at ``location``."""
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=WEIGHT.shape, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        if value is not None:
            tensor.external_data.add(key=key, value=str(value))
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 500])],
        [tensor],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.parametrize(("location", "offset"), [("weights.bin", 0), ("weights.bin", 4096), ("sub/weights.bin", None)])
def test_data_beside_the_model(tmp_path: Path, location: str, offset: int | None) -> None:
    path = write(tmp_path, location, offset)
    (tmp_path / location).parent.mkdir(exist_ok=True)
    (tmp_path / location).write_bytes(bytes(offset or 0) + WEIGHT.tobytes())
    model = load(path)
    tensor = model.graph.initializers["w"].const_value
    assert tensor is not None
    np.testing.assert_array_equal(tensor.numpy(), WEIGHT)
    x = np.ones((2, 3), np.float32)
    np.testing.assert_allclose(onnxruntime_outputs(str(path), {"x": x})["y"], x @ WEIGHT, rtol=1e-5, atol=1e-6)


def test_ir_model_with_external_data(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(WEIGHT.tobytes())
    source = ir.load(write(tmp_path))
    model = load(source)
    assert model.graph.initializers["w"].const_value is not source.graph.initializers["w"].const_value
    np.testing.assert_array_equal(model.graph.initializers["w"].const_value.numpy(), WEIGHT)  # type: ignore[union-attr]


def test_ir_model_with_data_outside_its_folder(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "weights.bin").write_bytes(WEIGHT.tobytes())
    with pytest.raises(ModelError, match=r"tensor 'w'.*outside the model's folder: '\.\./weights\.bin'"):
        load(ir.load(write(inner, "../weights.bin")))


@pytest.mark.parametrize("location", ["../weights.bin", "sub/../../weights.bin", "sub/../weights.bin", "..\\weights.bin", "C:w"])
def test_location_that_leaves_the_folder(tmp_path: Path, location: str) -> None:
    inner = tmp_path / "inner"
    (inner / "sub").mkdir(parents=True)
    (tmp_path / "weights.bin").write_bytes(WEIGHT.tobytes())
    with pytest.raises(ModelError, match=r"tensor 'w' points to external data outside the model's folder"):
        load(write(inner, location))


def test_absolute_location(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(WEIGHT.tobytes())
    with pytest.raises(ModelError, match=r"tensor 'w'.*outside the model's folder.*weights\.bin.*relative path"):
        load(write(tmp_path, str(tmp_path / "weights.bin")))


def test_link_that_leaves_the_folder(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "secret.bin").write_bytes(WEIGHT.tobytes())
    (inner / "weights.bin").symlink_to(tmp_path / "secret.bin")
    with pytest.raises(ModelError, match=r"tensor 'w'.*outside the model's folder: 'weights\.bin'"):
        load(write(inner))


def test_link_to_a_folder_outside(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "weights.bin").write_bytes(WEIGHT.tobytes())
    (inner / "sub").symlink_to(tmp_path, target_is_directory=True)
    with pytest.raises(ModelError, match=r"tensor 'w'.*outside the model's folder: 'sub/weights\.bin'"):
        load(write(inner, "sub/weights.bin"))


def test_link_inside_the_folder(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(WEIGHT.tobytes())
    (tmp_path / "weights.bin").symlink_to(tmp_path / "blob")
    np.testing.assert_array_equal(load(write(tmp_path)).graph.initializers["w"].const_value.numpy(), WEIGHT)  # type: ignore[union-attr]


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tensor 'w' keeps its data in 'weights\.bin', which is not in '.*': copy it"):
        load(write(tmp_path))


def test_file_that_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").mkdir()
    with pytest.raises(ModelError, match="not a regular file"):
        load(write(tmp_path))


def test_file_that_is_too_short(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(WEIGHT.tobytes()[:-1])
    with pytest.raises(ModelError, match=r"needs 'weights\.bin' to have 6000 bytes, and it has 5999: the file is cut short"):
        load(write(tmp_path))


def test_offset_past_the_end(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(WEIGHT.tobytes())
    with pytest.raises(ModelError, match=r"to have 6004 bytes, and it has 6000"):
        load(write(tmp_path, offset=4))


def test_length_that_does_not_fit_the_dims(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(WEIGHT.tobytes())
    with pytest.raises(ModelError, match=r"tensor 'w' declares 6000 bytes by its dims and 12 bytes of external data"):
        load(write(tmp_path, length=12))


@pytest.mark.parametrize(
    ("offset", "length"), [("four", 6000), (0, "many"), (0, "60_00"), ("٠", 6000), ("", 6000), ("9" * 5000, 1)]
)
def test_offset_or_length_that_is_not_a_number(tmp_path: Path, offset: object, length: object) -> None:
    (tmp_path / "weights.bin").write_bytes(WEIGHT.tobytes())
    with pytest.raises(ModelError, match="tensor 'w' has external data with an offset or length that is not a number"):
        load(write(tmp_path, offset=offset, length=length))  # type: ignore[arg-type]


def test_negative_offset(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(WEIGHT.tobytes())
    with pytest.raises(ModelError, match="tensor 'w' has external data at offset -4"):
        load(write(tmp_path, offset=-4))


@pytest.mark.parametrize("key", ["location", "offset"])
def test_a_place_that_is_given_twice(tmp_path: Path, key: str) -> None:
    path = write(tmp_path)
    (tmp_path / "weights.bin").write_bytes(WEIGHT.tobytes())
    proto = onnx.load(path, load_external_data=False)
    for _ in range(2):
        proto.graph.initializer[0].external_data.add(key=key, value="0")
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(ModelError, match="tensor 'w' says twice where its external data lies"):
        load(path)


def test_data_in_both_places(tmp_path: Path) -> None:
    path = write(tmp_path)
    (tmp_path / "weights.bin").write_bytes(WEIGHT.tobytes())
    proto = onnx.load(path, load_external_data=False)
    proto.graph.initializer[0].raw_data = WEIGHT.tobytes()
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(ModelError, match="tensor 'w' has both external data and data in the model: export the model again"):
        load(path)


def test_no_location(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"(?s)tensor 'w' has external data without a location"):
        load(write(tmp_path, location=""))


def test_source_without_a_folder(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(WEIGHT.tobytes())
    path = write(tmp_path)
    proto = onnx.load(path, load_external_data=False)
    for source in (path.read_bytes(), proto, ir.from_proto(proto)):
        with pytest.raises(
            ModelError, match=r"tensor 'w'.*'weights\.bin'.*folder of the model is not known: load the model by its"
        ):
            load(source)


def test_constant_node_with_external_data_outside(tmp_path: Path) -> None:
    path = write(tmp_path)
    proto = onnx.load(path, load_external_data=False)
    tensor = proto.graph.initializer[0]
    tensor.external_data[0].value = "../w.bin"
    proto.graph.node.insert(0, helper.make_node("Constant", [], ["w"], value=tensor))
    del proto.graph.initializer[:]
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(ModelError, match="outside the model's folder"):
        load(path)


def test_a_shape_may_lie_beside_the_model(tmp_path: Path) -> None:
    shape = np.array([-1, 3], np.int64)
    tensor = TensorProto(name="shape", data_type=TensorProto.INT64, dims=[2], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="shapes.bin")
    (tmp_path / "shapes.bin").write_bytes(shape.tobytes())
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in (("x", ["n", 3, 1]), ("y", ["n", 3]))]
    graph = helper.make_graph([helper.make_node("Reshape", ["x", "shape"], ["y"])], "g", info[:1], info[1:], [tensor])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    loaded = load(tmp_path / "model.onnx")
    x = np.arange(6, dtype=np.float32).reshape(2, 3, 1)
    np.testing.assert_array_equal(burnish.engines.get("onnxruntime").run(loaded, {"x": x})["y"], x[..., 0])
