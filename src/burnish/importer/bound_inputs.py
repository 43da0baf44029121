"""Inputs fixed to a value, such as a sampling rate or an initial recurrent state, and open dimensions fixed to an extent.

``fold_shape_constants`` then computes what depends only on them, and ``take_decided_branches`` replaces an If that they decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
from numpy.typing import ArrayLike

from burnish.errors import ConfigurationError
from burnish.graph import FLOATING, Builder, Tensor, replace_uses
from burnish.graph.annotations import UNNAMED_AXES
from burnish.settings import suggestion
from burnish.validation import is_whole

Bind: TypeAlias = Mapping[str, ArrayLike] | None

BATCH_AXES = (0, 1)
"""Possible sample axes of recurrent states: ``[batch, hidden]``, ``[layers, batch, hidden]``."""

SHOWN = 64
"""Largest value that a description writes out, in elements."""


def bind_inputs(model: ir.Model, bind: Mapping[str, ArrayLike]) -> bool:
    """Replace inputs by constants and fix open dimensions of others, in place.

    Args:
        model: a model of opset 18 or newer whose open dimensions have names.
        bind: {input name: value} or {name of an open dimension: extent}. A value is broadcast to the input's shape. For an open
            dimension it takes, at run time, the extent of another input with that dimension; if there is none, the value's own
            extent, provided it has all axes. If an input's only open dimension has no name in the file and is the first or
            second, it is assumed to be the batch: the first dimension of the first input. An extent of 0 removes the inputs with
            that dimension: an empty cache.

    Raises:
        ConfigurationError: the input or dimension does not exist, a value does not fit its dtype or shape, the extent of an open
            dimension is unknown, or no input would remain.
    """
    if not isinstance(bind, Mapping) or not all(isinstance(name, str) for name in bind):
        raise ConfigurationError(f"bind must be {{input: value}}, such as {{'sr': 16000}}, not {bind!r}")
    graph = model.graph
    inputs = {value.name or "": value for value in graph.inputs}
    extents = {name: setting for name, setting in bind.items() if name not in inputs}
    emptied = _fix_dimensions(graph, extents)
    bound = {inputs[name]: _as_array(inputs[name], setting) for name, setting in bind.items() if name in inputs}
    bound |= {value: _as_array(value, 0) for value in emptied if value not in bound}
    others = [value for value in graph.inputs if value not in bound]
    if not others and bound:
        raise ConfigurationError("bind: no input would be left: leave out the one that data is to be given for")
    builder = Builder(graph, before=next(iter(graph), None))
    constants = {value: _constant(builder, value, array, others) for value, array in bound.items()}
    for value, constant in constants.items():
        graph.inputs.remove(value)
        replace_uses(value, constant.value)
        constant.value.name, value.name = value.name, None
    return True


def _fix_dimensions(graph: ir.Graph, extents: Mapping[str, ArrayLike]) -> list[ir.Value]:
    open_names = {value: _open_names(value) for value in graph.inputs}
    known = dict.fromkeys(name for names in open_names.values() for name in sorted(names))
    fixed: dict[str, int] = {}
    for name, extent in extents.items():
        if name not in known:
            raise ConfigurationError(_no_input(graph, name, list(known)))
        if not is_whole(extent) or int(extent) < 0:
            raise ConfigurationError(
                f"bind: '{name}' is an open dimension of the inputs, which takes an integer of 0 or more, not {extent!r}"
            )
        fixed[name] = int(extent)
    for value in (*graph.inputs, *graph.outputs):
        if value.shape is not None:
            dims = value.shape.dims
            value.shape = ir.Shape([dim if isinstance(dim, int) else fixed.get(dim.value or "", dim) for dim in dims])
    empty = {name for name, extent in fixed.items() if extent == 0}
    return [value for value in graph.inputs if not empty.isdisjoint(open_names.get(value, ()))]


def _open_names(value: ir.Value) -> set[str]:
    dims = () if value.shape is None else value.shape.dims
    return {dim.value for dim in dims if isinstance(dim, ir.SymbolicDim) and dim.value is not None}


def described_bindings(bind: Mapping[str, ArrayLike]) -> dict[str, Any]:
    """Return fixed inputs as JSON-compatible values; for large ones shape and range."""

    def described(array: np.ndarray) -> Any:
        if array.size <= SHOWN:
            return array.tolist()
        return {"shape": list(array.shape), "lowest": array.min().item(), "highest": array.max().item()}

    return {name: described(np.asarray(value)) for name, value in bind.items()}


def _no_input(graph: ir.Graph, name: str, dimensions: list[str]) -> str:
    if name in graph.initializers:
        return f"bind: '{name}' is a weight or a constant of the model, and no input: leave it out"
    names = [value.name or "" for value in graph.inputs]
    open_ones = f", their open dimensions {', '.join(map(repr, dimensions))}" if dimensions else ""
    return (
        f"bind: the model has no input '{name}'{suggestion(name, [*names, *dimensions])}; its inputs are "
        f"{', '.join(map(repr, names)) or 'none'}{open_ones}"
    )


def _as_array(value: ir.Value, setting: ArrayLike) -> np.ndarray:
    name, dtype = value.name, value.dtype
    if dtype is None or not isinstance(value.type, ir.TensorType):
        raise ConfigurationError(f"bind: the input '{name}' is no tensor, and only tensors can be fixed to a value: leave it out")
    try:
        array = np.asarray(setting)
    except ValueError as error:
        raise ConfigurationError(
            f"bind: the input '{name}' is given rows of different lengths: give a number, or an array of one shape"
        ) from error
    is_text = array.dtype.kind in "US"
    if is_text and array.ndim > 0:
        raise ConfigurationError(f"bind: the input '{name}' is given a list with texts: give one text or number")
    if dtype == ir.DataType.STRING and is_text:
        return np.asarray(setting, dtype=np.str_)
    if not _fits(array, dtype):
        raise ConfigurationError(
            f"bind: the input '{name}' is {dtype.name.lower()}, and is given {_written(array)}: give {_expected(dtype)}"
        )
    with np.errstate(over="ignore"):
        cast = array.astype(dtype.numpy())
    if dtype in FLOATING:
        is_beyond = np.isinf(cast.astype(np.float64)) & np.isfinite(array.astype(np.float64))
    else:
        is_beyond = cast.astype(object) != array.astype(object)
    if np.any(is_beyond):
        raise ConfigurationError(
            f"bind: the input '{name}' is {dtype.name.lower()}, which does not hold {_written(array[is_beyond].flat[0])}: "
            "give a number in its range"
        )
    return cast


def _fits(array: np.ndarray, dtype: ir.DataType) -> bool:
    """True if values of this dtype may be given for an input; integers are accepted for floating-point inputs too."""
    if array.dtype.kind == "O":
        return False
    try:
        known = ir.DataType.from_numpy(array.dtype)
    except TypeError:
        return False
    if known == dtype:
        return True
    return (known.is_integer() and (dtype.is_integer() or dtype in FLOATING)) or (known in FLOATING and dtype in FLOATING)


def _expected(dtype: ir.DataType) -> str:
    if dtype == ir.DataType.BOOL:
        return "true or false"
    if dtype == ir.DataType.STRING:
        return "a text"
    return "numbers" if dtype in FLOATING else "integers"


def _written(setting: Any) -> str:
    array = np.asarray(setting)
    return f"{array.item()!r} ({array.dtype})" if array.size == 1 else f"an array of {array.dtype}"


def _constant(builder: Builder, value: ir.Value, array: np.ndarray, others: list[ir.Value]) -> Tensor:
    """Emit the constant for an input.

    Floating-point tensors are expanded at run time, so that they do not look like weights.
    """
    if value.shape is None:
        shape: list[int | Tensor] = list(array.shape)
    else:
        _check_broadcast(value, array)
        shape = [_extent(builder, value, axis, array, others) for axis in range(len(value.shape))]
    known = [extent for extent in shape if isinstance(extent, int)]
    if len(known) == len(shape) and (not shape or value.dtype not in FLOATING):
        # copied, since a broadcast array has no memory of its own
        return builder.constant(np.broadcast_to(array, known).copy())
    extents = [builder.integers([extent]) if isinstance(extent, int) else extent for extent in shape]
    target = builder.integers(known) if len(known) == len(shape) else builder.op("Concat", *extents, axis=0)
    return builder.op("Expand", builder.constant(array), target)


def _check_broadcast(value: ir.Value, array: np.ndarray) -> None:
    assert value.shape is not None
    dims = value.shape.dims
    fits = array.ndim <= len(dims) and all(
        extent == 1 or not isinstance(dim, int) or extent == dim
        for extent, dim in zip(reversed(array.shape), reversed(dims), strict=False)
    )
    if not fits:
        raise ConfigurationError(
            f"bind: the input '{value.name}' has the shape {_shape(value)}, and is given an array of shape "
            f"{list(array.shape)}: give one number for all elements, or an array that broadcasts to it"
        )


def _extent(builder: Builder, value: ir.Value, axis: int, array: np.ndarray, others: list[ir.Value]) -> int | Tensor:
    assert value.shape is not None
    dim = value.shape.dims[axis]
    if isinstance(dim, int):
        return dim
    extent = array.shape[axis - len(value.shape)] if len(value.shape) - axis <= array.ndim else None
    place = _place_of(dim, value, axis, others)
    if place is None:
        if array.ndim == len(value.shape):
            assert extent is not None
            return extent
        raise ConfigurationError(
            f"bind: the input '{value.name}' has the shape {_shape(value)}, and no input that is left says what "
            f"'{dim.value}' is: give an array with all its axes, or fix '{dim.value}' to an extent"
        )
    other, position = place
    if extent not in (None, 1):
        raise ConfigurationError(
            f"bind: the input '{value.name}' is given {extent} along '{dim.value}', which the input '{other.name}' leaves open: "
            "give one number for all"
        )
    return builder.op("Gather", builder.op("Shape", builder.tensor(other)), builder.integers([position]))


def _place_of(dim: ir.SymbolicDim, value: ir.Value, axis: int, others: list[ir.Value]) -> tuple[ir.Value, int] | None:
    for other in others:
        for position, extent in enumerate(other.shape.dims if other.shape is not None else ()):
            if isinstance(extent, ir.SymbolicDim) and extent.value == dim.value:
                return other, position
    assert value.shape is not None
    is_only = sum(isinstance(each, ir.SymbolicDim) for each in value.shape.dims) == 1
    first = others[0].shape
    if axis in (UNNAMED_AXES.get(value) or ()) and is_only and axis in BATCH_AXES and first is not None and len(first) > 0:
        return (others[0], 0) if isinstance(first.dims[0], ir.SymbolicDim) else None
    return None


def _shape(value: ir.Value) -> str:
    assert value.shape is not None
    return f"[{', '.join(str(dim if isinstance(dim, int) else dim.value) for dim in value.shape.dims)}]"
