"""Opening of models made for one sample: the interface and tools of the reopen rules.

For each value with samples, their axis is known, as in ``jax.vmap``; the rule of an operator, ``reopen`` in its record, emits
nodes that compute the same for every sample. If a node stays, its axes are counted without the sample axis, and ``axes`` in its
record gives the position of samples in the results (``Call.over``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import onnx_ir as ir

from burnish.graph import attribute_value, constant_array, replace_uses, typed_attribute
from burnish.graph.uses import is_used
from burnish.operators import axes
from burnish.operators.axes import Layout, small_numbers
from burnish.operators.extents import Factor, Kind, normal

Extent = int | str | None
"""A known number, the name of a dimension, or None if unknown."""
Shape = tuple[Extent, ...]


@dataclass(frozen=True)
class Batch:
    """The position of samples in a value.

    Attributes:
        axis: the sample axis.
        is_extra: True if the sample axis is extra; otherwise it replaces an axis of extent 1 of one sample.
    """

    axis: int
    is_extra: bool


FIRST = Batch(0, is_extra=True)
"""Samples along an extra first axis."""
STACKED = Batch(0, is_extra=False)
"""Samples along the first axis, in place of a sample's own."""
SAMPLES = Factor("samples", Kind.SAMPLES)
"""A sample axis, for the axis rules of records."""


@dataclass(frozen=True)
class Operand:
    """A value of the opened graph.

    Attributes:
        value: the value that replaces it in the opened graph.
        sample_shape: its shape for one sample, as in the original model; None if not even the rank is known.
        batch: position of its samples; None if it is the same for all samples.
    """

    value: ir.Value
    sample_shape: Shape | None
    batch: Batch | None = None

    @property
    def shape(self) -> Shape:
        """The shape for one sample.

        Raises:
            Refused: it is unknown.
        """
        if self.sample_shape is None:
            raise Refused(f"it reads '{self.value.name}', whose rank is not known")
        return self.sample_shape

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def samples(self) -> Batch:
        assert self.batch is not None
        return self.batch

    def new_axis(self, axis: int) -> int:
        """Return an axis of one sample, counted with the samples.

        Raises:
            Refused: the samples replace this axis.
        """
        batch = self.batch
        if batch is None:
            return axis
        if not batch.is_extra and batch.axis == axis:
            raise Refused(f"works along axis {axis} of '{self.value.name}', in the place of which the samples of a batch stand")
        return axis + (batch.is_extra and axis >= batch.axis)

    @property
    def layout(self) -> Layout:
        if self.sample_shape is None:
            return Layout(None, self.batch is None)
        name = self.value.name or ""
        factors = [
            extent if isinstance(extent, int) else Factor(f"{name} {at}", Kind.FIXED) for at, extent in enumerate(self.shape)
        ]
        if self.batch is not None:
            factors[self.batch.axis : self.batch.axis + (not self.batch.is_extra)] = [SAMPLES]
        return Layout(tuple(normal([factor]) for factor in factors), self.batch is None, small_numbers(self.value))


class Refused(Exception):
    """A node that cannot take a batch of any size.

    Args:
        reason: the obstacle, a clause that follows the description of the node.
        remedy: the remedy, instead of another export of the model.
    """

    def __init__(self, reason: str, remedy: str = ""):
        super().__init__(reason)
        self.reason, self.remedy = reason, remedy


def sample_shape(value: ir.Value) -> Shape | None:
    if value.shape is None:
        return None
    return tuple(extent if isinstance(extent, int) else extent.value for extent in value.shape.dims)


def elements(extents: Sequence[Extent]) -> tuple[int, Counter[str]] | None:
    """Return the product of extents: an integer, and the names of its other factors; None if an extent is unknown."""
    if None in extents:
        return None
    integers = math.prod(extent for extent in extents if isinstance(extent, int))
    return integers, Counter(extent for extent in extents if isinstance(extent, str))


def broadcast_extents(shapes: Sequence[Shape]) -> Shape:
    rank = max(map(len, shapes))
    return tuple(_wider([shape[axis] for shape in shapes if len(shape) >= -axis]) for axis in range(-rank, 0))


def _wider(extents: Sequence[Extent]) -> Extent:
    others = [extent for extent in extents if extent != 1]
    decided = [extent for extent in others if isinstance(extent, int)]
    if not others or decided:
        return decided[0] if decided else 1
    return others[0] if others.count(others[0]) == len(others) else None


class Count(Enum):
    """A placeholder for samples: their number among the elements of a shape, their axis among axes."""

    SAMPLES = "samples"


Element = int | ir.Value | Count
"""An element of a shape: a number, a computed vector of one or more, or the number of samples."""


