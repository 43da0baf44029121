"""Removal of nodes and replacement of values: what ``onnx_ir`` does, without a walk over the outputs of the graph."""

import onnx_ir as ir
import pytest

from burnish.graph import Builder, remove_node, replace_output, replace_uses


def graph_of_outputs(count):
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2]))
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 18}, name="outputs")
    builder = Builder(graph)
    values = [builder.op("Relu", builder.tensor(x)).value for _ in range(count)]
    graph.outputs.extend(values)
    return graph, values


def test_a_removed_node_reads_nothing_any_more():
    graph, (value,) = graph_of_outputs(1)
    node = value.producer()
    graph.outputs.clear()
    remove_node(node)
    assert list(graph) == []
    assert node.graph is None
    assert not graph.inputs[0].uses()


def test_a_node_that_is_read_is_not_removed():
    graph, (value, other) = graph_of_outputs(2)
    with pytest.raises(ValueError, match=f"'{value.name}' is still read"):
        remove_node(value.producer())
    graph.outputs.clear()
    Builder(graph).op("Abs", Builder(graph).tensor(other))
    with pytest.raises(ValueError, match="still read"):
        remove_node(other.producer())
    assert len(graph) == 3


def test_a_value_is_replaced_where_it_is_read_and_in_every_output():
    graph, (first, second) = graph_of_outputs(2)
    reader = Builder(graph).op("Add", Builder(graph).tensor(first), Builder(graph).tensor(first)).value.producer()
    graph.outputs.append(first)
    new = Builder(graph).op("Abs", Builder(graph).tensor(graph.inputs[0])).value
    replace_uses(first, new)
    assert list(reader.inputs) == [new, new]
    assert list(graph.outputs) == [new, second, new]
    assert not first.is_graph_output()
    replace_uses(new, new)
    assert list(graph.outputs) == [new, second, new]


def test_outputs_that_were_changed_elsewhere_are_found():
    graph, values = graph_of_outputs(4)
    others = [Builder(graph).op("Abs", Builder(graph).tensor(graph.inputs[0])).value for _ in range(4)]
    replace_output(values[0], others[0])
    graph.outputs[3] = values[1]  # known at position 1 only
    replace_output(values[1], others[1])
    assert list(graph.outputs) == [others[0], others[1], values[2], others[1]]
    graph.outputs[:] = [values[2], values[3]]
    replace_output(values[3], others[3])
    assert list(graph.outputs) == [values[2], others[3]]


def test_no_replacement_walks_over_all_outputs(monkeypatch):
    graph, values = graph_of_outputs(50)
    looked_at = 0
    getitem = type(graph.outputs).__getitem__

    def counted(outputs, index):
        nonlocal looked_at
        looked_at += 1
        return getitem(outputs, index)

    monkeypatch.setattr(type(graph.outputs), "__getitem__", counted)
    for value in values:
        new = Builder(graph).op("Abs", Builder(graph).tensor(graph.inputs[0])).value
        replace_uses(value, new)
        remove_node(value.producer())
    assert looked_at <= 4 * len(values)
