"""Builder that emits typed nodes into a graph and returns tensors with arithmetic.

builder = Builder(graph)
x = builder.tensor(value)
y = builder.op("Relu", x) * 0.5 + 1

Also functions based on it: the sum that undoes a broadcast, and replacement of nodes and values.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar, overload

import numpy as np
import onnx_ir as ir

from burnish.errors import ModelError, UnsupportedOperatorError
from burnish.graph.annotations import ORIGIN, SOURCE, Annotation, describe_node, describe_place
from burnish.graph.attributes import typed_attribute
from burnish.graph.constants import constant_array
from burnish.graph.inference import infer_outputs
from burnish.graph.names import Names
from burnish.graph.shapes import same_dimension, same_shape, static_shape
from burnish.graph.uses import remove_node, replace_output, replace_uses

BURNISH_DOMAIN = "burnish"
TRAINING_DOMAIN = "ai.onnx.preview.training"
"""Domain of the standard's Gradient and optimizers."""
HANDED_ON: tuple[Annotation[Any], ...] = (ORIGIN, SOURCE)
"""Annotations that nodes emitted before a given node inherit from it."""

Scalar = int | float | bool | np.number
T = TypeVar("T")


class Tensor:
    """A value of the graph under construction, with arithmetic.

    Python numbers become constants of its dtype. Nothing is computed: every operation emits one node.
    """

    __slots__ = ("builder", "value")

    def __init__(self, builder: Builder, value: ir.Value):
        self.builder = builder
        self.value = value

    @property
    def name(self) -> str:
        return self.value.name or ""

    @property
    def shape(self) -> ir.Shape | None:
        return self.value.shape

    @property
    def dtype(self) -> ir.DataType:
        """Element type.

        Raises:
            ModelError: it is unknown; there is no default.
        """
        if self.value.dtype is None:
            producer = self.value.producer()
            maker = "" if producer is None else f", output of {describe_place(producer)},"
            raise ModelError(
                f"the dtype of '{self.value.name}'{maker} cannot be inferred: declare it in the model's value_info, or use "
                "operators of the ONNX standard"
            )
        return self.value.dtype

    @property
    def rank(self) -> int | None:
        return None if self.value.shape is None else len(self.value.shape)

    def dimension(self, axis: int) -> int | None:
        """Return the extent of an axis if it is a known integer, else None.

        Raises:
            ModelError: there is no such axis.
        """
        if self.value.shape is None:
            return None
        if not -len(self.value.shape) <= axis < len(self.value.shape):
            readers = next((f", which {describe_place(node)} reads," for node in self.value.consumers()), "")
            raise ModelError(
                f"'{self.value.name}'{readers} has the shape {self.value.shape}, without a dimension {axis}: "
                "export the model again"
            )
        dimension = self.value.shape.dims[axis]
        return dimension if isinstance(dimension, int) else None

    @property
    def array(self) -> np.ndarray | None:
        """The constant array of this value, or None if it is known only at run time."""
        return constant_array(self.value)

    def __add__(self, other: Tensor | Scalar) -> Tensor:
        return self.builder.op("Add", self, other)

    def __radd__(self, other: Scalar) -> Tensor:
        return self.builder.op("Add", self.builder.scalar(other, self), self)

    def __sub__(self, other: Tensor | Scalar) -> Tensor:
        return self.builder.op("Sub", self, other)

    def __rsub__(self, other: Scalar) -> Tensor:
        return self.builder.op("Sub", self.builder.scalar(other, self), self)

    def __mul__(self, other: Tensor | Scalar) -> Tensor:
        return self.builder.op("Mul", self, other)

    def __rmul__(self, other: Scalar) -> Tensor:
        return self.builder.op("Mul", self, other)

    def __truediv__(self, other: Tensor | Scalar) -> Tensor:
        return self.builder.op("Div", self, other)

    def __rtruediv__(self, other: Scalar) -> Tensor:
        return self.builder.op("Div", self.builder.scalar(other, self), self)

    def __pow__(self, other: Tensor | Scalar) -> Tensor:
        return self.builder.op("Pow", self, other)

    def __rpow__(self, other: Scalar) -> Tensor:
        return self.builder.op("Pow", self.builder.scalar(other, self), self)

    def __neg__(self) -> Tensor:
        return self.builder.op("Neg", self)

    def __repr__(self) -> str:
        return f"Tensor({self.value!r})"


