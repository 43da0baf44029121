"""Replacement of sequences with known elements by tensors.

Unless they optimize, PyTorch's exporters write ``chunk``, ``split`` and ``unbind`` as SplitToSequence with a SequenceAt per
piece, and lists as SequenceConstruct. Split, Slice, Gather and Concat compute the same and pass gradients.

PyTorch's TorchScript exporter writes ``outputs.append(y)`` in a loop as a sequence state extended by SequenceInsert, and
``torch.stack(outputs)`` as ConcatFromSequence. A scanned output of the loop has the same elements and passes gradients.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from burnish.graph import (
    Builder,
    Names,
    Tensor,
    attribute_value,
    constant_array,
    remove_node,
    replace_node,
    replace_uses,
    replace_value,
    same_shape,
)
from burnish.graph.function_bodies import standard_function, write_out
from burnish.graph.uses import is_read, producer_of, remove_unread

MOST_PIECES = 4096
"""Most pieces of a split that are written one by one; longer sequences are recurrences, not lists."""

_MADE = frozenset({"SequenceConstruct", "SequenceEmpty", "SequenceInsert", "SequenceErase", "SplitToSequence"})


def resolve_sequences(model: ir.Model) -> bool:
    """Replace, in place, readers of sequences with known elements, in bodies too; return True if there were any.

    A computed position selects among elements of one shape, or among split pieces of extent one. Elements of several shapes and
    sequences from elsewhere stay.
    """
    return _Resolution(model.graph).run()


def write_out_maps(model: ir.Model) -> bool:
    """Replace every SequenceMap, in place, by the loop that the standard defines; return True if there were any."""
    maps = [node for node in model.graph.all_nodes() if node.op_type == "SequenceMap" and node.domain == ""]
    if not maps:
        return False
    names, node_names = Names.of(model.graph), Names(node.name for node in model.graph.all_nodes())
    for node in maps:
        function = standard_function(node, model.opset_imports[""])
        assert function is not None
        assert isinstance(node.graph, ir.Graph)
        node.graph.opset_imports.update(model.opset_imports)
        outputs = list(node.outputs)
        write_out(node, function, names, node_names)
        for identity in (output.producer() for output in outputs if not output.is_graph_output()):
            if identity is not None and identity.inputs[0] is not None:
                replace_value(identity.outputs[0], identity.inputs[0])
                remove_node(identity)
    return True


class _Resolution:
    def __init__(self, graph: ir.Graph):
        self.graph = graph
        self.elements: dict[ir.Value, list[ir.Value] | None] = {}
        self.stacks: dict[ir.Value, Tensor] = {}

    def builder(self, before: ir.Node) -> Builder:
        graph = before.graph
        assert isinstance(graph, ir.Graph)
        graph.opset_imports.update(self.graph.opset_imports)
        return Builder(graph, before=before)

    def run(self) -> bool:
        resolved = False
        for node in list(self.graph.all_nodes()):
            if node.domain == "" and node.inputs and node.inputs[0] is not None:
                match node.op_type:
                    case "SequenceAt":
                        resolved |= self.take_element(node, node.inputs[0])
                    case "ConcatFromSequence":
                        resolved |= self.concatenate(node, node.inputs[0])
                    case "SequenceLength":
                        resolved |= self.count(node, node.inputs[0])
        if resolved:
            for node in reversed(list(self.graph.all_nodes())):
                if node.op_type in _MADE and node.domain == "" and not is_read(node):
                    remove_node(node)
        return resolved

    def take_element(self, node: ir.Node, sequence: ir.Value) -> bool:
        position = _integer(node.inputs[1])
        elements = self.elements_of(sequence)
        if position is None or elements is None:
            piece = self.choose(node, sequence) if position is None else self.cut(node, sequence, position)
            if piece is not None:
                replace_node(node, piece)
            return piece is not None
        if not -len(elements) <= position < len(elements):
            return False  # the runtime reports it
        if node.graph is self.graph:
            replace_value(node.outputs[0], elements[position])
            remove_node(node)
        else:
            builder = self.builder(node)  # a body must compute its outputs itself
            replace_node(node, builder.op("Identity", builder.tensor(elements[position])))
        return True

    def concatenate(self, node: ir.Node, sequence: ir.Value) -> bool:
        elements = self.elements_of(sequence)
        builder = self.builder(node)
        axis = node.attributes["axis"].as_int()
        if not elements:
            split = producer_of(sequence, "SplitToSequence")
            x = None if split is None else split.inputs[0]
            if split is None or x is None or not _joins_again(split, axis, bool(attribute_value(node, "new_axis", 0))):
                return False
            replace_node(node, builder.op("Identity", builder.tensor(x)))
            return True
        tensors = [builder.tensor(element) for element in elements]
        if attribute_value(node, "new_axis", 0):
            tensors = [builder.op("Unsqueeze", tensor, builder.integers([axis])) for tensor in tensors]
        replace_node(node, builder.op("Concat", *tensors, axis=axis))
        return True

    def count(self, node: ir.Node, sequence: ir.Value) -> bool:
        elements = self.elements_of(sequence)
        builder = self.builder(node)
        if elements is not None:
            number = builder.integers([len(elements)])
        else:
            split = producer_of(sequence, "SplitToSequence")
            x, axis, chunk = (None, 0, None) if split is None else _operands(split)
            if x is None or chunk is None or chunk < 1:
                return False
            extent = builder.op("Gather", builder.op("Shape", builder.tensor(x)), builder.integers([axis]))
            number = extent if chunk == 1 else (extent + (chunk - 1)) / chunk
        replace_node(node, builder.op("Squeeze", number, builder.integers([0])))
        return True

    def choose(self, node: ir.Node, sequence: ir.Value) -> Tensor | None:
        """Return the element at a computed position; None if element shapes differ or are unknown."""
        builder = self.builder(node)
        place = node.inputs[1]
        assert place is not None
        split = producer_of(sequence, "SplitToSequence")
        if split is not None:
            x, axis, chunk = _operands(split)
            if x is not None and chunk == 1:
                piece = builder.op("Gather", builder.tensor(x), builder.tensor(place), axis=axis)
                return piece if _drops_axis(split) else builder.op("Unsqueeze", piece, builder.integers([axis]))
        elements, source = self.elements_of(sequence), sequence.producer()
        if not elements or source is None or not all(same_shape(element.shape, elements[0].shape) for element in elements):
            return None
        if sequence not in self.stacks:
            outer = self.builder(source)
            rows = [outer.op("Unsqueeze", outer.tensor(element), outer.integers([0])) for element in elements]
            self.stacks[sequence] = outer.op("Concat", *rows, axis=0)
        return builder.op("Gather", builder.tensor(self.stacks[sequence].value), builder.tensor(place), axis=0)

    def elements_of(self, sequence: ir.Value) -> list[ir.Value] | None:
        """Return the elements as values available before the sequence; None if unknown."""
        if sequence not in self.elements:
            self.elements[sequence] = self._find_elements(sequence)
        return self.elements[sequence]

    def _find_elements(self, sequence: ir.Value) -> list[ir.Value] | None:
        node = sequence.producer()
        if node is None or node.domain != "":
            return None
        if node.op_type == "SplitToSequence":
            return self._split(node)
        if node.op_type in ("SequenceConstruct", "SequenceEmpty"):
            return [value for value in node.inputs if value is not None]
        if node.op_type not in ("SequenceInsert", "SequenceErase") or node.inputs[0] is None:
            return None
        elements = self.elements_of(node.inputs[0])
        inserts = node.op_type == "SequenceInsert"
        place = node.inputs[-1] if len(node.inputs) == (3 if inserts else 2) else None
        if elements is None:
            return None
        end = len(elements) - (0 if inserts else 1)
        position = end if place is None else _integer(place)
        if position is None or not -len(elements) <= position <= end:
            return None
        position += len(elements) if position < 0 else 0
        added = [node.inputs[1]] if inserts and node.inputs[1] is not None else []
        return [*elements[:position], *added, *elements[position + (0 if inserts else 1) :]]

    def _split(self, node: ir.Node) -> list[ir.Value] | None:
        x, axis, chunk = _operands(node)
        sizes = None
        if x is None or x.dtype is None:
            return None
        if chunk is None:
            array = constant_array(node.inputs[1])
            sizes = array.tolist() if array is not None and array.ndim == 1 else None
        elif chunk > 0 and x.shape is not None and isinstance(extent := x.shape.dims[axis], int):
            if extent > chunk * MOST_PIECES:
                return None
            sizes = [min(chunk, extent - start) for start in range(0, extent, chunk)]
        if not sizes or len(sizes) > MOST_PIECES:
            return None
        builder = self.builder(node)
        made = builder.op("Split", builder.tensor(x), builder.integers(sizes), axis=axis, outputs=len(sizes))
        pieces = made if isinstance(made, tuple) else (made,)
        if _drops_axis(node):
            pieces = tuple(builder.op("Squeeze", piece, builder.integers([axis])) for piece in pieces)
        return [piece.value for piece in pieces]

    def cut(self, node: ir.Node, sequence: ir.Value, position: int) -> Tensor | None:
        split = producer_of(sequence, "SplitToSequence")
        if split is None:
            return None
        x, axis, chunk = _operands(split)
        if x is None or chunk is None:
            return None
        builder = self.builder(node)
        if _drops_axis(split):
            index = builder.op("Squeeze", builder.integers([position]), builder.integers([0]))
            return builder.op("Gather", builder.tensor(x), index, axis=axis)
        if position < 0:
            return None
        bounds = (builder.integers([number]) for number in (position * chunk, (position + 1) * chunk, axis))
        return builder.op("Slice", builder.tensor(x), *bounds)


def _operands(split: ir.Node) -> tuple[ir.Value | None, int, int | None]:
    """Return the split value, the axis, and the size of all pieces but the last, if common."""
    sizes = split.inputs[1] if len(split.inputs) > 1 else None
    return split.inputs[0], attribute_value(split, "axis", 0), 1 if sizes is None else _integer(sizes)


def _joins_again(split: ir.Node, axis: int, as_new: bool) -> bool:
    x, along, _ = _operands(split)
    if x is None or as_new != _drops_axis(split):
        return False
    return axis == along or (x.shape is not None and axis % len(x.shape) == along % len(x.shape))


def _drops_axis(split: ir.Node) -> bool:
    """True if pieces of extent one come without their axis; explicit sizes keep it."""
    without_sizes = len(split.inputs) < 2 or split.inputs[1] is None
    return without_sizes and attribute_value(split, "keepdims", 1) == 0


def _integer(value: ir.Value | None) -> int | None:
    array = constant_array(value)
    return int(array.item()) if array is not None and array.ndim == 0 else None


INT64_MIN = -(2**63)
_READERS = ("ConcatFromSequence", "SequenceAt", "SequenceLength")


def stack_built_lists(model: ir.Model) -> bool:
    """Replace, in place, lists that loops build from nothing or from known elements by scans; return True if there were any.

    Every iteration must append or prepend an element, and nothing else in the loop may read the list. Afterwards it may be
    joined, counted, or read by position. All elements have one shape, as stacking requires; without stacking, the shape must be
    known.
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
        state: index of the state.
        insertion: the node that extends it.
        in_front: True if elements are prepended.
        earlier: elements before the loop.
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
    made = producer_of(sequence, "SequenceEmpty", "SequenceConstruct", "SequenceInsert")
    if made is None:
        return None
    if made.op_type != "SequenceInsert":
        return tuple(value for value in made.inputs if value is not None)
    first = None if made.inputs[0] is None or len(made.inputs) > 2 else _elements(made.inputs[0])
    return None if first is None or made.inputs[1] is None else (*first, made.inputs[1])


