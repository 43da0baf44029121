"""Gradients in buckets: one exchange for many of them, begun as soon as the last of the bucket is computed.

The reverse pass comes to the parameters of the last layer first. While a bucket is exchanged it goes on, and the update of the
parameters waits for all of them.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from burnish.graph import (
    BURNISH_DOMAIN,
    Builder,
    Tensor,
    attribute_value,
    remove_node,
    replace_node,
    replace_uses,
    static_shape,
)
from burnish.ops.collectives import ALL_REDUCE_FINISH, ALL_REDUCE_START, OWN_GRADIENTS


def bucket_gradients(graph: ir.Graph, bucket_size: int, accumulating: bool = False) -> None:
    """Replace, in place, the exchanges of gradients by exchanges of buckets of them.

    Args:
        graph: a training graph in order, which exchanges each gradient by itself.
        bucket_size: the bytes from which on a bucket is full.
        accumulating: put ``OwnGradients`` in place of the exchange of a bucket; what is accumulated is exchanged instead.
    """
    position = {node: index for index, node in enumerate(graph)}
    nodes = list(graph)

    def ready(node: ir.Node) -> int:
        producers = [value.producer() for value in node.inputs if value is not None]
        return max((position[producer] for producer in producers if producer is not None), default=-1)

    exchanges = [node for node in nodes if node.domain == BURNISH_DOMAIN and attribute_value(node, "purpose", "") == "gradient"]
    buckets: list[list[ir.Node]] = []
    size = 0
    for node in sorted(exchanges, key=ready):
        value = node.inputs[0]
        assert value is not None
        first = buckets[-1][0].inputs[0] if buckets else None
        if first is None or size >= bucket_size or first.dtype != value.dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(node)
        size += int(math.prod(static_shape(value) or ()) * (4 if value.dtype is None else value.dtype.itemsize))
    if accumulating:
        own = [_leave_own(graph, bucket, nodes[max(map(ready, bucket)) + 1]) for bucket in buckets]
        for bucket, results in zip(buckets, own, strict=True):
            for node, result in zip(bucket, results, strict=True):
                replace_node(node, result)
        return
    started = [_start(graph, bucket, nodes[max(map(ready, bucket)) + 1]) for bucket in buckets]
    for bucket, buffer in zip(buckets, started, strict=True):
        _finish(graph, bucket, max(bucket, key=position.__getitem__), buffer)


def _start(graph: ir.Graph, bucket: list[ir.Node], behind: ir.Node) -> ir.Value:
    """Begin to exchange a bucket, before the node ``behind``."""
    builder = Builder(graph, before=behind)
    counted = attribute_value(bucket[0], "counted", 0)
    gradients = [builder.tensor(node.inputs[0]) for node in bucket if node.inputs[0] is not None]
    samples = [builder.tensor(value) for value in bucket[0].inputs[1:] if value is not None]
    return ALL_REDUCE_START(*gradients, *samples, purpose="gradient", counted=counted or None).value


def _finish(graph: ir.Graph, bucket: list[ir.Node], last: ir.Node, buffer: ir.Value) -> None:
    """Wait for a bucket where the last of its gradients was exchanged."""
    builder = Builder(graph, before=last)
    gradients = [builder.tensor(node.inputs[0]) for node in bucket if node.inputs[0] is not None]
    results = ALL_REDUCE_FINISH.emit(builder.tensor(buffer), *gradients)
    for node, result in zip(bucket, results, strict=True):
        output = node.outputs[0]
        name, is_output = output.name, output.is_graph_output()
        replace_uses(output, result.value)
        if is_output:
            output.name = None
            result.value.name = name
        remove_node(node)


def _leave_own(graph: ir.Graph, bucket: list[ir.Node], behind: ir.Node) -> tuple[Tensor, ...]:
    """Emit what this worker has of the gradients of a bucket, zeros where it has no samples, before the node ``behind``."""
    builder = Builder(graph, before=behind)
    gradients = [builder.tensor(node.inputs[0]) for node in bucket if node.inputs[0] is not None]
    samples = [builder.tensor(value) for value in bucket[0].inputs[1:] if value is not None]
    counted = attribute_value(bucket[0], "counted", 0)
    return OWN_GRADIENTS.emit(*gradients, *samples, counted=counted or None)
