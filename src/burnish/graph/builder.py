"""The builder: emits typed nodes into a graph and gives back tensors that can be computed with.

builder = Builder(graph)
x = builder.tensor(value)
y = builder.op("Relu", x) * 0.5 + 1
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar, overload

import numpy as np
import onnx_ir as ir

from burnish.errors import ModelError
from burnish.graph.attributes import typed_attribute
from burnish.graph.constants import constant_array
from burnish.graph.describe import SOURCE_METADATA, describe_place
from burnish.graph.inference import infer_outputs
from burnish.graph.shapes import static_shape

BURNISH_DOMAIN = "burnish"
TRAINING_DOMAIN = "ai.onnx.preview.training"
"""Where the standard keeps Gradient and its optimizers."""
ORIGIN_METADATA = "burnish.origin"
"""Where a node may say which node of the model it comes from; what is emitted in front of it says the same."""
NEVER_REPEATED_METADATA = "burnish.never_repeated"
"""A node whose metadata holds this key runs once and its outputs are kept: a collective between replicas has it."""
HANDED_ON = (ORIGIN_METADATA, SOURCE_METADATA)

Scalar = int | float | bool | np.number
T = TypeVar("T")


class Tensor:
    """A value of the graph under construction, with arithmetic.

    A Python number beside it becomes a constant of its dtype. Nothing is computed: every operation emits one node.
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
        """The element type; float32 is never assumed.

        Raises:
            ModelError: it is not known.
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
        """The extent along ``axis`` where it is a known integer, else None.

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
        """The constant behind this value, or None when it is known only at run time."""
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
    """Emits nodes at the end of a graph, or before a given node of it, with dtype and shape inferred.

    Args:
        graph: the graph to extend; its ``opset_imports`` decide operator versions.
        before: emit in front of this node instead of at the end.
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
        """The version of the standard domain that nodes are emitted in."""
        return self.graph.opset_imports[""]

    def tensor(self, value: ir.Value) -> Tensor:
        """Wrap a value that is already in the graph."""
        return Tensor(self, value)

    def tensors(self, values: Iterable[ir.Value | None]) -> tuple[Tensor, ...]:
        """Wrap values that are already in the graph, such as the inputs of a node without those that it leaves out."""
        return tuple(Tensor(self, value) for value in values if value is not None)

    def constant(self, array: np.ndarray) -> Tensor:
        """Emit a constant; equal small constants are emitted once per builder."""
        array = np.asarray(array, order="C")  # ascontiguousarray would turn a scalar into a vector of one
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
        """Return what ``emit`` gave when it was first called for this key: so that it stands in the graph once."""
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
        """Emit one node and return its output, or a tuple when it has several.

        Args:
            op_type: operator name in ``domain``.
            inputs: tensors; a number takes the dtype of the first tensor; None leaves an optional input out.
            outputs: how many outputs the node has.
            like: the (first) output has this tensor's dtype and shape: what the caller knows and inference may not.
            shape, dtype: the same, given apart.
            attributes: operator attributes; those that are None are left out.
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
        """Cast, unless the tensor has that dtype already."""
        return tensor if tensor.dtype == dtype else self.op("Cast", tensor, to=int(dtype))

    @contextmanager
    def each_scalar_once(self) -> Iterator[None]:
        """Let an operation on scalars that is asked for again inside give what it gave before, and emit no second node.

        A formula can then be written for one parameter, although a part of it is the same for all of them. None of these
        operations may draw random numbers.
        """
        earlier = self._scalars
        self._scalars = {} if earlier is None else earlier
        try:
            yield
        finally:
            self._scalars = earlier

    @contextmanager
    def attributed(self, source: str | None) -> Iterator[None]:
        """Let the nodes that are emitted inside say that they compute a part of ``source``; None: they say nothing."""
        earlier, self._source = self._source, source
        try:
            yield
        finally:
            self._source = earlier

    def _insert(self, node: ir.Node) -> None:
        if self._source is not None:
            node.metadata_props[SOURCE_METADATA] = self._source
        if self.before is None:
            self.graph.append(node)
        else:
            for key in HANDED_ON:
                if key in self.before.metadata_props:
                    node.metadata_props.setdefault(key, self.before.metadata_props[key])
            self.graph.insert_before(self.before, node)


def _is_scalar(value: ir.Value | None) -> bool:
    return value is not None and value.shape is not None and len(value.shape) == 0


def _text(array: np.ndarray) -> ir.StringTensor:
    encoded = [item if isinstance(item, bytes) else str(item).encode() for item in array.flat]
    return ir.StringTensor(encoded, shape=ir.Shape(array.shape))


def zeros_like(tensor: Tensor) -> Tensor:
    """Emit zeros of the dtype and shape of ``tensor``; made when the graph runs, and not stored in it."""
    return full_like(tensor, 0.0)


def full_like(tensor: Tensor, number: Scalar) -> Tensor:
    """Emit ``number`` in every place, of the dtype and shape of ``tensor``; made when the graph runs, and not stored in it."""
    builder, shape = tensor.builder, static_shape(tensor.value)
    extents = builder.op("Shape", tensor) if shape is None else builder.integers(shape)
    value = ir.Tensor(np.full(1, number, dtype=tensor.dtype.numpy()))
    return builder.op("ConstantOfShape", extents, value=value, like=tensor)
