"""Scaled dot-product attention (Vaswani et al. 2017), whose probabilities a kernel need not keep."""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir

from burnish.graph import Tensor, unbroadcast
from burnish.operators.activation import SOFTMAX_GRAD
from burnish.operators.registry import Operation
from burnish.operators.semantic import Operands, OutputType, SemanticOperator, like

LAST_TWO = [0, 1, 3, 2]
"""Exchanges the axes of the matrices among heads."""


def _result_types(operands: Operands) -> list[OutputType]:
    query = operands["query"]
    wide = ir.DataType.DOUBLE if query.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT

    def rows_of(columns: Tensor, dtype: ir.DataType) -> OutputType:
        if query.shape is None or columns.shape is None:
            return OutputType(dtype, None)
        return OutputType(dtype, ir.Shape([*query.shape.dims[:-1], columns.shape[-1]]))

    return [rows_of(operands["value"], query.dtype), rows_of(operands["key"], wide)]


ATTENTION = SemanticOperator(
    "ScaledDotProductAttention", ("query", "key", "value", "mask"), ("result", "probabilities"), _result_types
)
"""softmax(query key * factor / divisor + mask) value, over heads.

Query [N, H, M, D], key [N, H, D, L], transposed as the product reads it, and value [N, H, L, E] are of one dtype; mask broadcasts
to [N, H, M, L] and may be left out. Result [N, H, M, E] has their dtype. The scores, the mask and the probabilities [N, H, M, L]
are float32 where the heads have sixteen bits. Attributes: ``factor`` and ``divisor`` of the scores, one of them 1; ``zeros``:
whether a query that no key is shown to has zeros for its probabilities, which would be NaN.
"""

ATTENTION_GRAD = SemanticOperator(
    "ScaledDotProductAttentionGrad",
    ("flow", "query", "key", "value", "mask", "result", "probabilities"),
    ("dquery", "dkey", "dvalue"),
    like("query", "key", "value"),
)
"""The gradients of attention but that of the mask, from that of the result; inputs and attributes are as above."""


class _Gradients(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor | None
    scores: Tensor


@ATTENTION.lowering
def lower_attention(op: Operation) -> tuple[Tensor, Tensor]:
    builder, query, mask = op.builder, op.required(0), op.optional(3)
    wide = op.outputs[1].dtype
    scores = _scaled(op, builder.cast(builder.op("MatMul", query, op.required(1), shape=op.outputs[1].shape), wide))
    if mask is not None:
        scores = builder.op("Add", scores, mask, like=op.outputs[1])
    probabilities = builder.op("Softmax", scores, axis=-1, like=op.outputs[1])
    if op.attribute("zeros"):
        probabilities = builder.op("Where", builder.op("IsNaN", probabilities), builder.scalar(0, wide), probabilities)
    return builder.op("MatMul", builder.cast(probabilities, query.dtype), op.required(2), like=op.output), probabilities


@ATTENTION.gradient
def attention(op: Operation, flow: Tensor | None, by_probabilities: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradient of the mask is that of the scores; what reads the probabilities beside the result adds to it."""
    query, key, value, mask = (op.optional(index) for index in range(4))
    if flow is not None and by_probabilities is None and not op.wants(3):
        settings = {name: op.attribute(name) for name in ("factor", "divisor", "zeros")}
        return *ATTENTION_GRAD.emit(flow, query, key, value, mask, *op.outputs, **settings), None
    gradients = _gradients(op, flow, by_probabilities, op.inputs[:3], op.outputs[1])
    return gradients.query, gradients.key, gradients.value, None if mask is None else unbroadcast(gradients.scores, mask)


@ATTENTION_GRAD.lowering
def lower_attention_grad(op: Operation) -> tuple[Tensor | None, ...]:
    return _gradients(op, op.required(0), None, op.inputs[1:4], op.required(6))[:3]


def _gradients(
    op: Operation, flow: Tensor | None, by_probabilities: Tensor | None, heads: tuple[Tensor | None, ...], p: Tensor
) -> _Gradients:
    """With P the probabilities and dY the flow: dV = P'dY, dP = dY V', dS = P(dP - Σ dP·P), dQ = dS K', dK = Q'dS."""
    query, key, value = (head for head in heads if head is not None)
    builder = op.builder
    d_value = None
    if flow is not None:
        d_value = builder.op("MatMul", _transposed(builder.cast(p, value.dtype)), flow, like=value)
        through_result = builder.cast(builder.op("MatMul", flow, _transposed(value)), p.dtype)
        by_probabilities = through_result if by_probabilities is None else by_probabilities + through_result
    assert by_probabilities is not None
    d_scores = SOFTMAX_GRAD(by_probabilities, p, axis=-1)
    d_product = builder.cast(_scaled(op, d_scores), query.dtype)
    d_query = builder.op("MatMul", d_product, _transposed(key), like=query)
    d_key = builder.op("MatMul", _transposed(query), d_product, like=key)
    return _Gradients(d_query, d_key, d_value, d_scores)


def _scaled(op: Operation, scores: Tensor) -> Tensor:
    """The scores, or their gradient, times the factor, or by the divisor: the number that the model has, to its last digit."""
    if op.attribute("factor") != 1.0:
        return scores * op.attribute("factor")
    return scores if op.attribute("divisor") == 1.0 else scores / op.attribute("divisor")


def _transposed(heads: Tensor) -> Tensor:
    return heads.builder.op("Transpose", heads, perm=LAST_TWO)
