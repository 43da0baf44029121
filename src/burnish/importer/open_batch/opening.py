"""The graph while its batch is opened: what stands for each value, and the nodes that move samples from one axis to another."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import numpy as np
import onnx_ir as ir

from burnish.graph import replace_uses, typed_attribute
from burnish.importer.open_batch.operands import Batch, Operand, Refused, sample_shape


class Count(Enum):
    """Stands for the samples: among the elements of a shape for their number, among axes for theirs."""

    SAMPLES = "samples"


Element = int | ir.Value | Count
"""An element of a shape: a number, a vector of one or more that the graph computes, or the number of samples."""


class Opening:
    """What stands for the values of a graph, node after node.

    Args:
        graph: whose nodes are gone through.
        inputs: those that hold samples, with their place in each.

    Attributes:
        in_front: whether samples have an axis in front of all that a sample has.
    """

    def __init__(self, graph: ir.Graph, inputs: Sequence[tuple[ir.Value, Batch]]):
        self.graph = graph
        self.results: dict[ir.Value, Operand] = {}
        self.before: ir.Node | None = None
        self._first = inputs[0]
        self._count: ir.Value | None = None
        self._placed: dict[tuple[ir.Value, Batch, int], ir.Value] = {}
        self.named: set[ir.Value] = set()
        self.in_front = self._first[1].is_extra
        for value, batch in inputs:
            self.results[value] = Operand(value, sample_shape(value), batch)

    def operand(self, value: ir.Value) -> Operand:
        """What stands for a value of the model."""
        result = self.results.get(value)
        return Operand(value, sample_shape(value)) if result is None else result

    def settle(self, value: ir.Value, result: ir.Value, batch: Batch | None) -> None:
        """Let a result stand for a value of the model, under its name."""
        if result in self.named or result.producer() is None:
            result = self.emit("Identity", result)
        self.named.add(result)
        result.type = value.type
        if batch is None:
            result.shape = value.shape
            replace_uses(value, result)
        self.results[value] = Operand(result, sample_shape(value), batch)

    def emit(self, op_type: str, *operands: ir.Value | None, **attributes: Any) -> ir.Value:
        """Put a node of the standard in front of the one that is opened; returns its first output."""
        return self.insert(ir.node(op_type, operands, {name: typed_attribute(name, it) for name, it in attributes.items()}))

    def insert(self, node: ir.Node) -> ir.Value:
        """Put a node in front of the one that is opened; returns its first output."""
        if self.before is None:
            self.graph.append(node)
        else:
            self.graph.insert_before(self.before, node)
        return node.outputs[0]

    def constant(self, array: np.ndarray) -> ir.Value:
        tensor = ir.Tensor(array)
        value = self.emit("Constant", value=tensor)
        value.type, value.shape, value.const_value = ir.TensorType(tensor.dtype), ir.Shape(array.shape), tensor
        return value

    def integers(self, numbers: Sequence[int]) -> ir.Value:
        return self.constant(np.asarray(list(numbers), dtype=np.int64))

    def scalar(self, number: float, like: ir.Value) -> ir.Value:
        """A number of the element type of a value of the model."""
        if like.dtype is None:
            raise Refused("its element type is not known")
        return self.constant(np.asarray(number, dtype=like.dtype.numpy()))

    @property
    def count(self) -> ir.Value:
        """The number of samples, as a vector of one."""
        if self._count is None:
            value, batch = self._first
            node = ir.node("Shape", [value], {"start": batch.axis, "end": batch.axis + 1})
            first = next(iter(self.graph), None)
            assert first is not None
            self.graph.insert_before(first, node)
            self._count = node.outputs[0]
            self._count.type = ir.TensorType(ir.DataType.INT64)
        return self._count

    def extents(self, operand: Operand) -> list[Element]:
        """The shape of an operand for one sample: computed where it is not known."""
        read: list[Element] = []
        for axis, extent in enumerate(operand.shape):
            if isinstance(extent, int):
                read.append(extent)
                continue
            at = new_axis(operand, axis)
            read.append(self.emit("Shape", operand.value, start=at, end=at + 1))
        return read

    def vector(self, parts: Sequence[Element]) -> ir.Value:
        """A vector of integers that are known, or computed."""
        values: list[ir.Value] = []
        numbers: list[int] = []
        for part in parts:
            if isinstance(part, int):
                numbers.append(part)
                continue
            if numbers:
                values.append(self.integers(numbers))
                numbers = []
            values.append(self.count if isinstance(part, Count) else part)
        if numbers or not values:
            values.append(self.integers(numbers))
        return values[0] if len(values) == 1 else self.emit("Concat", *values, axis=0)

    def reshaped(self, value: ir.Value, parts: Sequence[Element]) -> ir.Value:
        """A value in another shape, which holds no element that stands for another."""
        if parts.count(Count.SAMPLES) == 1 and all(
            isinstance(part, int) and part > 0 for part in parts if part is not Count.SAMPLES
        ):
            return self.emit("Reshape", value, self.integers([part if isinstance(part, int) else -1 for part in parts]))
        if 0 in parts:
            return self.emit("Reshape", value, self.vector(parts), allowzero=1)
        return self.emit("Reshape", value, self.vector(parts))

    def placed(self, operand: Operand, batch: Batch, rank: int | None = None) -> ir.Value:
        """An operand with its samples where ``batch`` says.

        Args:
            operand: with samples.
            batch: where they are to stand. What stands in the place of an axis needs that to be of extent 1.
            rank: for one sample; where it is more than the operand's, axes of extent 1 come first.
        """
        rank = operand.rank if rank is None else rank
        key = (operand.value, batch, rank)
        if operand.batch == batch and rank == operand.rank:
            return operand.value
        if key not in self._placed:
            self._placed[key] = self._moved(operand, batch, rank)
        return self._placed[key]

    def _moved(self, operand: Operand, batch: Batch, rank: int) -> ir.Value:
        assert operand.batch is not None
        present, target = _order(operand.rank, operand.batch, rank - operand.rank), _order(rank, batch, 0)
        value = operand.value
        superfluous = [index for index, axis in enumerate(present) if axis not in target]
        if superfluous:
            value = self.emit("Squeeze", value, self.integers(superfluous))
        present = [axis for axis in present if axis in target]
        permutation = [present.index(axis) for axis in target if axis in present]
        if permutation != sorted(permutation):
            value = self.emit("Transpose", value, perm=permutation)
        added = [index for index, axis in enumerate(target) if axis not in present]
        return self.emit("Unsqueeze", value, self.integers(added)) if added else value

    def unsqueezed(self, value: ir.Value, axis: int) -> ir.Value:
        return self.emit("Unsqueeze", value, self.integers([axis]))

    def spread(self, operand: Operand, batch: Batch, rank: int | None = None) -> ir.Value:
        """An operand with samples where ``batch`` says; one that is the same for all samples is repeated for each."""
        if operand.batch is not None:
            return self.placed(operand, batch, rank)
        rank = operand.rank if rank is None else rank
        value, ones = operand.value, rank - operand.rank
        added = list(range(ones))
        if batch.is_extra:
            added = [axis if axis < batch.axis else axis + 1 for axis in added]
            added = sorted([*added, batch.axis])
        if added:
            value = self.emit("Unsqueeze", value, self.integers(added))
        parts: list[Element] = [1] * (rank + batch.is_extra)
        parts[batch.axis] = Count.SAMPLES
        return self.emit("Expand", value, self.vector(parts))

    def inserted(self, operand: Operand, axes: Sequence[int]) -> Operand:
        """An operand with more axes of extent 1 for one sample, numbered as in the result."""
        rank = operand.rank + len(axes)
        rest = iter(operand.shape)
        shape = tuple(1 if axis in axes else next(rest) for axis in range(rank))
        if operand.batch is None:
            return Operand(self.emit("Unsqueeze", operand.value, self.integers(sorted(axes))), shape)
        old_axes = [axis for axis in range(rank) if axis not in axes]
        order: list[int | Count] = [
            old_axes[axis] if isinstance(axis, int) else axis for axis in _order(operand.rank, operand.batch, 0)
        ]
        at = order.index(Count.SAMPLES)
        if operand.batch.is_extra:
            following = order[at + 1] if at + 1 < len(order) else rank
            assert isinstance(following, int)
            batch = Batch(following, is_extra=True)
        else:
            batch = Batch(old_axes[operand.batch.axis], is_extra=False)
        target = _order(rank, batch, 0)
        added = [index for index, axis in enumerate(target) if axis in axes]
        return Operand(self.emit("Unsqueeze", operand.value, self.integers(added)), shape, batch)

    def removed(self, operand: Operand, axes: Sequence[int]) -> Operand:
        """An operand without some axes, which are of extent 1 for one sample; samples that stand in one of them stay."""
        shape = tuple(extent for axis, extent in enumerate(operand.shape) if axis not in axes)
        if operand.batch is None:
            return Operand(self.emit("Squeeze", operand.value, self.integers(sorted(axes))), shape)
        order = _order(operand.rank, operand.batch, 0)
        gone = [index for index, axis in enumerate(order) if axis in axes]
        value = self.emit("Squeeze", operand.value, self.integers(gone)) if gone else operand.value
        at = order.index(Count.SAMPLES)
        axis = sum(index not in gone for index in range(at))
        return Operand(value, shape, Batch(axis, operand.batch.is_extra or operand.batch.axis in axes))


def _order(rank: int, batch: Batch, offset: int) -> list[int | Count]:
    """The axes of a value with its samples, by the number that they have for one sample, and where the samples are among them."""
    order: list[int | Count] = [axis + offset for axis in range(rank)]
    order[batch.axis : batch.axis + (not batch.is_extra)] = [Count.SAMPLES]
    return order


def new_axis(operand: Operand, axis: int) -> int:
    """Return the number that an axis of one sample has beside the samples.

    Raises:
        Refused: the samples stand in place of this axis.
    """
    batch = operand.batch
    if batch is None:
        return axis
    if not batch.is_extra and batch.axis == axis:
        raise Refused(f"works along axis {axis} of '{operand.value.name}', in the place of which the samples of a batch stand")
    return axis + (batch.is_extra and axis >= batch.axis)
