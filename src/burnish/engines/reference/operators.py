"""Numpy operators that replace those of the standard's evaluator.

They are the ones that the evaluator computes wrongly, only in part, or with fewer digits than its operands have: each by its
definition in the standard, in the dtype of its operands, or in float32 for sixteen-bit operands.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np
import onnx
from numpy.lib.stride_tricks import sliding_window_view
from onnx.helper import tensor_dtype_to_np_dtype
from onnx.reference.op_run import OpRun
from onnx.reference.ops.op_attention import Attention_24 as EvaluatorAttention
from onnx.reference.ops.op_loop import Loop as EvaluatorLoop
from onnx.reference.ops.op_pad import Pad_18 as EvaluatorPad
from onnx.reference.ops.op_resize import Resize as EvaluatorResize

from burnish.graph import same_padding, split_padding


class Operator(OpRun):
    """An operator of the standard domain, of every version; absent attributes have the standard's defaults."""

    op_domain = ""

    def _run(self, *operands: Any, **attributes: Any) -> tuple[np.ndarray, ...]:
        """Return the outputs, in the dtype of the first operand unless the standard says otherwise."""
        raise NotImplementedError


def wide(array: np.ndarray) -> np.ndarray:
    """Return the array in a dtype for precise sums: sixteen bits become float32, others do not change."""
    return array.astype(np.float32) if array.dtype.itemsize == 2 and array.dtype.kind not in "iub" else array


def per_channel(vector: np.ndarray, rank: int) -> np.ndarray:
    """Return a vector with one number per channel, shaped to broadcast with data of that rank."""
    return vector.reshape(-1, *[1] * (rank - 2))


def listed(given: Sequence[int] | None, default: int, count: int) -> list[int]:
    """Return the numbers of an attribute, or ``count`` times its default."""
    return [default] * count if given is None else list(given)


class Loop(EvaluatorLoop):
    """Supports a missing condition, any number of states, stacked outputs of any rank, and zero iterations."""

    op_domain = ""

    def _run(self, count: Any, condition: Any, *states: Any, context: Any = None, bindings: Any = None, **bodies: Any) -> Any:  # type: ignore[override]
        carried = list(states)
        rows = _Rows(self.body, 1 + len(states))  # type: ignore[attr-defined]
        going = True if condition is None else bool(np.all(condition))
        limit = None if count is None else int(np.asarray(count).item())
        iteration = 0
        while going and (limit is None or iteration < limit):
            values = [np.array(iteration, np.int64), np.array(True), *carried]
            following, *results = _run_body(self, values, context, bindings)
            going, iteration = bool(np.all(following)), iteration + 1
            carried = results[: len(states)]
            rows.add(results[len(states) :])
        return (*carried, *rows.stacked())


class Scan(OpRun):
    """Supports any axis, both directions, and zero slices."""

    op_domain = ""

    def need_context(self) -> bool:
        """True: a body reads values of the enclosing graphs."""
        return True

    def _run(self, *operands: Any, context: Any = None, bindings: Any = None, **attributes: Any) -> Any:
        sliced = attributes["num_scan_inputs"]
        states = len(operands) - sliced
        rows = _Rows(self.body, states)  # type: ignore[attr-defined]
        axes, directions = (listed(attributes.get(f"scan_input_{what}"), 0, sliced) for what in ("axes", "directions"))
        frames = [
            np.moveaxis(operand, axis, 0)[:: -1 if backwards else 1]
            for operand, axis, backwards in zip(operands[states:], axes, directions, strict=True)
        ]
        carried = list(operands[:states])
        for iteration in range(len(frames[0])):
            results = _run_body(self, [*carried, *(frame[iteration] for frame in frames)], context, bindings)
            carried = list(results[:states])
            rows.add(results[states:])
        axes, directions = (listed(attributes.get(f"scan_output_{what}"), 0, len(rows.slices)) for what in ("axes", "directions"))
        stacked = zip(rows.stacked(), axes, directions, strict=True)
        return (*carried, *(np.moveaxis(row[:: -1 if backwards else 1], 0, axis) for row, axis, backwards in stacked))


class _Rows:
    """The outputs of a body other than its states, for every iteration."""

    def __init__(self, body: Any, first: int):
        self.declared = list(body.proto_.output)[first:]
        self.slices: list[list[np.ndarray]] = [[] for _ in self.declared]

    def add(self, results: Sequence[np.ndarray]) -> None:
        for row, result in zip(self.slices, results, strict=True):
            row.append(result)

    def stacked(self) -> list[np.ndarray]:
        pairs = zip(self.slices, self.declared, strict=True)
        return [np.stack(row) if row else _nothing(declared) for row, declared in pairs]


