"""Data on another scale than the model was trained on, as its batch normalization tells at the first step."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import burnish
from burnish.errors import ObjectiveWarning


def convolutional(trained_on: np.ndarray, momentum: float = 0.9) -> onnx.ModelProto:
    """A network whose running statistics are those of the images [N, 3, 6, 6] that it was trained on."""
    rng = np.random.default_rng(0)
    kernels = rng.normal(size=(8, 3, 1, 1)).astype(np.float32)
    values = np.einsum("oi,nihw->nohw", kernels[:, :, 0, 0], trained_on)
    arrays = {
        "k": kernels,
        "s": np.ones(8),
        "b": np.zeros(8),
        "m": values.mean((0, 2, 3)),
        "v": values.var((0, 2, 3)),
        "w": rng.normal(size=(8, 3)),
    }
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 18]> g (float[N, 3, 6, 6] x) => (float[N, 3] y) '
        f"{{ c = Conv(x, k) n = BatchNormalization <momentum = {momentum}> (c, s, b, m, v) r = Relu(n) "
        "p = GlobalAveragePool(r) f = Flatten(p) y = MatMul(f, w) }"
    )
    model.graph.initializer.extend(numpy_helper.from_array(array.astype(np.float32), name) for name, array in arrays.items())
    return model


def images(seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).uniform(size=(8, 3, 6, 6)).astype(np.float32)


def said(program: burnish.Program, x: np.ndarray, engine: str = "onnxruntime", steps: int = 1) -> list[str]:
    batch = {"x": x.astype(np.float32), "labels": np.arange(8) % 3}
    with burnish.Session(program, engine, threads=1) as session, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            session.step(batch)
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught if isinstance(warning.message, ObjectiveWarning)]


@pytest.mark.parametrize("engine", ["onnxruntime", "torch"])
@pytest.mark.parametrize("momentum", [0.9, 0.99])
def test_pixels_that_were_not_divided_are_warned_of_once(engine, momentum):
    program = burnish.compile(convolutional(images(2), momentum))
    (message,) = said(program, 255 * images(), engine, steps=2)
    assert "BatchNormalization" in message
    assert "times the variance that it met when the model was trained" in message
    assert "pixels of 0 to 255 in place of 0 to 1" in message
    assert said(program, images(), engine) == []


def test_pixels_that_were_divided_in_vain_are_warned_of():
    (message,) = said(burnish.compile(convolutional(255 * images(2))), images())
    assert "th of the variance" in message
    assert "pixels of 0 to 1 in place of 0 to 255" in message


@pytest.mark.parametrize(
    ("model", "options", "x"),
    [
        (convolutional(images(2)), {}, (images() - 0.45) / 0.225),  # standardized or not, the scale is much the same
        (convolutional(images(2)), {}, 0 * images()),
        (convolutional(images(2)), {"norm": "frozen"}, 255 * images()),
        (convolutional(np.zeros((1, 3, 6, 6))), {}, images()),
    ],
    ids=["standardized", "nothing varies", "frozen", "never trained"],
)
def test_nothing_is_said_where_the_statistics_do_not_tell(model, options, x):
    assert said(burnish.compile(model, **options), x) == []
