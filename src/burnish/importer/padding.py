"""Explicit padding of convolutions and pools, with the same windows and divisors on every runtime.

``auto_pad`` and the ``output_shape`` of transposed convolutions become explicit pads: runtimes differ in their treatment with
dilations, output padding and rounded-up sizes, and the standard's inference differs from all of them.

Since opset 22 the standard omits windows that would start in the padding after the data. Runtimes never had them, but the
inference of older opsets does, so the declared size is one too large. Average pools that count padding and round up may have a
last window that exceeds the padding, where nothing counts; but ONNX Runtime before 1.29 divides by the full window. With the
padding written as data, all runtimes agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from burnish.errors import ModelError, UnsupportedOperatorError
from burnish.graph import Builder, attribute_value, describe_node, same_padding, split_padding, static_dimension
from burnish.graph.uses import is_used
from burnish.importer.shapes import infer_shapes

CONVOLUTIONS = {"Conv": 1, "ConvInteger": 1, "ConvTranspose": 1, "QLinearConv": 3}
POOLS = frozenset({"AveragePool", "LpPool", "MaxPool"})
_NOT_SET = ("NOTSET", "")


def write_pads(model: ir.Model) -> bool:
    """Write explicit pads, in place, if they follow from the attributes or from known sizes.

    Other nodes stay: their padding depends on a symbolic size.
    """
    nodes = [node for graph in model.graphs() for node in graph if _has_implicit_pads(node)]
    waiting = [node for node in nodes if not _write(node)]
    written = len(waiting) < len(nodes)
    if any(_sizes(node) for node in waiting):
        # The declared size of a node with implicit pads may differ from the runtimes', so that its readers do not fit.
        infer_shapes(model, strict=False)
        written |= any([_write(node) for node in waiting])
    return written


def _has_implicit_pads(node: ir.Node) -> bool:
    if node.domain != "" or (node.op_type not in CONVOLUTIONS and node.op_type not in POOLS):
        return False
    return attribute_value(node, "auto_pad", "NOTSET") not in _NOT_SET or "output_shape" in node.attributes


def _write(node: ir.Node) -> bool:
    kernel = _kernel(node)
    if kernel is None:
        return False
    if node.op_type == "ConvTranspose":
        return _write_transposed(node, kernel)
    mode = attribute_value(node, "auto_pad", "NOTSET")
    if mode == "VALID":
        _set_pads(node, [0] * len(kernel), [0] * len(kernel))
        return True
    strides, spans = _strides(node, kernel), _spans(node, kernel)
    totals = [same_padding(*axis) for axis in zip(_sizes(node), spans, strides, strict=True)]
    known = [total for total in totals if total is not None]
    if len(known) < len(kernel):
        return False
    _set_pads(node, *split_padding(known, more_at_end=mode == "SAME_UPPER"))
    # The output size is the data's, divided and rounded up, whatever the rounding attribute.
    node.attributes.pop("ceil_mode", None)
    return True


def _write_transposed(node: ir.Node, kernel: Sequence[int]) -> bool:
    """Write pads that cut the output to the data's size times the stride, or to ``output_shape``."""
    rank, mode = len(kernel), attribute_value(node, "auto_pad", "NOTSET")
    strides, spans = _strides(node, kernel), _spans(node, kernel)
    padding = list(_by_axis(node, "output_padding", 0, kernel))
    output_shape = attribute_value(node, "output_shape", None)
    if output_shape is not None and len(output_shape) < rank:
        raise _ill_counted(node, "output_shape", len(output_shape), rank)
    if output_shape is None and mode == "VALID":
        _set_pads(node, [0] * rank, [0] * rank)
        return True
    totals = []
    for axis, size in enumerate(_sizes(node)):
        last = spans[axis] + padding[axis]
        if output_shape is None:
            totals.append(last - strides[axis])
        elif size is None:
            return False
        else:
            totals.append((size - 1) * strides[axis] + last - output_shape[axis - rank])
    if output_shape is not None and min(totals) < 0:
        return False
    _set_pads(node, *split_padding([max(total, 0) for total in totals], more_at_end=mode == "SAME_UPPER"))
    if min(totals) < 0:
        padding = [more + max(-total, 0) for more, total in zip(padding, totals, strict=True)]
        node.attributes["output_padding"] = ir.AttrInt64s("output_padding", padding)
    node.attributes.pop("output_shape", None)
    return True


