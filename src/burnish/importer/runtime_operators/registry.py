"""Rewrites of runtime-specific operators by name; their modules are imported on demand.

Also image layouts: channels last, and the processor-specific layouts of models saved by ONNX Runtime's optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from types import MappingProxyType

import onnx_ir as ir

from burnish.graph import Builder, Tensor, bodies, describe_node
from burnish.graph.annotations import COMPUTED, HELD
from burnish.graph.uses import is_used, origin_of, producer_of
from burnish.operators import Operation
from burnish.operators.positions import known_rank

RUNTIME_DOMAIN = "com.microsoft"
"""Domain of ONNX Runtime's own operators."""

Results = Tensor | tuple[Tensor | None, ...] | None
Rewrite = Callable[[Operation], Results]

STANDARD_INTEGER_PRODUCTS = frozenset({"QLinearConv", "QLinearMatMul"})
"""Standard operators on quantized integers, which are rewritten like a runtime's."""

FAMILIES = tuple("attention early_forms grouped_query_attention linear_algebra normalization products quantization".split())
"""Modules that register rewrites."""

_rewrites: dict[str, Rewrite] = {}


def rewrites(*op_types: str) -> Callable[[Rewrite], Rewrite]:
    """Register a rewrite of operators: ``rule(op) -> outputs``, or None for a form that stays.

    The rule emits nodes of opset 18 or newer, in their form in ``op.builder.opset``.
    """

    def register(rule: Rewrite) -> Rewrite:
        _rewrites.update(dict.fromkeys(op_types, rule))
        return rule

    return register


def find_rewrite(node: ir.Node) -> Rewrite | None:
    """Return the rewrite of a node, or None."""
    if node.domain == RUNTIME_DOMAIN or (node.domain == "" and node.op_type in STANDARD_INTEGER_PRODUCTS):
        return rewritten_operators().get(node.op_type)
    return None


@cache
def rewritten_operators() -> Mapping[str, Rewrite]:
    """Return every rewrite by operator name."""
    for family in FAMILIES:
        import_module(f"{__package__}.{family}")
    return MappingProxyType(_rewrites)


def is_read(op: Operation, index: int) -> bool:
    """True if a node's output at this index is read."""
    return index < len(op.node.outputs) and is_used(op.node.outputs[index])


def held(x: Tensor) -> Tensor:
    """Mark a tensor's source constants, in each branch, as no weights: they encode data or positions."""
    _hold(x.value)
    return x


def _hold(value: ir.Value) -> None:
    value = origin_of(value, ("Identity",))
    producer = producer_of(value)
    if value.is_initializer():
        HELD.set(value, True)
    elif producer is not None and producer.op_type == "Constant":
        COMPUTED.set(producer, True)
    elif producer is not None and producer.op_type == "If":
        for body in bodies(producer):
            _hold(body.outputs[producer.outputs.index(value)])


def split(x: Tensor, sizes: list[int], axis: int) -> tuple[Tensor, ...]:
    """Split a tensor into parts of these sizes along an axis."""
    builder: Builder = x.builder
    if len(sizes) == 1:
        return (x,)
    parts = builder.op("Split", x, builder.integers(sizes), axis=axis, outputs=len(sizes))
    return parts if isinstance(parts, tuple) else (parts,)


_DOMAINS = frozenset({"com.microsoft.nchwc", "com.ms.internal.nhwc"})


def laid_out_for_one_processor(node: ir.Node) -> str | None:
    """Return an explanation and remedy for a node with a processor-specific layout; None for others."""
    if node.domain not in _DOMAINS:
        return None
    return (
        f"{describe_node(node)} was saved by ONNX Runtime in the layout of one processor, which no other runtime reads: give the "
        "file that was optimized, or save it with graph_optimization_level = ORT_ENABLE_EXTENDED"
    )


def channels_first(op: Operation, x: Tensor) -> Tensor:
    """Transpose ``[batch, ..., channels]`` to ``[batch, channels, ...]``."""
    rank = known_rank(op, x)
    return op.builder.op("Transpose", x, perm=[0, rank - 1, *range(1, rank - 1)])


def channels_last(op: Operation, x: Tensor) -> Tensor:
    """Transpose ``[batch, channels, ...]`` to ``[batch, ..., channels]``."""
    return op.builder.op("Transpose", x, perm=[0, *range(2, known_rank(op, x)), 1])