class Builder:
    """Emits nodes at the end of a graph or before one of its nodes, and infers their dtypes and shapes.

    Args:
        graph: the graph to extend; its ``opset_imports`` decide operator versions.
        before: the node to insert before, instead of at the end.
    """

    def __init__(self, graph: ir.Graph, before: ir.Node | None = None):
        self.graph = graph
        self.before = before
        self._constants: dict[tuple[str, tuple[int, ...], bytes], Tensor] = {}
        self._emitted: dict[Hashable, Any] = {}
        self._scalars: dict[Hashable, Tensor] | None = None
        self._source: str | None = None

    @property
    def opset(self) -> int:
        """Version of the standard domain of the graph."""
        return self.graph.opset_imports[""]

    def tensor(self, value: ir.Value) -> Tensor:
        return Tensor(self, value)

    def tensors(self, values: Iterable[ir.Value | None]) -> tuple[Tensor, ...]:
        """Wrap values of the graph, such as the inputs of a node; omitted inputs are skipped."""
        return tuple(Tensor(self, value) for value in values if value is not None)

    def constant(self, array: np.ndarray) -> Tensor:
        """Emit a constant; equal small constants are emitted once per builder."""
        array = np.asarray(array, order="C")  # ascontiguousarray would turn a scalar into a vector
        key = (array.dtype.str + array.dtype.name, array.shape, array.tobytes() if array.size <= 1024 else b"")
        cacheable = array.size <= 1024
        if cacheable and key in self._constants:
            return self._constants[key]
        held = _text(array) if array.dtype.kind in "OSU" else ir.Tensor(array)
        node = ir.node("Constant", [], {"value": typed_attribute("value", held)})
        output = node.outputs[0]
        output.dtype = ir.DataType.from_numpy(array.dtype)
        output.shape = ir.Shape(array.shape)
        self._insert(node)
        tensor = Tensor(self, output)
        if cacheable:
            self._constants[key] = tensor
        return tensor

    def scalar(self, number: Scalar, like: Tensor | ir.DataType) -> Tensor:
        """Emit a rank-0 constant in the dtype of ``like``."""
        dtype = like.dtype if isinstance(like, Tensor) else like
        return self.constant(np.asarray(number, dtype=dtype.numpy()))

    def once(self, key: Hashable, emit: Callable[[], T]) -> T:
        """Return the result of the first call of ``emit`` for this key, so that its nodes are emitted once."""
        if key not in self._emitted:
            self._emitted[key] = emit()
        result: T = self._emitted[key]
        return result

    def integers(self, numbers: Sequence[int]) -> Tensor:
        """Emit a one-dimensional int64 constant: axes, a shape, a permutation."""
        return self.constant(np.asarray(list(numbers), dtype=np.int64))

    @overload
    def op(
        self,
        op_type: str,
        *inputs: Tensor | Scalar | None,
        domain: str = "",
        outputs: Literal[1] = 1,
        like: Tensor | None = None,
        shape: ir.Shape | Sequence[Any] | None = None,
        dtype: ir.DataType | None = None,
        **attributes: Any,
    ) -> Tensor: ...

    @overload
    def op(
        self,
        op_type: str,
        *inputs: Tensor | Scalar | None,
        domain: str = "",
        outputs: int,
        like: Tensor | None = None,
        shape: ir.Shape | Sequence[Any] | None = None,
        dtype: ir.DataType | None = None,
        **attributes: Any,
    ) -> tuple[Tensor, ...]: ...

    def op(
        self,
        op_type: str,
        *inputs: Tensor | Scalar | None,
        domain: str = "",
        outputs: int = 1,
        like: Tensor | None = None,
        shape: ir.Shape | Sequence[Any] | None = None,
        dtype: ir.DataType | None = None,
        **attributes: Any,
    ) -> Tensor | tuple[Tensor, ...]:
        """Emit one node and return its output, or a tuple of several outputs.

        Args:
            op_type: operator name in ``domain``.
            inputs: tensors; a number takes the dtype of the first tensor; None omits an optional input.
            outputs: number of outputs.
            like: tensor with the known dtype and shape of the (first) output, for outputs that inference may not know.
            shape, dtype: the same, given separately.
            attributes: operator attributes; None omits one.
        """
        reference = next((item for item in inputs if isinstance(item, Tensor)), None)
        values: list[ir.Value | None] = []
        for item in inputs:
            if item is None or isinstance(item, Tensor):
                values.append(None if item is None else item.value)
            else:
                if reference is None:
                    raise TypeError(f"{op_type}: a number needs a tensor beside it to take its dtype from")
                values.append(self.scalar(item, reference).value)
        key = None
        if self._scalars is not None and values and all(map(_is_scalar, values)) and outputs == 1:
            key = (op_type, domain, *values, repr(sorted(attributes.items())), repr((dtype, shape)))
            if key in self._scalars:
                return self._scalars[key]
        present = {name: typed_attribute(name, attribute) for name, attribute in attributes.items() if attribute is not None}
        node = ir.node(op_type, values, present, domain=domain, num_outputs=outputs)
        self.graph.opset_imports.setdefault(domain, 1)
        self._insert(node)
        infer_outputs(node, self.graph.opset_imports)
        first = node.outputs[0]
        if like is not None:
            first.type, first.shape = like.value.type, None if like.shape is None else ir.Shape(like.shape.dims)
        if shape is not None:
            first.shape = shape if isinstance(shape, ir.Shape) else ir.Shape(shape)
        if dtype is not None:
            first.type = ir.TensorType(dtype)
        if key is not None and self._scalars is not None:
            self._scalars[key] = Tensor(self, first)
        if outputs == 1:
            return Tensor(self, first)
        return tuple(Tensor(self, output) for output in node.outputs)

    def cast(self, tensor: Tensor, dtype: ir.DataType) -> Tensor:
        """Cast a tensor unless it already has the dtype."""
        return tensor if tensor.dtype == dtype else self.op("Cast", tensor, to=int(dtype))

    @contextmanager
    def each_scalar_once(self) -> Iterator[None]:
        """Within this context, emit equal operations on scalars only once.

        A formula can then be written per parameter even if a part of it is common to all. The operations must not draw random
        numbers.
        """
        earlier = self._scalars
        self._scalars = {} if earlier is None else earlier
        try:
            yield
        finally:
            self._scalars = earlier

    @contextmanager
    def attributed(self, source: str | None) -> Iterator[None]:
        """Within this context, record ``source`` as the operation that emitted nodes belong to; None records nothing."""
        earlier, self._source = self._source, source
        try:
            yield
        finally:
            self._source = earlier

    def _insert(self, node: ir.Node) -> None:
        if self._source is not None:
            SOURCE.set(node, self._source)
        if self.before is None:
            self.graph.append(node)
        else:
            for annotation in HANDED_ON:
                annotation.hand_on(self.before, node)
            self.graph.insert_before(self.before, node)


