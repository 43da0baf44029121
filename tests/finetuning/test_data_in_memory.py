"""Data in memory to tune a model on: the same as from a file, and named errors for what cannot be."""

from __future__ import annotations

import signal

import numpy as np
import onnx_ir as ir
import pytest
import torch

import burnish
from burnish.data import DataDescription
from burnish.errors import ConfigurationError, DataError, NonFiniteLossError
from burnish.finetuning.options import FinetuneOptions
from burnish.finetuning.preparation import transfer
from burnish.models import residual_network
from burnish.training import TrainingInterrupted
from burnish.training.callbacks import Callback
from oracles.small_networks import CLASSES, Network

OPTIONS = {"epochs": 1, "lr": 0.05, "threads": 1}


@pytest.fixture(scope="module")
def model() -> ir.Model:
    return residual_network(width=2, blocks=(1,))


@pytest.fixture(scope="module")
def samples() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(16, 1, 8, 8)).astype(np.float32), np.array(["owl", "cat"])[np.arange(16) % 2]


@pytest.mark.slow
def test_arrays_are_tuned_on_as_a_file_with_them(model, samples, tmp_path):
    x, y = samples
    np.savez(tmp_path / "data.npz", x=x, y=y)
    of_file = burnish.finetune(
        model, tmp_path / "data.npz", eval_data=tmp_path / "data.npz", output=tmp_path / "a.onnx", **OPTIONS
    )
    of_arrays = burnish.finetune(model, (x, y), eval_data=(x, y), output=tmp_path / "b.onnx", **OPTIONS)
    assert of_arrays.path.read_bytes() == of_file.path.read_bytes()


def test_arrays_by_name_are_taken_as_they_are(model, samples):
    x, y = samples
    made, dataset = transfer(model, {"x": x, "labels": (y == "owl").astype(np.int64)})
    assert made.notes[0].endswith("is re-initialized for 2 classes; the file had 10")
    assert len(dataset) == 16


@pytest.mark.slow
def test_a_head_of_as_many_classes_stays_only_if_the_file_names_them(samples, tmp_path):
    """Numbers say nothing of whose they are; what is asked for is done."""
    x, names = samples
    numbers = np.arange(16) % 2
    old = residual_network(width=2, blocks=(1,), classes=2)
    weight = old.graph.initializers["classifier.weight"].const_value.numpy()
    named = old.clone()
    named.metadata_props.update(DataDescription(classes=("cat", "owl")).metadata())

    def kept(model: ir.Model, labels: np.ndarray, head: str) -> tuple[bool, str]:
        made, _ = transfer(model, (x, labels), FinetuneOptions(head=head))
        return np.array_equal(made.model.graph.initializers["classifier.weight"].const_value.numpy(), weight), made.notes[0]

    for model, labels, stays in ((old, numbers, False), (old, names, False), (named, numbers, False), (named, names, True)):
        assert kept(model, labels, "auto")[0] is stays
        assert not kept(model, labels, "new")[0]
        is_kept, note = kept(model, labels, "keep")
        assert is_kept
        assert note == "head: 'classifier.weight' stays, as head='keep' (--head keep) says"
    assert kept(old, numbers, "auto")[1].endswith(
        "re-initialized for 2 classes; the file had 2 too, and does not say that they are these (head='keep', --head keep, "
        "keeps it)"
    )
    with pytest.raises(ConfigurationError, match=r"head='keep' .* the file's head has 2 classes, and data has 4: leave it out"):
        transfer(old, (x, np.arange(16) % 4), FinetuneOptions(head="keep"))
    assert transfer(old, (x, np.arange(16) % 4))[0].task.classes == 4
    with pytest.raises(ConfigurationError, match=r"head='keeps' \(--head\): give 'auto', 'new', 'keep'"):
        transfer(old, (x, numbers), FinetuneOptions(head="keeps"))


