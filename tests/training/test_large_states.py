"""Opening, saving, restoring and exporting hold no second copy of the state: memory is counted where NumPy takes it."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
import onnx
import pytest

import burnish
from burnish.files import export
from burnish.files.state_file import StateFile
from burnish.training import Session

WIDTH, LAYERS = 512, 8
STATE_BYTES = 4 * WIDTH**2 * LAYERS
INPUTS = {name: np.ones((1, WIDTH), np.float32) for name in ("x", "targets")}


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("large") / "model.onnx"
    floats = onnx.TensorProto.FLOAT
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) / WIDTH for _ in range(LAYERS)]
    graph = onnx.helper.make_graph(
        [
            onnx.helper.make_node("MatMul", [f"h{index}" if index else "x", f"w{index}"], [f"h{index + 1}"])
            for index in range(LAYERS)
        ],
        "stack",
        [onnx.helper.make_tensor_value_info("x", floats, ("batch", WIDTH))],
        [onnx.helper.make_tensor_value_info(f"h{LAYERS}", floats, ("batch", WIDTH))],
        [onnx.numpy_helper.from_array(weight, f"w{index}") for index, weight in enumerate(weights)],
    )
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)]), path)
    return burnish.compile(path, loss="mse", optimizer=burnish.optim.sgd(lr=0.01), metrics=())


def growth(run: Callable[[], object]) -> float:
    """By how many times the state's size NumPy's and Python's memory grows at most while something runs."""
    tracemalloc.start()
    try:
        kept = run()
        peak = tracemalloc.get_traced_memory()[1]
        del kept
    finally:
        tracemalloc.stop()
    return peak / STATE_BYTES


@pytest.fixture(params=["onnxruntime", "torch"])
def session(request, program):
    with Session(program, engine=request.param) as session:
        session.step(INPUTS)
        yield session


def test_the_initial_state_is_the_only_copy(program):
    with Session(program, engine="reference"):
        pass  # the weights are in the file alone now
    assert growth(program.initial_state) < 1.3


def test_opening(program):
    """The two sets of buffers that a step swaps; the state is taken over entry by entry."""
    assert growth(lambda: Session(program, engine="onnxruntime")) < 2.3


def test_a_checkpoint(session, tmp_path):
    session.save_checkpoint(tmp_path / "warm.safetensors")
    assert growth(lambda: session.save_checkpoint(tmp_path / "last.safetensors")) < 0.4


def test_restoring(session, tmp_path):
    """Into the buffers of the next step; on PyTorch into tensors that take the place of the others when all is read."""
    session.save_checkpoint(tmp_path / "last.safetensors")
    expected = session.state()
    session.step(INPUTS)
    bound = 0.4 if session.engine.name == "onnxruntime" else 1.3
    assert growth(lambda: session.restore(tmp_path / "last.safetensors")) < bound
    for name, array in session.state().items():
        np.testing.assert_array_equal(array, expected[name])


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_exporting(session, tmp_path, monkeypatch, limit):
    save = export.save_inference
    monkeypatch.setattr("burnish.adapters.exports.save_inference", lambda model, path: save(model, path, limit))
    session.export(tmp_path / "warm.onnx")
    assert growth(lambda: session.export(tmp_path / "tuned.onnx")) < 0.4
    model = onnx.load(tmp_path / "tuned.onnx")
    state = session.state()
    for initializer in model.graph.initializer:
        np.testing.assert_array_equal(onnx.numpy_helper.to_array(initializer), state[f"param/{initializer.name}"])


def test_a_restore_that_fails_in_the_middle_leaves_the_state(session, tmp_path, monkeypatch):
    session.save_checkpoint(tmp_path / "last.safetensors")
    session.step(INPUTS)
    before = session.state()
    read = StateFile.__getitem__
    asked: list[str] = []

    def fail(self, name):
        asked.append(name)
        if len(asked) > LAYERS // 2:
            raise burnish.errors.CheckpointError("the disk is gone")
        return read(self, name)

    monkeypatch.setattr(StateFile, "__getitem__", fail)
    with pytest.raises(burnish.errors.CheckpointError, match="the disk is gone"):
        session.restore(tmp_path / "last.safetensors")
    assert len(asked) == LAYERS // 2 + 1
    for name, array in session.state().items():
        np.testing.assert_array_equal(array, before[name])
