"""Attention without a matrix of probabilities: its operators, and the graph passes that insert them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from burnish.graph import Builder, attribute_value, constant_array, replace_value, same_dimension
from burnish.graph.constants import constant_result
from burnish.graph.uses import only_user, producer_of, remove_unread
from burnish.kernels.engine_operator import EngineOperator
from burnish.kernels.replacements import fuses
from burnish.operators.attention import ATTENTION, ATTENTION_GRAD

HEADS = ("query", "key", "value")
FUSED_ATTENTION = EngineOperator("FusedAttention", (*HEADS, "mask"), ("result", "logarithms"))
FUSED_ATTENTION_GRAD = EngineOperator(
    "FusedAttentionGrad", ("flow", *HEADS, "result", "logarithms", "mask"), ("dquery", "dkey", "dvalue")
)
CUDA_ATTENTION = EngineOperator("CudaAttention", (*HEADS, "mask"), ("result", "logarithms", "seed", "offset"))
CUDA_ATTENTION_GRAD = EngineOperator(
    "CudaAttentionGrad", ("flow", *HEADS, "result", "logarithms", "seed", "offset", "mask"), ("dquery", "dkey", "dvalue")
)


HIDES = -3.3e38
"""A number that hides a key when added to its score: -infinity, or anything as low as the least float32 or bfloat16."""

LONGEST_MASK = 1 << 12
"""The number of tokens up to which a mask is evaluated to see what it hides."""

WIDEST_HEAD = 192
"""The largest head size whose gradients flash attention on CUDA supports on every such card."""
ALIGNMENT = 16
"""The number of bytes that CUDA kernels read at once: rows of heads and masks are aligned to it."""


@fuses(ATTENTION, ATTENTION_GRAD)
def fuse_attention(graph: ir.Graph, dtypes: Collection[ir.DataType] = (ir.DataType.FLOAT,)) -> bool:
    """Replace attention of these ``dtypes`` by ``burnish.FusedAttention`` and ``burnish.FusedAttentionGrad``, in place.

    Attention is not replaced if something other than its gradient reads the probabilities, if heads and values differ in width,
    or if the mask has other axes than the kernels support: all four, or the last two.
    """
    found = list(_attention_of(graph, dtypes))
    for node, gradients in found:
        _fuse(node, gradients, FUSED_ATTENTION, FUSED_ATTENTION_GRAD)
    return bool(found)


def use_cuda_attention(graph: ir.Graph, dtypes: Collection[ir.DataType], opset: int) -> bool:
    """Replace attention of these ``dtypes`` by ``burnish.CudaAttention`` and ``burnish.CudaAttentionGrad``, in place.

    The exceptions are as for ``fuse_attention``, and heads of unsupported width. A constant mask that hides later keys from each
    query, and nothing else, becomes an attribute.
    """
    changed = False
    for node, gradients in _attention_of(graph, dtypes):
        query = node.inputs[0]
        if query is not None and _takes_heads(query):
            _fuse(node, gradients, CUDA_ATTENTION, CUDA_ATTENTION_GRAD, causal=_is_causal(node, opset))
            changed = True
    return changed


def _takes_heads(query: ir.Value) -> bool:
    if query.shape is None or len(query.shape) != 4 or query.dtype is None:
        return False
    width = query.shape[-1]
    return isinstance(width, int) and 0 < width <= WIDEST_HEAD and width * query.dtype.itemsize % ALIGNMENT == 0


def _attention_of(graph: ir.Graph, dtypes: Collection[ir.DataType]) -> list[tuple[ir.Node, list[ir.Node]]]:
    """Return the attention nodes that kernels could replace, each with the nodes of its gradients."""
    taken = []
    for node in graph:
        if not ATTENTION.is_of(node) or node.inputs[0] is None or node.inputs[0].dtype not in dtypes or not _has_kernel(node):
            continue
        gradients = [user for user, _ in node.outputs[1].uses()]
        if not node.outputs[1].is_graph_output() and all(map(ATTENTION_GRAD.is_of, gradients)):
            taken.append((node, gradients))
    return taken


def _mask_of(node: ir.Node) -> ir.Value | None:
    return node.inputs[3] if len(node.inputs) > 3 else None


def _is_causal(node: ir.Node, opset: int) -> bool:
    """True if the mask is a constant that hides later keys from each query, and adds nothing to the others."""
    mask = _mask_of(node)
    shape = None if mask is None or mask.shape is None else [extent for extent in mask.shape if isinstance(extent, int)]
    if mask is None or shape is None or len(shape) != len(mask.shape or ()) or set(shape[:-2]) - {1} or shape[-2] != shape[-1]:
        return False
    array = constant_result(mask, opset) if 1 < shape[-1] <= LONGEST_MASK else None
    if array is None:
        return False
    hidden = np.triu(np.ones(shape[-2:], bool), 1)
    matrix = array.reshape(shape[-2:])
    return bool((matrix[hidden] <= HIDES).all() and (matrix[~hidden] == 0).all())


def _has_kernel(node: ir.Node) -> bool:
    (query, value), mask = (node.inputs[index] for index in (0, 2)), _mask_of(node)
    if query is None or value is None or query.shape is None or value.shape is None:
        return False
    reads_mask = mask is None or (mask.shape is not None and len(mask.shape) in (2, len(query.shape)))
    return reads_mask and same_dimension(query.shape[-1], value.shape[-1])


def _fuse(
    node: ir.Node,
    gradients: list[ir.Node],
    operator: EngineOperator,
    gradient_operator: EngineOperator,
    causal: bool | None = None,
) -> None:
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    query, key = (_Operand.of(node, place, gradients) for place in (0, 1))
    scale = float(attribute_value(node, "factor", 1.0)) / float(attribute_value(node, "divisor", 1.0))
    settings: dict[str, Any] = {"scale": scale * query.number * key.number, "zeros": attribute_value(node, "zeros", 0)}
    if causal is not None:
        settings["causal"] = int(causal)
    heads, mask = (query.value, key.value, node.inputs[2]), None if causal else _mask_of(node)
    builder = Builder(graph, before=node)
    operands = [None if value is None else builder.tensor(value) for value in (*heads, mask)]
    result, *kept = operator.emit(*operands, like=builder.tensor(node.outputs[0]), **settings)
    kept[0].value.type = ir.TensorType(ir.DataType.FLOAT)
    for index, gradient in enumerate(gradients):
        builder, flow = Builder(graph, before=gradient), gradient.inputs[0]
        assert flow is not None
        flows = gradient_operator.emit(builder.tensor(flow), *operands[:3], result, *kept, operands[3], **settings)
        replaced = (query.gradients[index], key.gradients[index], gradient.outputs[2])
        for made, value, operand in zip(flows, replaced, heads, strict=True):
            assert operand is not None
            made.value.type, made.value.shape = operand.type, operand.shape
            replace_value(value, made.value)
        remove_unread(graph, *(value.producer() for value in replaced))
    replace_value(node.outputs[0], result.value)
    remove_unread(graph, node)


class _Operand(NamedTuple):
    """A replacement for an operand that is a value times a number: the number is moved into the scale.

    Attributes:
        value, number: the two factors; the operand itself and one, if a reader of a gradient needs that of the product.
        gradients: gradients of the value, one for each node that computes gradients of attention.
    """

    value: ir.Value
    number: float
    gradients: tuple[ir.Value, ...]

    @classmethod
    def of(cls, node: ir.Node, place: int, gradients: list[ir.Node]) -> _Operand:
        operand = node.inputs[place]
        assert operand is not None
        whole = cls(operand, 1.0, tuple(gradient.outputs[place] for gradient in gradients))
        value, number = _scaled(operand)
        before = []
        for output in whole.gradients:
            user = only_user(output)
            source, factor = (output, 1.0) if user is None else _scaled(user.outputs[0])
            if (source, factor) != (output, number) or user is None:
                return whole
            before.append(user.outputs[0])
        return cls(value, number, tuple(before))


def _scaled(result: ir.Value) -> tuple[ir.Value, float]:
    """Return the factors of a value that is a product with a number; the value itself and one for others."""
    node = producer_of(result, "Mul")
    for place in () if node is None else (0, 1):
        assert node is not None
        value, array = node.inputs[place], constant_array(node.inputs[1 - place])
        if value is None or value.shape is None or array is None or array.size != 1 or not array.all():
            continue
        if array.ndim <= len(value.shape):
            return value, float(array.item())
    return result, 1.0
