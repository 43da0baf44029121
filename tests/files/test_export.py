"""The inference model that a program and its state give: PyTorch's numbers, the source's names, files written whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn

import burnish
from burnish.errors import CheckpointError
from burnish.files import export
from burnish.files.export import export_inference, save_inference
from burnish.program import Program
from oracles.combinations import spread
from oracles.onnxruntime_outputs import onnxruntime_outputs
from oracles.tiny_program import tiny_program
from torch_models import MobileNetV2, ResNet, export_onnx

Arrays = dict[str, np.ndarray]

NETWORKS = {
    "residual": lambda: ResNet((1, 1), 8, 10),
    "depthwise": lambda: MobileNetV2(((1, 16, 1, 1), (6, 24, 2, 2)), classes=10),
}


def randomized(network: str) -> nn.Module:
    torch.manual_seed(1)
    module = NETWORKS[network]()
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.normal_(layer.bias, std=0.3)
            nn.init.normal_(layer.running_mean, std=0.3)
            nn.init.uniform_(layer.running_var, 0.5, 2)
    return module


def compiled(module: nn.Module) -> tuple[Program, Arrays]:
    """The program of a module, and the module's own parameters and statistics as state."""
    program = burnish.compile(export_onnx(module, torch.zeros(2, 3, 32, 32)))
    state = {}
    tensors = module.state_dict()
    for entry in program.signature["predict"].inputs:
        if entry.is_state:
            state[entry.name] = tensors[entry.name.partition("/")[2]].numpy()
    return program, state


@spread("network", NETWORKS, test=1)
def test_agrees_with_pytorch_folded_or_not(network: str) -> None:
    module = randomized(network)
    program, state = compiled(module)
    x = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = module.eval()(x).numpy()
    outputs = {}
    for fold in (False, True):
        model = export_inference(program, state, fold_norm=fold)
        onnx.checker.check_model(ir.to_proto(model), full_check=True)
        assert [value.name for value in model.graph.inputs] == ["x"]
        assert [value.name for value in model.graph.outputs] == ["logits"]
        outputs[fold] = onnxruntime_outputs(model, {"x": x.numpy()})["logits"]
        assert np.linalg.norm(outputs[fold] - expected) <= 1e-5 * np.linalg.norm(expected)
    assert np.abs(outputs[True] - outputs[False]).max() <= 1e-5 * np.abs(outputs[False]).max()


def test_names_are_the_sources() -> None:
    module = randomized("residual")
    program, state = compiled(module)
    names = {name for name in module.state_dict() if not name.endswith("num_batches_tracked")}
    assert set(export_inference(program, state, fold_norm=False).graph.initializers) == names
    folded = export_inference(program, state)
    convolutions = {name for name in names if "conv" in name or "downsample.0" in name}
    biases = {name.replace("weight", "bias") for name in convolutions}
    assert set(folded.graph.initializers) == convolutions | biases | {"fc.weight", "fc.bias"}
    assert not any(node.op_type == "BatchNormalization" for node in folded.graph)


def test_the_program_and_the_state_are_left_as_they_are() -> None:
    program, state = compiled(randomized("residual"))
    before = ir.to_proto(program.predict).SerializeToString(deterministic=True)
    copies = {name: array.copy() for name, array in state.items()}
    export_inference(program, state)
    assert ir.to_proto(program.predict).SerializeToString(deterministic=True) == before
    for name, array in copies.items():
        np.testing.assert_array_equal(state[name], array)


def test_whole_state_of_a_session_is_accepted() -> None:
    program = tiny_program()
    state = dict(program.weights) | {"opt/momentum/weight": np.zeros((4, 3), np.float32), "step": np.asarray(3)}
    model = export_inference(program, state)
    x = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    centred = (x - state["stat/mean"]) * state["param/scale"]
    expected = centred @ state["param/weight"] + state["param/bias"]
    np.testing.assert_allclose(onnxruntime_outputs(model, {"x": x})["logits"], expected, rtol=1e-5, atol=1e-6)
    assert set(model.graph.initializers) == {"weight", "bias", "scale", "mean"}


def test_a_value_that_took_an_initializers_name_gives_it_back() -> None:
    program = tiny_program()
    program.predict.graph[0].outputs[0].name = "weight"
    model = export_inference(program, program.weights)
    onnx.checker.check_model(ir.to_proto(model))
    np.testing.assert_array_equal(model.graph.initializers["weight"].const_value.numpy(), program.weights["param/weight"])  # type: ignore[union-attr]


