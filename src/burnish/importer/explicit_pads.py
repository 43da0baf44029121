"""``auto_pad`` of convolutions and pools, and ``output_shape`` of transposed convolutions, as explicit pads.

Runtimes differ in what they do with them beside dilations, output paddings and a rounded-up output size, and the standard's
inference differs from all of them. Explicit pads mean the same everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from burnish.errors import ModelError
from burnish.graph import attribute_value, describe_node, same_padding, split_padding, static_dimension
from burnish.importer.shapes import infer_shapes

CONVOLUTIONS = {"Conv": 1, "ConvInteger": 1, "ConvTranspose": 1, "QLinearConv": 3}
POOLS = frozenset({"AveragePool", "LpPool", "MaxPool"})
_NOT_SET = ("NOTSET", "")


def write_pads(model: ir.Model) -> None:
    """Write, in place, explicit pads wherever they follow from the attributes, or from sizes that are known.

    Other nodes stay as they are: their padding changes with an input of symbolic size.
    """
    nodes = [node for graph in model.graphs() for node in graph if _has_implicit_pads(node)]
    waiting = [node for node in nodes if not _write(node)]
    if any(_sizes(node) for node in waiting):
        # A node of implicit pads may be declared in a size that runtimes do not give it, and what follows not fit.
        infer_shapes(model, strict=False)
        for node in waiting:
            _write(node)


def _has_implicit_pads(node: ir.Node) -> bool:
    if node.domain != "" or (node.op_type not in CONVOLUTIONS and node.op_type not in POOLS):
        return False
    return attribute_value(node, "auto_pad", "NOTSET") not in _NOT_SET or "output_shape" in node.attributes


def _write(node: ir.Node) -> bool:
    """Write the pads of a node; return whether they are known."""
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
    # The output size is that of the data, divided and rounded up, whatever the node says of rounding.
    node.attributes.pop("ceil_mode", None)
    return True


def _write_transposed(node: ir.Node, kernel: Sequence[int]) -> bool:
    """The output has the size of the data times the stride, or ``output_shape``; pads are what is too much for that."""
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
    """The spatial extents of the data; None where one is symbolic."""
    data, kernel = node.inputs[0], _kernel(node)
    if data is None or kernel is None:
        return []
    return [static_dimension(data.shape, axis + 2) for axis in range(len(kernel))]


def _strides(node: ir.Node, kernel: Sequence[int]) -> Sequence[int]:
    return _by_axis(node, "strides", 1, kernel)


def _by_axis(node: ir.Node, name: str, default: int, kernel: Sequence[int]) -> Sequence[int]:
    """An attribute that has an integer for each axis of the kernel.

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