def _nothing(declared: onnx.ValueInfoProto) -> np.ndarray:
    """Return the stacked output of zero iterations; an undeclared extent counts as 0."""
    kind = declared.type.tensor_type
    extents = [dimension.dim_value for dimension in kind.shape.dim]
    return np.zeros([0, *extents], onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type or onnx.TensorProto.FLOAT))


def _run_body(op: Any, values: Sequence[Any], context: Mapping[str, Any] | None, bindings: Any) -> list[Any]:
    """Run a body on its inputs, which hide outer values of the same names."""
    inputs = {**(context or {}), **dict(zip(op.body.input_names, values, strict=True))}
    return list(op._run_body(inputs, bindings=bindings))


def erf(x: np.ndarray) -> np.ndarray:
    """The error function, in the dtype of ``x``."""
    exact: np.ndarray = np.vectorize(math.erf, otypes=[np.float64])(x.astype(np.float64))
    return exact.astype(x.dtype)


class Erf(Operator):
    """The evaluator returns values of float32."""

    def _run(self, x: np.ndarray, **attributes: Any) -> tuple[np.ndarray, ...]:
        return (erf(x),)


class Gelu(Operator):
    """The evaluator runs the standard's function body, whose constants are float32."""

    def _run(self, x: np.ndarray, approximate: str = "none", **attributes: Any) -> tuple[np.ndarray, ...]:
        data = wide(x)
        if approximate == "tanh":
            cube = data + 0.044715 * data**3
            return ((0.5 * data * (1 + np.tanh(math.sqrt(2 / math.pi) * cube))).astype(x.dtype),)
        return ((0.5 * data * (1 + erf(data * math.sqrt(0.5)))).astype(x.dtype),)


class HardSwish(Operator):
    """The evaluator runs the standard's function body, whose constant 1/6 is float32."""

    def _run(self, x: np.ndarray, **attributes: Any) -> tuple[np.ndarray, ...]:
        data = wide(x)
        return ((data * np.clip(data / 6 + 0.5, 0, 1)).astype(x.dtype),)


class Softsign(Operator):
    """The evaluator writes into the result, which fails for a scalar."""

    def _run(self, x: np.ndarray, **attributes: Any) -> tuple[np.ndarray, ...]:
        return (np.asarray(x / (1 + np.abs(x))),)


class Mean(Operator):
    """The evaluator sums in the shape of the first operand."""

    def _run(self, *operands: np.ndarray, **attributes: Any) -> tuple[np.ndarray, ...]:
        total = functools.reduce(np.add, map(wide, operands))
        return (np.asarray(total / total.dtype.type(len(operands))).astype(operands[0].dtype),)


class LogSoftmax(Operator):
    """Avoids the logarithm of a probability, which may be too small for its dtype."""

    def _run(self, x: np.ndarray, axis: int = -1, **attributes: Any) -> tuple[np.ndarray, ...]:
        if x.size == 0:
            return (x,)
        below = x - x.max(axis=axis, keepdims=True)
        return ((below - np.log(np.exp(below).sum(axis=axis, keepdims=True))).astype(x.dtype),)


class DequantizeLinear(Operator):
    """The evaluator has it only from opset 19 on, and computes in float32 whatever the dtype of the scale."""

    def _run(
        self,
        x: np.ndarray,
        scale: np.ndarray,
        zero_point: np.ndarray | None = None,
        axis: int = 1,
        block_size: int = 0,
        output_dtype: int = 0,
        **attributes: Any,
    ) -> tuple[np.ndarray, ...]:
        dtype = tensor_dtype_to_np_dtype(output_dtype) if output_dtype else scale.dtype
        wide = np.float64 if scale.dtype == np.float64 else np.float32
        number = x.astype(wide)
        if zero_point is not None:
            number = number - _placed(zero_point.astype(wide), x.shape, axis, block_size)
        return (np.asarray(number * _placed(scale.astype(wide), x.shape, axis, block_size)).astype(dtype),)


def _placed(numbers: np.ndarray, shape: tuple[int, ...], axis: int, block: int) -> np.ndarray:
    if numbers.size == 1:
        return numbers.reshape(())
    if block:
        return np.repeat(numbers, block, axis).take(range(shape[axis]), axis)
    along = axis % len(shape)
    return numbers.reshape([-1 if place == along else 1 for place in range(len(shape))])


class ReduceLogSumExp(Operator):
    """The evaluator writes into the result, which fails for a scalar."""

    def _run(
        self, x: np.ndarray, axes: Any = None, keepdims: int = 1, noop_with_empty_axes: int = 0, **attributes: Any
    ) -> tuple[np.ndarray, ...]:
        named = [] if axes is None else np.asarray(axes).tolist()
        along = tuple(named) if named or noop_with_empty_axes else tuple(range(x.ndim))
        data = wide(x)
        largest = np.max(data, axis=along, keepdims=True, initial=-np.inf)
        shift = np.where(np.isfinite(largest), largest, 0)
        result = np.log(np.sum(np.exp(data - shift), axis=along, keepdims=True)) + shift
        return (np.asarray(result if keepdims else np.squeeze(result, axis=along), x.dtype),)


