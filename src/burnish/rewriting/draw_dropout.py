"""Dropout with masks from a seed, for models that run in their exported training mode."""

from __future__ import annotations

import onnx_ir as ir

from burnish.graph import Builder, Tensor, attribute_value, replace_node
from burnish.operators import Operation
from burnish.random import initial_key, keep_mask


def draw_dropout(model: ir.Model, source: int | ir.Value) -> bool:
    """Replace, in place, the main graph's dropout nodes that are or may be in training mode by masks drawn from a key.

    Each node has its own stream. The returned mask is true for kept elements, so everywhere outside training. A mask depends only
    on the shape and the key or seed; with a seed it is the same in every run.

    Args:
        model: a canonical model.
        source: seed of nodes without a ``seed`` attribute, a signed 64-bit integer; or a key in the graph, for all nodes.
    """
    stream = 0
    for node in [node for node in model.graph if node.op_type == "Dropout" and node.domain == ""]:
        op = Operation(node, Builder(model.graph, before=node))
        training = op.optional(2)
        if training is None or (training.array is not None and not training.array.any()):
            continue
        if isinstance(source, ir.Value):
            key = op.builder.tensor(source)
        else:
            seed = attribute_value(node, "seed", None)
            key = op.builder.constant(initial_key(source if seed is None else int(seed)))
        replace_node(node, _dropout(op, training, key, stream)[: len(node.outputs)])
        stream += 1
    return stream > 0


def _dropout(op: Operation, training: Tensor, key: Tensor, stream: int) -> tuple[Tensor, Tensor]:
    """Emit ``where(training, x * mask / (1 - ratio), x)``, zeros for ratio 1, and the mask."""
    builder, x = op.builder, op.input
    ratio = op.optional(1)
    share = builder.scalar(0.5, ir.DataType.DOUBLE) if ratio is None else builder.cast(ratio, ir.DataType.DOUBLE)
    share = builder.op("Reshape", share, builder.integers([]))
    trains = builder.op("Reshape", training, builder.integers([]))
    # Outside training nothing is dropped or scaled.
    share = builder.op("Where", trains, share, builder.scalar(0.0, share), like=share)
    known = None if ratio is None or training.array is None else ratio.array
    mask = keep_mask(builder, key, stream, x, share if known is None else float(known.reshape(())))
    rest = 1.0 - share
    nothing = builder.op("LessOrEqual", rest, 0.0)
    divisor = builder.op("Where", nothing, builder.scalar(1.0, rest), rest, like=rest)
    scale = builder.cast(builder.op("Where", nothing, builder.scalar(0.0, rest), 1.0 / divisor, like=rest), x.dtype)
    return builder.op("Mul", x, builder.cast(mask, x.dtype) * scale, like=x), mask