def _set_pads(node: ir.Node, begin: Sequence[int], end: Sequence[int]) -> None:
    node.attributes.pop("auto_pad", None)
    node.attributes["pads"] = ir.AttrInt64s("pads", [*begin, *end])


def _kernel(node: ir.Node) -> Sequence[int] | None:
    declared: Sequence[int] | None = attribute_value(node, "kernel_shape", None)
    if declared is not None or node.op_type not in CONVOLUTIONS:
        return declared
    weight = node.inputs[CONVOLUTIONS[node.op_type]]
    if weight is None or weight.shape is None:
        return None
    sizes = [static_dimension(weight.shape, axis) for axis in range(2, len(weight.shape))]
    known = [size for size in sizes if size is not None]
    return known if sizes and len(known) == len(sizes) else None


def _sizes(node: ir.Node) -> list[int | None]:
    data, kernel = node.inputs[0], _kernel(node)
    if data is None or kernel is None:
        return []
    return [static_dimension(data.shape, axis + 2) for axis in range(len(kernel))]


def _strides(node: ir.Node, kernel: Sequence[int]) -> Sequence[int]:
    return _by_axis(node, "strides", 1, kernel)


def _by_axis(node: ir.Node, name: str, default: int, kernel: Sequence[int]) -> Sequence[int]:
    """Return an attribute with an integer per axis of the kernel.

    Raises:
        ModelError: it has another number of them.
    """
    values: Sequence[int] = attribute_value(node, name, [default] * len(kernel))
    if len(values) != len(kernel):
        raise _ill_counted(node, name, len(values), len(kernel))
    return values


def _ill_counted(node: ir.Node, name: str, count: int, rank: int) -> ModelError:
    return ModelError(
        f"{describe_node(node)} has {count} numbers in '{name}', and a kernel of {rank} axes: export the model again"
    )


def _spans(node: ir.Node, kernel: Sequence[int]) -> list[int]:
    dilations = _by_axis(node, "dilations", 1, kernel)
    return [(size - 1) * dilation + 1 for size, dilation in zip(kernel, dilations, strict=True)]


def drop_windows_in_padding(model: ir.Model) -> bool:
    """Rewrite, in place, pools with windows that start in the padding after the data, so that no rounding up is needed.

    Nodes with symbolic spatial sizes stay: nothing is inferred from them.

    Raises:
        UnsupportedOperatorError: max pooling in that case whose indices are read.
    """
    changed = False
    while pools := [node for graph in model.graphs() for node in graph if _is_rounded_up(node)]:
        # Readers of a pool with a wrong size may not fit; infer as far as possible.
        infer_shapes(model, strict=False)
        node = next((node for node in pools if any(axis.has_dropped for axis in _axes(node))), None)
        if node is None:
            break
        _write_without(node)
        changed = True
    return changed


@dataclass(frozen=True)
class _Axis:
    size: int | None
    begin: int
    end: int
    stride: int
    span: int

    @property
    def leftover(self) -> int:
        """Trailing entries of the padded data that no window reaches if the output size is rounded down."""
        return 0 if self.size is None else (self.size + self.begin + self.end - self.span) % self.stride

    @property
    def has_dropped(self) -> bool:
        """True if rounding up adds a window that starts after the data and the padding before it."""
        if self.size is None or not self.leftover:
            return False
        windows = (self.size + self.begin + self.end - self.span) // self.stride + 2
        return (windows - 1) * self.stride >= self.size + self.begin


def _is_rounded_up(node: ir.Node) -> bool:
    return node.op_type in POOLS and node.domain == "" and bool(attribute_value(node, "ceil_mode", 0))


