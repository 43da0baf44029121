"""The graphs that an engine opens, each lowered to its target when it is first read, and rewritten on the way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest

import burnish
from burnish.compiler.lowered_graphs import LoweredGraphs
from burnish.engines.onnxruntime import OnnxRuntimeEngine
from burnish.errors import ConfigurationError, UnsupportedOperatorError
from burnish.graph import BURNISH_DOMAIN
from burnish.models import residual_network
from burnish.operators.activation import RELU_GRAD
from burnish.operators.convolution import CONV_WEIGHT_GRAD
from burnish.targets import TARGETS, Target
from oracles.kernel_graphs import without_semantic_graphs
from oracles.tiny_program import LR, tiny_batch, tiny_program

STANDARD = TARGETS["onnxruntime"]
KERNELS = STANDARD.with_kernels({CONV_WEIGHT_GRAD, "ReluGrad"})


@pytest.fixture(scope="module")
def program() -> burnish.Program:
    return burnish.compile(residual_network(width=4, blocks=(1,)), optimizer="sgd:lr=0.1")


def semantic(model: ir.Model) -> set[str]:
    return {node.op_type for node in model.graph if node.domain == BURNISH_DOMAIN}


def test_the_graphs_of_the_program_serve_a_target_without_kernels(program):
    graphs = program.graphs.lowered_to(STANDARD)
    for name in ("step", "grad", "evaluate", "predict", "init", "apply"):
        assert graphs[name] is program.graphs[name]
    copy = graphs.copy_of("step")
    assert copy is not program.step
    assert len(copy.graph) == len(program.step.graph)


def test_a_graph_with_kernels_is_made_once_and_copies_at_each_call(program):
    graphs = program.graphs.lowered_to(KERNELS)
    assert semantic(graphs["step"]) == {CONV_WEIGHT_GRAD.name, RELU_GRAD.name}
    assert graphs["step"] is graphs["step"]
    first, second = graphs.copy_of("step"), graphs.copy_of("step")
    assert first is not second
    assert first is not graphs["step"]
    assert not semantic(graphs.lowered_to(STANDARD)["step"])
    with pytest.raises(KeyError):
        graphs["backward"]


def test_a_rewrite_comes_after_those_before_it(program):
    seen: list[tuple[str, int]] = []

    def note(word: str):
        return lambda model: seen.append((word, len(semantic(model))))

    graphs = program.graphs.lowered_to(STANDARD)
    once = graphs.rewritten(note("first"), "step", "predict")
    twice = once.rewritten(note("second"), "step", marks=[RELU_GRAD])
    assert once["evaluate"] is program.evaluate
    assert not seen
    twice["step"]
    twice["step"]
    assert seen == [("first", 1), ("second", 1)]
    seen.clear()
    assert once["predict"] is not program.predict
    assert seen == [("first", 0)]
    assert graphs["predict"] is program.predict


def test_a_program_without_semantic_graphs_is_checked_against_the_target(program):
    alone = without_semantic_graphs(program)
    assert alone.graphs.lowered_to(KERNELS)["step"] is alone.step
    narrow = Target("narrow", 18, 10, operators={"Conv": STANDARD.operators["Conv"]})
    with pytest.raises(UnsupportedOperatorError, match=r"is not among the operators that narrow runs"):
        alone.graphs.lowered_to(narrow)["predict"]
    with pytest.raises(UnsupportedOperatorError, match=r"is not among the operators that narrow runs"):
        program.graphs.lowered_to(narrow)["step"]


def test_a_target_that_loads_older_opsets_alone(program):
    copy = program.predict.clone()
    copy.graph.opset_imports[""] = 20
    graphs = LoweredGraphs.read({**program.graphs, "predict": copy}, program.signature, program.options)
    node = next(node for node in copy.graph if node.op_type == "Relu")
    node.op_type = "Gelu"
    with pytest.raises(UnsupportedOperatorError, match=r"^Gelu .* is of opset 20, and old loads opset 18 at most"):
        graphs.lowered_to(Target("old", 18, 10))["predict"]


def test_a_single_graph_is_a_step_without_state():
    program = tiny_program()
    graphs = LoweredGraphs.of_model(program.step, STANDARD)
    assert list(graphs.signature) == ["step"]
    assert not graphs.signature.state
    assert isinstance(graphs, LoweredGraphs)
    inputs = {**program.initial_state(0), **tiny_batch(), "lr": np.float32(LR)}
    inputs = {value.name: np.asarray(inputs[value.name]) for value in program.step.graph.inputs}
    runner = OnnxRuntimeEngine().open(graphs, {}, threads=1)
    outputs = runner.step(inputs)
    expected = OnnxRuntimeEngine().run(program.step, inputs)
    assert outputs.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(outputs[name], array)


def test_fixed_shapes_are_asked_of_a_single_graph_too():
    fixed = replace(STANDARD, name="fixed", symbolic_shapes=False)
    with pytest.raises(ConfigurationError, match=r"^fixed takes fixed shapes, and the input 'x' of the step graph is \[batch, "):
        LoweredGraphs.of_model(tiny_program().step, fixed)
