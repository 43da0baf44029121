"""Attention, rotary position embedding and recurrent layers for inference; training decomposes them."""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir
import torch

from burnish.engines.torch.translate.dtypes import torch_dtype
from burnish.engines.torch.translate.rules import Call, translates
from burnish.engines.torch.translate.translation import Translator
from burnish.errors import EngineError
from burnish.graph import describe_node
from burnish.rewriting.lower_semantic_operators import expand_recurrent_layers

PADDED_MASKS = 24
"""The first opset with masks for fewer keys than there are."""


def _heads(x: Any, count: int) -> Any:
    """Convert ``[batch, sequence, heads * size]`` to ``[batch, heads, sequence, size]``."""
    return torch.transpose(torch.unflatten(x, -1, (count, -1)), 1, 2)


def _in_one(x: Any) -> Any:
    return torch.flatten(torch.transpose(x, 1, 2), 2)


@translates("Attention", since=23)
def attention(op: Call) -> Any:
    q, k, v = (op.tensor(index) for index in range(3))
    in_one = op.rank() == 3
    q_heads, kv_heads = op.attribute("q_num_heads"), op.attribute("kv_num_heads")
    if in_one:
        q, k, v = _heads(q, q_heads), _heads(k, kv_heads), _heads(v, kv_heads)
    else:
        q_heads, kv_heads = op.extents(0)[1], op.extents(1)[1]
    if op.has(4):
        k, v = torch.cat([op.tensor(4), k], 2), torch.cat([op.tensor(5), v], 2)
    present = k, v
    if q_heads != kv_heads:
        k, v = (torch.repeat_interleave(x, q_heads // kv_heads, 1) for x in present)
    size = op.extents(0)[-1] // q_heads if in_one else op.extents(0)[-1]
    scores = torch.matmul(q * op.attribute("scale", size**-0.5), torch.transpose(k, 2, 3))
    cap = op.attribute("softcap", 0.0)
    capped = torch.tanh(scores / cap) * cap if cap else scores
    bias = _bias(op, op.torch_dtype())
    biased = capped if bias is None else capped + bias
    precision = op.attribute("softmax_precision")
    wide = biased if precision is None else biased.to(torch_dtype(precision))
    probabilities = torch.softmax(wide, -1).to(op.torch_dtype()) if precision is not None else torch.softmax(wide, -1)
    if bias is not None:
        # Such a query sees no key, and a softmax over -inf only is NaN.
        excluded = torch.amax(bias, -1, keepdim=True) == -math.inf
        probabilities = torch.masked_fill(probabilities, excluded, 0.0)
    y = torch.matmul(probabilities, v)
    stage = (scores, capped, biased, probabilities)[op.attribute("qk_matmul_output_mode", 0)]
    return _in_one(y) if in_one else y, *present, stage


def _bias(op: Call, dtype: torch.dtype) -> Any:
    """Return the term added to the scores: -inf if a query does not see a key, and a mask of numbers."""
    queries, keys = op.extents(0)[-2], op.extents(1)[-2] + (op.extents(4)[2] if op.has(4) else 0)
    places = torch.arange(keys, device=op.device)
    lengths = torch.reshape(op.tensor(6), [-1, 1, 1, 1]) if op.has(6) else None
    bias = None if lengths is None else _excluding(places >= lengths, dtype)
    if op.has(3):
        mask = op.tensor(3)
        mask = _excluding(torch.logical_not(mask), dtype) if op.dtype(3) == ir.DataType.BOOL else mask
        missing = keys - op.extents(3)[-1]
        if op.opset >= PADDED_MASKS and not (isinstance(missing, int) and missing == 0):
            mask = torch.constant_pad_nd(mask, [0, missing], -math.inf)
        bias = mask if bias is None else bias + mask
    offset = (op.extents(4)[2] if op.has(4) else 0) if lengths is None else lengths - queries
    distance = places - torch.unsqueeze(torch.arange(queries, device=op.device), 1) - offset
    before, after = op.attribute("left_window_size", -1), op.attribute("right_window_size", -1)
    after = 0 if op.attribute("is_causal", 0) else after
    for is_hidden in ([distance > after] if after >= 0 else []) + ([distance < -before] if before >= 0 else []):
        hidden = _excluding(is_hidden, dtype)
        bias = hidden if bias is None else bias + hidden
    return bias


def _excluding(excluded: Any, dtype: torch.dtype) -> Any:
    return torch.where(excluded, torch.scalar_tensor(-math.inf, dtype=dtype), torch.scalar_tensor(0.0, dtype=dtype))


@translates("RotaryEmbedding", since=23)
def rotary_embedding(op: Call) -> Any:
    x, cosine, sine = op.tensor(0), op.tensor(1), op.tensor(2)
    in_one, heads = op.rank() == 3, op.attribute("num_heads")
    size = op.extents()[-1] // heads if in_one else op.extents()[-1]
    x = _heads(x, heads) if in_one else x
    if op.has(3):
        cosine, sine = cosine[op.tensor(3)], sine[op.tensor(3)]
    cosine, sine = torch.unsqueeze(cosine, 1), torch.unsqueeze(sine, 1)
    dimension = op.attribute("rotary_embedding_dim", 0) or size
    turned, rest = torch.narrow(x, -1, 0, dimension), torch.narrow(x, -1, dimension, size - dimension)
    if op.attribute("interleaved", 0):
        one, other = (torch.select(torch.unflatten(turned, -1, (-1, 2)), -1, index) for index in (0, 1))
        pair = torch.stack([one * cosine - other * sine, one * sine + other * cosine], -1)
        turned = torch.flatten(pair, -2)
    else:
        half = dimension // 2
        one, other = torch.narrow(turned, -1, 0, half), torch.narrow(turned, -1, half, half)
        turned = torch.cat([one * cosine - other * sine, one * sine + other * cosine], -1)
    y = torch.cat([turned, rest], -1)
    return _in_one(y) if in_one else y


@translates("GRU", "LSTM", "RNN", since=7)
def recurrent_layer(op: Call) -> Any:
    layer = op.node
    read = dict.fromkeys(value for value in layer.inputs if value is not None)
    own = {value: ir.Value(name=f"in{index}", type=value.type, shape=value.shape) for index, value in enumerate(read)}
    operands = [None if value is None else own[value] for value in layer.inputs]
    node = ir.Node("", layer.op_type, operands, list(layer.attributes.values()), num_outputs=len(layer.outputs))
    for inner, outer in zip(node.outputs, layer.outputs, strict=True):
        inner.type, inner.shape = outer.type, outer.shape
    outputs = [index for index, output in enumerate(layer.outputs) if output.uses() or output.is_graph_output()]
    body = ir.Graph(
        list(own.values()),
        [node.outputs[index] for index in outputs],
        nodes=[node],
        name=f"{layer.op_type}_{layer.name or ''}",
        opset_imports={"": op.opset},
    )
    expanded = expand_recurrent_layers(ir.Model(body, ir_version=10)).graph
    if any(inner.op_type == layer.op_type for inner in expanded):
        raise EngineError(
            f"{describe_node(layer)} has clip, input_forget=1 or an activation that the torch engine has no form for: "
            "use engine='onnxruntime'"
        )
    module = Translator(expanded, op.opset, op.device).translated()
    results = op.module(module, list(read))
    found = {index: results[position] for position, index in enumerate(outputs)}
    return tuple(found.get(index) for index in range(len(layer.outputs)))
