"""Batch normalization put back after layers into which it was folded, before a file is tuned."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

import burnish
from burnish.errors import ConfigurationError, UnsupportedOperatorError
from burnish.finetuning.options import FinetuneOptions
from burnish.finetuning.planning import plan
from burnish.finetuning.preparation import transfer
from burnish.graph.annotations import FOLDED
from burnish.importer.export_notes import folded_layers
from oracles.small_networks import Network


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two convolutions and a head, at one sample and open, and images of three classes."""
    place = tmp_path_factory.mktemp("folded")
    for name, batch in (("open.onnx", "batch"), ("one.onnx", 1)):
        ir.save(convolutions(batch), place / name)
    rng = np.random.default_rng(0)
    labels = np.arange(24) % 3
    x = rng.normal(labels[:, None, None, None], 0.5, (24, 3, 6, 6)).astype(np.float32)
    np.savez(place / "data.npz", x=x, y=labels)
    return place


def convolutions(batch: int | str, is_said: bool = True) -> ir.Model:
    network = Network("folded", [3, 6, 6])
    builder, rng = network.builder, np.random.default_rng(1)
    network.graph.inputs[0].shape = ir.Shape([batch, 3, 6, 6])
    y = network.input
    for number, (before, channels) in enumerate(((3, 4), (4, 4), (4, 4), (4, 4))):
        weight = network.weight(f"conv{number}.weight", rng.standard_normal((channels, before, 3, 3)) / 3)
        bias = network.weight(f"conv{number}.bias", rng.standard_normal(channels))
        y = builder.op("Conv", y, weight, bias, pads=[1, 1, 1, 1])
        producer = y.value.producer()
        assert producer is not None
        producer.name = f"conv{number}"
        if is_said:
            FOLDED.set(producer, f"bn{number}")
        y = builder.op("Relu", y)
    pooled = builder.op("ReduceMean", y, builder.integers([2, 3]), keepdims=0)
    return network.model(network.dense("head", pooled, 4, 5))


def logits_of(model: ir.Model, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["open.onnx", "one.onnx"])
def test_it_is_put_back_and_changes_no_output(folder, name):
    prepared, dataset = transfer(folder / name, folder / "data.npz")
    assert "put after 4 layers into which the exporter folded it, with the statistics of 24 samples" in " ".join(prepared.notes)
    put_in = [node for node in prepared.model.graph if node.op_type == "BatchNormalization"]
    assert [node.inputs[1].name for node in put_in] == [f"conv{number}.norm.weight" for number in range(4)]
    as_it_was, _ = transfer(folder / name, folder / "data.npz", FinetuneOptions(folded_norm="keep"))
    assert "it stays there, and these train as they are" in " ".join(as_it_was.notes)
    x = dataset.batch(np.arange(1))["x"]
    np.testing.assert_allclose(logits_of(prepared.model, x), logits_of(as_it_was.model, x), rtol=1e-4, atol=1e-5)
    groups = prepared.groups()
    assert all(groups[f"conv{number}.bias"] == "frozen" for number in range(4))
    assert not any(name.startswith("conv") for name in as_it_was.groups())


def test_only_layers_that_train_get_it(folder):
    prepared, _ = transfer(folder / "open.onnx", folder / "data.npz", FinetuneOptions(freeze_until="conv2*"))
    assert "put after 2 layers" in " ".join(prepared.notes)
    assert set(prepared.frozen) == {"conv0.weight", "conv0.bias", "conv1.weight", "conv1.bias"}
    alone, _ = transfer(folder / "open.onnx", folder / "data.npz", FinetuneOptions(freeze_until="head"))
    assert not any("normalization" in note for note in alone.notes)


@pytest.mark.slow
def test_the_tuned_file_has_it_folded(folder, tmp_path):
    tuned = burnish.finetune(
        folder / "open.onnx", folder / "data.npz", output=tmp_path / "tuned.onnx", epochs=1, lr=0.01, threads=1
    )
    before, after = onnx.load(folder / "open.onnx"), onnx.load(tuned.path)
    assert [node.op_type for node in after.graph.node if node.op_type in ("Conv", "BatchNormalization")] == ["Conv"] * 4
    assert {tensor.name for tensor in before.graph.initializer if "conv" in tensor.name} <= {
        tensor.name for tensor in after.graph.initializer
    }


@pytest.mark.parametrize("bias", ["model/bn/batchnorm/sub:0", "model/bn/FusedBatchNormV3_bias_fused_bn"])
def test_files_of_tensorflow_say_so_by_their_names(bias):
    model = convolutions("batch", is_said=False)
    value = model.graph.initializers["conv1.bias"]
    value.name = bias
    assert folded_layers(model) == {"conv1.weight": bias}


