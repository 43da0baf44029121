"""What a model file says of its data."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import burnish
from burnish.data import ArrayDataset, DataDescription, DataSpec, open_dataset
from burnish.data.preprocessing import PRESETS
from burnish.errors import DataError
from burnish.graph.annotations import CLASS_NUMBERS, CLASSES, OBJECTIVE, PIXELS
from burnish.models import residual_network
from burnish.program import Program
from specs.program_inputs import class_entry, data_entry

KNOWN = DataDescription(PRESETS["imagenet"], ("ant", "bee", "Küken"))


def test_what_is_written_is_read():
    metadata = KNOWN.metadata()
    assert set(metadata) == {PIXELS.key, CLASSES.key}
    assert DataDescription.read(metadata) == KNOWN
    numbered = DataDescription(classes=("3", "5"), numbers=(3, 5))
    assert DataDescription.read(numbered.metadata()) == numbered
    assert DataDescription.read({"names": "['of another tool']"}) == DataDescription()
    assert DataDescription().metadata() == {}


def test_what_a_data_set_says_of_itself():
    dataset = ArrayDataset({"x": np.zeros(2)}, ("a", "b"), preprocessing=PRESETS["unit"])
    assert DataDescription.of(dataset) == DataDescription(PRESETS["unit"], ("a", "b"))
    assert DataDescription.of(object()) == DataDescription()


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({PIXELS.key: "{"}, r"the model: its metadata 'burnish\.pixels' cannot be read \(Expecting"),
        ({CLASSES.key: "[" * 100_000}, r"'burnish\.classes' cannot be read \(it holds more than 100 lists"),
        ({PIXELS.key: "[1]"}, r"'burnish\.pixels' cannot be read \(it is a list\); export it again"),
        ({PIXELS.key: '{"mean": "half"}'}, r"'burnish\.pixels' cannot be read \(pixels: mean='half'"),
        ({PIXELS.key: '{"median": 1}'}, r"'burnish\.pixels' cannot be read \(pixels has no option 'median'"),
        ({PIXELS.key: '{"scale": NaN}'}, r"'burnish\.pixels' cannot be read \(pixels: scale=nan"),
        ({CLASSES.key: '["a", 1]'}, r"'burnish\.classes' cannot be read \(a name is no text\)"),
        ({CLASS_NUMBERS.key: "[1, 2.5]"}, r"'burnish\.class_numbers' cannot be read \(a number is no integer\)"),
        ({CLASSES.key: '"ab"'}, r"'burnish\.classes' cannot be read \(it is a str\)"),
    ],
)
def test_metadata_that_were_changed(metadata, message):
    with pytest.raises(DataError, match=message):
        DataDescription.read(metadata)


@pytest.fixture
def exported(tmp_path):
    """A model file that says what its data were, with an entry of another tool."""
    model = residual_network((3, 4, 4), classes=3, width=2, blocks=(1,))
    model.metadata_props["other"] = "kept"
    session = burnish.Session(burnish.compile(model))
    session.metadata = KNOWN.metadata()
    return session.export(tmp_path / "exported.onnx")


def properties(path):
    """The metadata of a file, but for what it was trained on."""
    return {entry.key: entry.value for entry in onnx.load(path).metadata_props if entry.key != OBJECTIVE.key}


@pytest.mark.slow
def test_a_model_keeps_what_is_known_through_programs_and_exports(exported, tmp_path):
    expected = {"other": "kept", **KNOWN.metadata()}
    assert properties(exported) == expected
    program = burnish.compile(exported)
    program.save(tmp_path / "program")
    program.save(tmp_path / "program.onnx")
    for loaded in (program, Program.load(tmp_path / "program"), Program.load(tmp_path / "program.onnx")):
        assert {key: value for key, value in loaded.metadata.items() if key != OBJECTIVE.key} == expected
        assert DataSpec.by(loaded).described == KNOWN
        burnish.Session(loaded).export(tmp_path / "again.onnx")
        assert properties(tmp_path / "again.onnx") == expected


@pytest.mark.slow
def test_a_model_made_of_a_program_in_one_file_is_none(exported, tmp_path):
    burnish.compile(exported).save(tmp_path / "program.onnx")
    burnish.Session(burnish.compile(tmp_path / "program.onnx")).export(tmp_path / "again.onnx")
    assert properties(tmp_path / "again.onnx") == {"other": "kept", **KNOWN.metadata()}


@pytest.mark.slow
def test_a_checkpoint_keeps_what_is_known(exported, tmp_path):
    program = burnish.compile(residual_network((3, 4, 4), classes=3, width=2, blocks=(1,)))
    session = burnish.Session(program)
    session.metadata = KNOWN.metadata()
    session.save_checkpoint(tmp_path / "one.safetensors")
    later = burnish.Session(program)
    later.restore(tmp_path / "one.safetensors")
    assert DataDescription.read(later.metadata) == KNOWN
    later.export(tmp_path / "later.onnx")
    assert DataDescription.read(properties(tmp_path / "later.onnx")) == KNOWN
    other = burnish.Session(program)
    other.restore(tmp_path / "one.safetensors", strict=False)
    assert other.metadata == {}


def wanted(described=KNOWN, classes=3):
    return DataSpec((data_entry(3, 4, 4),), class_entry(classes), (), described)


def test_a_described_model_is_read_as_it_was_trained(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (2, 4, 4, 3), dtype=np.uint8)
    np.savez(tmp_path / "data.npz", x=pixels, y=np.array(["bee", "Küken"]))
    dataset = open_dataset(tmp_path / "data.npz", wanted())
    assert (dataset.preprocessing, dataset.classes) == (PRESETS["imagenet"], KNOWN.classes)
    assert dataset.batch(np.arange(2))["labels"].tolist() == [1, 2]
    plain = open_dataset(tmp_path / "data.npz", wanted(), pixels="unit")
    np.testing.assert_array_equal(plain.batch(np.arange(2))["x"], np.float32(pixels / 255).transpose(0, 3, 1, 2))


def test_other_classes_than_the_model_s_are_numbered_anew(tmp_path):
    np.savez(tmp_path / "data.npz", x=np.zeros((2, 3, 4, 4), np.float32), y=np.array(["wasp", "bee"]))
    assert open_dataset(tmp_path / "data.npz", wanted()).classes == ("bee", "wasp")
    np.savez(tmp_path / "data.npz", x=np.zeros((2, 3, 4, 4), np.float32), y=np.array(["bee", "ant"]))
    assert open_dataset(tmp_path / "data.npz", wanted(classes=2)).classes == ("ant", "bee")


def test_numbers_that_are_no_pixels_are_taken_as_they_are(tmp_path):
    x = np.random.default_rng(0).normal(size=(2, 3, 4, 4)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, y=np.zeros(2))
    dataset = open_dataset(tmp_path / "data.npz", wanted())
    np.testing.assert_array_equal(dataset.batch(np.arange(2))["x"], x)
    assert dataset.preprocessing is None


def test_a_damaged_description_stops_before_data_are_read():
    model = residual_network((3, 4, 4), classes=3, width=2, blocks=(1,))
    model.metadata_props[PIXELS.key] = json.dumps({"std": 0})
    program = burnish.compile(ir.to_proto(model))
    with pytest.raises(DataError, match=r"its metadata 'burnish\.pixels' cannot be read \(pixels: std=0"):
        DataSpec.by(program)


@pytest.mark.slow
def test_a_trainer_writes_what_its_data_were(tmp_path):
    program = burnish.compile(residual_network((3, 4, 4), classes=3, width=2, blocks=(1,)))
    pixels = np.random.default_rng(0).integers(0, 256, (6, 4, 4, 3), dtype=np.uint8)
    data = (pixels, np.array(["a", "b", "c"] * 2))
    settings = {"pixels": "imagenet", "batch_size": 3, "run_directory": tmp_path / "run", "progress": False}
    trainer = burnish.Trainer(program, data, data, **settings)
    np.testing.assert_array_equal(
        trainer.loader.dataset.batch(np.arange(6))["x"], trainer.eval_loader.dataset.batch(np.arange(6))["x"]
    )
    trainer.run()
    trainer.session.export(tmp_path / "tuned.onnx")
    expected = DataDescription(PRESETS["imagenet"], ("a", "b", "c"))
    assert DataDescription.read(properties(tmp_path / "tuned.onnx")) == expected
    again = burnish.Session(program)
    again.restore(tmp_path / "run" / "checkpoints" / "latest.safetensors")
    assert DataDescription.read(again.metadata) == expected