def _axes(node: ir.Node) -> list[_Axis]:
    data = node.inputs[0]
    kernel = attribute_value(node, "kernel_shape", ())
    rank = len(kernel)
    if data is None or attribute_value(node, "auto_pad", "NOTSET") not in ("NOTSET", ""):
        return []
    pads = attribute_value(node, "pads", [0] * 2 * rank)
    strides = attribute_value(node, "strides", [1] * rank)
    dilations = attribute_value(node, "dilations", [1] * rank)
    return [
        _Axis(
            static_dimension(data.shape, axis + 2),
            pads[axis],
            pads[axis + rank],
            strides[axis],
            (kernel[axis] - 1) * dilations[axis] + 1,
        )
        for axis in range(rank)
    ]


def _write_without(node: ir.Node) -> None:
    axes = _axes(node)
    if not any(axis.size is None or (axis.leftover and not axis.has_dropped) for axis in axes):
        node.attributes["ceil_mode"] = ir.AttrInt64("ceil_mode", 0)
        return
    # Another axis needs the rounding: end the padding at the end of the last window or of the data.
    surplus = [axis.leftover if axis.has_dropped else 0 for axis in axes]
    ends = [max(axis.end - entries, 0) for axis, entries in zip(axes, surplus, strict=True)]
    node.attributes["pads"] = ir.AttrInt64s("pads", [*(axis.begin for axis in axes), *ends])
    cropped = {index + 2: axis.end - entries for index, (axis, entries) in enumerate(zip(axes, surplus, strict=True))}
    cropped = {axis: count for axis, count in cropped.items() if count < 0}
    if not cropped:
        return
    if len(node.outputs) > 1 and is_used(node.outputs[1]):
        raise UnsupportedOperatorError(
            f"{describe_node(node)} rounds its output size up (ceil_mode=1) where the last window would lie behind the data, and "
            "the places of its maxima are read: export the model with ceil_mode=0"
        )
    graph, data = node.graph, node.inputs[0]
    assert isinstance(graph, ir.Graph)
    assert data is not None
    builder = Builder(graph, before=node)
    starts, stops = builder.integers([0] * len(cropped)), builder.integers(list(cropped.values()))
    node.replace_input_with(0, builder.op("Slice", builder.tensor(data), starts, stops, builder.integers(list(cropped))).value)


def count_padding_as_data(model: ir.Model) -> bool:
    """Write, in place, the padding of average pools that count it as a Pad of zeros, and omit empty padding.

    Pools with padding and symbolic spatial sizes stay: their windows in the padding are unknown.
    """
    changed = False
    for graph in model.graphs():
        for node in list(graph):
            if _counts_padding(node) and _may_pad(node):
                _write_padding(node, graph)
                changed = True
    return changed


def _counts_padding(node: ir.Node) -> bool:
    return (
        node.op_type == "AveragePool"
        and node.domain == ""
        and bool(attribute_value(node, "ceil_mode", 0))
        and bool(attribute_value(node, "count_include_pad", 0))
        and attribute_value(node, "auto_pad", "NOTSET") in ("NOTSET", "")
    )


def _may_pad(node: ir.Node) -> bool:
    if not any(attribute_value(node, "pads", ())):
        return True
    data = node.inputs[0]
    axes = range(2, 2 + len(attribute_value(node, "kernel_shape", ())))
    return data is not None and all(static_dimension(data.shape, axis) is not None for axis in axes)


def _write_padding(node: ir.Node, graph: ir.Graph) -> None:
    pads = attribute_value(node, "pads", ())
    node.attributes.pop("count_include_pad")
    if not any(pads):
        return
    data, rank = node.inputs[0], len(pads) // 2
    assert data is not None
    builder = Builder(graph, before=node)
    amounts = builder.integers([0, 0, *pads[:rank], 0, 0, *pads[rank:]])
    node.attributes.pop("pads")
    node.replace_input_with(0, builder.op("Pad", builder.tensor(data), amounts).value)
