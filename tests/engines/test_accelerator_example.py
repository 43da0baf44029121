"""The accelerator of the examples: a target in a file and an engine of numpy, which train, and whose faults are found."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from typer.testing import CliRunner

import burnish
from burnish.cli.application import app
from burnish.comparison import compare_engines
from burnish.errors import ConfigurationError, EngineError, UnsupportedOperatorError
from burnish.models import residual_network
from oracles.normalized_networks import image_batches, inverted_residual
from oracles.small_networks import CLASSES, perceptron

EXAMPLE = Path(__file__).parents[2] / "examples/accelerator"
SAMPLES = 8


@pytest.fixture(scope="module", autouse=True)
def accelerator():
    sys.path.insert(0, str(EXAMPLE))
    import accelerator

    yield accelerator
    sys.path.remove(str(EXAMPLE))


def of_fixed_batch(model: ir.Model) -> ir.Model:
    for value in model.graph.inputs:
        assert value.shape is not None
        value.shape = ir.Shape([SAMPLES, *value.shape.dims[1:]])
    return model


NETWORKS = {
    "residual": lambda: residual_network(input_shape=(3, 8, 8), classes=CLASSES, width=4, blocks=(1, 1)),
    "inverted_residual": lambda: inverted_residual(double=False),
}


@pytest.fixture(scope="module", params=NETWORKS)
def program(request) -> burnish.Program:
    model = of_fixed_batch(NETWORKS[request.param]())
    return burnish.compile(model, optimizer="sgd:lr=0.1,momentum=0.9", metrics=("accuracy",))


def test_it_is_small():
    files = [path for path in EXAMPLE.rglob("*") if path.is_file() and path.suffix in (".py", ".toml")]
    assert len(files) == 4
    assert sum(len(path.read_text().splitlines()) for path in files) < 200


@pytest.mark.slow
def test_it_trains_as_the_reference_does(program, accelerator):
    batches = image_batches(1, SAMPLES, np.float32) * 12
    session = burnish.Session(program, engine=accelerator.AcceleratorEngine())
    losses = [session.step(batch)["loss"] for batch in batches]
    expected = burnish.Session(program, engine="reference")
    np.testing.assert_allclose(losses[:3], [expected.step(batch)["loss"] for batch in batches[:3]], rtol=1e-4)
    assert losses[-1] < losses[0] / 2
    assert session.evaluate(batches[0])["loss"] > 0
    assert session.predict({"x": batches[0]["x"]})["logits"].shape == (SAMPLES, CLASSES)


@pytest.mark.slow
def test_comparison_with_the_reference(program, accelerator):
    comparison = compare_engines(program, ["reference", accelerator.AcceleratorEngine()], steps=2)
    assert comparison.message() == "reference and accelerator agree over 2 steps"


@pytest.mark.slow
@pytest.mark.parametrize(
    "operator",
    [
        "Conv",
        "BatchNormalization",
        "ConvWeightGrad",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("LogSoftmax", "ReduceSum")),
    ],
)
def test_an_operator_that_is_wrong_is_found(accelerator, operator):
    right = accelerator.OPERATORS[operator]

    def wrong(attributes, *operands):
        result = right(attributes, *operands)
        return (result[0] * 1.01, *result[1:]) if isinstance(result, tuple) else result * 1.01

    program = burnish.compile(of_fixed_batch(NETWORKS["residual"]()), optimizer="sgd:lr=0.1")
    engine = accelerator.AcceleratorEngine(accelerator.OPERATORS | {operator: wrong})
    comparison = compare_engines(program, ["reference", engine], steps=1)
    assert not comparison.agrees
    fault = comparison.reports[0].fault
    assert fault is not None
    assert operator in (fault.within or fault.operator)
    assert f"accelerator differs from reference in step 0, in {comparison.reports[0].differing[0]!r}" in comparison.message()


@pytest.mark.slow
def test_the_command_finds_it_by_its_entry_point(accelerator, tmp_path, monkeypatch):
    real = importlib.metadata.entry_points
    point = importlib.metadata.EntryPoint("accelerator", "accelerator:AcceleratorEngine", "burnish.engines")

    def entry_points(**selection):
        if selection.get("group") != "burnish.engines":
            return real(**selection)
        return importlib.metadata.EntryPoints([point]).select(**selection)

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    path = tmp_path / "model.onnx"
    ir.save(of_fixed_batch(NETWORKS["inverted_residual"]()), path)
    command = ["compare", str(path), "--engines", "reference,accelerator", "--steps", "1"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    wrong = {"Clip": lambda attributes, x, low=None, high=None: np.clip(x, low, high) + np.float32(0.01)}
    monkeypatch.setattr(accelerator.AcceleratorEngine.__init__, "__defaults__", (accelerator.OPERATORS | wrong,))
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert "first at Clip " in result.output.replace("\n", " ")


@pytest.mark.slow
def test_what_it_does_not_run_is_named(accelerator):
    engine = accelerator.AcceleratorEngine()
    with pytest.raises(
        ConfigurationError, match=r"^accelerator takes fixed shapes, and the input 'x' of the .* is \[batch, 3, 8, 8\]"
    ):
        burnish.Session(burnish.compile(NETWORKS["residual"]()), engine=engine)
    with pytest.raises(UnsupportedOperatorError, match=r"Tanh .* is not among the operators that accelerator runs"):
        burnish.compile(of_fixed_batch(perceptron()), target=EXAMPLE / "accelerator/target.toml")
    program = burnish.compile(of_fixed_batch(NETWORKS["residual"]()))
    with pytest.raises(EngineError, match=r"has the device 'accelerator' only, not 'cuda': leave device out"):
        burnish.Session(program, engine=engine, device="cuda")
    with pytest.raises(EngineError, match=r"The engine 'accelerator' cannot exchange values with other workers"):
        burnish.Session(program, engine=engine, parallel=burnish.DataParallel())


@pytest.mark.slow
def test_a_program_that_is_compiled_for_it(accelerator, tmp_path):
    target = accelerator.AcceleratorEngine.target
    program = burnish.compile(of_fixed_batch(NETWORKS["residual"]()), target=EXAMPLE / "accelerator/target.toml")
    assert program.target == target
    assert "ConvWeightGrad" in {node.op_type for node in program.step.graph}
    loaded = burnish.Program.load(program.save(tmp_path / "program"))
    batch = image_batches(1, SAMPLES, np.float32)[0]
    losses = [
        burnish.Session(loaded, engine=engine).step(batch)["loss"] for engine in (accelerator.AcceleratorEngine(), "onnxruntime")
    ]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
