"""A small decoder in the style of onnxruntime-genai's files: grouped attention with a cache, weights in four bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

VOCABULARY, WIDTH, HEADS, KV_HEADS, SIZE, HIDDEN, LAYERS, BLOCK = 20, 32, 2, 1, 16, 48, 2, 16
RUNTIME = "com.microsoft"


class _File:
    def __init__(self, seed: int, quantized: bool):
        self.rng = np.random.default_rng(seed)
        self.quantized = quantized
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []

    def weight(self, name: str, array: np.ndarray) -> str:
        self.initializers.append(numpy_helper.from_array(array, name))
        return name

    def node(self, op_type: str, inputs: list[str], outputs: list[str], domain: str = "", **attributes: Any) -> str:
        name = f"/{outputs[-1]}/{op_type}"
        self.nodes.append(helper.make_node(op_type, inputs, outputs, name=name, domain=domain, **attributes))
        return next(output for output in outputs if output)

    def linear(self, x: str, rows: int, columns: int, name: str) -> str:
        """A projection [columns] to [rows]."""
        if not self.quantized:
            w = self.weight(f"{name}.MatMul.weight", self.rng.normal(size=(columns, rows)).astype(np.float32) * 0.3)
            return self.node("MatMul", [x, w], [name])
        blocks = columns // BLOCK
        q = self.weight(f"{name}.weight_Q4", self.rng.integers(0, 256, (rows, blocks, BLOCK // 2)).astype(np.uint8))
        scales = self.weight(f"{name}.weight_scales", self.rng.uniform(0.02, 0.1, rows * blocks).astype(np.float32))
        sizes = {"N": rows, "K": columns, "bits": 4, "block_size": BLOCK}
        return self.node("MatMulNBits", [x, q, scales], [name], RUNTIME, **sizes)

    def norm(self, name: str) -> str:
        return self.weight(f"{name}.weight", self.rng.uniform(0.5, 1.5, WIDTH).astype(np.float32))


def decoder(quantized: bool = True, seed: int = 0) -> onnx.ModelProto:
    """``input_ids``, ``attention_mask`` and a cache to ``logits`` and the cache."""
    file = _File(seed, quantized)
    table = file.weight("model.embed_tokens.weight", file.rng.normal(size=(VOCABULARY, WIDTH)).astype(np.float32))
    hidden = file.node("Gather", [table, "input_ids"], ["embedded"])
    one = file.weight("one", np.array([1], np.int64))
    counted = file.node("ReduceSum", ["attention_mask", one], ["counted"], keepdims=1)
    last = file.node("Cast", [file.node("Sub", [counted, one], ["last"])], ["seqlens_k"], to=TensorProto.INT32)
    shape = file.node("Shape", ["attention_mask"], ["mask_shape"])
    index = file.weight("index", np.array(1, np.int64))
    whole = file.node("Cast", [file.node("Gather", [shape, index], ["length"], axis=0)], ["total"], to=TensorProto.INT32)
    angles = np.outer(np.arange(12), 1 / 100.0 ** (np.arange(0, SIZE, 2) / SIZE))
    tables = [file.weight(name, f(angles).astype(np.float32)) for name, f in (("cos_cache", np.cos), ("sin_cache", np.sin))]
    normed = file.node(
        "SimplifiedLayerNormalization", [hidden, file.norm("norm.0")], ["normed.0"], axis=-1, epsilon=1e-6, stash_type=1
    )
    cache = []
    for layer in range(LAYERS):
        q, k, v = (
            file.linear(normed, heads * SIZE, WIDTH, f"layers.{layer}.{name}")
            for name, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS), ("v_proj", KV_HEADS))
        )
        past = [f"past_key_values.{layer}.{name}" for name in ("key", "value")]
        present = [f"present.{layer}.{name}" for name in ("key", "value")]
        cache += [*zip(past, present, strict=True)]
        attended = file.node(
            "GroupQueryAttention",
            [q, k, v, *past, last, whole, *tables],
            [f"attention.{layer}", *present],
            RUNTIME,
            num_heads=HEADS,
            kv_num_heads=KV_HEADS,
            scale=SIZE**-0.5,
            do_rotary=1,
            rotary_interleaved=0,
            local_window_size=-1,
        )
        projected = file.linear(attended, WIDTH, HEADS * SIZE, f"layers.{layer}.o_proj")
        normed, hidden = _skip(file, hidden, projected, f"norm.{layer}.middle")
        gate, up = (file.linear(normed, HIDDEN, WIDTH, f"layers.{layer}.{name}") for name in ("gate_proj", "up_proj"))
        gated = file.node("Mul", [gate, file.node("Sigmoid", [gate], [f"sigmoid.{layer}"])], [f"silu.{layer}"])
        product = file.node("Mul", [gated, up], [f"product.{layer}"])
        down = file.linear(product, WIDTH, HIDDEN, f"layers.{layer}.down_proj")
        normed, hidden = _skip(file, hidden, down, f"norm.{layer + 1}", is_last=layer == LAYERS - 1)
    head = file.weight("lm_head.MatMul.weight", file.rng.normal(size=(WIDTH, VOCABULARY)).astype(np.float32) * 0.3)
    file.node("MatMul", [normed, head], ["logits"])
    return _model(file, cache)


def _skip(file: _File, hidden: str, added: str, name: str, is_last: bool = False) -> tuple[str, str]:
    outputs = [f"{name}.normed"] if is_last else [f"{name}.normed", "", "", f"{name}.sum"]
    operands = [hidden, added, file.norm(name)]
    file.node("SkipSimplifiedLayerNormalization", operands, outputs, RUNTIME, epsilon=1e-6)
    return outputs[0], outputs[-1]


def _model(file: _File, cache: list[tuple[str, str]]) -> onnx.ModelProto:
    tokens = ["batch_size", "sequence_length"]
    inputs = [
        helper.make_tensor_value_info("input_ids", TensorProto.INT64, tokens),
        helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch_size", "total_sequence_length"]),
    ]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [*tokens, VOCABULARY])]
    for past, present in cache:
        shape = ["batch_size", KV_HEADS, "past_sequence_length", SIZE]
        inputs.append(helper.make_tensor_value_info(past, TensorProto.FLOAT, shape))
        shape = ["batch_size", KV_HEADS, "total_sequence_length", SIZE]
        outputs.append(helper.make_tensor_value_info(present, TensorProto.FLOAT, shape))
    graph = helper.make_graph(file.nodes, "main_graph", inputs, outputs, file.initializers)
    opsets = [helper.make_opsetid("", 14), helper.make_opsetid(RUNTIME, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=7, producer_name="onnxruntime-genai")