def _may_be_stacked(result: ir.Value, element: ir.Value, earlier: Sequence[ir.Value], fixed: Container[object]) -> bool:
    """True if all elements are known to have one shape, from the list's readers or from inference.

    Args:
        result: the list.
        element: the element that an iteration adds.
        earlier: elements from before the loop.
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
    # Elements joined along an axis have equal extents along the others.
    return all(known) or any(known[reader.attributes["axis"].as_int()] for reader in joining)


def _stack(model: ir.Model, loop: ir.Node, built: _BuiltList) -> ir.Node:
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
    first = builder.integers([0])
    earlier = reversed(built.earlier) if built.in_front else built.earlier
    rows = [builder.op("Unsqueeze", builder.tensor(value), first) for value in earlier]
    return builder.op("Concat", *rows, builder.tensor(stacked), axis=0).value


def _read_stacked(model: ir.Model, reader: ir.Node, stacked: ir.Value, in_front: bool) -> None:
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
    builder = tensor.builder
    before, after = builder.op("Shape", tensor, end=axis), builder.op("Shape", tensor, start=axis + 2)
    return builder.op("Reshape", tensor, builder.op("Concat", before, builder.integers([-1]), after, axis=0))


def resolve_optionals(model: ir.Model) -> bool:
    """Replace, in place, readers of optional values made in the model and of plain values; return True if there were any.

    Optional inputs, and optional results of branches, may be empty at run time and stay.
    """
    resolved = False
    for node in list(model.graph.all_nodes()):
        graph = node.graph
        if node.domain != "" or node.op_type not in ("OptionalGetElement", "OptionalHasElement"):
            continue
        assert isinstance(graph, ir.Graph)
        is_known, held = _held(node.inputs[0] if node.inputs else None)
        if not is_known or (held is None and node.op_type == "OptionalGetElement"):
            continue
        graph.opset_imports.update(model.graph.opset_imports)
        builder = Builder(graph, before=node)
        if node.op_type == "OptionalHasElement":
            replace_node(node, builder.constant(np.asarray(held is not None)))
        else:
            assert held is not None
            replace_node(node, builder.op("Identity", builder.tensor(held), like=builder.tensor(held)))
        resolved = True
    if resolved:
        for node in reversed(list(model.graph.all_nodes())):
            if node.op_type == "Optional" and node.domain == "" and not is_read(node):
                remove_node(node)
    return resolved


def hold_optional_inputs(model: ir.Model) -> bool:
    """Convert optional inputs, and optional outputs that hold a tensor, to tensors, in place; return True if there were any.

    A batch provides all inputs.
    """
    changed = False
    for value in model.graph.inputs:
        if isinstance(value.type, ir.OptionalType) and isinstance(value.type.elem_type, ir.TensorType):
            value.type, changed = value.type.elem_type, True
    for position, output in enumerate(model.graph.outputs):
        made = producer_of(output, "Optional")
        held = made.inputs[0] if made is not None and made.inputs else None
        if held is None or not isinstance(held.type, ir.TensorType):
            continue
        builder = Builder(model.graph)
        tensor = builder.tensor(held)
        plain = builder.op("Identity", tensor, like=tensor).value
        name, output.name = output.name, f"{output.name}:optional"
        plain.name, model.graph.outputs[position], changed = name, plain, True
    return changed


def _held(value: ir.Value | None) -> tuple[bool, ir.Value | None]:
    if value is None:
        return True, None
    made = producer_of(value, "Optional")
    if made is not None:
        return True, made.inputs[0] if made.inputs else None
    return not isinstance(value.type, ir.OptionalType) and value.type is not None, value