def _is_scalar(value: ir.Value | None) -> bool:
    return value is not None and value.shape is not None and len(value.shape) == 0


def _text(array: np.ndarray) -> ir.StringTensor:
    encoded = [item if isinstance(item, bytes) else str(item).encode() for item in array.flat]
    return ir.StringTensor(encoded, shape=ir.Shape(array.shape))


def zeros_like(tensor: Tensor) -> Tensor:
    """Emit zeros with the dtype and shape of ``tensor``, created at run time."""
    return full_like(tensor, 0.0)


def full_like(tensor: Tensor, number: Scalar) -> Tensor:
    """Emit a tensor of ``number`` with the dtype and shape of ``tensor``, created at run time."""
    builder, shape = tensor.builder, static_shape(tensor.value)
    extents = builder.op("Shape", tensor) if shape is None else builder.integers(shape)
    value = ir.Tensor(np.full(1, number, dtype=tensor.dtype.numpy()))
    return builder.op("ConstantOfShape", extents, value=value, like=tensor)


LONGEST_LEADING_RUN = 16384
"""Longest sum over leading axes that is not split, in terms. ONNX Runtime adds the terms sequentially."""

LARGEST_IMBALANCE = 8
"""Largest ratio of the number of blocks to the square root of the number of terms; a more uneven split is not worth the extra
pass.
"""


