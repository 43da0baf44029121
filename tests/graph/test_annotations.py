"""How nodes are named in messages, and what they say of their quantization and pruning, in files that may come from anywhere."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from burnish.errors import ModelError
from burnish.graph import Builder, describe_node, describe_place, name_sources
from burnish.graph.annotations import PRUNING, PruningMark
from burnish.quantization.graph import QUANTIZATION, QuantizationMark


def named(name: str, output: str, domain: str = "") -> ir.Node:
    node = ir.node("Relu", [ir.Value(name="x")], name=name, domain=domain)
    node.outputs[0].name = output
    return node


def test_a_node_is_named_by_operator_name_and_output():
    assert describe_node(named("act", "y")) == "Relu 'act' (output 'y')"
    assert describe_node(named("", "y", "ai.onnx")) == "Relu (output 'y')"
    assert describe_node(named("act", "", "com.example")) == "com.example.Relu 'act'"


@pytest.mark.parametrize(
    ("source", "described"),
    [
        (None, "Relu 'act' (output 'y')"),
        ("Relu 'act' (output 'y')", "Relu 'act' (output 'y')"),
        ("gradient of Conv 'stem'", "Relu 'act' (output 'y') of the gradient of Conv 'stem'"),
        ("Conv 'stem'", "Relu 'act' (output 'y') of the Conv 'stem'"),
        ("the loss", "Relu 'act' (output 'y') of the loss"),
        ("gradient of the loss", "Relu 'act' (output 'y') of the gradient of the loss"),
    ],
)
def test_the_place_of_a_node(source: str | None, described: str) -> None:
    node = named("act", "y")
    if source is not None:
        node.metadata_props["burnish.source"] = source
    assert describe_place(node) == described


@pytest.mark.parametrize("name", ["the the", "bathe the cat", "the theory/the thesis"])
def test_names_of_the_model_stay_as_they_are(name: str) -> None:
    node = named(name, f"{name}_out")
    node.metadata_props["burnish.source"] = f"gradient of MatMul '{name}'"
    assert describe_place(node) == f"Relu '{name}' (output '{name}_out') of the gradient of MatMul '{name}'"
    node.metadata_props["burnish.source"] = "the optimizer"
    assert describe_place(node) == f"Relu '{name}' (output '{name}_out') of the optimizer"


def test_what_replaces_a_node_of_the_model_says_which_it_was():
    graph = ir.Graph([], [], nodes=[named("the the", "y")], opset_imports={"": 18})
    name_sources(graph)
    (node,) = graph
    builder = Builder(graph, before=node)
    emitted = builder.op("Neg", builder.scalar(1.0, ir.DataType.FLOAT)).value.producer()
    assert emitted is not None
    assert describe_place(emitted).endswith(" of the Relu 'the the' (output 'y')")


KINDS = {QUANTIZATION.key: QuantizationMark, PRUNING.key: PruningMark}


@pytest.mark.parametrize("text", ["", "[", "[]", "3", '{"role": "weight"}', '{"unknown": 1}', "[" * 100_000])
@pytest.mark.parametrize("key", KINDS)
def test_what_cannot_be_read_is_refused_by_the_node(key, text):
    node = ir.Node("", "Mul", [], name="masked")
    node.metadata_props[key] = text
    with pytest.raises(ModelError, match=f"^Mul 'masked' has an entry '{key}' in its metadata that this burnish cannot read"):
        KINDS[key].of(node)
    del node.metadata_props[key]
    assert KINDS[key].of(node) is None


def test_what_is_written_is_read():
    node, mark = ir.Node("", "QuantizeLinear", []), QuantizationMark("activation", "observed", 255, momentum=0.9, settled=0.01)
    mark.put(node)
    assert QuantizationMark.of(node) == mark
