"""Workers that train a quantized model together: they have the same scales and ranges."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import onnx.parser
import pytest

import burnish
from burnish import surgery
from burnish.distributed import ArrayCommunicator

MODEL = """<ir_version: 8, opset_import: ["": 18]>
g (float[N, 6] x) => (float[N, 2] y) <float[6, 2] w, float[2, 2] v> {
    h = MatMul (x, w)
    r = Relu (h)
    y = MatMul (r, v)
}"""
GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(8, 6)).astype(np.float32)
TARGETS = GENERATOR.normal(size=(8, 2)).astype(np.float32)
HALVES = (slice(0, 4), slice(4, 8))


class Meeting:
    """Connects two threads as two workers."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=600)
        self._arrays: list[np.ndarray | None] = [None, None]

    def communicator(self, rank: int) -> ArrayCommunicator:
        def all_gather(array: np.ndarray) -> np.ndarray:
            self._arrays[rank] = array.copy()
            self._barrier.wait()
            gathered = np.stack(self._arrays)
            self._barrier.wait()
            return gathered

        return ArrayCommunicator(rank, 2, lambda array: all_gather(array).sum(0, dtype=array.dtype), all_gather)


@pytest.mark.parametrize("scales", ["learned", "observed"])
def test_two_workers_have_the_same_scales_and_the_average_of_their_ranges(scales: str) -> None:
    proto = onnx.parser.parse_model(MODEL)
    for name, array in (("w", X[:6, :2]), ("v", X[6:, :2])):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array.copy(), name))
    options = {"momentum": 0.5} if scales == "observed" else {}
    quantized = surgery.quantize(proto, scales=scales, calibration=[{"x": X / 2}], **options)
    program = burnish.compile(quantized, loss="mse", optimizer=burnish.optim.sgd(lr=0.01))
    meeting = Meeting()

    def worker(rank: int) -> dict[str, np.ndarray]:
        parallel = burnish.DataParallel(communicator=meeting.communicator(rank))
        with burnish.Session(program, engine="onnxruntime", threads=1, parallel=parallel) as session:
            for _ in range(2):
                session.step({"x": X[HALVES[rank]], "targets": TARGETS[HALVES[rank]]})
            return session.state()

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(worker, range(2))
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name], err_msg=name)
    if scales == "observed":
        seen = np.mean([[X[half].min(), X[half].max()] for half in HALVES], axis=0)
        before = np.asarray([X.min(), X.max()]) / 2
        np.testing.assert_allclose(first["stat/x_range"], 0.25 * before + 0.75 * seen, rtol=1e-5)
    else:
        assert first["param/x_scale"] != program.initial_state()["param/x_scale"]
