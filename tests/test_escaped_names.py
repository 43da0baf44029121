"""Names in a model can hold anything: nothing in them steers a terminal, wherever they are shown."""

from __future__ import annotations

import logging
import pickle
import warnings

import numpy as np
import onnx
import pytest
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner

import burnish
from burnish.cli import console
from burnish.cli.application import app
from burnish.errors import BurnishError, CarryOverWarning, GradientError, ObjectiveWarning, UntrainedWeightsWarning, escaped
from burnish.training.progress import Bar, Lines, Reached
from oracles.combinations import spread

STEERING = "\x1b[31mred\nerror: forged\r\u202egnp\u2066\u200b\x9b2J\u2028\x7f\x00\t"
WRITTEN = r"\x1b[31mred\nerror: forged\r\u202egnp\u2066\u200b\x9b2J\u2028\x7f\x00\t"


def steers(text: str) -> list[str]:
    """What of a command's output steers a terminal; lines end somewhere."""
    return [character for character in text if not character.isprintable() and character != "\n"]


def test_what_steers_a_terminal_is_written_out():
    assert escaped(STEERING) == WRITTEN
    assert escaped(escaped(STEERING)) == WRITTEN
    assert escaped("Köln, 日本, é\u00a0\\n") == "Köln, 日本, é\u00a0\\n"
    assert escaped("\ud800") == r"\ud800"


ERRORS = [error for error in vars(burnish.errors).values() if isinstance(error, type) and issubclass(error, BurnishError)]


@pytest.mark.parametrize("error", ERRORS)
def test_errors(error):
    assert str(error(f"the node '{STEERING}'")) == f"the node '{WRITTEN}'"


@pytest.mark.parametrize(
    "warning",
    [CarryOverWarning(STEERING), ObjectiveWarning(STEERING), UntrainedWeightsWarning(STEERING, "options", {})],
)
def test_warnings(warning):
    shown = warnings.formatwarning(warning, type(warning), "file.py", 1)
    assert WRITTEN in shown
    assert steers(shown) == []


@pytest.mark.parametrize(
    "raised", [UntrainedWeightsWarning("w stays", "options", {"w": "why"}), GradientError("no rule", "options")]
)
def test_processes_hand_over_what_they_raise(raised):
    """Whether by pickling, or as test runners do, by making it anew of its arguments."""
    again = pickle.loads(pickle.dumps(raised))
    assert (type(again), vars(again)) == (type(raised), vars(raised))
    assert str(again) == str(type(raised)(*raised.args)) == str(raised)


def test_the_log(caplog):
    with caplog.at_level(logging.INFO, logger="burnish"):
        logging.getLogger("burnish").info("%s does not compile", STEERING)
    assert caplog.messages == [f"{WRITTEN} does not compile"]


def test_consoles_and_tables(capsys):
    console.output().print(f"of '{STEERING}'", markup=False)
    console.errors().print(f"of '{STEERING}'", markup=False)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == (f"of '{WRITTEN}'\n", f"of '{WRITTEN}'\n")
    table = Table()
    table.add_column(console.cell(STEERING), overflow="fold")
    table.add_row(console.cell("[red]name"))
    with Console(width=200) as plain, plain.capture() as shown:
        plain.print(table)
    assert WRITTEN in shown.get()
    assert "[red]name" in shown.get()
    assert steers(shown.get()) == []


@pytest.mark.parametrize("progress", [Lines, Bar])
def test_progress(progress, capsys):
    shown = progress()
    name = f"loss:[red]{STEERING}"
    reached = Reached(1, 1, 1, 1, 1, {name: 0.5})
    shown.start(0, 1)
    shown.epoch(reached, {name: 0.5})
    shown.note(STEERING)
    shown.close()
    text = capsys.readouterr().out.replace("\n", "")
    assert WRITTEN in text
    assert "forged" not in [line.strip() for line in text.splitlines()]
    assert f"loss:[red]{WRITTEN}"[:20] in text


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model whose names all steer a terminal, and data for it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    x, w, b, m, y, n = (f"{name}{STEERING}" for name in "xwbmyn")
    nodes = [onnx.helper.make_node("MatMul", [x, w], [m], name=n), onnx.helper.make_node("Add", [m, b], [y], name=n + "2")]
    graph = onnx.helper.make_graph(
        nodes,
        "steering",
        [onnx.helper.make_tensor_value_info(x, onnx.TensorProto.FLOAT, ["batch", 2])],
        [onnx.helper.make_tensor_value_info(y, onnx.TensorProto.FLOAT, ["batch", 3])],
        [onnx.numpy_helper.from_array(np.ones((2, 3), np.float32), w), onnx.numpy_helper.from_array(np.ones(3, np.float32), b)],
    )
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9), "model.onnx")
    generator = np.random.default_rng(0)
    np.savez("data.npz", x=generator.normal(size=(6, 2)).astype(np.float32), y=np.array([f"a{STEERING}", "b", "c"] * 2))
    np.savez("lacking.npz", z=np.zeros(3))
    return tmp_path


@spread(
    ("arguments", "code"),
    [
        (("inspect", "model.onnx"), 0),
        (("inspect", "model.onnx", "--json"), 0),
        (("inspect", "run"), 0),
        (("check", "model.onnx"), 0),
        (("check", "model.onnx", "--trainable", "q*"), 1),
        (("check", "model.onnx", "--outputs", "q"), 1),
        (("compile", "model.onnx", "-o", "program"), 0),
        (("train", "model.onnx", "--data", "data.npz", "-o", "other"), 0),
        (("train", "model.onnx", "--data", "lacking.npz", "-o", "other"), 1),
        (("compare", "model.onnx", "--steps", "1"), 0),
        (("predict", "run", "data.npz", "--top", "3"), 0),
        (("predict", "run", "lacking.npz"), 1),
        (("evaluate", "run", "data.npz"), 0),
        (("export", "run", "-o", "tuned.onnx"), 0),
    ],
    test=2,
)
def test_commands(folder, arguments, code):
    if arguments[0] in ("predict", "evaluate", "export") or "run" in arguments:
        train = ["train", "model.onnx", "--data", "data.npz", "-o", "run"]
        assert CliRunner().invoke(app, train).exit_code == 0
    result = CliRunner().invoke(app, list(arguments))
    assert (result.exit_code, None if code else result.exception) == (code, None), result.output
    assert steers(result.output) == []
    assert not any(line.startswith("error: forged") for line in result.output.splitlines())
    if arguments[0] in ("inspect", "compare"):
        assert "\\u202e" in result.output