WITH_SCORES = 4
"""The number of outputs of a node that returns its scores."""


class Attention(EvaluatorAttention):
    """Supports a causal mask shared by all queries, and returns the scores from before the cap if requested.

    The evaluator applies such a mask to the first query only, and returns capped scores.
    """

    op_domain = ""

    def _run(  # type: ignore[override]
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray | None = None, *cache: Any, **attributes: Any
    ) -> Any:
        if mask is not None:
            queries = q.shape[-2]
            mask = np.broadcast_to(mask, (*mask.shape[:-2], queries, mask.shape[-1]))
        results = super()._run(q, k, v, mask, *cache, **attributes)
        if len(self.output) < WITH_SCORES or attributes.get("qk_matmul_output_mode") or not attributes.get("softcap"):
            return results
        uncapped = super()._run(q, k, v, mask, *cache, **{**attributes, "softcap": None})
        return (*results[:3], uncapped[3])


class GatherElements(Operator):
    """Supports indices with fewer rows or columns than the data, and any number of them along the axis."""

    def _run(self, data: np.ndarray, indices: np.ndarray, axis: int = 0, **attributes: Any) -> tuple[np.ndarray, ...]:
        along = axis % data.ndim
        seen = tuple(slice(None) if place == along else slice(extent) for place, extent in enumerate(indices.shape))
        return (np.take_along_axis(data[seen], indices, axis=along),)


class Unique(Operator):
    """Supports the order of first occurrence along any axis, with any number of outputs."""

    def _run(self, x: np.ndarray, axis: int | None = None, sorted: int = 1, **attributes: Any) -> tuple[np.ndarray, ...]:
        y, first, inverse, counts = np.unique(x, return_index=True, return_inverse=True, return_counts=True, axis=axis)
        inverse = inverse.reshape(-1)
        if not sorted:
            order = np.argsort(first)
            y, first, counts = np.take(y, order, axis=axis or 0), first[order], counts[order]
            inverse = np.argsort(order)[inverse]
        return (y, *(numbers.astype(np.int64) for numbers in (first, inverse, counts)))[: len(self.output)]


class Pad(EvaluatorPad):
    """Supports negative amounts, which remove elements."""

    op_domain = ""

    def _run(self, data: np.ndarray, pads: np.ndarray, *operands: Any, **attributes: Any) -> Any:
        axes = operands[1] if len(operands) > 1 and operands[1] is not None else range(data.ndim)
        begins, ends = pads.reshape(2, -1)
        kept = [slice(None)] * data.ndim
        for axis, begin, end in zip(axes, begins, ends, strict=True):
            kept[axis] = slice(max(-begin, 0), data.shape[axis] - max(-end, 0))
        return super()._run(data[tuple(kept)], np.maximum(pads, 0), *operands, **attributes)  # type: ignore[no-untyped-call]


class GroupNormalization(Operator):
    """Normalizes each sample's groups of channels; scale and bias per channel, or before opset 21 per group."""

    def _run(
        self, x: np.ndarray, scale: np.ndarray, bias: np.ndarray, num_groups: int, epsilon: float = 1e-5, **attributes: Any
    ) -> tuple[np.ndarray, ...]:
        grouped = wide(x).reshape(x.shape[0], num_groups, -1)
        centered = grouped - grouped.mean(axis=2, keepdims=True)
        normalized = centered / np.sqrt((centered**2).mean(axis=2, keepdims=True) + epsilon)
        repeats = x.shape[1] // len(scale)
        factors = [per_channel(np.repeat(wide(vector), repeats), x.ndim) for vector in (scale, bias)]
        return ((normalized.reshape(x.shape) * factors[0] + factors[1]).astype(x.dtype),)


class LRN(Operator):
    """Divides each element by a power of the sum of squares of its neighbours among the channels."""

    def _run(
        self, x: np.ndarray, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0, **attributes: Any
    ) -> tuple[np.ndarray, ...]:
        data, channels = wide(x), x.shape[1]
        below, above = (size - 1) // 2, size // 2
        sums = [(data[:, max(0, c - below) : c + above + 1] ** 2).sum(axis=1) for c in range(channels)]
        return ((data / (bias + alpha / size * np.stack(sums, axis=1)) ** beta).astype(x.dtype),)


