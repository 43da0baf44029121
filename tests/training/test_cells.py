"""Notebooks: what cells show of objects as HTML, folders of runs whose cell is run again, and progress in one place."""

from __future__ import annotations

import re
import sys
import types
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import burnish
from burnish import models
from burnish.training.cells import cell
from burnish.training.progress import Lines, automatic

X = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
LABELS = (X[:, 0] > 0).astype(np.int64)
HOSTILE = "</td><script>alert(1)</script>&\x1b[31m"
VOID = ("circle", "line", "polyline", "rect")


class Page(HTMLParser):
    """The elements, the texts by element, and whether all that is opened is closed."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.tags.append(tag)
        assert not any(name.startswith("on") for name, _ in attributes)
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: Any) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, text: str) -> None:
        if text.strip():
            self.texts.append((self.open[-1], text.strip()))

    @property
    def table(self) -> dict[str, str]:
        cells = [text for tag, text in self.texts if tag == "td"]
        return dict(zip(cells[::2], cells[1::2], strict=True))


def perceptron() -> burnish.Program:
    model = models.create("mlp", classes=2, input_shape=(4,))
    return burnish.compile(model, loss="cross_entropy", optimizer="sgd", metrics=["accuracy"])


def trained(folder: Path, **options: Any) -> tuple[burnish.Trainer, Any]:
    given = {"epochs": 2, "progress": False, "threads": 1, "run_directory": folder, **options}
    trainer = burnish.Trainer(perceptron(), (X, LABELS), eval_data=(X, LABELS), **given)
    return trainer, trainer.run()


def test_a_program_and_a_session_show_their_inputs_and_what_they_run_on():
    program = perceptron()
    table = Page(program._repr_html_()).table
    assert table["inputs"] == "x [batch, 4], labels [batch]"
    assert table["loss"] == "cross_entropy"
    assert table["optimizer"] == "sgd"
    assert table["parameters"].endswith("numbers in 6 tensors")
    with burnish.Session(program, threads=1) as session:
        session.step({"x": X, "labels": LABELS})
        shown = Page(session._repr_html_()).table
    assert (shown["engine"], shown["threads"], shown["steps"]) == ("onnxruntime", "1", "1")
    assert shown["inputs"] == table["inputs"]


def test_a_trainer_and_its_result_show_figures_and_curves(tmp_path):
    trainer, result = trained(tmp_path / "run")
    for shown in (trainer, result):
        page = Page(shown._repr_html_())
        assert page.tags.count("svg") == 2
        assert "script" not in page.tags
        titles = [text for tag, text in page.texts if tag == "text"]
        assert {"loss", "accuracy", "training", "evaluation"} <= {*titles}
        assert page.table["best epoch"].startswith(f"{result.best['epoch']} (accuracy ")
    assert Page(trainer._repr_html_()).table["epochs"] == "2 of 2"
    assert Page(result._repr_html_()).table["accuracy"] == f"{result.metrics['accuracy']:.4g}"
    assert repr(trainer) == f"Trainer('{tmp_path / 'run'}', epoch 2/2, step 4/4)"
    assert re.fullmatch(r"TrainingResult\(loss=[\d.]+, accuracy=[\d.]+, best epoch \d, 4 steps, '.*run'\)", repr(result))


def test_a_trainer_that_has_not_run_shows_no_curve(tmp_path):
    trainer = burnish.Trainer(perceptron(), (X, LABELS), progress=False, threads=1, run_directory=tmp_path / "run")
    page = Page(trainer._repr_html_())
    assert "svg" not in page.tags
    assert page.table["steps"].startswith("0 of ")


def test_a_tuned_model_shows_its_notes(tmp_path):
    model = models.create("mlp", classes=2, input_shape=(4,))
    for _ in range(2):  # a cell that is run again writes the same file
        tuned = burnish.finetune(model, (X, LABELS), output=tmp_path / "tuned.onnx", epochs=1, threads=1)
    page = Page(tuned._repr_html_())
    assert [text for tag, text in page.texts if tag == "li"] == list(tuned.notes)
    assert page.table["file"] == str(tmp_path / "tuned.onnx")
    assert repr(tuned).startswith(f"Finetuned('{tmp_path / 'tuned.onnx'}', loss=")
    assert "\n" not in repr(tuned)


def test_hostile_names_are_escaped(tmp_path):
    _, result = trained(tmp_path / "run")
    history = [{**row, HOSTILE: 1.0, "accuracy": None} for row in result.history]
    hostile = replace(result, metrics={HOSTILE: 1.0}, history=history, run_directory=Path(HOSTILE), stopped=HOSTILE)
    for shown in (hostile._repr_html_(), cell(HOSTILE, [(HOSTILE, HOSTILE)], {HOSTILE: {HOSTILE: [(0, 1), (1, 2)]}}, [HOSTILE])):
        page = Page(shown)
        assert "script" not in page.tags
        assert "\x1b" not in shown
        assert "<script>" not in shown
        assert "&lt;script&gt;" in shown


def test_colours_are_those_of_the_theme_but_for_the_lines_of_charts(tmp_path):
    _, result = trained(tmp_path / "run")
    style = result._repr_html_().partition("<style>")[2].partition("</style>")[0]
    assert all(rule.strip().startswith(".burnish-cell") for rule in style.split("}") if rule.strip())
    coloured = re.findall(r"([\w-]+): (#\w+)", style)
    assert {name for name, _ in coloured} == {"stroke", "fill"}
    for _, colour in coloured:  # seen on white as on black: a contrast of 2.5 to each at least
        channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [value / 12.92 if value <= 0.04 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
        light = np.dot(linear, (0.2126, 0.7152, 0.0722))
        assert 1.05 / (light + 0.05) > 2.5
        assert (light + 0.05) / 0.05 > 2.5


class Handle:
    """What a display of IPython is changed by."""

    def __init__(self, shown: list[list[str]]):
        self.shown = shown

    def update(self, data: dict[str, str], raw: bool) -> None:
        self.shown[-1].append(data["text/plain"])


@pytest.fixture
def notebook(monkeypatch) -> list[list[str]]:
    """A kernel of Jupyter; for each display of a cell, what stood in it."""
    shown: list[list[str]] = []

    def display(data: dict[str, str], raw: bool, display_id: bool) -> Handle:
        shown.append([data["text/plain"]])
        return Handle(shown)

    ipython, shell = types.ModuleType("IPython"), types.SimpleNamespace(kernel=object())
    ipython.get_ipython = lambda: shell  # type: ignore[attr-defined]
    ipython.display = types.ModuleType("IPython.display")  # type: ignore[attr-defined]
    ipython.display.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", ipython.display)
    return shown


def test_a_cell_that_is_run_again_begins_a_new_run_in_a_folder_of_its_own(notebook, tmp_path, capsys):
    first, again, third = (trained(tmp_path / "run", progress=True)[0] for _ in range(3))
    assert [trainer.run_directory.name for trainer in (first, again, third)] == ["run", "run-2", "run-3"]
    assert again.rows[-1]["loss"] == first.rows[-1]["loss"]  # it began anew, and did not go on
    said = capsys.readouterr().out
    assert f"'{tmp_path / 'run'}' holds a run already: this one goes to '{tmp_path / 'run-2'}'" in said
    resumed, result = trained(tmp_path / "run", resume=True, epochs=3)
    assert (resumed.run_directory.name, result.steps) == ("run", 6)
    assert trained(tmp_path / "run", overwrite=True)[0].run_directory.name == "run"


def test_outside_of_notebooks_a_folder_with_a_run_is_refused(tmp_path):
    trained(tmp_path / "run")
    with pytest.raises(burnish.errors.ConfigurationError, match="holds a run already"):
        trained(tmp_path / "run")


def test_progress_stays_in_one_place_of_the_cell(notebook, tmp_path, capsys):
    trained(tmp_path / "run", epochs=40, progress=True)
    (places,) = notebook
    assert places[-1].count("\n") == 10
    assert places[-1].startswith("... 30 epochs before\nepoch 31/40  train loss ")
    assert "epoch 40/40" in places[-1]
    assert capsys.readouterr().out.count("\n") <= 2


def test_without_a_kernel_nothing_of_ipython_is_needed(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    assert type(automatic()) is Lines
    monkeypatch.delitem(sys.modules, "IPython")
    assert type(automatic()) is Lines
    assert "IPython" not in sys.modules
