"""Operators of other domains: those that ONNX Runtime has of its own, and those of a library."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import burnish
from burnish.engines.onnxruntime import OnnxRuntimeEngine
from burnish.errors import EngineError, GradientError, UnsupportedOperatorError
from burnish.operators import gradient, registry

W = {size: np.linspace(-0.5, 0.5, size * size, dtype=np.float32).reshape(size, size) for size in (3, 4)}


def network(domain: str = "com.microsoft", last: bool = False) -> onnx.ModelProto:
    """``h w`` of both windows h of three numbers in a sample x of four, or both windows of ``x w``."""
    operand, result = ("h", "y") if last else ("x", "h")
    unfold = helper.make_node("UnfoldTensor", [operand], [result], name="windows", domain=domain, dim=1, size=3, step=1)
    product = helper.make_node("MatMul", ["x" if last else "h", "w"], ["h" if last else "y"], name="product")
    graph = helper.make_graph(
        [product, unfold] if last else [unfold, product],
        "network",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 2, 3])],
        [numpy_helper.from_array(W[4 if last else 3], "w")],
        value_info=[helper.make_tensor_value_info("h", TensorProto.FLOAT, ["batch", 4] if last else ["batch", 2, 3])],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(domain, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def compiled(model: onnx.ModelProto, engine: OnnxRuntimeEngine) -> burnish.Program:
    return burnish.compile(model, loss="mean_squared_error", optimizer="sgd:lr=0.5", target=engine.target)


def windows(x: np.ndarray) -> np.ndarray:
    return np.stack([x[:, :3], x[:, 1:]], axis=1)


@pytest.fixture
def batch() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {"x": generator.normal(size=(5, 4)).astype(np.float32), "targets": generator.normal(size=(5, 2, 3)).astype(np.float32)}


@pytest.mark.slow
def test_an_operator_that_no_gradient_runs_through_stays_as_it_is(batch, tmp_path):
    engine = OnnxRuntimeEngine()
    program = compiled(network(), engine)
    assert "UnfoldTensor" in [node.op_type for node in program.step.graph]
    loaded = burnish.Program.load(program.save(tmp_path / "program"))
    session = burnish.Session(loaded, engine=engine)
    session.step(batch)
    hidden = windows(batch["x"])
    error = (hidden @ W[3] - batch["targets"]) * 2 / batch["targets"].size
    slope = np.einsum("swi,swo->io", hidden, error)
    np.testing.assert_allclose(session.state()["param/w"], W[3] - 0.5 * slope, rtol=1e-5, atol=1e-6)


def test_programs_are_of_standard_operators_unless_the_target_says_otherwise():
    with pytest.raises(
        UnsupportedOperatorError, match=r"UnfoldTensor 'windows' .* is not among the operators that onnxruntime runs"
    ):
        burnish.compile(network(), loss="mean_squared_error")


@pytest.mark.parametrize("engine", ["reference", "torch"])
def test_other_engines_do_not_have_it(engine):
    program = compiled(network(), OnnxRuntimeEngine())
    session = burnish.Session(program, engine=engine)
    with pytest.raises(
        UnsupportedOperatorError, match=rf"UnfoldTensor 'windows' .* is not among the operators that {engine} runs"
    ):
        session.predict({"x": np.zeros((1, 4), np.float32)})


def test_a_gradient_needs_a_rule(batch, monkeypatch):
    engine = OnnxRuntimeEngine()
    with pytest.raises(
        GradientError,
        match=r"com\.microsoft\.UnfoldTensor 'windows' .* has no gradient rule, .*, or export the model without this operator",
    ):
        compiled(network(last=True), engine)
    monkeypatch.setitem(registry.records(), ("com.microsoft", "UnfoldTensor"), [])

    @gradient("UnfoldTensor", domain="com.microsoft")
    def unfold(op, dy):
        builder = op.builder
        rows = [
            builder.op("Squeeze", window, builder.integers([1]))
            for window in builder.op("Split", dy, num_outputs=2, axis=1, outputs=2)
        ]
        first, second = (builder.op("Pad", row, builder.integers([0, before, 0, 1 - before])) for before, row in enumerate(rows))
        return first + second

    session = burnish.Session(compiled(network(last=True), engine), engine=engine)
    session.step(batch)
    error = (windows(batch["x"] @ W[4]) - batch["targets"]) * 2 / batch["targets"].size
    cotangent = np.pad(error[:, 0], ((0, 0), (0, 1))) + np.pad(error[:, 1], ((0, 0), (1, 0)))
    np.testing.assert_allclose(session.state()["param/w"], W[4] - 0.5 * batch["x"].T @ cotangent, rtol=1e-5, atol=1e-6)


def test_a_domain_that_the_runtime_does_not_have_needs_a_library():
    with pytest.raises(
        UnsupportedOperatorError, match=r"com\.example\.UnfoldTensor 'windows' .* is not among the operators that"
    ):
        compiled(network("com.example"), OnnxRuntimeEngine())


def test_a_library_that_cannot_be_loaded(tmp_path):
    with pytest.raises(
        EngineError, match=r"^custom_op_library: ONNX Runtime .* cannot load '.*none\.so': there is no such file\. Give"
    ):
        OnnxRuntimeEngine(custom_op_library=tmp_path / "none.so")
    path = tmp_path / "broken.so"
    path.write_bytes(b"no library")
    with pytest.raises(EngineError, match=r"cannot load '.*broken\.so': .*\. Give a shared library that exports Register"):
        OnnxRuntimeEngine(custom_op_library=str(path))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that registers nothing: ONNX Runtime's wheel has no headers to write an operator with."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("library")
    source, path = folder / "operators.c", folder / "operators.so"
    source.write_text("void *RegisterCustomOps(void *options, const void *api) { return 0; }\n")
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(path)], check=True)
    return path


@pytest.mark.slow
def test_with_a_library_operators_of_any_domain_pass(library, batch):
    engine = OnnxRuntimeEngine(custom_op_library=library)
    program = compiled(network("com.example"), engine)
    assert "com.example" in {node.domain for node in program.step.graph}
    # What the library lacks, the runtime names when it loads the graph.
    with pytest.raises(EngineError, match=r"com\.example.*UnfoldTensor"):
        burnish.Session(program, engine=engine).step(batch)
    session = burnish.Session(compiled(network(), engine), engine=engine)
    assert np.isfinite(session.step(batch)["loss"])
