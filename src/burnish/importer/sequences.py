"""Sequences of tensors whose elements are known become the tensors themselves.

PyTorch's exporters, unless they are told to optimize, write ``chunk``, ``split`` and ``unbind`` as SplitToSequence with a
SequenceAt for every piece, and lists as SequenceConstruct. Split, Slice, Gather and Concat compute the same, and gradients flow
through.
"""

from __future__ import annotations

import onnx_ir as ir

from burnish.graph import (
    Builder,
    Names,
    Tensor,
    attribute_value,
    constant_array,
    remove_node,
    replace_node,
    replace_value,
    same_shape,
)
from burnish.graph.function_bodies import standard_function, write_out
from burnish.graph.uses import is_read, producer_of

MOST_PIECES = 4096
"""Pieces of a split that are written one by one; a recurrence over more is no list that somebody wrote."""

_MADE = frozenset({"SequenceConstruct", "SequenceEmpty", "SequenceInsert", "SequenceErase", "SplitToSequence"})


def resolve_sequences(model: ir.Model) -> bool:
    """Replace, in place, what reads a sequence of known elements, in bodies too; return whether anything was.

    A position that is no constant chooses among elements of one shape, or among the pieces of extent one of a split. Where
    elements have several shapes, or a sequence comes from elsewhere, nodes stay as they are.
    """
    return _Resolution(model.graph).run()


def write_out_maps(model: ir.Model) -> bool:
    """Write every SequenceMap out, in place, as the loop that is its function in the standard; return whether there was any."""
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
        """Emits in front of a node, in the graph or body that it is in."""
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
            return False  # whoever runs it says so
        if node.graph is self.graph:
            replace_value(node.outputs[0], elements[position])
            remove_node(node)
        else:
            builder = self.builder(node)  # what a body returns is computed in it
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
        """The element at a position that is computed; None where elements differ in their shapes, or are not known."""
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
        """The elements, as values that are there before the sequence is made; None where they are not known."""
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
        """The pieces of a split whose sizes are known."""
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
        """One piece of a split of an axis whose extent is not known."""
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
    """What is split, along which axis, and the size of the pieces where all but the last have the same."""
    sizes = split.inputs[1] if len(split.inputs) > 1 else None
    return split.inputs[0], attribute_value(split, "axis", 0), 1 if sizes is None else _integer(sizes)


def _joins_again(split: ir.Node, axis: int, as_new: bool) -> bool:
    """Whether pieces that are joined along an axis, a new one of them or not, are what was split."""
    x, along, _ = _operands(split)
    if x is None or as_new != _drops_axis(split):
        return False
    return axis == along or (x.shape is not None and axis % len(x.shape) == along % len(x.shape))


def _drops_axis(split: ir.Node) -> bool:
    """Whether the pieces are of extent one and come without their axis; sizes keep it."""
    without_sizes = len(split.inputs) < 2 or split.inputs[1] is None
    return without_sizes and attribute_value(split, "keepdims", 1) == 0


def _integer(value: ir.Value | None) -> int | None:
    """A constant scalar."""
    array = constant_array(value)
    return int(array.item()) if array is not None and array.ndim == 0 else None
