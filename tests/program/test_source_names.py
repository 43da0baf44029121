"""Every node of a program says what of the model it computes a part of."""

from __future__ import annotations

import onnx_ir as ir
import pytest

import burnish
from burnish.engines.communicator import COLLECTIVES
from burnish.graph import source_of
from burnish.models import residual_network
from burnish.operators import semantic_operators
from burnish.program import Program
from oracles.kernel_graphs import kernel_graphs

MODEL = residual_network((1, 4, 4), classes=3, width=2, blocks=(1,))


def sources(model: ir.Model) -> dict[str, set[str | None]]:
    """Operator -> what its nodes say, constants left out."""
    found: dict[str, set[str | None]] = {}
    for node in model.graph:
        if node.op_type != "Constant":
            found.setdefault(node.op_type, set()).add(source_of(node))
    return found


@pytest.mark.parametrize("options", [{}, {"precision": "float16"}, {"recompute": "layers"}], ids=str)
def test_nodes_name_the_node_of_the_model_that_they_come_from(options):
    program = burnish.compile(MODEL, optimizer="adam", **options)
    layers = {str(source_of(node)) for node in program.predict.graph if node.op_type == "Conv"}
    assert {layer.split("'")[0] for layer in layers} == {"Conv "}
    found = sources(program.step)
    named = {source for source in found["Conv"] if source is not None}
    assert layers < named
    assert {source.removeprefix("gradient of ") for source in named} == layers
    assert "the loss" in found["LogSoftmax"]
    assert "the metrics" in found["ArgMax"]
    assert "the optimizer" in found["Sqrt"]
    assert any(str(source).startswith("BatchNormalization") for source in found["Reciprocal"])


def test_what_is_not_lowered_names_it_too():
    program = burnish.compile(MODEL)
    found = sources(kernel_graphs(program, semantic_operators() - COLLECTIVES)["grad"])
    assert None not in set().union(*found.values())
    assert len(found["ConvWeightGrad"]) == 3
    assert all(str(source).startswith("gradient of Conv ") for source in found["ConvWeightGrad"])


def test_a_saved_program_still_says_it(tmp_path):
    program = burnish.compile(MODEL)
    loaded = Program.load(program.save(tmp_path / "program"))
    assert sources(loaded.step) == sources(program.step)


def test_the_gradient_of_a_model_that_was_not_compiled_says_nothing():
    gradient = burnish.grad(MODEL, wrt="classifier.weight")
    assert set().union(*sources(gradient).values()) == {None}
