"""The options of a trainer are declared once: ``Trainer`` has each as a keyword argument, and the command line those of a run."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields

import numpy as np
import pytest
from typer.testing import CliRunner

import burnish
from burnish.cli.application import app
from burnish.cli.train_options import Course
from burnish.errors import ConfigurationError
from burnish.options import declarations
from burnish.training.trainer_options import RunOptions, TrainerOptions

GIVEN = {
    "epochs": (3, "3"),
    "batch_size": (5, "5"),
    "seed": (7, "7"),
    "threads": (1, "1"),
    "engine": ("reference", "reference"),
    "device": ("cpu", "cpu"),
    "checkpoint_every": (2, "2"),
    "step_timeout": (2.5, "2.5"),
    "keep_checkpoints": (4, "4"),
    "journal": (True, "true"),
    "tables": ("tables", "tables"),
    "best_metric": ("loss", "loss"),
}
"""Of each option, its value in Python and its text."""


class Begun(Exception):
    """Ends a command when its trainer is asked for."""


def test_trainer_shows_each_option_and_says_what_it_is():
    shown = inspect.signature(burnish.Trainer).parameters
    assert [*shown] == ["program", "train_data", *inspect.signature(TrainerOptions).parameters]
    assert shown["eval_data"].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    arguments = inspect.getdoc(burnish.Trainer).partition("Args:\n")[2].partition("\nRaises:")[0]
    said = [name for names in re.findall(r"^    (\w[\w, ]*):", arguments, re.MULTILINE) for name in names.split(", ")]
    assert sorted(said) == sorted(shown)


def test_the_command_line_has_the_options_of_a_run():
    assert GIVEN.keys() == declarations(RunOptions).keys()
    assert {field.name for field in fields(RunOptions)} <= {field.name for field in fields(Course)}


def test_python_command_line_and_file_come_to_the_same_options(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found: list[RunOptions] = []

    def begun(self):
        found.append(self.course)
        raise Begun

    monkeypatch.setattr("burnish.cli.training_run.TrainingRun.__post_init__", begun)
    (tmp_path / "model.onnx").write_bytes(b"")
    np.savez("data.npz", x=np.zeros((2, 2), np.float32), y=np.zeros(2, np.int64))
    given = [f"--{name.replace('_', '-')}" + ("" if text == "true" else f"={text}") for name, (_, text) in GIVEN.items()]
    train = ["train", "model.onnx", "--data", "data.npz"]
    assert isinstance(CliRunner().invoke(app, [*train, *given]).exception, Begun)
    lines = [f"{name.replace('_', '-')} = {text if text == 'true' else repr(text)}\n" for name, (_, text) in GIVEN.items()]
    (tmp_path / "run.toml").write_text("[train]\n" + "".join(lines))
    assert isinstance(CliRunner().invoke(app, [*train, "--config", "run.toml"]).exception, Begun)
    asked = TrainerOptions(**{name: value for name, (value, _) in GIVEN.items()}).run_options()
    for course in found:
        assert {**course.run_options(), "tables": str(course.tables)} == asked
    assert len(found) == 2
    assert all(value != default for value, default in zip(asked.values(), RunOptions().run_options().values(), strict=True))


def test_an_option_that_there_is_not_is_named_with_its_nearest():
    with pytest.raises(ConfigurationError, match=r"^Trainer has no option 'epoch' \(did you mean 'epochs'\?\)"):
        burnish.Trainer(None, None, epoch=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs=0: give a whole number of 1 or more"),
        ({"keep_checkpoints": 1.5}, "keep_checkpoints=1.5: give a whole number"),
        ({"step_timeout": 0}, "step_timeout=0: give a number of seconds above 0"),
        ({"parallel": 2}, "parallel=2: give burnish.DataParallel"),
        ({"resume": True, "overwrite": True}, "resume goes on with a run, and overwrite drops it"),
    ],
)
def test_a_value_that_no_run_can_have(options, message):
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        TrainerOptions(**options)


def test_numbers_of_numpy_are_kept_as_those_of_python():
    options = TrainerOptions(epochs=np.int64(2), seed=np.int32(3))
    assert (type(options.epochs), type(options.seed)) == (int, int)