@pytest.mark.slow
def test_where_nothing_says_that_it_was_folded(folder):
    data = folder / "data.npz"
    left, _ = transfer(convolutions("batch", is_said=False), data)
    assert "whose 4 convolutions look as if it had been folded into them; if it was, folded_norm='insert'" in " ".join(left.notes)
    put_in, _ = transfer(convolutions("batch", is_said=False), data, FinetuneOptions(folded_norm="insert"))
    assert sum(node.op_type == "BatchNormalization" for node in put_in.model.graph) == 4
    small, _ = transfer(folder / "open.onnx", data, FinetuneOptions(batch_size=4))
    assert "as a batch of 4 is too small to normalize by" in " ".join(small.notes)
    with pytest.raises(ConfigurationError, match="folded_norm='never': give 'auto', 'insert' or 'keep'"):
        transfer(folder / "open.onnx", data, FinetuneOptions(folded_norm="never"))


@pytest.mark.slow
def test_a_file_of_one_sample_begins_as_the_open_one_does(folder):
    """Same layers with the same statistics, the same loss of the first step, and the same rate."""
    begun = {}
    for name in ("open.onnx", "one.onnx"):
        prepared, dataset = transfer(folder / name, folder / "data.npz")
        planned = plan(prepared, dataset, FinetuneOptions(epochs=2, threads=1))
        program = planned.program(planned.stages[0], len(dataset))
        with burnish.Session(program, threads=1) as session:
            state = session.state()
            begun[name] = state, planned.lr, session.step(dataset.batch(np.arange(8)))["loss"]
    (expected, lr, loss), (state, lr_of_one, loss_of_one) = begun.values()
    assert state.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(state[name], array, rtol=1e-5, atol=1e-6, err_msg=name)
    assert lr_of_one == pytest.approx(lr, rel=1e-6)
    assert loss_of_one == pytest.approx(loss, rel=1e-5)


def test_statistics_of_a_file_of_one_sample_are_taken_of_many_at_once(folder, monkeypatch):
    sizes = []
    insert = importlib.import_module("burnish.surgery.insert")  # the package has a function of this name
    measured = insert.measure_values

    def counted(model, layers, data, engine):
        batches = list(data)
        sizes.extend(len(batch["x"]) for batch in batches)
        return measured(model, layers, batches, engine)

    monkeypatch.setattr(insert, "measure_values", counted)
    transfer(folder / "one.onnx", folder / "data.npz")
    assert sizes == [24]


def with_samples_apart() -> ir.Model:
    """A convolution that reads its image without the axis of the sample, and one behind it that reads several images of each."""
    network = Network("apart", [2, 6, 6])
    builder, rng = network.builder, np.random.default_rng(1)
    network.graph.inputs[0].shape = ir.Shape([1, 2, 6, 6])
    y = builder.op("Transpose", network.input, perm=[1, 0, 2, 3])
    weight = network.weight("conv.weight", rng.standard_normal((3, 1, 3, 3)))
    y = builder.op("Conv", y, weight, network.weight("conv.bias", rng.standard_normal(3)))
    producer = y.value.producer()
    assert producer is not None
    producer.name = "conv"
    FOLDED.set(producer, "bn")
    pooled = builder.op("ReduceMean", builder.op("Relu", y), builder.integers([0, 2, 3]), keepdims=0)
    return network.model(network.dense("head", builder.op("Reshape", pooled, builder.integers([1, 3])), 3, 5))


def test_where_samples_cannot_stand_in_front_they_are_measured_one_by_one(tmp_path):
    """A layer that reads two images of each sample: its statistics are those of both, as without an open batch."""
    x = np.random.default_rng(3).normal(1, 2, (12, 2, 6, 6)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, y=np.arange(12) % 3)
    model = with_samples_apart()
    with pytest.raises(
        UnsupportedOperatorError, match=r"'conv'.*does not have the samples along the first axis of its output alone"
    ):
        burnish.surgery.insert(model, "conv", [{"x": x}], batch="open")
    prepared, _ = transfer(model, tmp_path / "data.npz")
    (layer,) = (node for node in prepared.model.graph if node.op_type == "BatchNormalization")
    one_by_one = burnish.surgery.insert(model, "conv", [{"x": image[None]} for image in x], rescale=True)
    for value in layer.inputs[1:]:
        expected = one_by_one.graph.initializers[value.name].const_value.numpy()
        np.testing.assert_allclose(value.const_value.numpy(), expected, rtol=1e-5)