class LayerNormalization(Operator):
    """Normalizes along the last axes; the statistics are float32 if ``stash_type`` says so, whatever the operands."""

    def _run(
        self,
        x: np.ndarray,
        scale: np.ndarray,
        bias: np.ndarray | None = None,
        axis: int = -1,
        epsilon: float = 1e-5,
        stash_type: int = 1,
        **attributes: Any,
    ) -> tuple[np.ndarray, ...]:
        data, along = wide(x), tuple(range(axis % x.ndim, x.ndim))
        mean = data.mean(axis=along, keepdims=True)
        inverse_std = 1 / np.sqrt(((data - mean) ** 2).mean(axis=along, keepdims=True) + data.dtype.type(epsilon))
        normalized = ((data - mean) * inverse_std).astype(x.dtype) * scale
        stashed = np.float32 if stash_type == 1 else x.dtype
        return (normalized if bias is None else normalized + bias), mean.astype(stashed), inverse_std.astype(stashed)


class LpNormalization(Operator):
    """Divides by the norm along an axis; a zero norm gives zeros."""

    def _run(self, x: np.ndarray, axis: int = -1, p: int = 2, **attributes: Any) -> tuple[np.ndarray, ...]:
        data = wide(x)
        norm = np.abs(data).sum(axis=axis, keepdims=True) if p == 1 else np.sqrt((data**2).sum(axis=axis, keepdims=True))
        return (np.divide(data, norm, out=np.zeros_like(data), where=norm != 0).astype(x.dtype),)


class MeanVarianceNormalization(Operator):
    """Divides by the deviation plus 1e-9, like the standard's function body."""

    def _run(self, x: np.ndarray, axes: tuple[int, ...] = (0, 2, 3), **attributes: Any) -> tuple[np.ndarray, ...]:
        data, along = wide(x), tuple(axes)
        centered = data - data.mean(axis=along, keepdims=True)
        return ((centered / (np.sqrt((centered**2).mean(axis=along, keepdims=True)) + 1e-9)).astype(x.dtype),)


@dataclass(frozen=True)
class Windows:
    """Windows over data of known size; one entry per spatial axis.

    ``pads_end`` is the node's attribute; ``reach_end`` is how far the last window reaches beyond the data: more for a rounded-up
    output size, less for trailing elements that no window reaches.
    """

    kernel: list[int]
    strides: list[int]
    dilations: list[int]
    pads_begin: list[int]
    pads_end: list[int]
    reach_end: list[int]
    counts: list[int]

    @property
    def rank(self) -> int:
        return len(self.kernel)

    @staticmethod
    def of(extents: Sequence[int], kernel: Sequence[int], attributes: dict[str, Any]) -> Windows:
        """Return the windows of a convolution or pool over data of these spatial extents."""
        rank = len(kernel)
        strides, dilations = (listed(attributes.get(name), 1, rank) for name in ("strides", "dilations"))
        pads, mode = listed(attributes.get("pads"), 0, 2 * rank), attributes.get("auto_pad") or "NOTSET"
        spans = [(size - 1) * dilation + 1 for size, dilation in zip(kernel, dilations, strict=True)]
        begin, end = pads[:rank], pads[rank:]
        if mode == "VALID":
            begin, end = [0] * rank, [0] * rank
        elif mode in ("SAME_UPPER", "SAME_LOWER"):
            totals = [same_padding(*axis) or 0 for axis in zip(extents, spans, strides, strict=True)]
            begin, end = map(list, split_padding(totals, more_at_end=mode == "SAME_UPPER"))
        rounded_up = bool(attributes.get("ceil_mode")) and not mode.startswith("SAME")
        counts, reach_end = [], []
        for axis in range(rank):
            room = extents[axis] + begin[axis] + end[axis] - spans[axis]
            count = room // strides[axis] + 1
            # A window that would start after the data is left out.
            if rounded_up and room % strides[axis] and count * strides[axis] < extents[axis] + begin[axis]:
                count += 1
            counts.append(count)
            reach_end.append((count - 1) * strides[axis] + spans[axis] - begin[axis] - extents[axis])
        return Windows(list(kernel), strides, dilations, begin, end, reach_end, counts)

    def view(self, x: np.ndarray, outside: Any) -> np.ndarray:
        """Return ``x`` [N, C, *space] as [N, C, *counts, *kernel], with ``outside`` beyond the data."""
        rank = self.rank
        cropped = x[(..., *(slice(None, min(reach, 0) or None) for reach in self.reach_end))]
        around = [(0, 0), (0, 0), *((begin, max(reach, 0)) for begin, reach in zip(self.pads_begin, self.reach_end, strict=True))]
        padded = np.pad(cropped, around, constant_values=outside)
        spans = [(size - 1) * dilation + 1 for size, dilation in zip(self.kernel, self.dilations, strict=True)]
        seen = sliding_window_view(padded, spans, axis=tuple(range(2, rank + 2)))
        steps = [slice(None, None, step) for step in (*self.strides, *self.dilations)]
        return seen[(slice(None), slice(None), *steps)]

    def counted(self, extents: Sequence[int], include_pads: bool) -> np.ndarray:
        """Return the number of elements of each window [*counts] inside data of these extents, or inside its pads too."""
        total = np.ones(())
        for axis, extent in enumerate(extents):
            first = np.arange(self.counts[axis])[:, None] * self.strides[axis] - self.pads_begin[axis]
            places = first + np.arange(self.kernel[axis]) * self.dilations[axis]
            inside = places < extent + self.pads_end[axis] if include_pads else (places >= 0) & (places < extent)
            total = np.multiply.outer(total, inside.sum(axis=1))
        return total


