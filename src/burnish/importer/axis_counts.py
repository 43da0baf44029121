"""Count the axes that the values of a model can have. A file of a kilobyte can ask for millions, and inference keeps each.

A Gather of indices by themselves nearly doubles their axes, and a vector of a thousand elements may be a shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import onnx_ir as ir

from burnish.graph import attribute_value, bodies, constant_array, static_shape
from burnish.operators.registry import Elementwise, elementwise

MOST_AXES = 32
"""The most axes of an array that every version of NumPy can hold and iterate over."""

SHAPED = {"ConstantOfShape": 0, "Expand": 1, "Reshape": 1}
"""Operators that read a shape, and the index of that operand."""
COUNTED = {"NonZero": 2, "Range": 1, "Shape": 1, "Size": 0}
"""Operators with a fixed number of axes in the result."""
ONE_MORE = frozenset({"ConcatFromSequence", "GatherND", "Loop", "OneHot", "STFT", "Scan"})
"""Operators that can add one axis to those of their operands."""
OTHERS = 5
"""No other operator gives more axes than this if its operands have fewer."""
KEEPING = frozenset({"Cast", "Flatten", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators that give no more elements than their first operand has, besides those that compute on each of its elements."""


def may_have_many_axes(graph: ir.Graph) -> bool:
    """Say if a value of a graph, or of a body in it, may have more than ``MOST_AXES`` axes.

    Counts are upper bounds. A shape of unknown length counts as too long.
    """
    return _Counts().exceed(graph)


def _largest(value: ir.Value | None) -> int | None:
    """Return the largest number in a constant, or in the difference of two; None for any other value."""
    array = constant_array(value)
    if array is not None:
        return int(array.max()) if array.size else 0
    maker = None if value is None else value.producer()
    if maker is None or maker.op_type != "Sub":
        return None
    first, second = (constant_array(operand) for operand in maker.inputs)
    return None if first is None or second is None or not first.size or not second.size else int(first.max()) - int(second.min())