def test_missing_parameter() -> None:
    program = tiny_program()
    state = {name: array for name, array in program.weights.items() if name != "param/bias"}
    with pytest.raises(CheckpointError, match=r"does not fit the program: missing 'param/bias'.*state of a session"):
        export_inference(program, state)


def test_parameter_of_another_shape() -> None:
    program = tiny_program()
    with pytest.raises(CheckpointError, match=r"'param/bias' has shape \[4\], expected \[3\]"):
        export_inference(program, dict(program.weights) | {"param/bias": np.zeros(4, np.float32)})


def test_parameter_of_another_dtype() -> None:
    program = tiny_program()
    with pytest.raises(CheckpointError, match="'param/bias' has dtype float64, expected float32"):
        export_inference(program, dict(program.weights) | {"param/bias": np.zeros(3)})


def _predict(path: Path, x: np.ndarray) -> np.ndarray:
    return onnxruntime.InferenceSession(path).run(None, {"x": x})[0]


@pytest.fixture
def model() -> ir.Model:
    program = tiny_program()
    weights = dict(program.weights)
    return export_inference(program, weights)


X = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)


def test_saved_file_opens_in_a_bare_runtime(tmp_path: Path, model: ir.Model) -> None:
    path = save_inference(model, tmp_path / "deep" / "folder" / "tuned.onnx")
    np.testing.assert_array_equal(_predict(path, X), onnxruntime_outputs(model, {"x": X})["logits"])
    assert [file.name for file in path.parent.iterdir()] == ["tuned.onnx"]


def test_large_weights_go_beside_the_file(tmp_path: Path, model: ir.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "SMALLEST_EXTERNAL", 16)
    path = save_inference(model, tmp_path / "tuned.onnx", one_file_limit=50)
    (data,) = (file for file in tmp_path.iterdir() if file != path)
    assert data.name.startswith("tuned.onnx-")
    assert data.suffix == ".data"
    assert data.stat().st_size == 48 + 16 + 16
    np.testing.assert_array_equal(_predict(path, X), onnxruntime_outputs(model, {"x": X})["logits"])
    loaded = burnish.load(path)
    np.testing.assert_array_equal(
        loaded.graph.initializers["weight"].const_value.numpy(),  # type: ignore[union-attr]
        model.graph.initializers["weight"].const_value.numpy(),  # type: ignore[union-attr]
    )


def test_data_of_an_earlier_save_is_removed_and_nothing_else(
    tmp_path: Path, model: ir.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "SMALLEST_EXTERNAL", 16)
    (tmp_path / "tuned.onnx-notes.data").write_text("mine")
    path = save_inference(model, tmp_path / "tuned.onnx", one_file_limit=50)
    tensor = model.graph.initializers["weight"].const_value
    assert tensor is not None
    model.graph.initializers["weight"].const_value = ir.Tensor(2 * tensor.numpy(), name="weight")
    save_inference(model, path, one_file_limit=50)
    assert len(list(tmp_path.glob("tuned.onnx-*.data"))) == 2
    np.testing.assert_array_equal(_predict(path, X), onnxruntime_outputs(model, {"x": X})["logits"])
    save_inference(model, path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["tuned.onnx", "tuned.onnx-notes.data"]


def test_weights_from_a_file_of_the_source_are_taken_along(
    tmp_path: Path, model: ir.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "SMALLEST_EXTERNAL", 16)
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    loaded = burnish.load(save_inference(model, tmp_path / "first" / "tuned.onnx", one_file_limit=50))
    path = save_inference(loaded, tmp_path / "second" / "copy.onnx")
    assert [file.name for file in path.parent.iterdir()] == ["copy.onnx"]
    np.testing.assert_array_equal(_predict(path, X), onnxruntime_outputs(model, {"x": X})["logits"])


@pytest.mark.parametrize("limit", [50, 10**9])
def test_interrupted_save_leaves_the_earlier_file(
    tmp_path: Path, model: ir.Model, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(export, "SMALLEST_EXTERNAL", 16)
    path = save_inference(model, tmp_path / "tuned.onnx", one_file_limit=limit)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    expected = _predict(path, X)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    changed = model.clone()
    changed.graph.initializers["weight"].const_value = ir.Tensor(np.zeros((4, 3), np.float32), name="weight")
    monkeypatch.setattr("os.replace", full)
    with pytest.raises(CheckpointError, match=r"could not be written: .*No space left.*earlier file there is untouched"):
        save_inference(changed, path, one_file_limit=limit)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    np.testing.assert_array_equal(_predict(path, X), expected)


def test_folder_that_cannot_be_made(tmp_path: Path, model: ir.Model) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"could not be created: .*Choose a folder"):
        save_inference(model, tmp_path / "file" / "tuned.onnx")
