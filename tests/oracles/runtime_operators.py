"""Nodes of the domain ``com.microsoft``, in every form that the CPU's kernels take, and files of one such node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

DOMAIN = "com.microsoft"
B, S, N, D = 2, 4, 3, 4
"""Samples, places, heads, the size of a head."""
H = N * D


@dataclass(frozen=True)
class Case:
    """One use of an operator.

    Attributes:
        op_type: the operator's name.
        name: tells uses apart.
        inputs: arrays, None for what is left out; floating-point ones in float64, to be rounded.
        attributes: of the node.
        outputs: the positions of the outputs that are compared.
        held: inputs that are initializers.
        batched: inputs whose first axis is the batch.
        domain: as the file writes it.
        rows: which part of the first output the runtime defines.
    """

    op_type: str
    name: str
    inputs: Sequence[np.ndarray | None]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    outputs: Sequence[int] = (0,)
    held: Sequence[int] = ()
    batched: Sequence[int] = (0,)
    domain: str = DOMAIN
    rows: np.ndarray | None = None

    def __str__(self) -> str:
        return f"{self.op_type}-{self.name}"

    def feeds(self, dtype: str) -> dict[str, np.ndarray]:
        return {
            f"input{index}": array
            for index, array in enumerate(self.arrays(dtype))
            if array is not None and index not in self.held
        }

    def arrays(self, dtype: str) -> list[np.ndarray | None]:
        return [None if x is None else x.astype(dtype) if x.dtype.kind == "f" else x for x in self.inputs]

    def differentiated(self) -> list[str]:
        return [
            f"input{index}"
            for index, x in enumerate(self.inputs)
            if x is not None and x.dtype.kind == "f" and index not in self.held
        ]

    def model(self, dtype: str = "float32", symbolic: bool = False, opset: int = 18) -> onnx.ModelProto:
        """A file of the node, that declares nothing of what it returns."""
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        arrays = self.arrays(dtype)
        names = [f"input{index}" if x is not None else "" for index, x in enumerate(arrays)]
        inputs, initializers = [], []
        for index, x in enumerate(arrays):
            if x is None:
                continue
            if index in self.held:
                initializers.append(numpy_helper.from_array(x, names[index]))
                continue
            shape: list[Any] = list(x.shape)
            if symbolic and index in self.batched:
                shape[0] = "batch"
            inputs.append(helper.make_tensor_value_info(names[index], helper.np_dtype_to_tensor_dtype(x.dtype), shape))
        results = [f"output{index}" if index in self.outputs else "" for index in range(max(self.outputs) + 1)]
        node = helper.make_node(self.op_type, names, results, name="node", domain=self.domain, **self.attributes)
        declared = [
            helper.make_tensor_value_info(result, TensorProto.INT32 if self._is_count(result) else kind, None)
            for result in results
            if result
        ]
        graph = helper.make_graph([node], "node", inputs, declared, initializers)
        opsets = [helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)

    def _is_count(self, result: str) -> bool:
        return self.op_type == "EmbedLayerNormalization" and result == "output1"


def cases() -> list[Case]:
    """Every case, from one seed."""
    rng = np.random.default_rng(7)
    makers = (_activations, _normalization, _products, _attention, _multi_head, _rotary, _grouped, _quantized, _early)
    return [case for maker in makers for case in maker(rng)]


def _activations(rng: np.random.Generator) -> Iterator[Case]:
    x, bias = rng.normal(size=(B, S, H)), rng.normal(size=H)
    yield Case("Gelu", "plain", [x])
    yield Case("FastGelu", "plain", [x])
    yield Case("FastGelu", "bias", [x, bias])
    yield Case("BiasGelu", "plain", [x, bias])
    yield Case("QuickGelu", "plain", [x])
    yield Case("QuickGelu", "alpha", [x], {"alpha": 1.0})


def _normalization(rng: np.random.Generator) -> Iterator[Case]:
    x, skip = rng.normal(size=(B, S, H)), rng.normal(size=(B, S, H))
    scale, bias, more = rng.normal(size=(3, H))
    both = (0, 1)
    yield Case("SimplifiedLayerNormalization", "plain", [x, scale], {"epsilon": 1e-5, "axis": -1}, domain="")
    yield Case("SimplifiedLayerNormalization", "axis", [x, rng.normal(size=(S, H))], {"epsilon": 0.1, "axis": 1}, domain="")
    yield Case("SkipLayerNormalization", "plain", [x, skip, scale, bias, more], {"epsilon": 1e-3}, (0, 3), batched=both)
    yield Case("SkipLayerNormalization", "no_bias", [x, skip, scale], batched=both)
    yield Case("SkipLayerNormalization", "broadcast", [x, rng.normal(size=(1, S, H)), scale, bias], {"epsilon": 1e-5})
    yield Case("SkipSimplifiedLayerNormalization", "plain", [x, skip, scale, more], {"epsilon": 1e-6}, (0, 3), batched=both)
    yield Case("SkipSimplifiedLayerNormalization", "no_bias", [x, skip, scale], {"epsilon": 1e-5}, batched=both)
    words = rng.integers(0, 9, (B, S)).astype(np.int32)
    segments = rng.integers(0, 2, (B, S)).astype(np.int32)
    tables = [rng.normal(size=(9, H)), rng.normal(size=(S + 2, H)), rng.normal(size=(2, H))]
    mask = np.array([[1, 1, 1, 0], [1, 1, 0, 0]], np.int32)
    inputs = [words, segments, *tables, scale, bias, mask]
    yield Case("EmbedLayerNormalization", "mask", inputs, {"epsilon": 1e-5}, (0, 1), batched=(0, 1, 7))
    yield Case("EmbedLayerNormalization", "no_segments", [words, None, *tables[:2], None, scale, bias], {}, (0, 1, 2))
    positions = rng.integers(0, S, (B, S)).astype(np.int32)
    yield Case("EmbedLayerNormalization", "positions", [*inputs[:7], None, positions], {}, (0, 1), batched=(0, 1, 8))


def _products(rng: np.random.Generator) -> Iterator[Case]:
    a, b = rng.normal(size=(B, 3, 4, 5)), rng.normal(size=(B, 3, 5, 6))
    yield Case("FusedMatMul", "alpha", [a, b], {"alpha": 0.3}, batched=(0, 1))
    transposed = [a.swapaxes(2, 3), b.swapaxes(2, 3)]
    yield Case("FusedMatMul", "transposed", transposed, {"transA": 1, "transB": 1, "alpha": -2.0}, batched=(0, 1))
    moved = [np.moveaxis(a, 2, 0), np.moveaxis(b, 2, 0)]
    yield Case("FusedMatMul", "batch", moved, {"transBatchA": 1, "transBatchB": 1}, batched=())
    both = [np.moveaxis(a.swapaxes(2, 3), 2, 0), b]
    yield Case("FusedMatMul", "batch_transposed", both, {"transBatchA": 1, "transA": 1}, batched=())
    x, w, bias = rng.normal(size=(B, 5)), rng.normal(size=(6, 5)), rng.normal(size=6)
    gemm = {"transB": 1, "alpha": 0.5, "beta": 2.0}
    yield Case("FusedGemm", "leaky", [x, w, bias], {**gemm, "activation": "LeakyRelu", "activation_alpha": 0.2})
    yield Case("FusedGemm", "tanh", [x, w], {"transB": 1, "activation": "Tanh"})
    yield Case("FusedGemm", "sigmoid", [x, w, bias], {"transB": 1, "activation": "Sigmoid"})
    image, kernel = rng.normal(size=(B, 3, 6, 6)), rng.normal(size=(4, 3, 3, 3))
    bias, summand = rng.normal(size=4), rng.normal(size=(B, 4, 6, 6))
    conv = {"pads": [1, 1, 1, 1], "kernel_shape": [3, 3]}
    yield Case("FusedConv", "sum_relu", [image, kernel, bias, summand], {**conv, "activation": "Relu"}, batched=(0, 3))
    clip = {"activation": "Clip", "activation_params": [-0.5, 0.7]}
    yield Case("FusedConv", "clip", [image, kernel, bias], {**conv, **clip})
    hard = {"activation": "HardSigmoid", "activation_params": [0.2, 0.6]}
    yield Case("FusedConv", "hard_sigmoid", [image, kernel], {**conv, "strides": [2, 2], **hard})
    leaky = {"activation": "LeakyRelu", "activation_params": [0.1]}
    yield Case("FusedConv", "leaky", [image, kernel, bias], {**conv, **leaky})
    yield Case("Trilu", "lower", [rng.normal(size=(B, 4, 4)), np.array(1)], {"upper": 0})


def _attention(rng: np.random.Generator) -> Iterator[Case]:
    x, weight, bias = rng.normal(size=(B, S, 5)), rng.normal(size=(5, 3 * H)), rng.normal(size=3 * H)
    heads = {"num_heads": N}

    def case(name: str, mask: np.ndarray | None, attributes: Mapping[str, Any] | None = None, **more: Any) -> Case:
        batched = (0,) if mask is None or mask.shape[0] != B else (0, 3)
        return Case("Attention", name, [x, weight, bias, mask], {**heads, **(attributes or {})}, batched=batched, **more)

    yield case("plain", None)
    yield case("unidirectional", None, {"unidirectional": 1, "scale": 0.7})
    yield case("ends", np.array([3, 4], np.int32))
    yield case("begins", np.array([3, 4, 1, 0], np.int32))
    yield case("keys", np.array([[1, 1, 0, 0], [0, 1, 1, 1]], np.int32), {"mask_filter_value": -50.0})
    yield case("keys_causal", np.array([[1, 1, 0, 1], [1, 1, 1, 1]], np.int32), {"unidirectional": 1})
    yield case("queries", rng.integers(0, 2, (B, S, S)).astype(np.int32))
    yield case("all_excluded", np.zeros((B, S), np.int32))
    sizes = [H, H, 2 * N]
    other = [rng.normal(size=(5, sum(sizes))), rng.normal(size=sum(sizes))]
    yield Case("Attention", "value_size", [x, *other], {**heads, "qkv_hidden_sizes": sizes})
    past = rng.normal(size=(2, B, N, 3, D))
    both = {**heads, "unidirectional": 1}
    yield Case("Attention", "past", [x, weight, bias, None, past], both, (0, 1))
    mask = np.ones((B, S + 3), np.int32)
    mask[0, :2] = 0
    yield Case("Attention", "past_mask", [x, weight, bias, mask, past], both, (0, 1), batched=(0, 3))
    added = rng.normal(size=(1, N, S, S))
    yield Case("Attention", "bias", [x, weight, bias, None, None, added], heads)


def _multi_head(rng: np.random.Generator) -> Iterator[Case]:
    keys = 5
    q, k, v = rng.normal(size=(B, S, H)), rng.normal(size=(B, keys, H)), rng.normal(size=(B, keys, 2 * N))
    bias = rng.normal(size=2 * H + 2 * N)
    heads, batched = {"num_heads": N}, (0, 1, 2)

    def case(name: str, inputs: list[np.ndarray | None], attributes: Mapping[str, Any] | None = None, **more: Any) -> Case:
        return Case("MultiHeadAttention", name, inputs, {**heads, **(attributes or {})}, **{"batched": batched, **more})

    yield case("cross", [q, k, v])
    yield case("bias", [q, k, v, bias], {"scale": 0.4})
    yield case("unidirectional", [q, k[:, :S], v[:, :S]], {"unidirectional": 1})
    mask = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], np.int32)
    yield case("padding", [q, k, v, None, mask], batched=(0, 1, 2, 4))
    yield case("ends", [q, k, v, None, np.array([3, 5], np.int32)], batched=(0, 1, 2, 4))
    yield case("padding_of_queries", [q, k, v, None, rng.integers(0, 2, (B, S, keys)).astype(np.int32)], batched=(0, 1, 2, 4))
    added = rng.normal(size=(1, N, S, keys))
    yield case("added", [q, k, v, bias, mask, added], {"mask_filter_value": -20.0}, batched=(0, 1, 2, 4))
    heads_of_keys = [rng.normal(size=(B, N, keys, D)), rng.normal(size=(B, N, keys, D))]
    yield case("split_heads", [q, *heads_of_keys])
    past = [rng.normal(size=(B, N, 3, D)), rng.normal(size=(B, N, 3, D))]
    v = rng.normal(size=(B, keys, H))
    yield case("past", [q, k, v, None, None, None, *past], outputs=(0, 1, 2), batched=(0, 1, 2, 6, 7))
    yield case(
        "past_causal", [q, k[:, :S], v[:, :S], None, None, None, *past], {"unidirectional": 1}, outputs=(0, 1, 2), batched=()
    )
    yield case("present", [q, k, v], outputs=(0, 1, 2))


def _rotary(rng: np.random.Generator) -> Iterator[Case]:
    heads, rows = rng.normal(size=(B, N, S, D)), rng.normal(size=(B, S, H))
    angles = rng.normal(size=(9, D // 2))
    cosine, sine = np.cos(angles), np.sin(angles)
    positions = rng.integers(0, 9, (B, S))
    for interleaved in (0, 1):
        kind, attributes = ("halves", "interleaved")[interleaved], {"interleaved": interleaved}
        yield Case("RotaryEmbedding", f"{kind}_heads", [heads, positions, cosine, sine], attributes, batched=(0, 1))
        yield Case("RotaryEmbedding", f"{kind}_rows", [rows, positions, cosine, sine], attributes, batched=(0, 1))
        yield Case("RotaryEmbedding", f"{kind}_first", [rows, np.array([2]), cosine, sine], attributes)
        partial = {**attributes, "num_heads": 2, "rotary_embedding_dim": 4}
        yield Case("RotaryEmbedding", f"{kind}_partial", [rows, positions, cosine, sine], partial, batched=(0, 1))


def _grouped(rng: np.random.Generator) -> Iterator[Case]:
    heads, size = 4, 16
    q, k, v = rng.normal(size=(B, S, heads * size)), *rng.normal(size=(2, B, S, 2 * size))
    last, whole = np.full(B, S - 1, np.int32), np.array([S], np.int32)
    attributes = {"num_heads": heads, "kv_num_heads": 2}
    angles = rng.normal(size=(16, size // 2))
    tables = [np.cos(angles), np.sin(angles)]
    batched = (0, 1, 2, 5)

    def case(name: str, inputs: list[np.ndarray | None], more: Mapping[str, Any] | None = None, **record: Any) -> Case:
        return Case(
            "GroupQueryAttention",
            name,
            inputs,
            {**attributes, **(more or {})},
            **{"batched": batched, "outputs": (0, 1, 2), **record},
        )

    first = [q, k, v, None, None, last, whole]
    yield case("plain", first)
    yield case("scale_cap", first, {"scale": 0.5, "softcap": 1.5})
    yield case("window", first, {"local_window_size": 2})
    yield case("rotary", [*first, *tables], {"do_rotary": 1})
    yield case("rotary_interleaved", [*first, *tables], {"do_rotary": 1, "rotary_interleaved": 1})
    packed = np.concatenate([q, k, v], -1)
    yield case("packed", [packed, None, None, None, None, last, whole, *tables], {"do_rotary": 1}, batched=(0, 5))
    uneven = [q, k, v, None, None, np.array([1, S - 1], np.int32), whole]
    rows = np.array([[True, True, False, False], [True] * S])
    yield case("uneven", uneven, outputs=(0,), rows=rows)
    smooth = {"smooth_softmax": 1}
    yield case("smooth", first, smooth)
    empty = [np.zeros((B, 2, 0, size))] * 2
    yield case("empty_past", [q, k, v, *empty, last, whole, *tables], {"do_rotary": 1}, held=(3, 4))
    past = rng.normal(size=(2, B, 2, 3, size))
    together = [q[:, :1], k[:, :1], v[:, :1], *past, np.full(B, 3, np.int32), np.array([4], np.int32)]
    yield case("one_more", [*together, *tables], {"do_rotary": 1}, batched=(0, 1, 2, 3, 4, 5))
    alone = [x[:1] for x in (q, k, v, *past)]
    several = [*alone, np.full(1, S + 2, np.int32), np.array([S + 3], np.int32)]
    yield case("several_more", [*several, *tables], {"do_rotary": 1, "local_window_size": 3}, batched=(0, 1, 2, 3, 4, 5))
    other = [q[:, :1], k[:, :1], v[:, :1], *past, np.array([1, 3], np.int32), np.array([4], np.int32)]
    yield case("uneven_past", [*other, *tables], {"do_rotary": 1}, batched=(0, 1, 2, 3, 4, 5))
    added = rng.normal(size=(1, heads, S, S))
    yield case("added", [*first, None, None, None, added])
    yield case("sink", [*first, None, None, None, None, rng.normal(size=heads)])
    positions = np.tile(np.arange(S), (B, 1)) + 2
    yield case("positions", [*first, *tables, positions], {"do_rotary": 1}, batched=(0, 1, 2, 5, 9))


def _quantized(rng: np.random.Generator) -> Iterator[Case]:
    rows, columns, block = 6, 40, 16
    blocks = 3
    a, bias = rng.normal(size=(B, S, columns)), rng.normal(size=rows)
    scales = rng.uniform(0.05, 0.2, (rows, blocks))
    sizes = {"N": rows, "K": columns, "block_size": block}
    for bits in (4, 8):
        integers = rng.integers(0, 256, (rows, blocks, block * bits // 8)).astype(np.uint8)
        attributes = {**sizes, "bits": bits}
        yield Case("MatMulNBits", f"{bits}_bits", [a, integers, scales], attributes, held=(1, 2))
        zeros = rng.integers(0, 256, (rows, -(-blocks * bits // 8))).astype(np.uint8)
        yield Case("MatMulNBits", f"{bits}_bits_zeros", [a, integers, scales, zeros], attributes, held=(1, 2, 3))
    integers = rng.integers(0, 256, (rows, blocks, block // 2)).astype(np.uint8)
    numbers = rng.uniform(6, 9, (rows, blocks))
    attributes = {**sizes, "bits": 4}
    yield Case("MatMulNBits", "zeros_of_floats", [a, integers, scales, numbers], attributes, held=(1, 2, 3))
    order = (np.arange(blocks * block) // block)[::-1].astype(np.int32).copy()
    yield Case("MatMulNBits", "order", [a, integers, scales, None, order], attributes, held=(1, 2, 4))
    yield Case("MatMulNBits", "bias", [a, integers, scales, None, None, bias], attributes, held=(1, 2, 5))
    table, indices = rng.integers(0, 256, (9, 16)).astype(np.uint8), rng.integers(0, 9, (B, S))
    by_row = {"bits": 4, "block_size": 16, "gather_axis": 0, "quantize_axis": 1}
    scales = rng.uniform(0.05, 0.2, (9, 2))
    yield Case("GatherBlockQuantized", "rows", [table, indices, scales], by_row, held=(0, 2), batched=(1,))
    zeros = rng.integers(0, 256, (9, 1)).astype(np.uint8)
    yield Case("GatherBlockQuantized", "zeros", [table, indices, scales, zeros], by_row, held=(0, 2, 3), batched=(1,))


def _early(rng: np.random.Generator) -> Iterator[Case]:
    """Operators that the standard lacks, or got later."""
    yield Case("Inverse", "matrices", [rng.normal(size=(B, 4, 4))])
    yield Case("Inverse", "axes", [rng.normal(size=(B, 2, 3, 3))])
    yield Case("Inverse", "exchanges", [np.array([[0.0, 2.0], [0.5, 0.0]]) + np.eye(2) * 1e-3], batched=())
    rows = [rng.normal(size=(B, 3)), rng.normal(size=(5, 3))]
    yield Case("CDist", "squared", rows, {"metric": "sqeuclidean"})
    yield Case("CDist", "euclidean", rows, {"metric": "euclidean"})
    x = rng.normal(size=(B, S))
    yield Case("Pad", "edge", [x, np.array([0, 1, 0, 2])], {"mode": "edge"}, held=(1,))
    yield Case("GatherND", "rows", [x, np.array([[0, 1], [1, 3], [0, 1]])], held=(1,), batched=())
    packed, scales = rng.integers(0, 256, 120).astype(np.uint8), rng.uniform(0.1, 1, 15)
    sizes = {"N": 6, "K": 40, "block_size": 16}
    for kind in (0, 1):
        inputs = [rng.normal(size=(B, 40)), packed, scales]
        yield Case("MatMulBnb4", f"kind_{kind}", inputs, {**sizes, "quant_type": kind}, held=(1, 2))