@pytest.mark.slow
@pytest.mark.parametrize("freeze_until", [None, "head"])
def test_a_second_head_stays_as_it_is(freeze_until, tmp_path):
    """Its layers, with normalization folded in or not, are no part of what the loss trains."""
    network = Network("two", [6])
    shared = network.builder.op("Relu", network.dense("shared", network.input, 6, 8))
    other = network.dense("other.last", network.builder.op("Relu", network.dense("other.first", shared, 8, 8)), 8, 3)
    model = network.model(network.dense("head", shared, 8, CLASSES))
    other.value.name = "aux"
    model.graph.outputs.append(other.value)
    rng = np.random.default_rng(0)
    data = rng.normal(size=(24, 6)).astype(np.float32), np.arange(24) % 3
    options = {"head_output": "logits", "freeze_until": freeze_until, **OPTIONS}
    tuned = burnish.finetune(model, data, output=tmp_path / "tuned.onnx", **options)
    after = burnish.load(tuned.path).graph
    for name in ("other.first.weight", "other.last.weight", "other.last.bias"):
        before = model.graph.initializers[name].const_value.numpy()
        np.testing.assert_array_equal(after.initializers[name].const_value.numpy(), before)
    assert {value.name for value in after.outputs} == {"logits", "aux"}
    assert after.initializers["head.weight"].shape == (8, 3)


@pytest.mark.slow
@pytest.mark.parametrize("blank", [0, 3])
def test_sequences_are_aligned_by_ctc(blank, tmp_path):
    network = Network("frames", [12, 4])
    hidden = network.builder.op("Tanh", network.dense("hidden", network.input, 4, 8))
    model = network.model(network.dense("head", hidden, 8, 6))
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, (16, 3)) + (blank == 0)
    data = {
        "x": rng.normal(size=(16, 12, 4)).astype(np.float32),
        "labels": labels,
        "input_lengths": np.full(16, 12),
        "target_lengths": np.full(16, 3),
    }
    tuned = burnish.finetune(model, data, loss=f"ctc:blank={blank}", output=tmp_path / "tuned.onnx", **OPTIONS)
    head = burnish.load(tuned.path).graph.initializers["head.weight"]
    assert head.shape == (8, 4)
    assert not any(note.startswith("classes:") for note in tuned.notes)
    assert np.isfinite(tuned.result.metrics["loss"])


def test_what_cannot_be_is_named(model, samples):
    x, y = samples
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.tensor(x), torch.arange(16)), batch_size=8)
    message = r"of type DataLoader gives batches as they come.* train on batches by burnish\.compile and burnish\.Trainer"
    with pytest.raises(DataError, match=message):
        transfer(model, batches)
    with pytest.raises(DataError, match="label names the column of a table, and a tuple has none: leave it out"):
        transfer(model, (x, y), FinetuneOptions(label="kind", missing="error"))
    with pytest.raises(ConfigurationError, match="image_size: that is for data that are read from files"):
        transfer(model, (x, y), FinetuneOptions(image_size=(4, 4)))
    with pytest.raises(DataError, match="data: all samples have the label 0, and nothing can be told apart"):
        transfer(model, (x, np.zeros(16, np.int64)))


def test_names_of_classes_are_no_values(model, samples):
    with pytest.raises(DataError, match=r"the labels are text, and the loss compares with numbers .* such as cross_entropy"):
        transfer(model, samples, FinetuneOptions(loss="mse"))


def test_a_stopped_call_points_to_no_folder_that_is_gone(tmp_path):
    class Stop(Callback):
        def on_step_end(self, run, report):
            signal.raise_signal(signal.SIGINT)

    x = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
    model, data = burnish.models.create("mlp", classes=2, input_shape=(3,)), (x, np.arange(16) % 2)
    options = {"lr": 0.1, "threads": 1, "output": tmp_path / "tuned.onnx"}
    with pytest.raises(TrainingInterrupted, match=r"Nothing is saved, as burnish\.finetune keeps no checkpoints") as stopped:
        burnish.finetune(model, data, callbacks=[Stop()], **options)
    assert stopped.value.checkpoint is None
    assert not (tmp_path / "tuned.onnx").exists()
    with pytest.raises(NonFiniteLossError) as failed:
        burnish.finetune(model, (x * np.float32(1e30), data[1]), **options)
    assert "burnish-finetune-" not in str(failed.value)
