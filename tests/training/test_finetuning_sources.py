"""Data in memory to tune a model on: the same as from a file, and named errors for what cannot be."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch

import burnish
from burnish.errors import ConfigurationError, DataError
from burnish.models import residual_network
from burnish.training.finetuning import transfer

OPTIONS = {"epochs": 1, "lr": 0.05, "threads": 1}


@pytest.fixture(scope="module")
def model() -> ir.Model:
    return residual_network(width=2, blocks=(1,))


@pytest.fixture(scope="module")
def samples() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(16, 1, 8, 8)).astype(np.float32), np.array(["owl", "cat"])[np.arange(16) % 2]


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
    assert made.notes[0].endswith("is drawn anew for 2 classes; the file had 10")
    assert len(dataset) == 16


def test_what_cannot_be_is_named(model, samples):
    x, y = samples
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.tensor(x), torch.arange(16)), batch_size=8)
    message = r"of type DataLoader gives batches as they come.* train on batches by burnish\.compile and burnish\.Trainer"
    with pytest.raises(DataError, match=message):
        transfer(model, batches)
    with pytest.raises(ConfigurationError, match="label: that is for data that are read from files"):
        transfer(model, (x, y), label="kind", missing="error")
    with pytest.raises(DataError, match="data: all samples have the label 0, and nothing can be told apart"):
        transfer(model, (x, np.zeros(16, np.int64)))


def test_a_loss_of_values_is_no_loss_of_classes(model, samples):
    with pytest.raises(ConfigurationError, match=r"mean_squared_error compares values, and fine-tuning learns classes: train"):
        transfer(model, samples, loss="mse")
