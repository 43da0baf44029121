"""A program whose samples stand along another axis than the first, in the C client: it takes the model's layout, and what would
cut along the first axis refuses it by name."""

from __future__ import annotations

import functools
import subprocess

import c_library
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import burnish
from burnish.program import Program
from oracles.same_state import assert_same_state
from oracles.standard_operators import STANDARD

reason = c_library.missing()
pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))

STEPS, SAMPLES, CLASSES = 4, 6, 3


@functools.cache
def program(cached: bool) -> Program:
    """A class for each step of `[time, batch, 5]`; the head alone trains."""
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 17]> g (float[time, batch, 5] x) => (float[time, batch, 3] logits)'
        "{ s = LSTM <hidden_size = 6> (x, w, r) h = Squeeze (s, one) logits = MatMul (h, head) }"
    )
    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(size=shape) for name, shape in {"w": (1, 24, 5), "r": (1, 24, 6), "head": (6, CLASSES)}.items()}
    model.graph.initializer.extend(numpy_helper.from_array(array.astype(np.float32), name) for name, array in arrays.items())
    model.graph.initializer.append(numpy_helper.from_array(np.array([1]), "one"))
    options = {"trainable": ["head"], "cached_features": "auto"} if cached else {}
    return burnish.compile(model, loss="cross_entropy:class_axis=-1", optimizer="sgd:lr=0.1", **options)


@functools.cache
def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(STEPS, SAMPLES, 5)).astype(np.float32)
    return {"x": x, "labels": rng.integers(0, CLASSES, (STEPS, SAMPLES))}


@pytest.fixture(scope="module")
def client(tmp_path_factory) -> c_library.Client:
    return c_library.Client(c_library.build(tmp_path_factory.mktemp("c"), "libburnish.so"))


def test_a_session_takes_the_layout_of_the_model(client, tmp_path):
    program(False).save(tmp_path / "program")
    ours = client.open(tmp_path / "program")
    assert {name: ours.sample_axis(name) for name in ("x", "labels")} == {"x": 1, "labels": 1}
    with burnish.Session(program(False), engine=STANDARD, threads=1) as theirs:
        assert float(ours.step(batch())["loss"]) == theirs.step(batch())["loss"]
        assert_same_state(ours.state(), theirs.state())
    with pytest.raises(c_library.ClientError, match="disagree about 'time': 4 and 6"):
        ours.step({**batch(), "labels": batch()["labels"].T})
    ours.close()


def test_what_cuts_along_the_first_axis_is_refused(client, tmp_path):
    program(True).save(tmp_path / "cached")
    session = client.open(tmp_path / "cached")
    with pytest.raises(
        c_library.ClientError,
        match="ConfigurationError: 'x' has its samples along axis 1, and a cache keeps samples of the first axis: run ",
    ):
        session.cache()
    features = session.features({"x": batch()["x"]})
    with burnish.Session(program(True), engine=STANDARD, threads=1) as theirs:
        assert_same_state(features, theirs.features({"x": batch()["x"]}))
        labelled = {**features, "labels": batch()["labels"]}
        assert float(session.step(labelled)["loss"]) == theirs.step(labelled)["loss"]
    session.close()
    trainer = c_library.build(tmp_path, "train", c_library.SOURCES / "main.c")
    program(False).save(tmp_path / "program")
    command = [str(trainer), str(tmp_path / "program"), "--batch", "2", "--steps", "1"]
    for name, array in batch().items():
        np.save(tmp_path / f"{name}.npy", array)
        command += ["--data", f"{name}={tmp_path / name}.npy"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "x: the model has its samples along another axis than the first" in refused.stderr
    assert refused.stdout == ""
    program(False).package(tmp_path / "board", runtime="c")
    told = (tmp_path / "board" / "README.md").read_text()
    assert "refuses this program, in which those of `x` and `labels` stand elsewhere" in told
    assert "--data" not in told
