"""Files of one sample whose shapes no inference follows: the batch is opened where the sample stands."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

import burnish
from burnish.finetuning.preparation import transfer
from oracles.small_networks import CLASSES, Network


def test_an_output_that_does_not_say_so_has_its_sample_in_front(tmp_path):
    """As PyTorch's older exporter writes ``expand``: by ``Where`` on the shape, after which the extent is unknown."""
    network = Network("one", [6])
    builder = network.builder
    network.graph.inputs[0].shape = ir.Shape([1, 6])
    shape = builder.op("Shape", network.input)
    extents = builder.op("Where", builder.op("Equal", shape, builder.integers([-1, -1])), builder.integers([1, 1]), shape)
    x = builder.op("Expand", network.input, extents)
    x.value.shape = ir.Shape([None, 6])
    logits = network.dense("head", builder.op("Tanh", network.dense("hidden", x, 6, 8)), 8, CLASSES)
    logits.value.shape = ir.Shape(["lost", CLASSES])
    model = network.model(logits)
    np.savez(tmp_path / "data.npz", x=np.zeros((12, 6), np.float32), y=np.arange(12) % 3)
    prepared, _ = transfer(model, tmp_path / "data.npz")
    assert list(prepared.model.graph.outputs[0].shape or ()) == [1, 3]
    program = burnish.compile(prepared.model, batch=prepared.batch, optimizer="sgd:lr=0.1")
    (logits_entry,) = program.signature["predict"].outputs
    assert logits_entry.extents == ("batch", 3)
    with burnish.Session(program, threads=1) as session:
        assert np.isfinite(session.step({"x": np.zeros((4, 6), np.float32), "labels": np.arange(4) % 3})["loss"])