class Opening:
    """The replacements of a graph's values, node after node.

    Args:
        graph: the graph to open.
        inputs: the inputs with samples, and the position of samples in each.

    Attributes:
        in_front: True if the sample axis comes before all axes of a sample.
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
        result = self.results.get(value)
        return Operand(value, sample_shape(value)) if result is None else result

    def settle(self, value: ir.Value, result: ir.Value, batch: Batch | None) -> None:
        """Replace a value of the model by a result, under its name."""
        if result in self.named or result.producer() is None:
            result = self.emit("Identity", result)
        self.named.add(result)
        result.type = value.type
        if batch is None:
            result.shape = value.shape
            replace_uses(value, result)
        self.results[value] = Operand(result, sample_shape(value), batch)

    def emit(self, op_type: str, *operands: ir.Value | None, **attributes: Any) -> ir.Value:
        """Insert a standard node before the opened one; return its first output."""
        return self.insert(ir.node(op_type, operands, {name: typed_attribute(name, it) for name, it in attributes.items()}))

    def insert(self, node: ir.Node) -> ir.Value:
        """Insert a node before the opened one; return its first output."""
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
        """Return a constant of the element type of a value of the model."""
        if like.dtype is None:
            raise Refused("its element type is not known")
        return self.constant(np.asarray(number, dtype=like.dtype.numpy()))

    @property
    def count(self) -> ir.Value:
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
        return [
            extent if isinstance(extent, int) else self.extent(operand.value, operand.new_axis(axis))
            for axis, extent in enumerate(operand.shape)
        ]

    def extent(self, value: ir.Value, axis: int) -> ir.Value:
        """Return the extent of a value along an axis, as a vector of one."""
        return self.emit("Shape", value, start=axis, end=axis + 1)

    def vector(self, parts: Sequence[Element]) -> ir.Value:
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
        """Reshape a value; the shape has no wildcard elements such as -1."""
        known = [part for part in parts if isinstance(part, int) and part > 0]
        if parts.count(Count.SAMPLES) == 1 and len(known) == len(parts) - 1:
            return self.emit("Reshape", value, self.integers([part if isinstance(part, int) else -1 for part in parts]))
        return self.emit("Reshape", value, self.vector(parts), **({"allowzero": 1} if 0 in parts else {}))

    def placed(self, operand: Operand, batch: Batch, rank: int | None = None) -> ir.Value:
        """Return an operand with its samples at ``batch``.

        Args:
            operand: an operand with samples.
            batch: the new position. Samples can replace only an axis of extent 1.
            rank: rank for one sample; if it is more than the operand's, axes of extent 1 come first.
        """
        rank = operand.rank if rank is None else rank
        key = (operand.value, batch, rank)
        if operand.batch == batch and rank == operand.rank:
            return operand.value
        if key not in self._placed:
            self._placed[key] = self._moved(operand, batch, rank)
        return self._placed[key]

    def moved(self, operand: Operand, batch: Batch = FIRST) -> Operand:
        """Return an operand with its samples at ``batch``, by default first."""
        return Operand(self.placed(operand, batch), operand.shape, batch)

    def _moved(self, operand: Operand, batch: Batch, rank: int) -> ir.Value:
        present, target = _order(operand.rank, operand.samples, rank - operand.rank), _order(rank, batch)
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

    def spread(self, operand: Operand, batch: Batch) -> ir.Value:
        """Return an operand with samples at ``batch``; one that is the same for all samples is repeated for each."""
        if operand.batch is not None:
            return self.placed(operand, batch)
        value = self.unsqueezed(operand.value, batch.axis) if batch.is_extra else operand.value
        parts: list[Element] = [1] * (operand.rank + batch.is_extra)
        parts[batch.axis] = Count.SAMPLES
        return self.emit("Expand", value, self.vector(parts))

    def inserted(self, operand: Operand, axes: Sequence[int]) -> Operand:
        """Return an operand with more axes of extent 1 for one sample, numbered as in the result."""
        rank = operand.rank + len(axes)
        rest = iter(operand.shape)
        shape = tuple(1 if axis in axes else next(rest) for axis in range(rank))
        if operand.batch is None:
            return Operand(self.emit("Unsqueeze", operand.value, self.integers(sorted(axes))), shape)
        old_axes = [*(axis for axis in range(rank) if axis not in axes), rank]
        batch = Batch(old_axes[operand.batch.axis], operand.batch.is_extra)
        added = [index for index, axis in enumerate(_order(rank, batch)) if axis in axes]
        return Operand(self.emit("Unsqueeze", operand.value, self.integers(added)), shape, batch)

    def removed(self, operand: Operand, axes: Sequence[int]) -> Operand:
        """Return an operand without some axes of extent 1 for one sample; samples at one of them stay."""
        shape = tuple(extent for axis, extent in enumerate(operand.shape) if axis not in axes)
        if operand.batch is None:
            return Operand(self.emit("Squeeze", operand.value, self.integers(sorted(axes))), shape)
        at = operand.batch.axis
        gone = [index for index, axis in enumerate(_order(operand.rank, operand.batch)) if axis in axes]
        value = self.emit("Squeeze", operand.value, self.integers(gone)) if gone else operand.value
        return Operand(value, shape, Batch(at - sum(index < at for index in gone), operand.batch.is_extra or at in axes))


def _order(rank: int, batch: Batch, offset: int = 0) -> list[int | Count]:
    """Return the axes of a value by their numbers for one sample, with a placeholder at the sample axis."""
    order: list[int | Count] = [axis + offset for axis in range(rank)]
    order[batch.axis : batch.axis + (not batch.is_extra)] = [Count.SAMPLES]
    return order


class Call:
    """A node with samples.

    Args:
        node: a node of the original model; it does not change, and is removed in the end.
        opening: the opening that it belongs to.
        told: the axis rule in its record.
    """

    def __init__(self, node: ir.Node, opening: Opening, told: axes.AxesRule | None = None):
        self.node, self.opening, self._axes = node, opening, told
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
        return [operand for operand in self.operands if operand is not None]

    def attribute(self, name: str, default: Any = None) -> Any:
        return attribute_value(self.node, name, default)

    def axis(self, rank: int, default: int = 0, name: str = "axis") -> int:
        """Return an attribute with an axis, as a non-negative number."""
        axis = int(self.attribute(name, default))
        if not -rank <= axis < rank:
            raise Refused(f"has the {name} {axis}, which a tensor of {rank} dimensions lacks")
        return axis % rank

    def array(self, index: int) -> np.ndarray | None:
        """Return an operand if it is constant; None if it is computed or omitted."""
        return constant_array(self.operand(index).value) if self.has(index) else None

    def integers(self, index: int, what: str) -> list[int]:
        """Return an operand of known integers.

        Raises:
            Refused: they are computed.
        """
        array = self.array(index)
        if array is None:
            raise Refused(f"computes {what}, which have to be known")
        return [int(number) for number in array.reshape(-1)]

    def same_for_all(self, *indices: int) -> None:
        """Raise Refused if an operand other than these differs from sample to sample."""
        for index, operand in enumerate(self.operands):
            if operand is not None and operand.batch is not None and index not in indices:
                raise Refused(f"reads '{operand.value.name}' as operand {index}, which would have to be the same for all samples")

    def alone(self) -> Operand:
        """Return the first operand, the only one that may have samples; errors as for ``same_for_all``."""
        self.same_for_all(0)
        return self.operand()

    def result_shape(self, index: int = 0) -> Shape:
        shape = sample_shape(self.node.outputs[index])
        if shape is None:
            raise Refused("has a result whose rank is not known")
        return shape

    def is_read(self, index: int) -> bool:
        return index < len(self.node.outputs) and is_used(self.node.outputs[index])

    def no_results_after(self, count: int) -> None:
        """Raise Refused if a result after the first ``count`` is read."""
        for index in range(count, len(self.node.outputs)):
            if self.is_read(index):
                raise Refused(
                    f"has the result '{self.node.outputs[index].name}', which is read and would hold more than one sample's"
                )

    def again(self, *operands: ir.Value | None, **attributes: Any) -> list[ir.Value]:
        """Emit the same node over other operands, with some attributes changed; None removes an attribute."""
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
        """Return other first operands, followed by the remaining original ones."""
        rest = [None if operand is None else operand.value for operand in self.operands[len(first) :]]
        return [*first, *rest]

    def spread(self, batch: Batch, **attributes: Any) -> Result:
        """Emit the node with the samples of all operands, and so those of its result, at ``batch``."""
        return self.again(*(self.opening.spread(operand, batch) for operand in self.present), **attributes)[0], batch

    def over(self, *first: Operand, **attributes: Any) -> list[Result | None]:
        """Emit the node over other first operands; its axis rule finds the samples in the results."""
        operands = [*first, *self.operands[len(first) :]]
        values = self.again(*(None if operand is None else operand.value for operand in operands), **attributes)
        node, batch = values[0].producer(), next(operand.samples for operand in first if operand.batch is not None)
        assert node is not None
        assert self._axes is not None
        try:
            told = self._axes(axes.Call(node, [None if operand is None else operand.layout for operand in operands]))
        except axes.Untold as error:
            raise Refused(f"puts samples where they cannot be told apart: {error}") from error
        each = told if isinstance(told, list) else [told]
        return [(value, Batch(_axis_of_samples(one), batch.is_extra)) for value, one in zip(values, each, strict=False)]

    def named_axes(self) -> list[int] | None:
        """Return the axes in the second operand, or in the attribute; None if neither is present."""
        return self.integers(1, "the axes") if self.has(1) else self.attribute("axes")


def _axis_of_samples(told: object) -> int:
    if not isinstance(told, tuple) or told.count((SAMPLES,)) != 1:
        raise Refused("puts samples where they cannot be told apart")
    return told.index((SAMPLES,))


Result = tuple[ir.Value, Batch | None]
ReopenRule = Callable[[Call], Result | Sequence[Result | None]]
"""A rule that opens an operator of the standard: it emits nodes that compute the same for every sample.

It returns, for each result, the replacement and the position of its samples; None for a result that is not read.
"""


def outcome(operand: Operand) -> Result:
    return operand.value, operand.batch
