"""Average pools that count padding and round their output size up, written so that every runtime divides by the same counts.

A last window may reach beyond the padding; what lies there is not counted. ONNX Runtime before 1.29 divides by the size of the
whole window all the same. Where the padding is part of the data, nothing is left to count beside it, and all runtimes agree.
"""

from __future__ import annotations

import onnx_ir as ir

from burnish.graph import Builder, attribute_value, static_dimension


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
