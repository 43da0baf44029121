"""Targets in files, and what a program that is compiled for one may hold."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

import burnish
from burnish.data.random_data import random_batches
from burnish.errors import ConfigurationError, UnsupportedOperatorError
from burnish.operators.convolution import CONV_WEIGHT_GRAD
from burnish.targets import (
    ANY_DOMAIN,
    TARGETS,
    Support,
    Target,
    check_allowed,
    read_target,
    target_from_dict,
    target_of,
    target_to_dict,
)
from oracles.small_graphs import SmallGraph
from oracles.small_networks import perceptron

WHOLE = """
name = "accelerator"
opset = 21
ir_version = 10
shapes = "static"
dtypes = ["float32", "int64"]
operators = ["Add", {name = "Conv", newest = 11}, {name = "Cast", dtypes = ["float32", "bool", "double"]}]
kernels = ["ConvWeightGrad"]

[domains]
"com.microsoft" = ["FusedConv"]
"com.example" = "*"
"""
LEAST = 'name = "least"\nopset = 18\nir_version = 10\n'


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "target.toml"
        path.write_text(text)
        return path

    return write


def test_a_file_says_what_a_runtime_can_do(write):
    target = read_target(write(WHOLE))
    narrow = frozenset({ir.DataType.FLOAT, ir.DataType.INT64})
    assert target == Target(
        "accelerator",
        21,
        10,
        operators={
            "Add": Support(dtypes=narrow),
            "Conv": Support(11, narrow),
            "Cast": Support(dtypes=frozenset({ir.DataType.FLOAT, ir.DataType.BOOL, ir.DataType.DOUBLE})),
        },
        domains={"com.microsoft": frozenset({"FusedConv"}), "com.example": None},
        kernels=frozenset({CONV_WEIGHT_GRAD.name}),
        symbolic_shapes=False,
    )
    assert target_from_dict(json.loads(json.dumps(target_to_dict(target)))) == target
    assert target_of(write(WHOLE)) == target_of(str(write(WHOLE))) == target_of(target) == target


def test_all_operators_of_the_standard(write):
    target = read_target(write(LEAST + 'operators = "*"'))
    assert target.operators == TARGETS["onnxruntime"].operators
    assert target.symbolic_shapes
    assert target_to_dict(target)["operators"] == "*"
    narrow = read_target(write(LEAST + 'operators = "*"\ndtypes = ["bool"]'))
    assert narrow.operators["Add"] == Support(dtypes=frozenset({ir.DataType.BOOL}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", r"the target '.*target\.toml' is no TOML: Invalid value"),
        ("opset = 18", r"name is None; give it a name"),
        ('name = "x"\nopset = 0', r"opset is 0; give a whole number of at least one"),
        ('name = "x"\nopset = 18', r"ir_version is None; give a whole number"),
        (LEAST, r"operators is None; give a list of standard operators, or \"\*\" for all of them"),
        (LEAST + "operators = [3]", r"3 is among the operators; give a name, or \{name = \"Conv\""),
        (
            LEAST + 'operators = ["Con"]',
            r"the standard has no operator 'Con' \(did you mean 'Conv'\?\); operators of other domains",
        ),
        (
            LEAST + 'operators = [{name = "Conv", oldest = 3}]',
            r"the operator Conv has 'oldest'; it may have newest, dtypes and outputs",
        ),
        (LEAST + 'operators = [{name = "Conv", newest = "11"}]', r"newest is '11'; give a whole number"),
        (LEAST + 'operators = ["Conv"]\ndtypes = ["float31"]', r"there is no dtype 'float31' \(did you mean 'float32'\?\)"),
        (LEAST + 'operators = ["Conv"]\ndtypes = "float32"', r"dtypes is 'float32'; give a list of names"),
        (LEAST + 'operators = ["Conv"]\nkernels = ["ConvGrad"]', r"no semantic operator 'ConvGrad' for kernels \(did you mean"),
        (LEAST + 'operators = ["Conv"]\nshapes = "fixed"', r"shapes is 'fixed'; give \"static\" or \"symbolic\""),
        (LEAST + 'operators = ["Conv"]\nkernel = []', r"there is no key 'kernel' \(did you mean 'kernels'\?\); keys are name"),
        (LEAST + 'operators = ["Conv"]\ndomains = 3', r"domains is 3; give a table of domains"),
        (LEAST + 'operators = ["Conv"]\n[domains]\n"ai.onnx" = "*"', r"'ai\.onnx' is among the domains; it is the standard's"),
        (LEAST + 'operators = ["Conv"]\n[domains]\n"com.example" = 3', r"the domain 'com\.example' is 3; give a list of names"),
    ],
)
def test_a_file_that_describes_no_target(write, text, message):
    with pytest.raises(ConfigurationError, match=message):
        read_target(write(text))


def test_a_target_that_is_not_there(tmp_path):
    with pytest.raises(ConfigurationError, match=r"the target '.*none\.toml' cannot be read: No such file or directory"):
        burnish.compile(perceptron(), target=tmp_path / "none.toml")
    for name in ("onxruntime", 3):
        with pytest.raises(
            ConfigurationError, match=rf"target: unknown '{name}'; choose among 'onnxruntime', 'web', .*'reference', or give"
        ):
            burnish.compile(perceptron(), target=name)  # type: ignore[arg-type]


def one_node(operator: str, domain: str = "", opset: int = 18, dtype: str = "float32") -> ir.Model:
    small = SmallGraph({"x": (dtype, [4])}, opset)
    result = small.builder.op(operator, small["x"], domain=domain, like=small["x"])
    node = result.value.producer()
    assert node is not None
    node.name, small.graph.opset_imports[domain] = "node", opset if domain == "" else 1
    small.output("y", result)
    return ir.Model(small.graph, ir_version=10)


def test_versions_and_dtypes_of_an_operator_are_looked_at():
    target = Target("narrow", 21, 10, operators={"Identity": Support(), "Relu": Support(13, frozenset({ir.DataType.FLOAT}))})
    with pytest.raises(UnsupportedOperatorError, match=r"^Relu 'node' .* is of version 14 of its operator, and narrow runs"):
        check_allowed(one_node("Relu"), target)
    check_allowed(one_node("Relu", opset=13), target)
    with pytest.raises(
        UnsupportedOperatorError, match=r"^Relu 'node' .* reads or returns 'x', double, and narrow runs Relu over float: change"
    ):
        check_allowed(one_node("Relu", opset=13, dtype="float64"), target)


def test_the_domain_of_an_operator_is_looked_at():
    target = Target(
        "narrow", 21, 10, operators={"Identity": Support()}, domains={"com.example": frozenset({"Relu"}), "com.open": None}
    )
    check_allowed(one_node("Relu", "com.example"), target)
    check_allowed(one_node("Tanh", "com.open"), target)
    for operator, domain in (("Relu", ""), ("Tanh", "com.example"), ("Relu", "com.other"), ("Relu", "burnish")):
        with pytest.raises(UnsupportedOperatorError, match=r"'node' .* is not among the operators that narrow runs"):
            check_allowed(one_node(operator, domain), target)
    any_domain = Target(
        "wide", 21, 10, operators={"Identity": Support()}, domains={ANY_DOMAIN: None, "com.example": frozenset({"Relu"})}
    )
    check_allowed(one_node("Relu", "com.other"), any_domain)
    for operator, domain in (("Relu", ""), ("Tanh", "com.example"), ("Relu", "burnish")):
        with pytest.raises(UnsupportedOperatorError, match=r"is not among the operators that wide runs"):
            check_allowed(one_node(operator, domain), any_domain)


def test_fixed_shapes_are_asked_for_by_name(write):
    target = read_target(write(LEAST + 'operators = "*"\nshapes = "static"'))
    message = (
        r"^least takes fixed shapes, and the input 'x' of the (step|grad) graph is \[batch, \d+\]: export the model with a number"
    )
    with pytest.raises(ConfigurationError, match=message):
        burnish.compile(perceptron(), target=target)


def test_a_program_keeps_the_target_of_a_file(write, tmp_path):
    path = write(LEAST.replace("18", "21") + 'operators = "*"\nkernels = ["ReluGrad"]')
    program = burnish.compile(perceptron(), target=path, optimizer="sgd:lr=0.1")
    assert program.target == read_target(path)
    assert {node.op_type for node in program.step.graph if node.domain == "burnish"} <= {"ReluGrad"}
    loaded = burnish.Program.load(program.save(tmp_path / "program"))
    assert loaded.target == program.target
    batch = next(iter(random_batches(program, seed=0)))
    plain = burnish.Session(burnish.compile(perceptron(), optimizer="sgd:lr=0.1")).step(batch)
    assert burnish.Session(loaded).step(batch)["loss"] == np.float32(plain["loss"])
