"""Inputs of a graph on ONNX Runtime: small ones are copied into buffers, and no batch is mistaken for another."""

import numpy as np
import pytest

import burnish
from burnish.engines.onnxruntime import OnnxRuntimeEngine, bound_graph
from burnish.models import residual_network


@pytest.fixture(scope="module")
def program() -> burnish.Program:
    return burnish.compile(residual_network(), loss="cross_entropy", optimizer=burnish.optim.sgd(lr=0.1, momentum=0.9))


@pytest.mark.parametrize("largest", [256, 2**18])
def test_batches_of_changing_sizes_train_as_without_buffers(monkeypatch, program, largest):
    """At 256 bytes labels are copied, and images in a batch of one alone."""
    random = np.random.default_rng(0)
    batches = [
        {"x": random.standard_normal((size, 1, 8, 8), np.float32), "labels": random.integers(0, 10, size)}
        for size in (4, 4, 2, 4, 1, 4)
    ]
    losses = {}
    for limit in (-1, largest):
        monkeypatch.setattr(bound_graph, "LARGEST_COPIED_INPUT", limit)
        session = burnish.Session(program, engine=OnnxRuntimeEngine(kernels=False))
        losses[limit] = [session.step(batch)["loss"] for batch in batches]
    assert losses[largest] == losses[-1]
    assert len(set(losses[largest])) == len(batches)


def test_an_array_that_is_written_over_is_read_anew(program):
    session = burnish.Session(program, engine=OnnxRuntimeEngine(kernels=False))
    x = np.random.default_rng(0).standard_normal((3, 1, 8, 8), np.float32)
    (before,) = session.predict({"x": x}).values()
    x[...] = 0
    (after,) = session.predict({"x": x}).values()
    (zeros,) = session.predict({"x": np.zeros_like(x)}).values()
    assert not np.array_equal(before, after)
    np.testing.assert_array_equal(after, zeros)