class _Counts:
    """Upper bounds for the axes of values, and for the elements of possible shapes."""

    def __init__(self) -> None:
        self._axes: dict[ir.Value, int] = {}
        self._elements: dict[ir.Value, int] = {}

    def exceed(self, graph: Iterable[ir.Node]) -> bool:
        for node in graph:
            axes = self._of_result(node)
            if axes is None or axes > MOST_AXES:
                return True
            elements = self._elements_of_result(node)
            for output in node.outputs:
                self._axes[output] = axes
                if elements is not None:
                    self._elements[output] = elements
        return False

    def axes(self, value: ir.Value | None) -> int:
        """Return a bound for the axes of a value. It is 0 if the rank is unknown, because inference then adds no axes."""
        if value is None:
            return 0
        found = self._axes.get(value)
        if found is None:
            found = self._axes[value] = 0 if value.shape is None else len(value.shape)
        return found

    def elements(self, value: ir.Value | None) -> int | None:
        """Return a bound for the elements of a value; None if it is not known."""
        if value is None:
            return 0
        if value not in self._elements:
            array = None if value.producer() is None and value.const_value is None else constant_array(value)
            shape = static_shape(value)
            if array is None and shape is None:
                return None
            self._elements[value] = math.prod(shape or ()) if array is None else array.size
        return self._elements[value]

    def _of_result(self, node: ir.Node) -> int | None:
        """Return a bound for the axes of a node's outputs; None if it is not known."""
        kind, inputs = node.op_type, node.inputs
        within = bodies(node)
        if within:
            return self._of_bodies(node, within)
        if kind in SHAPED and len(inputs) > SHAPED[kind]:
            length = self.elements(inputs[SHAPED[kind]])
            return length if length is None or kind != "Expand" else max(length, self.axes(inputs[0]))
        if kind in COUNTED:
            return COUNTED[kind]
        if kind == "Constant":
            array = constant_array(node.outputs[0]) if node.outputs else None
            return 1 if array is None else array.ndim
        if kind in ("Gather", "GatherND"):
            return max(0, sum(map(self.axes, inputs)) - (kind == "Gather"))
        if kind in ("Squeeze", "Unsqueeze"):
            return self._of_changed_axes(node)
        if kind.startswith("Reduce") and not attribute_value(node, "keepdims", 1):
            return self._of_changed_axes(node)
        if kind == "Einsum":
            return len(str(attribute_value(node, "equation", "")))
        most = max(map(self.axes, inputs), default=0)
        if elementwise(node) is not None or kind in ("Cast", "Concat", "Slice", "Transpose"):
            return most
        return max(OTHERS, len(attribute_value(node, "shape", ())), most + (kind in ONE_MORE))

    def _of_changed_axes(self, node: ir.Node) -> int | None:
        """Return a bound for the axes after some are inserted or removed; None if it is not known."""
        before = self.axes(node.inputs[0] if node.inputs else None)
        second = node.inputs[1] if len(node.inputs) > 1 else None
        if node.op_type == "Unsqueeze":
            added = self.elements(second) if second is not None else len(attribute_value(node, "axes", ()))
            return None if added is None else before + added
        axes = attribute_value(node, "axes", None) if second is None else constant_array(second)
        if axes is None:
            return 0 if second is None and node.op_type != "Squeeze" else before
        numbers = {int(axis) for axis in np.ravel(axes)}
        from_end = sum(axis < 0 for axis in numbers)  # the others may name the same axes again
        return max(0, before - max(from_end, len(numbers) - from_end))

    def _of_bodies(self, node: ir.Node, within: Sequence[ir.Graph]) -> int | None:
        most = max(map(self.axes, node.inputs), default=0)
        for body in within:
            for given in body.inputs:
                self._axes[given] = max(most, 0 if given.shape is None else len(given.shape))
            if self.exceed(body):
                return None
            most = max([most, *map(self.axes, body.outputs)])
        return most + (node.op_type in ONE_MORE)

    def _elements_of_result(self, node: ir.Node) -> int | None:
        """Return a bound for the elements of a node's outputs; None if it is not known."""
        kind, inputs = node.op_type, node.inputs
        if kind == "Shape" and inputs:
            return self.axes(inputs[0])
        if kind == "Size":
            return 1
        if kind == "ConstantOfShape" and inputs:
            return self._filled(inputs[0])
        if kind == "Range" and len(inputs) == 3:
            start, end, step = (constant_array(inputs[0]), _largest(inputs[1]), constant_array(inputs[2]))
            return None if start is None or end is None or step is None else max(0, len(range(int(start), end, int(step) or 1)))
        if kind in KEEPING or kind.startswith("Reduce") or elementwise(node) is Elementwise.UNARY:
            return self.elements(inputs[0]) if inputs else None
        if kind == "Gather" and len(inputs) == 2 and self.axes(inputs[0]) <= 1:
            return self.elements(inputs[1])
        if kind == "Concat":
            return self._added(map(self.elements, inputs))
        if elementwise(node) is Elementwise.BROADCAST and all(self.axes(value) <= 1 for value in inputs):
            counts = [*map(self.elements, inputs)]
            return None if None in counts else max((count for count in counts if count is not None), default=None)
        return None

    def _filled(self, shape: ir.Value | None) -> int | None:
        """Return a bound for the elements of an array of this shape: a constant, or the shape of another value."""
        array, maker = constant_array(shape), None if shape is None else shape.producer()
        if array is not None:
            return int(math.prod(int(extent) for extent in array.flat))
        return self.elements(maker.inputs[0]) if maker is not None and maker.op_type == "Shape" and maker.inputs else None

    def _added(self, counts: Iterable[int | None]) -> int | None:
        known = [*counts]
        return None if None in known else sum(count or 0 for count in known)
