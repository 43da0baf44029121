"""Mixed precision: the place of its casts, and computation in float32 if PyTorch has no fast kernels for sixteen bits.

PyTorch uses oneDNN for sixteen-bit convolutions and products if the processor has vectors for them. Otherwise oneDNN emulates
these, or PyTorch's own loops multiply, which are many times slower than those for float32 and round between terms. Then the
operands are cast before a product, which sums in float32, and its result is rounded after it. Values kept for the backward pass
still have sixteen bits.

These casts are ``burnish.CastApart``, which is never fused into a chain of elementwise operators: that would remove some
roundings, and recomputed layers would have other bits.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import onnx_ir as ir
import torch

from burnish.engines.torch.translate.dtypes import TORCH_DTYPES
from burnish.engines.torch.translate.rules import Call, translates
from burnish.graph import Builder, Tensor, remove_node, replace_node
from burnish.kernels.engine_operator import EngineOperator
from burnish.kernels.linear import FUSED_BATCHED_PRODUCT, FUSED_LINEAR, FUSED_LINEAR_GRAD
from burnish.operators.convolution import CONV_INPUT_GRAD, CONV_WEIGHT_GRAD

CAST_APART = EngineOperator("CastApart", ("x",), ("y",), shares_memory={"y": "x"})


@translates(CAST_APART)
def cast_apart(op: Call) -> Any:
    """Translate a cast that is never fused: see ``widening``."""
    return op.tensor().to(TORCH_DTYPES[ir.DataType(op.attribute("to"))])


WIDTHS = {ir.DataType.FLOAT16: 2, ir.DataType.BFLOAT16: 2, ir.DataType.FLOAT: 4, ir.DataType.DOUBLE: 8}


def read_shapes_before_casts(graph: ir.Graph) -> bool:
    """Make every Shape read the operand of a cast, in place: a cast without other readers need not be computed."""
    changed = False
    for node in graph:
        if node.op_type != "Shape" or node.domain != "":
            continue
        while (source := _before_cast(node.inputs[0])) is not None:
            node.replace_input_with(0, source)
            changed = True
    return changed


def transpose_narrow(graph: ir.Graph) -> bool:
    """Transpose a matrix before its cast, in the narrower dtype, in place: products read it in this form."""
    changed = False
    for node in list(graph):
        source = node.inputs[0] if node.inputs else None
        other = None if source is None else source.producer()
        if other is None or source is None or source.shape is None or len(source.shape) != 2 or source.is_graph_output():
            continue
        kinds = (other.op_type, node.op_type)
        if kinds not in (("Cast", "Transpose"), ("Transpose", "Cast")) or other.domain != "" or node.domain != "":
            continue
        transposition = node if kinds[1] == "Transpose" else other
        if "perm" in transposition.attributes and list(transposition.attributes["perm"].as_ints()) != [1, 0]:
            continue
        before, after = other.inputs[0], node.outputs[0]
        if len(source.uses()) != 1 or before is None:
            continue
        if before.dtype not in WIDTHS or after.dtype not in WIDTHS:
            continue
        widens = WIDTHS[before.dtype] < WIDTHS[after.dtype]
        if kinds != (("Cast", "Transpose") if widens else ("Transpose", "Cast")) or before.dtype == after.dtype:
            continue
        builder = Builder(graph, before=node)
        operand = builder.tensor(before)
        if widens:
            exchanged = builder.cast(builder.op("Transpose", operand, perm=[1, 0]), after.dtype)
        else:
            exchanged = builder.op("Transpose", builder.cast(operand, after.dtype), perm=[1, 0])
        replace_node(node, exchanged)
        remove_node(other)
        changed = True
    return changed


def _before_cast(value: ir.Value | None) -> ir.Value | None:
    producer = None if value is None else value.producer()
    return producer.inputs[0] if producer is not None and producer.op_type == "Cast" and producer.domain == "" else None


CONVOLUTIONS = frozenset({("", "Conv"), ("", "ConvTranspose"), CONV_INPUT_GRAD.key, CONV_WEIGHT_GRAD.key})
PRODUCTS = frozenset(
    {("", name) for name in ("MatMul", "Gemm", "Einsum")}
    | {operator.key for operator in (FUSED_LINEAR, FUSED_LINEAR_GRAD, FUSED_BATCHED_PRODUCT)}
)
"""Operators that are widened, by domain and name."""

READ = {CONV_INPUT_GRAD.name: 2, CONV_WEIGHT_GRAD.name: 2}
"""The number of operands whose values are read, if not all: for a third one, only the shape matters."""

NEAR = 8
"""The number of nodes between two products up to which they share a cast of a common operand, like the two gradients of a
convolution. Over a longer distance, the cast, which is twice as wide, would take memory.
"""


def narrow_dtypes(device: torch.device) -> frozenset[ir.DataType]:
    """Return the sixteen-bit dtypes with slow products on a device."""
    if device.type != "cpu":
        return frozenset()
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return frozenset({ir.DataType.BFLOAT16, ir.DataType.FLOAT16})
    # With AVX-512 but no instructions for bfloat16, oneDNN emulates them, which is slower than float32.
    imitated = torch.cpu._is_avx512_supported() and not torch.cpu._is_avx512_bf16_supported()
    quick = {
        ir.DataType.BFLOAT16: torch.ops.mkldnn._is_mkldnn_bf16_supported() and not imitated,
        ir.DataType.FLOAT16: torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    }
    return frozenset(dtype for dtype, is_quick in quick.items() if not is_quick)


def widened(model: ir.Model, device: torch.device) -> ir.Model:
    """Return a model in its fastest form for a device: unchanged if all its dtypes are fast, else a copy."""
    narrow = narrow_dtypes(device)
    if not any(output.dtype in narrow for node in model.graph.all_nodes() for output in node.outputs):
        return model
    model = model.clone()
    widen(model.graph, CONVOLUTIONS | PRODUCTS, narrow)
    return model


def widen(graph: ir.Graph, operators: Collection[tuple[str, str]], narrow: Collection[ir.DataType]) -> bool:
    """Make every node of these operators and dtypes compute in float32, in place.

    Args:
        graph: the graph, including the bodies of its control operators.
        operators: operators by domain and name.
        narrow: dtypes to widen.
    """
    changed = False
    casts: dict[tuple[ir.Graph, ir.Value], tuple[ir.Value, int]] = {}
    for place, node in enumerate(list(graph.all_nodes()) if narrow else ()):
        owner = node.graph
        if (node.domain, node.op_type) not in operators or not isinstance(owner, ir.Graph):
            continue
        if node.outputs[0].dtype not in narrow:
            continue
        builder = Builder(owner, before=node)
        for index, value in enumerate(node.inputs[: READ.get(node.op_type)]):
            if value is None or value.dtype not in narrow:
                continue
            cast, last = casts.get((owner, value), (None, 0))
            if cast is None or place - last > NEAR:
                cast = _cast(builder, value, ir.DataType.FLOAT).value
            casts[owner, value] = cast, place
            node.replace_input_with(index, cast)
        _round_behind(owner, node)
        changed = True
    return changed


def _round_behind(graph: ir.Graph, node: ir.Node) -> None:
    """Make a node that reads float32 return float32, followed by a cast to its original dtype."""
    count = len(node.outputs)
    wide = ir.Node(node.domain, node.op_type, node.inputs, list(node.attributes.values()), name=node.name, num_outputs=count)
    wide.metadata_props.update(node.metadata_props)
    graph.insert_before(node, wide)
    builder = Builder(graph, before=node)
    rounded: list[Tensor | None] = []
    for result, output in zip(node.outputs, wide.outputs, strict=True):
        output.type, output.shape = ir.TensorType(ir.DataType.FLOAT), result.shape
        assert result.dtype is not None
        rounded.append(_cast(builder, output, result.dtype) if result.uses() or result.is_graph_output() else None)
    replace_node(node, tuple(rounded))


def _cast(builder: Builder, value: ir.Value, dtype: ir.DataType) -> Tensor:
    cast = CAST_APART(builder.tensor(value), to=int(dtype))
    cast.value.type, cast.value.shape = ir.TensorType(dtype), value.shape
    return cast
