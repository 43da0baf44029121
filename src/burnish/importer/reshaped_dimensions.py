"""Open dimensions behind a Reshape, such as the rows of a batch of sequences and the batch that they are put back to.

The standard's inference gives the dimension that a -1 stands for a new name, and another one when rows become sequences again.
What adds rows to the input would add tensors that are not known to have one shape, and its gradient look for it at run time.
"""

from __future__ import annotations

import math
from fractions import Fraction

import onnx_ir as ir

from burnish.graph.shapes import broadcast_shapes, multiple_name
from burnish.operators.registry import Elementwise, elementwise

INVENTED = "unk__"
"""How names begin that the standard's inference makes up."""


def name_reshaped_dimensions(model: ir.Model) -> None:
    """Give, in place, dimensions with a name that was made up the name that they are known to equal.

    A Reshape keeps the number of elements, so that of one open dimension on either side each follows from the other: a multiple
    or a part of it. Where that leads back to a dimension it gets its name; a multiple gets one such as ``64*batch``.

    Args:
        model: its shapes have been inferred, and its open dimensions have names.
    """
    names = _Names()
    for node in model.graph:
        if node.domain != "":
            continue
        output = node.outputs[0]
        if node.op_type in ("Reshape", "Flatten"):
            source = node.inputs[0]
            if source is not None and source.shape is not None and output.shape is not None:
                names.equate_elements(source.shape, output.shape)
        elif elementwise(node) is Elementwise.BROADCAST and output.shape is not None:
            shapes = [value.shape for value in node.inputs if value is not None]
            if all(shape is not None for shape in shapes):
                together = broadcast_shapes(*(names.resolved(shape) for shape in shapes if shape is not None))
                names.equate_dimensions(together, output.shape)
    if names.equal:
        for graph in model.graphs():
            for value in (output for node in graph for output in node.outputs):
                if value.shape is not None:
                    value.shape = names.resolved(value.shape)


class _Names:
    """What names that were made up are known to equal.

    Attributes:
        equal: the name that stands for it.
    """

    def __init__(self) -> None:
        self.equal: dict[str, str] = {}
        self._multiples: dict[str, tuple[Fraction, str]] = {}

    def resolved(self, shape: ir.Shape) -> ir.Shape:
        """The shape with the names that are known."""
        return ir.Shape([dim if isinstance(dim, int) else ir.SymbolicDim(self._name(dim)) for dim in shape.dims])

    def equate_elements(self, source: ir.Shape, target: ir.Shape) -> None:
        """Note that two shapes have as many elements."""
        known, known_target = ([dim for dim in shape.dims if isinstance(dim, int)] for shape in (source, target))
        names, target_names = ([self._name(dim) for dim in shape.dims if not isinstance(dim, int)] for shape in (source, target))
        elements, others = math.prod(known), math.prod(known_target)
        if len(names) != 1 or len(target_names) != 1 or elements == 0 or others == 0:
            return
        name, target_name = names[0], target_names[0]
        if name is None or target_name is None or name == target_name or not target_name.startswith(INVENTED):
            return
        factor, base = self._multiples.get(name, (Fraction(1), name))
        base = self._standing_for(base)
        factor *= Fraction(elements, others)
        multiple = multiple_name(factor.numerator, base) if factor.denominator == 1 else f"{factor}*{base}"
        if multiple == target_name:
            return
        self.equal[target_name] = multiple
        if factor != 1:
            self._multiples[multiple] = factor, base

    def equate_dimensions(self, known: ir.Shape, shape: ir.Shape) -> None:
        """Note that two shapes are one."""
        for dim, other in zip(known.dims, self.resolved(shape).dims, strict=True):
            if isinstance(dim, int) or isinstance(other, int) or dim.value is None or other.value is None:
                continue
            if other.value != dim.value and other.value.startswith(INVENTED):
                self.equal[other.value] = dim.value

    def _name(self, dim: ir.SymbolicDim) -> str | None:
        return None if dim.value is None else self._standing_for(dim.value)

    def _standing_for(self, name: str) -> str:
        while name in self.equal:
            name = self.equal[name]
        return name
