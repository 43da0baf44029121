"""Detectors whose loss is an ONNX graph of its own: loss, every gradient and five steps beside PyTorch's."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
from torch import nn

import burnish
from oracles import whole_models
from oracles.combinations import diagonal

OUTPUTS = {"yolo": ["grid"], "ssd": ["scores", "offsets"]}
ENGINES = ("onnxruntime", "torch")


def files_of(name: str, module: nn.Module, folder: Path, exporter: str) -> tuple[Path, Path]:
    """The detector and its loss, each as a file; what the loss reads of the detector has the name of its output."""
    ((labels, _),) = whole_models.batches(name, 1)
    images = {"x": labels.pop("x")}
    detector, loss = folder / "detector.onnx", folder / "loss.onnx"
    statistics = {key: value.clone() for key, value in module.detector.state_dict().items() if "running" in key}
    traced = copy.deepcopy(module)
    whole_models.write(traced.detector, images, OUTPUTS[name], detector, "torchscript", 18, positional=1)
    whole_models.restore_statistics(detector, statistics)
    outputs = traced.detector(images["x"])
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    read = {key: tensor.detach() for key, tensor in zip(OUTPUTS[name], outputs, strict=True)}
    whole_models.write(traced.loss, read | labels, ["loss"], loss, exporter, 18, positional=len(read | labels))
    return detector, loss


@diagonal(
    ("name", list(OUTPUTS)),
    ("engine", ENGINES),
    ("exporter", ["torchscript", pytest.param("dynamo", marks=pytest.mark.slow)]),
    test=1,
)
def test_a_detector_trains_by_a_loss_graph_as_in_pytorch(name: str, engine: str, exporter: str, tmp_path: Path) -> None:
    module = whole_models.build(name)
    given = whole_models.batches(name)
    exact = whole_models.in_pytorch(name, copy.deepcopy(module).double(), given)
    detector, loss = files_of(name, module, tmp_path, exporter)
    program = whole_models.compiled(name, detector, module.detector, loss=burnish.losses.from_onnx(loss), output=None)
    batches = [whole_models.feeds_of(batch) for batch in given]

    feeds = program.initial_state() | batches[0]
    outputs = burnish.engines.get(engine).run(
        program.grad, {entry.name: feeds[entry.name] for entry in program.signature["grad"].inputs}
    )
    errors = {
        key: np.linalg.norm(outputs[f"grad:{key.removeprefix('detector.')}"] - gradient) / np.linalg.norm(gradient)
        for key, gradient in exact.gradients.items()
    }
    assert {key: error for key, error in errors.items() if not error < 1e-4} == {}
    with burnish.Session(program, engine=engine) as session:
        losses = [session.step(batch)["loss"] for batch in batches]
        state = session.state()
    np.testing.assert_allclose(losses, exact.losses, rtol=1e-4)
    moved = {key.removeprefix("detector."): value for key, value in exact.state.items() if key.startswith("detector.")}
    for key, value in moved.items():
        if not key.endswith("num_batches_tracked"):
            ours = state[f"stat/{key}" if "running" in key else f"param/{key}"]
            assert np.linalg.norm(ours - value) < 1e-4 * np.linalg.norm(value), key
