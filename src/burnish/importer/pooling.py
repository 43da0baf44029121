"""Pools, written so that every version and every runtime gives them as many windows and the same divisor.

Since opset 22 the standard says that a window which would start in the padding after the data is left out. Runtimes never had
such windows, also in older opsets, but the standard's inference counts them there: the declared size is one too large. Average
pools that count padding and round their size up have a last window that may reach beyond the padding; what lies there is not
counted. ONNX Runtime before 1.29 divides by the size of the whole window all the same. If the padding is part of the data,
nothing is left to count next to it, and all runtimes agree.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from burnish.errors import UnsupportedOperatorError
from burnish.graph import Builder, attribute_value, describe_node, static_dimension
from burnish.graph.uses import is_used
from burnish.importer.explicit_pads import POOLS
from burnish.importer.shapes import infer_shapes


def drop_windows_in_padding(model: ir.Model) -> None:
    """Write, in place, each pool with such a window without it: its output size needs no rounding up there.

    Where spatial sizes are symbolic, nodes stay as they are: nothing is inferred from them.

    Raises:
        UnsupportedOperatorError: max pooling in that case, of which the places of the maxima are read.
    """
    while pools := [node for graph in model.graphs() for node in graph if _is_rounded_up(node)]:
        # What follows a pool of the wrong size may not fit, so inference goes on as far as it can.
        infer_shapes(model, strict=False)
        node = next((node for node in pools if any(axis.has_dropped for axis in _axes(node))), None)
        if node is None:
            return
        _write_without(node)


@dataclass(frozen=True)
class _Axis:
    """One spatial axis of a pool; ``size`` is None where it is symbolic."""

    size: int | None
    begin: int
    end: int
    stride: int
    span: int

    @property
    def leftover(self) -> int:
        """How many trailing entries of the padded data no window reaches when the output size is rounded down."""
        return 0 if self.size is None else (self.size + self.begin + self.end - self.span) % self.stride

    @property
    def has_dropped(self) -> bool:
        """Whether rounding up adds a window that would start after the data and the padding before it."""
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
    # Another axis needs the rounding: here the padding after the data ends where the last window ends, or the data does.
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


def count_padding_as_data(model: ir.Model) -> None:
    """Write, in place, the padding of such pools as a Pad of zeros before them, and leave it out where there is none.

    A pool with padding whose spatial sizes are symbolic stays as it is: which windows start in the padding is not known.
    """
    for graph in model.graphs():
        for node in list(graph):
            if _counts_padding(node) and _may_pad(node):
                _write(node, graph)


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


def _write(node: ir.Node, graph: ir.Graph) -> None:
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
