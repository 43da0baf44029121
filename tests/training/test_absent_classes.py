"""Labels with classes that no sample has, and models with outputs for more classes than the data have."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest

import burnish
from burnish.errors import DataError, ObjectiveWarning
from burnish.finetuning.preparation import transfer
from burnish.finetuning.tasks import absent_classes
from oracles.small_networks import CLASSES, Network


@pytest.mark.parametrize(
    ("occurring", "said"),
    [
        ([0, 1, 2], None),
        ([], None),
        ([1, 2, 3], r"^classes: the labels begin at 1, .* numbered from 1, subtract it, or the head has outputs that nothing"),
        ([0, 3], r"^classes: no sample has 1, 2 of 0 to 3; the head has an output for each"),
        ([1, 3], r"^classes: no sample has 0, 2 of 0 to 3;"),
        ([0, 9], r"^classes: no sample has 1, 2, 3, 4, 5 and 3 more of 0 to 9;"),
    ],
)
def test_what_is_said_of_absent_classes(occurring, said):
    line = absent_classes(occurring)
    assert line is None if said is None else re.search(said, line or "")


def test_labels_from_1_are_said_where_the_head_is_drawn_anew(tmp_path):
    network = Network("plain", [6])
    model = network.model(network.dense("head", network.input, 6, CLASSES))
    labels = np.arange(12) % CLASSES
    np.savez(tmp_path / "from_0.npz", x=np.zeros((12, 6), np.float32), y=labels)
    np.savez(tmp_path / "from_1.npz", x=np.zeros((12, 6), np.float32), y=labels + 1)
    assert not any(note.startswith("classes:") for note in transfer(model, tmp_path / "from_0.npz")[0].notes)
    prepared, _ = transfer(model, tmp_path / "from_1.npz")
    assert (prepared.is_new, prepared.head.classes) == (True, CLASSES + 1)
    assert any(note.startswith("classes: the labels begin at 1") for note in prepared.notes)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([3, 3], "all samples have the label 3, and nothing can be told apart"),
        ([-1, 1], "a sample has the label -1, and classes are numbered from 0: number them so, or give names as labels"),
    ],
)
def test_labels_that_tell_nothing_apart_are_refused(tmp_path, labels, message):
    network = Network("plain", [6])
    np.savez(tmp_path / "data.npz", x=np.zeros((2, 6), np.float32), y=np.asarray(labels))
    with pytest.raises(DataError, match=message):
        transfer(network.model(network.dense("head", network.input, 6, CLASSES)), tmp_path / "data.npz")


@pytest.mark.parametrize(
    ("labels", "outputs", "warned"),
    [
        (np.arange(90) % 3, 10, "10 classes, and the data have 3 classes (no label is above 2)"),
        (np.array(["a", "b"])[np.arange(8) % 2], 5, "5 classes, and the data have 2 classes"),
        (np.arange(90) % 3, 3, None),
        (np.arange(6) % 5, 6, None),
    ],
)
def test_outputs_that_no_sample_has_a_class_for(tmp_path, labels, outputs, warned):
    """Few samples may miss a class by chance; of names there is one for each class."""
    network = Network("classes", [4])
    program = burnish.compile(network.model(network.dense("head", network.input, 4, outputs)))
    data = np.random.default_rng(0).normal(size=(len(labels), 4)).astype(np.float32), labels
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ObjectiveWarning)
        burnish.Trainer(program, data, run_directory=tmp_path, progress=False)
    said = [str(warning.message) for warning in caught]
    assert [warned in text for text in said] == ([True] if warned else [])
    assert all("burnish finetune" in text for text in said)