class Conv(Operator):
    """Products of the weight with windows of the data."""

    def _run(
        self, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None, group: int = 1, **attributes: Any
    ) -> tuple[np.ndarray, ...]:
        windows = Windows.of(x.shape[2:], w.shape[2:], attributes)
        rank, (images, channels), outputs = windows.rank, x.shape[:2], w.shape[0]
        if channels != w.shape[1] * group or outputs % group:
            raise ValueError(f"{channels} channels, a weight of shape {w.shape} and {group} groups do not fit together")
        seen = windows.view(wide(x), 0).reshape(images, group, channels // group, *windows.counts, *windows.kernel)
        # [group, images and windows, channels and kernel] times [group, channels and kernel, outputs]
        rows = np.moveaxis(seen, (1, 2), (0, rank + 2)).reshape(group, -1, w[0].size)
        columns = wide(w).reshape(group, outputs // group, -1).transpose(0, 2, 1)
        y = (rows @ columns).reshape(group, images, *windows.counts, outputs // group)
        y = np.moveaxis(y, (0, -1), (1, 2)).reshape(images, outputs, *windows.counts)
        return (_biased(y, bias).astype(x.dtype),)


class ConvTranspose(Operator):
    """Each element of the data times the weight, added up at the windows of the transposed convolution."""

    def _run(
        self, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None, group: int = 1, **attributes: Any
    ) -> tuple[np.ndarray, ...]:
        kernel, (images, channels), sizes = w.shape[2:], x.shape[:2], x.shape[2:]
        rank, outputs = len(kernel), w.shape[1] * group
        if channels != w.shape[0] or channels % group:
            raise ValueError(f"{channels} channels, a weight of shape {w.shape} and {group} groups do not fit together")
        strides, dilations = (listed(attributes.get(name), 1, rank) for name in ("strides", "dilations"))
        padding = listed(attributes.get("output_padding"), 0, rank)
        spans = [(size - 1) * dilation + 1 for size, dilation in zip(kernel, dilations, strict=True)]
        full = [(sizes[axis] - 1) * strides[axis] + spans[axis] + padding[axis] for axis in range(rank)]
        data = wide(x).reshape(images, group, channels // group, -1)
        weight = wide(w).reshape(group, channels // group, outputs // group, *kernel)
        y = np.zeros((images, outputs, *full), data.dtype)
        for tap in np.ndindex(*kernel):
            product = np.swapaxes(weight[(slice(None),) * 3 + tap], 1, 2) @ data
            places = [
                slice(first := place * dilation, first + (size - 1) * stride + 1, stride)
                for place, dilation, size, stride in zip(tap, dilations, sizes, strides, strict=True)
            ]
            y[(slice(None), slice(None), *places)] += product.reshape(images, outputs, *sizes)
        begin, end = _crops(full, sizes, strides, rank, attributes)
        kept = [slice(begin[axis], full[axis] - end[axis]) for axis in range(rank)]
        return (_biased(y[(slice(None), slice(None), *kept)], bias).astype(x.dtype),)


def _crops(
    full: list[int], sizes: tuple[int, ...], strides: list[int], rank: int, attributes: dict[str, Any]
) -> tuple[list[int], list[int]]:
    """Return the numbers of elements removed before and after the whole sum."""
    mode, wanted = attributes.get("auto_pad") or "NOTSET", attributes.get("output_shape")
    if wanted is None and mode == "VALID":
        return [0] * rank, [0] * rank
    if wanted is None and mode == "NOTSET":
        pads = listed(attributes.get("pads"), 0, 2 * rank)
        return pads[:rank], pads[rank:]
    target = [sizes[axis] * strides[axis] for axis in range(rank)] if wanted is None else list(wanted)[-rank:]
    totals = [extent - number for extent, number in zip(full, target, strict=True)]
    if min(totals) < 0:
        raise ValueError(f"the output shape {target} is larger than what the windows reach, {full}")
    begin, end = split_padding(totals, more_at_end=mode == "SAME_UPPER")
    return list(begin), list(end)


def _biased(y: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    return y if bias is None else y + per_channel(wide(bias), y.ndim)


class MaxPool(Operator):
    """The first largest element of each window, and its index in all of the data."""

    def _run(self, x: np.ndarray, kernel_shape: list[int], storage_order: int = 0, **attributes: Any) -> tuple[np.ndarray, ...]:
        windows = Windows.of(x.shape[2:], kernel_shape, attributes)
        lowest = -np.inf if x.dtype.kind not in "iu" else np.iinfo(x.dtype).min
        seen = windows.view(x, lowest)
        flat = seen.reshape(*seen.shape[: 2 + windows.rank], -1)
        first = flat.argmax(axis=-1)
        y = np.take_along_axis(flat, first[..., None], axis=-1)[..., 0]
        if len(self.output) < 2:
            return (y,)
        positions = windows.view(_positions(x.shape, by_column=bool(storage_order)), -1).reshape(flat.shape)
        return y, np.take_along_axis(positions, first[..., None], axis=-1)[..., 0]


class AveragePool(Operator):
    """The mean over the counted elements of each window: those inside the data, or inside its pads too, but none beyond."""

    def _run(
        self, x: np.ndarray, kernel_shape: list[int], count_include_pad: int = 0, **attributes: Any
    ) -> tuple[np.ndarray, ...]:
        windows = Windows.of(x.shape[2:], kernel_shape, attributes)
        total = windows.view(wide(x), 0).sum(axis=tuple(range(-windows.rank, 0)))
        numbers = windows.counted(x.shape[2:], include_pads=bool(count_include_pad))
        return ((total / numbers.astype(total.dtype)).astype(x.dtype),)


class LpPool(Operator):
    """The p-norm of each window."""

    def _run(self, x: np.ndarray, kernel_shape: list[int], p: int = 2, **attributes: Any) -> tuple[np.ndarray, ...]:
        windows = Windows.of(x.shape[2:], kernel_shape, attributes)
        powers = windows.view(np.abs(wide(x)) ** p, 0).sum(axis=tuple(range(-windows.rank, 0)))
        return (_root(powers, p).astype(x.dtype),)


class GlobalLpPool(Operator):
    """The p-norm of each channel; the evaluator has none."""

    def _run(self, x: np.ndarray, p: int = 2, **attributes: Any) -> tuple[np.ndarray, ...]:
        powers = (np.abs(wide(x)) ** p).sum(axis=tuple(range(2, x.ndim)), keepdims=True)
        return (_root(powers, p).astype(x.dtype),)


class GlobalMaxPool(Operator):
    """The largest element of each channel; the evaluator only has it for images."""

    def _run(self, x: np.ndarray, **attributes: Any) -> tuple[np.ndarray, ...]:
        return (x.max(axis=tuple(range(2, x.ndim)), keepdims=True),)


class MaxUnpool(Operator):
    """Elements at the flat output positions of their indices, in the importer's form; zero elsewhere."""

    def _run(
        self, x: np.ndarray, indices: np.ndarray, output_shape: np.ndarray | None = None, **attributes: Any
    ) -> tuple[np.ndarray, ...]:
        kernel = attributes["kernel_shape"]
        rank = len(kernel)
        strides, pads = listed(attributes.get("strides"), 1, rank), listed(attributes.get("pads"), 0, 2 * rank)
        spatial = [
            (x.shape[axis + 2] - 1) * strides[axis] - pads[axis] - pads[axis + rank] + kernel[axis] for axis in range(rank)
        ]
        shape = [*x.shape[:2], *spatial] if output_shape is None else [int(extent) for extent in output_shape]
        flat = np.zeros(prod(shape), x.dtype)
        flat[indices.reshape(-1)] = x.reshape(-1)
        return (flat.reshape(shape),)


def _root(powers: np.ndarray, p: int) -> np.ndarray:
    if p == 1:
        return powers
    return np.sqrt(powers) if p == 2 else powers ** (1 / p)


def _positions(shape: tuple[int, ...], by_column: bool) -> np.ndarray:
    """Return the number of each element, in row-major order; or in column order of the last two axes."""
    if not by_column or len(shape) < 4:
        return np.arange(prod(shape)).reshape(shape)
    exchanged = (*shape[:-2], shape[-1], shape[-2])
    return np.swapaxes(np.arange(prod(shape)).reshape(exchanged), -1, -2)


class Resize(EvaluatorResize):
    """With coordinates from end to end, the resized length is its integer extent, not the product with the scale."""

    op_domain = ""

    def _run(self, x: np.ndarray, roi: Any = None, scales: Any = None, sizes: Any = None, **attributes: Any) -> Any:  # type: ignore[override]
        by_ends = attributes.get("coordinate_transformation_mode") in ("align_corners", "tf_crop_and_resize")
        if by_ends and scales is not None and len(scales):
            extents = np.array([x.shape[axis] for axis in attributes.get("axes") or range(x.ndim)])
            scales, sizes = None, np.floor(extents.astype(np.float32) * scales).astype(np.int64)
        return super()._run(x, roi, scales, sizes, **attributes)


CUBIC_A = -0.75
Taps = list[tuple[np.ndarray, np.ndarray]]
"""Positions and weights of each tap along one axis, in the points' shape."""


class GridSample(Operator):
    """Interpolation at the points of a grid, in any number of dimensions."""

    def _run(
        self,
        x: np.ndarray,
        grid: np.ndarray,
        mode: str = "linear",
        padding_mode: str = "zeros",
        align_corners: int = 0,
    ) -> tuple[np.ndarray, ...]:
        data = wide(x)
        along = []
        for axis, size in enumerate(x.shape[2:]):
            numbers = grid[..., -1 - axis].reshape(len(grid), math.prod(grid.shape[1:-1])).astype(data.dtype)
            position = (numbers + 1) / 2 * (size - 1) if align_corners else ((numbers + 1) * size - 1) / 2
            along.append(_taps(position, size, mode, padding_mode, bool(align_corners)))
        return (_read(data, along).reshape(*x.shape[:2], *grid.shape[1:-1]).astype(x.dtype),)


class AffineGrid(Operator):
    """The images of pixel positions (from -1 to 1) under an affine map."""

    def _run(self, theta: np.ndarray, size: np.ndarray, align_corners: int = 0) -> tuple[np.ndarray, ...]:
        spatial = [int(extent) for extent in size[2:]]
        dtype = wide(theta).dtype
        axes = []
        for extent in spatial:
            if align_corners:
                axes.append(np.linspace(-1, 1, extent, dtype=dtype) if extent > 1 else np.zeros(1, dtype))
            else:
                axes.append((2 * np.arange(extent, dtype=dtype) + 1) / extent - 1)
        places = [*reversed(np.meshgrid(*axes, indexing="ij")), np.ones(spatial, dtype)]
        grid = np.einsum("nij,j...->n...i", wide(theta), np.stack(places))
        return (grid.astype(theta.dtype),)


class DeformConv(Operator):
    """A convolution over points that are moved by offsets and weighted by a mask; zeros outside the data."""

    def _run(
        self,
        x: np.ndarray,
        w: np.ndarray,
        offset: np.ndarray,
        bias: np.ndarray | None = None,
        mask: np.ndarray | None = None,
        group: int = 1,
        offset_group: int = 1,
        strides: Sequence[int] | None = None,
        dilations: Sequence[int] | None = None,
        pads: Sequence[int] | None = None,
        **_: Any,
    ) -> tuple[np.ndarray, ...]:
        images, channels, *spatial = x.shape
        axes, kernel, output = len(spatial), w.shape[2:], offset.shape[2:]
        step, spacing = listed(strides, 1, axes), listed(dilations, 1, axes)
        begin = listed(pads, 0, 2 * axes)[:axes]
        data = wide(x).reshape(images * offset_group, channels // offset_group, *spatial)
        moves = wide(offset).reshape(len(data), *kernel, axes, *output)
        along, points = [], math.prod(kernel) * math.prod(output)
        for axis, size in enumerate(spatial):
            inside = np.arange(kernel[axis]) * spacing[axis] - begin[axis]
            starts = np.arange(output[axis]) * step[axis]
            places = np.expand_dims(inside, [a for a in range(2 * axes) if a != axis])
            places = places + np.expand_dims(starts, [a for a in range(2 * axes) if a != axes + axis])
            position = (np.take(moves, axis, axis=1 + axes) + places.astype(data.dtype)).reshape(len(data), points)
            along.append(_taps(position, size, "linear", "zeros", aligned=False))
        read = _read(data, along)
        if mask is not None:
            read = read * wide(mask).reshape(len(data), 1, points)
        columns = read.reshape(images, group, channels // group * math.prod(kernel), math.prod(output))
        y = np.matmul(wide(w).reshape(group, len(w) // group, -1), columns).reshape(images, len(w), *output)
        if bias is not None:
            y = y + wide(bias).reshape(-1, *[1] * axes)
        return (y.astype(x.dtype),)


class MaxRoiPool(Operator):
    """The largest element of each bin of each region, whose corners are rounded to whole elements; zero for an empty bin."""

    def _run(
        self, x: np.ndarray, rois: np.ndarray, pooled_shape: Sequence[int], spatial_scale: float = 1.0
    ) -> tuple[np.ndarray, ...]:
        y = np.zeros((len(rois), x.shape[1], *pooled_shape), x.dtype)
        for region, (image, *corners) in enumerate(rois):
            left, top, right, bottom = (
                float(np.sign(n) * np.floor(np.abs(n) + 0.5)) for n in np.asarray(corners) * rois.dtype.type(spatial_scale)
            )
            rows, columns = (
                _bins(start, end, number, size, rois.dtype)
                for start, end, number, size in zip((top, left), (bottom, right), pooled_shape, x.shape[2:], strict=True)
            )
            for (i, row), (j, column) in product(enumerate(rows), enumerate(columns)):
                box = x[int(image), :, row, column]
                if box.size:
                    y[region, :, i, j] = box.max(axis=(1, 2))
        return (y,)


def _bins(start: float, end: float, number: int, size: int, dtype: np.dtype) -> list[slice]:
    length = dtype.type(max(end - start + 1, 1)) / dtype.type(number)
    limits = [(np.floor(place * length) + start, np.ceil((place + 1) * length) + start) for place in range(number)]
    return [slice(int(np.clip(begin, 0, size)), int(np.clip(stop, 0, size))) for begin, stop in limits]


def _taps(position: np.ndarray, size: int, mode: str, padding: str, aligned: bool) -> Taps:
    """Return the elements around points along an axis; padding moves the points, or for cubic interpolation the elements."""
    is_cubic = mode in ("cubic", "bicubic")
    place = _padded(padding, size, aligned)
    if not is_cubic:
        position = place(position)
    if mode == "nearest":
        base, weights = np.round(position), [np.ones_like(position)]
    else:
        base = np.floor(position)
        fraction = position - base
        weights = _cubic(fraction) if is_cubic else [1 - fraction, fraction]
    taps = []
    for number, weight in enumerate(weights):
        at = base + number - (1 if is_cubic else 0)
        at = place(at) if is_cubic else at
        inside = np.clip(at, 0, size - 1)
        taps.append((inside.astype(np.int64), np.where(inside == at, weight, 0) if padding == "zeros" else weight))
    return taps


def _padded(padding: str, size: int, aligned: bool) -> Callable[[np.ndarray], np.ndarray]:
    if padding == "zeros":
        return lambda places: places
    if padding == "border":
        return lambda places: np.clip(places, 0, size - 1)
    first, span = (0.0, max(size - 1, 1)) if aligned else (-0.5, size)

    def reflected(places: np.ndarray) -> np.ndarray:
        return np.clip(span - np.abs(np.mod(places - first, 2 * span) - span) + first, 0, size - 1)

    return reflected


def _cubic(fraction: np.ndarray) -> list[np.ndarray]:
    """Return the weights of the cubic convolution kernel (Keys, 1981) at the four surrounding elements."""
    weights = []
    for distance in (1 + fraction, fraction, 1 - fraction, 2 - fraction):
        near = ((CUBIC_A + 2) * distance - (CUBIC_A + 3)) * distance**2 + 1
        far = CUBIC_A * (((distance - 5) * distance + 8) * distance - 4)
        weights.append(np.where(distance <= 1, near, far))
    return weights


def _read(data: np.ndarray, along: Sequence[Taps]) -> np.ndarray:
    """Return images ``[N, C, spatial]`` at points, as sums over the products of the axes' taps: ``[N, C, points]``."""
    flat = data.reshape(*data.shape[:2], math.prod(data.shape[2:]))
    total = np.zeros((*data.shape[:2], along[0][0][0].shape[1]), data.dtype)
    for taps in product(*along):
        place, weight = np.zeros((), np.int64), np.ones((), data.dtype)
        for size, (places, weights) in zip(data.shape[2:], taps, strict=True):
            place, weight = place * size + places, weight * weights
        total += weight[:, None] * np.take_along_axis(flat, place[:, None], axis=2)
    return total


OPERATORS: list[type[OpRun]] = [
    AffineGrid,
    Attention,
    AveragePool,
    Conv,
    ConvTranspose,
    DeformConv,
    DequantizeLinear,
    Erf,
    GatherElements,
    Gelu,
    GlobalLpPool,
    GlobalMaxPool,
    GridSample,
    GroupNormalization,
    HardSwish,
    LRN,
    LayerNormalization,
    LogSoftmax,
    Loop,
    LpNormalization,
    LpPool,
    MaxPool,
    MaxRoiPool,
    MaxUnpool,
    Mean,
    MeanVarianceNormalization,
    Pad,
    ReduceLogSumExp,
    Resize,
    Scan,
    Softsign,
    Unique,
]

__all__ = ["OPERATORS"]