def unbroadcast(cotangent: Tensor, operand: Tensor) -> Tensor:
    """Sum ``cotangent`` over the axes along which ``operand`` was broadcast, and return it in ``operand``'s shape.

    The axes are chosen when the graph is built if the shapes are known. If a dimension is unknown, or a named one may be 1, the
    graph compares the two shapes at run time. A very long sum over leading axes is done in two stages: 262,144 float32 terms of
    one sign, added sequentially, have an error of 8e-6.
    """
    if same_shape(cotangent.shape, operand.shape):
        return cotangent
    builder = cotangent.builder
    if cotangent.shape is None or operand.shape is None:
        return _unbroadcast_at_run_time(cotangent, operand)
    missing = len(cotangent.shape) - len(operand.shape)
    leading = list(range(missing))
    repeated: list[int] = []
    for axis, dimension in enumerate(operand.shape.dims):
        other = cotangent.shape.dims[axis + missing]
        if same_dimension(dimension, other):
            continue
        if dimension == 1:
            repeated.append(axis + missing)
        elif not isinstance(dimension, int):
            return _unbroadcast_at_run_time(cotangent, operand)
    if not leading and not repeated:
        return cotangent
    partial = _sum_blocks_of_leading_axes(cotangent, leading + repeated)
    if partial is not None:
        return unbroadcast(partial, operand)
    if leading and repeated and any(dimension != 1 for dimension in operand.shape.dims):
        summed = builder.op("ReduceSum", cotangent, builder.integers(leading + repeated), keepdims=1)
        return builder.op("Squeeze", summed, builder.integers(leading), like=operand)
    if leading and not repeated:
        return builder.op("ReduceSum", cotangent, builder.integers(leading), keepdims=0, like=operand)
    if repeated and not leading:
        return builder.op("ReduceSum", cotangent, builder.integers(repeated), keepdims=1, like=operand)
    total = builder.op("ReduceSum", cotangent, builder.integers(leading + repeated), keepdims=0)
    return builder.op("Reshape", total, builder.integers([1] * len(operand.shape)), like=operand)


def _sum_blocks_of_leading_axes(cotangent: Tensor, summed: list[int]) -> Tensor | None:
    """Sum blocks of the leading axes, into a shape that broadcasts like the cotangent's. Return None without a good split.

    ``summed``, ascending, lists the axes to sum; its leading axes have n terms in total. They become k sums, with k the divisor
    of n near its square root: [n, ...] to [k, ...], and [n, m, ...] to [k, 1, ...].
    """
    assert cotangent.shape is not None
    dims = cotangent.shape.dims
    count = next((index for index, axis in enumerate(summed) if axis != index), len(summed))
    extents = [dimension for dimension in dims[:count] if isinstance(dimension, int)]
    terms = math.prod(extents)
    if len(extents) < count or terms <= LONGEST_LEADING_RUN:
        return None
    block = next(divisor for divisor in range(math.isqrt(terms), 0, -1) if terms % divisor == 0)
    blocks = terms // block
    rest = [dimension if isinstance(dimension, int) else -1 for dimension in dims[count:]]
    if blocks > LARGEST_IMBALANCE * math.sqrt(terms) or rest.count(-1) > 1 or 0 in rest:
        return None
    builder = cotangent.builder
    ones = [1] * (count - 2)
    split = builder.op("Reshape", cotangent, builder.integers([blocks, block, *ones, *rest]))
    partial = [blocks, *[1] * (count - 1), *dims[count:]]
    return builder.op("ReduceSum", split, builder.integers([1]), keepdims=int(count > 1), shape=partial)


