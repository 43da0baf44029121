"""Gradients in buckets: one exchange for many of them, begun as soon as the last of the bucket is computed.

The reverse pass comes to the parameters of the last layer first. While a bucket is exchanged it goes on, and the update of the
parameters waits for all of them.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from burnish.graph import BURNISH_DOMAIN, Builder, attribute_value, replace_node, static_shape
from burnish.operators.collectives import ALL_REDUCE_FINISH, ALL_REDUCE_START, OWN_GRADIENTS


def bucket_gradients(graph: ir.Graph, bucket_size: int, accumulating: bool = False) -> None:
    """Replace, in place, the exchanges of gradients by exchanges of buckets of them.

    Args:
        graph: a training graph in order, which exchanges each gradient by itself.
        bucket_size: a bucket of this many bytes, or more, is full.
        accumulating: put ``OwnGradients`` in place of the exchange of a bucket; what is accumulated is exchanged instead.
    """
    nodes = list(graph)
    position = {node: index for index, node in enumerate(nodes)}

    def ready(exchange: ir.Node) -> int:
        """The position of the node that computes the last operand."""
        producers = [value.producer() for value in exchange.inputs if value is not None]
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

    operator, purpose = (OWN_GRADIENTS, None) if accumulating else (ALL_REDUCE_START, "gradient")
    begun = []
    for bucket in buckets:
        builder = Builder(graph, before=nodes[max(map(ready, bucket)) + 1])
        gradients, samples = builder.tensors(node.inputs[0] for node in bucket), builder.tensors(bucket[0].inputs[1:])
        begun.append(operator.emit(*gradients, *samples, purpose=purpose, counted=attribute_value(bucket[0], "counted", None)))
    for bucket, results in zip(buckets, begun, strict=True):
        if not accumulating:
            builder = Builder(graph, before=max(bucket, key=position.__getitem__))
            results = ALL_REDUCE_FINISH.emit(*builder.tensors([results[0].value, *(node.inputs[0] for node in bucket)]))
        for node, result in zip(bucket, results, strict=True):
            replace_node(node, result)
