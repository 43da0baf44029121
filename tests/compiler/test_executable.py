"""Executables: what an engine opens, lowered to its target when it is asked for, and rewritten on the way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest

import burnish
from burnish.compiler.executable import Executable, executable_of, lower
from burnish.engines.onnxruntime import OnnxRuntimeEngine
from burnish.errors import ConfigurationError, UnsupportedOperatorError
from burnish.graph import BURNISH_DOMAIN
from burnish.models import residual_network
from burnish.operators.activation import RELU_GRAD
from burnish.operators.convolution import CONV_WEIGHT_GRAD
from burnish.targets import TARGETS, Target
from oracles.tiny_program import LR, tiny_batch, tiny_program

STANDARD = TARGETS["onnxruntime"]
KERNELS = STANDARD.with_kernels({CONV_WEIGHT_GRAD, "ReluGrad"})


@pytest.fixture(scope="module")
def program() -> burnish.Program:
    return burnish.compile(residual_network(width=4, blocks=(1,)), optimizer="sgd:lr=0.1")


def semantic(model: ir.Model) -> set[str]:
    return {node.op_type for node in model.graph if node.domain == BURNISH_DOMAIN}


def test_the_graphs_of_the_program_serve_a_target_without_kernels(program):
    executable = lower(program, STANDARD)
    for name in ("step", "grad", "evaluate", "predict", "init", "apply"):
        assert executable.graph(name) is program.graphs[name]
    copy = executable.copy_of("step")
    assert copy is not program.step
    assert len(copy.graph) == len(program.step.graph)


def test_a_graph_with_kernels_is_made_once_and_copies_at_each_call(program):
    executable = lower(program, KERNELS)
    assert semantic(executable.graph("step")) == {CONV_WEIGHT_GRAD.name, RELU_GRAD.name}
    assert executable.graph("step") is executable.graph("step")
    first, second = executable.copy_of("step"), executable.copy_of("step")
    assert first is not second
    assert first is not executable.graph("step")
    assert not semantic(executable.lowered_to(STANDARD).graph("step"))
    with pytest.raises(KeyError):
        executable.graph("backward")


def test_a_rewrite_comes_after_those_before_it(program):
    seen: list[tuple[str, int]] = []

    def note(word: str):
        return lambda model: seen.append((word, len(semantic(model))))

    executable = lower(program, STANDARD)
    once = executable.rewritten(note("first"), "step", "predict")
    twice = once.rewritten(note("second"), "step", marks=[RELU_GRAD])
    assert once.graph("evaluate") is program.evaluate
    assert not seen
    twice.graph("step")
    twice.graph("step")
    assert seen == [("first", 1), ("second", 1)]
    seen.clear()
    assert once.graph("predict") is not program.predict
    assert seen == [("first", 0)]
    assert executable.graph("predict") is program.predict


def test_a_program_without_semantic_graphs_is_checked_against_the_target(program):
    alone = replace(program, semantic={})
    assert lower(alone, KERNELS).graph("step") is alone.step
    narrow = Target("narrow", 18, 10, operators={"Conv": STANDARD.operators["Conv"]})
    with pytest.raises(UnsupportedOperatorError, match=r"is not among the operators that narrow runs"):
        lower(alone, narrow).graph("predict")
    with pytest.raises(UnsupportedOperatorError, match=r"is not among the operators that narrow runs"):
        lower(program, narrow).graph("step")


def test_a_target_that_loads_older_opsets_alone(program):
    copy = program.predict.clone()
    copy.graph.opset_imports[""] = 20
    newer = replace(program, predict=copy, semantic={})
    node = next(node for node in copy.graph if node.op_type == "Relu")
    node.op_type = "Gelu"
    with pytest.raises(UnsupportedOperatorError, match=r"^Gelu .* is of opset 20, and old loads opset 18 at most"):
        lower(newer, Target("old", 18, 10)).graph("predict")


def test_a_single_graph_is_a_step_without_state():
    program = tiny_program()
    executable = executable_of(program.step, STANDARD)
    assert list(executable.signature) == ["step"]
    assert not executable.signature.state
    assert isinstance(executable, Executable)
    inputs = {**program.initial_state(0), **tiny_batch(), "lr": np.float32(LR)}
    inputs = {value.name: np.asarray(inputs[value.name]) for value in program.step.graph.inputs}
    runner = OnnxRuntimeEngine().open(executable, {}, threads=1)
    outputs = runner.step(inputs)
    expected = OnnxRuntimeEngine().run(program.step, inputs)
    assert outputs.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(outputs[name], array)


def test_fixed_shapes_are_asked_of_a_single_graph_too():
    fixed = replace(STANDARD, name="fixed", symbolic_shapes=False)
    with pytest.raises(ConfigurationError, match=r"^fixed takes fixed shapes, and the input 'x' of the step graph is \[batch, "):
        executable_of(tiny_program().step, fixed)