def _unbroadcast_at_run_time(cotangent: Tensor, operand: Tensor) -> Tensor:
    builder = cotangent.builder
    target = builder.op("Shape", operand)
    rank = builder.op("Shape", builder.op("Shape", cotangent))
    padding = rank - builder.op("Shape", target)
    padded = builder.op("Concat", builder.op("Expand", builder.integers([1]), padding), target, axis=0)
    is_one = builder.op("Equal", padded, builder.integers([1]))
    axes = builder.op("Squeeze", builder.op("NonZero", is_one), builder.integers([0]))
    summed = builder.op("ReduceSum", cotangent, axes, keepdims=1, noop_with_empty_axes=1)
    return builder.op("Reshape", summed, target, allowzero=1, like=operand)


def replace_value(output: ir.Value, replacement: ir.Value, but: ir.Node | None = None) -> None:
    """Replace a node's output by another value for all readers except the node ``but``.

    A graph output keeps its name: the replacement takes it, or an Identity of it if it needs its own name.
    """
    if not output.is_graph_output():
        replace_uses(output, replacement, but)
        return
    producer = output.producer()
    assert producer is not None
    graph = producer.graph
    assert isinstance(graph, ir.Graph)
    name = output.name
    maker = replacement.producer()
    if maker is None or maker.graph is not graph or replacement.is_graph_output():
        builder = Builder(graph, before=producer)
        replacement = builder.op("Identity", Tensor(builder, replacement)).value
    replace_uses(output, replacement, but)
    output.name = None
    replacement.name = name


def replace_node(node: ir.Node, replacements: Tensor | tuple[Tensor | None, ...]) -> None:
    """Replace the outputs of a node and remove the node.

    A replacement takes the output's shape if that is known. None, or a missing last entry, is for an output that nothing reads;
    surplus replacements are ignored.

    Raises:
        UnsupportedOperatorError: an output is read and has no replacement.
    """
    results = replacements if isinstance(replacements, tuple) else (replacements,)
    for index, output in enumerate(node.outputs):
        replacement = results[index] if index < len(results) else None
        if replacement is None:
            if output.uses() or output.is_graph_output():
                raise UnsupportedOperatorError(
                    f"what replaces {describe_node(node)} has {len(results)} of {len(node.outputs)} outputs, and none for its "
                    f"output {index}, '{output.name}', which is read: let its lowering or training form return one for each"
                )
            continue
        new = replacement.value
        if new.type is None:
            new.type = output.type
        if output.shape is not None:
            new.shape = output.shape
        replace_value(output, new)
    remove_node(node)


def insert_behind(node: ir.Node, following: ir.Node, names: Names) -> None:
    """Insert a node between another node's first output and all its readers.

    A graph output keeps its name, which moves to the new node's output; the value before it gets a new name from ``names``.
    """
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    before, behind = node.outputs[0], following.outputs[0]
    behind.type, behind.shape = before.type, None if before.shape is None else ir.Shape(before.shape.dims)
    graph.insert_after(node, following)
    for reader, index in list(before.uses()):
        if reader is not following:
            reader.replace_input_with(index, behind)
    if before.is_graph_output():
        name = before.name
        replace_output(before, behind)
        before.name = names.take(f"{name}:before")
        behind.name = name


@contextmanager
def garbage_kept() -> Iterator[None]:
    """Disable garbage collection in this context or in the decorated function.

    While graphs are built, Python's collector repeatedly scans them and all of PyTorch but finds almost nothing. That takes a
    third of the build time.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
