"""Lists that a loop puts together become tensors that it stacks.

PyTorch's TorchScript exporter writes ``outputs.append(y)`` in a loop as a sequence among the loop's states, which SequenceInsert
makes longer, and ``torch.stack(outputs)`` after it as ConcatFromSequence. A scanned output of the loop holds the same elements,
and gradients flow through.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from burnish.graph import Builder, Tensor, attribute_value, constant_array, remove_node, replace_node, replace_uses, same_shape
from burnish.graph.uses import producer_of, remove_unread

INT64_MIN = -(2**63)
_READERS = ("ConcatFromSequence", "SequenceAt", "SequenceLength")


def stack_built_lists(model: ir.Model) -> bool:
    """Replace, in place, the lists that loops put together, from nothing or from known elements; return whether there were any.

    An element is added in every iteration, at the end or in front, and nothing else in the loop reads the list. After it the list
    is joined, counted, or read by position. Elements have one shape, which stacking them asks for; where nothing stacks them, the
    shape has to be known.
    """
    replaced = False
    fixed = {extent.value for value in model.graph.inputs if value.shape for extent in value.shape if not isinstance(extent, int)}
    fixed.discard(None)
    for node in list(model.graph.all_nodes()):
        while node.op_type == "Loop" and node.domain == "" and (found := _built_list(node, fixed)) is not None:
            node, replaced = _stack(model, node, found), True
    return replaced


@dataclass(frozen=True)
class _BuiltList:
    """A list among the states of a loop.

    Attributes:
        state: which of the states it is.
        insertion: the node that makes it longer.
        in_front: whether the newest element is the first.
        earlier: the elements that are there before the loop.
    """

    state: int
    insertion: ir.Node
    in_front: bool
    earlier: tuple[ir.Value, ...]


def _built_list(loop: ir.Node, fixed: Container[object]) -> _BuiltList | None:
    body = loop.attributes["body"].as_graph()
    for state in range(len(loop.inputs) - 2):
        initial, inside, returned = loop.inputs[2 + state], body.inputs[2 + state], body.outputs[1 + state]
        insertion = producer_of(returned, "SequenceInsert")
        earlier = None if initial is None else _elements(initial)
        if earlier is None or insertion is None:
            continue
        is_grown = insertion.inputs[0] is inside and insertion.graph is body and not returned.uses()
        if not is_grown or len(inside.uses()) != 1 or list(body.outputs).count(returned) != 1 or inside.is_graph_output():
            continue
        place = insertion.inputs[2] if len(insertion.inputs) > 2 else None
        position = None if place is None else constant_array(place)
        if place is not None and (position is None or position.size != 1 or int(position.reshape(())) != 0):
            continue
        element = insertion.inputs[1]
        if element is not None and _may_be_stacked(loop.outputs[state], element, earlier, fixed):
            return _BuiltList(state, insertion, place is not None, earlier)
    return None


def _elements(sequence: ir.Value) -> tuple[ir.Value, ...] | None:
    """The elements of a list that was made as a whole, or put together at its end; None for another."""
    made = producer_of(sequence, "SequenceEmpty", "SequenceConstruct", "SequenceInsert")
    if made is None:
        return None
    if made.op_type != "SequenceInsert":
        return tuple(value for value in made.inputs if value is not None)
    first = None if made.inputs[0] is None or len(made.inputs) > 2 else _elements(made.inputs[0])
    return None if first is None or made.inputs[1] is None else (*first, made.inputs[1])


def _may_be_stacked(result: ir.Value, element: ir.Value, earlier: Sequence[ir.Value], fixed: Container[object]) -> bool:
    """Whether all elements have one shape, as far as what reads the list says so or the shape is known.

    Args:
        result: the list.
        element: what an iteration adds to it.
        earlier: what was in it before.
        fixed: names of extents that are the same in every iteration.
    """
    readers = [reader for reader, _ in result.uses()]
    if not readers or result.is_graph_output() or not all(reader.op_type in _READERS for reader in readers):
        return False
    dims = None if element.shape is None else element.shape.dims
    if dims is None or element.dtype is None:
        return False
    joining = [reader for reader in readers if reader.op_type == "ConcatFromSequence"]
    if any(attribute_value(reader, "new_axis", 0) for reader in joining):
        return True
    if not all(same_shape(element.shape, value.shape) for value in earlier):
        return False
    known = [isinstance(extent, int) or extent.value in fixed for extent in dims]
    # Elements that are joined along an axis have the same extents along the others.
    return all(known) or any(known[reader.attributes["axis"].as_int()] for reader in joining)


def _stack(model: ir.Model, loop: ir.Node, built: _BuiltList) -> ir.Node:
    """Let a loop scan the elements of a list, in the place of a state that holds it; returns the loop that stands for it."""
    body, element = loop.attributes["body"].as_graph(), built.insertion.inputs[1]
    graph = loop.graph
    assert element is not None
    assert isinstance(graph, ir.Graph)
    for emitted_into in (body, graph):
        emitted_into.opset_imports.update(model.graph.opset_imports)
    scanned = Builder(body).op("Identity", Builder(body).tensor(element)).value
    old = loop.outputs[built.state]
    body.outputs.pop(1 + built.state)
    remove_node(built.insertion)
    body.inputs.pop(2 + built.state)
    body.outputs.append(scanned)
    operands = [value for index, value in enumerate(loop.inputs) if index != 2 + built.state]
    new = ir.Node("", "Loop", operands, list(loop.attributes.values()), num_outputs=len(loop.outputs), name=loop.name)
    new.metadata_props.update(loop.metadata_props)
    graph.insert_before(loop, new)
    stacked = new.outputs[-1]
    stacked.type = element.type
    assert element.shape is not None
    stacked.shape = ir.Shape([ir.SymbolicDim(None), *element.shape.dims])
    stay = [output for index, output in enumerate(loop.outputs) if index != built.state]
    for output, moved in zip(stay, new.outputs, strict=False):
        moved.type, moved.shape = output.type, output.shape
        replace_uses(output, moved)
        moved.name, output.name = output.name, None
    if built.earlier:
        stacked = _after(Builder(graph, before=loop), built, stacked)
    for reader in dict.fromkeys(reader for reader, _ in old.uses()):
        _read_stacked(model, reader, stacked, built.in_front)
    initial = loop.inputs[2 + built.state]
    remove_node(loop)
    remove_unread(graph, None if initial is None else initial.producer())
    return new


def _after(builder: Builder, built: _BuiltList, stacked: ir.Value) -> ir.Value:
    """The elements of before the loop with those of the loop after them; in the order in which they were added."""
    first = builder.integers([0])
    earlier = reversed(built.earlier) if built.in_front else built.earlier
    rows = [builder.op("Unsqueeze", builder.tensor(value), first) for value in earlier]
    return builder.op("Concat", *rows, builder.tensor(stacked), axis=0).value


def _read_stacked(model: ir.Model, reader: ir.Node, stacked: ir.Value, in_front: bool) -> None:
    """Let what reads a list read the stacked elements."""
    graph = reader.graph
    assert isinstance(graph, ir.Graph)
    graph.opset_imports.update(model.graph.opset_imports)
    builder = Builder(graph, before=reader)
    rows = builder.tensor(stacked)
    first = builder.integers([0])
    if reader.op_type == "SequenceLength":
        replace_node(reader, builder.op("Squeeze", builder.op("Shape", rows, end=1), first))
        return
    if in_front:
        rows = builder.op("Slice", rows, builder.integers([-1]), builder.integers([INT64_MIN]), first, builder.integers([-1]))
    if reader.op_type == "SequenceAt":
        position = reader.inputs[1]
        assert position is not None
        replace_node(reader, builder.op("Gather", rows, builder.tensor(position), axis=0))
        return
    axis, is_new = reader.attributes["axis"].as_int(), attribute_value(reader, "new_axis", 0)
    rank = rows.rank
    assert rank is not None
    axis %= rank if is_new else rank - 1
    order = [*range(1, axis + 1), 0, *range(axis + 1, rank)]
    joined = rows if axis == 0 else builder.op("Transpose", rows, perm=order)
    replace_node(reader, joined if is_new else _merged(joined, axis))


def _merged(tensor: Tensor, axis: int) -> Tensor:
    """The tensor with ``axis`` and the one after it as one."""
    builder = tensor.builder
    before, after = builder.op("Shape", tensor, end=axis), builder.op("Shape", tensor, start=axis + 2)
    return builder.op("Reshape", tensor, builder.op("Concat", before, builder.integers([-1]), after, axis=0))
