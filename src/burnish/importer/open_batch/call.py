"""A node whose operands hold samples, as a rule sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from burnish.graph import attribute_value, constant_array, typed_attribute
from burnish.graph.uses import is_used
from burnish.importer.open_batch.opening import Opening, new_axis
from burnish.importer.open_batch.operands import Batch, Operand, Refused, Shape, sample_shape


class Call:
    """A node that samples reach.

    Args:
        node: of the model as it was made; it stays as it is, and is removed in the end.
        opening: that it is a part of.
    """

    def __init__(self, node: ir.Node, opening: Opening):
        self.node, self.opening = node, opening
        self.operands = [None if value is None else opening.operand(value) for value in node.inputs]

    def has(self, index: int) -> bool:
        return index < len(self.operands) and self.operands[index] is not None

    def operand(self, index: int = 0) -> Operand:
        operand = self.operands[index] if index < len(self.operands) else None
        if operand is None:
            raise Refused(f"lacks its operand {index}")
        return operand

    @property
    def present(self) -> list[Operand]:
        """The operands that are not left out."""
        return [operand for operand in self.operands if operand is not None]

    def attribute(self, name: str, default: Any = None) -> Any:
        return attribute_value(self.node, name, default)

    def axis(self, rank: int, default: int = 0, name: str = "axis") -> int:
        """An attribute that is an axis, as a number that is not negative."""
        axis = int(self.attribute(name, default))
        if not -rank <= axis < rank:
            raise Refused(f"has the {name} {axis}, which a tensor of {rank} dimensions lacks")
        return axis % rank

    def array(self, index: int) -> np.ndarray | None:
        """An operand that is known, None where it is computed or left out."""
        return constant_array(self.operand(index).value) if self.has(index) else None

    def integers(self, index: int, what: str) -> list[int]:
        """An operand of integers that are known.

        Raises:
            Refused: they are not.
        """
        array = self.array(index)
        if array is None:
            raise Refused(f"computes {what}, which have to be known")
        return [int(number) for number in array.reshape(-1)]

    def same_for_all(self, *indices: int) -> None:
        """Raise Refused where an operand other than these differs from sample to sample."""
        for index, operand in enumerate(self.operands):
            if operand is not None and operand.batch is not None and index not in indices:
                raise Refused(f"reads '{operand.value.name}' as operand {index}, which would have to be the same for all samples")

    def result_shape(self, index: int = 0) -> Shape:
        """The shape of a result for one sample."""
        shape = sample_shape(self.node.outputs[index])
        if shape is None:
            raise Refused("has a result whose rank is not known")
        return shape

    def is_read(self, index: int) -> bool:
        """Whether there is a result of this number that is read."""
        return index < len(self.node.outputs) and is_used(self.node.outputs[index])

    def one_result(self) -> None:
        """Raise Refused where a result after the first is read."""
        for index in range(1, len(self.node.outputs)):
            if self.is_read(index):
                raise Refused(
                    f"has the result '{self.node.outputs[index].name}', which is read and would hold more than one sample's"
                )

    def again(self, *operands: ir.Value | None, **attributes: Any) -> list[ir.Value]:
        """Emit the same node over other operands, with some attributes changed; an attribute that is None is left out."""
        inputs = list(operands)
        while inputs and inputs[-1] is None:
            inputs.pop()
        changed = {name: value for name, value in self.node.attributes.items() if name not in attributes}
        changed |= {name: typed_attribute(name, value) for name, value in attributes.items() if value is not None}
        node = ir.node(
            self.node.op_type, inputs, changed, domain=self.node.domain, num_outputs=len(self.node.outputs), name=self.node.name
        )
        node.metadata_props.update(self.node.metadata_props)
        self.opening.insert(node)
        for output, copied in zip(self.node.outputs, node.outputs, strict=True):
            if not output.name:
                copied.name = ""
        return list(node.outputs)

    def with_rest(self, *first: ir.Value | None) -> list[ir.Value | None]:
        """Other first operands, followed by the remaining ones as they are."""
        rest = [None if operand is None else operand.value for operand in self.operands[len(first) :]]
        return [*first, *rest]

    def over(self, x: Operand, **attributes: Any) -> list[Result | None]:
        """The same node over another first operand, along whose samples the results have theirs; other operands stay."""
        return [(value, x.batch) for value in self.again(*self.with_rest(x.value), **attributes)]

    def named_axes(self) -> list[int] | None:
        """The axes that the second operand names, or the attribute; None where neither is there."""
        return self.integers(1, "the axes") if self.has(1) else self.attribute("axes")

    def new_axis(self, axis: int, index: int = 0) -> int:
        """Return the number that an axis of an operand, of one sample, has beside the samples.

        Raises:
            Refused: the samples stand in place of this axis.
        """
        return new_axis(self.operand(index), axis)


Result = tuple[ir.Value, Batch | None]
Rule = Callable[[Call], Result | Sequence[Result | None]]
"""Opens an operator of the standard: it emits nodes that compute the same for every sample.

For each result it returns what stands for it and where its samples stand; None for a result that is not read.
"""


def outcome(operand: Operand) -> Result:
    return operand.value, operand.batch
