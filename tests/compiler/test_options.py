"""Options are declared once: Python, the command line and files of options come to the same object, and each is read."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields, replace

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

import burnish
from burnish.cli.application import app
from burnish.compiler import compile as compiling
from burnish.compiler.compile import compile_inference
from burnish.compiler.options import CompileOptions
from burnish.errors import ConfigurationError
from burnish.options import DECLARED, Options, declarations, option, takes

MODEL = """
<ir_version: 10, opset_import: ["": 21]>
small (float[batch, 4] x) => (float[batch, 3] logits) <float[4, 3] w, float[3] b = {0, 0, 0}> {
  product = MatMul(x, w)
  logits = Add(product, b)
}"""

GIVEN = {
    "loss": ("cross_entropy:label_smoothing=0.1", "cross_entropy:label_smoothing=0.1"),
    "trainable": (["w", "b*"], ["w,b*"]),
    "hold_rows": ({"w": [0, 1]}, ["w=0,1"]),
    "sparse": (["nothing*"], ["nothing*"]),
    "norm": ("train:momentum=cumulative", ["train:momentum=cumulative"]),
    "metrics": (["accuracy", "top_2"], ["accuracy,top_2"]),
    "outputs": ("logits", "logits"),
    "precision": ("bfloat16", "bfloat16"),
    "recompute": ("1MB:batch=2", ["1MB:batch=2"]),
    "memory": ("1MB:batch=2", "1MB:batch=2"),
    "cached_features": (["x", "product"], "x,product"),
    "batch": ("open", "open"),
    "sample_axis": ({"x": 0}, ["x=0"]),
    "bind": ({"batch": 2}, ["batch=2"]),
}
"""Of each option that the command line has, its value in Python, and the texts that say the same."""


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    proto = onnx.parser.parse_model(MODEL)
    del proto.graph.initializer[:]
    rng = np.random.default_rng(0)
    for name, shape in {"w": (4, 3), "b": (3,)}.items():
        array = rng.standard_normal(shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.save(proto, "model.onnx")
    np.savez("data.npz", x=np.zeros((4, 4), np.float32), y=np.zeros(4, np.int64))
    return "model.onnx"


class Built(Exception):
    """Ends a call when the options are there."""


@pytest.fixture
def built(monkeypatch):
    """The options that the compiler was handed."""
    found: list[CompileOptions] = []

    def compiled(source, options):
        found.append(options)
        raise Built

    monkeypatch.setattr(compiling, "compiled", compiled)
    return found


def test_every_option_of_the_command_line_is_compared_below():
    assert [name for name, (_, declared) in declarations(CompileOptions).items() if declared.help] == [
        name for name in CompileOptions.__dataclass_fields__ if name in GIVEN
    ]
    assert GIVEN.keys() <= CompileOptions.__dataclass_fields__.keys()


@pytest.mark.parametrize("name", GIVEN)
def test_python_command_line_and_file_come_to_the_same_options(name, model, built):
    value, texts = GIVEN[name]
    with pytest.raises(Built):
        burnish.compile(model, optimizer=burnish.optim.sgd(momentum=0.9), **{name: value})
    key = name.replace("_", "-")
    given = [f"--{key}={text}" for text in (texts if isinstance(texts, list) else [texts])]
    runner = CliRunner()
    assert isinstance(runner.invoke(app, ["compile", model, "-o", "program", *given]).exception, Built)
    with open("run.toml", "w") as file:
        file.write(f"[train]\ndata = 'data.npz'\n{key} = {texts!r}\n")
    assert isinstance(runner.invoke(app, ["train", model, "--config", "run.toml"]).exception, Built)
    by_python, by_command, by_file = built
    assert by_command == by_python
    assert getattr(by_command, name) != getattr(CompileOptions(), name)
    assert replace(by_file, steps_per_epoch=None) == by_python


def test_inference_takes_its_options_as_training_does():
    own = inspect.signature(compile_inference).parameters
    declared = declarations(CompileOptions)
    for name in own.keys() - {"source", "loss"}:
        assert (own[name].annotation, own[name].default) == (declared[name][0].type, declared[name][0].default)
    assert own["loss"].annotation == f"{declared['loss'][0].type} | None"


def test_compile_shows_each_option_and_says_what_it_is():
    shown = inspect.signature(burnish.compile).parameters
    assert [*shown] == ["source", *(field.name for field in fields(CompileOptions))]
    arguments = inspect.getdoc(burnish.compile).partition("Args:\n")[2].partition("\nReturns:")[0]
    said = [name for names in re.findall(r"^    (\w[\w, ]*):", arguments, re.MULTILINE) for name in names.split(", ")]
    assert said == [*shown]
    assert all(DECLARED in field.metadata for field in fields(CompileOptions))


@pytest.mark.parametrize(("wrong", "meant"), [("lose", "loss"), ("optimiser", "optimizer"), ("metric", "metrics")])
def test_an_option_that_there_is_not_is_named_with_its_nearest(wrong, meant, model):
    with pytest.raises(ConfigurationError, match=rf"^compile has no option '{wrong}' \(did you mean '{meant}'\?\)"):
        burnish.compile(model, **{wrong: "mse"})


def test_every_option_is_read_when_a_model_is_compiled(model, monkeypatch):
    read: set[str] = set()

    class Watched(CompileOptions):
        def __getattribute__(self, name):
            read.add(name)
            return super().__getattribute__(name)

    options = Watched()
    read.clear()
    compiling.compiled(model, options)
    modules_alone = {"example_inputs", "dynamic_shapes", "verify"}
    assert modules_alone | {field.name for field in fields(CompileOptions)} <= read


def test_options_contradict_each_other():
    with pytest.raises(ConfigurationError, match="the model computes its loss as 'cost', so leave loss out, or output"):
        CompileOptions(output="cost", loss="mse")
    with pytest.raises(ConfigurationError, match="memory and recompute are both given"):
        CompileOptions(memory="64MB", recompute="layers")


def test_a_check_keeps_what_it_returns_and_leaves_the_default():
    def doubled(number):
        return 2 * number

    from dataclasses import dataclass

    @dataclass(frozen=True, kw_only=True)
    class Few(Options):
        """Few.

        Args:
            count: how many.
        """

        count: int = option(3, check=doubled)

    @takes(Few)
    def call(source: str, options: Few) -> tuple[str, int]:
        """Call.

        Args:
            source: of it.
        """
        return source, options.count

    assert call("x") == ("x", 3)
    assert call(source="x", count=4) == ("x", 8)
    assert inspect.getdoc(call).endswith("Args:\n    source: of it.\n    count: how many.")
