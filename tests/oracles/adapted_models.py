"""A small model with a layer of each kind that adapters stand beside."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

WORDS, WIDTH, LENGTH, CLASSES = 11, 8, 5, 3
LAYERS = ("words", "dense", "turned", "whole", "packed", "filter", "head")


def layered_model(seed: int = 0, quantized: bool = True) -> onnx.ModelProto:
    """A classifier of ``ids`` [N, 5]: an embedding, a MatMul with a bias, one of a transposed weight, one of int8 weights, one of
    four bits, a convolution, and a Gemm with ``transB``.

    Args:
        seed: of the weights.
        quantized: with the layers ``whole`` and ``packed``.
    """
    generator = np.random.default_rng(seed)
    initializers = [
        numpy_helper.from_array(generator.normal(size=shape).astype(np.float32) * 0.4, name)
        for name, shape in {
            "words.weight": (WORDS, WIDTH),
            "dense.weight": (WIDTH, WIDTH),
            "dense.bias": (WIDTH,),
            "turned.weight": (WIDTH, WIDTH),
            "filter.weight": (6, WIDTH, 3),
            "filter.bias": (6,),
            "head.weight": (CLASSES, 6),
            "head.bias": (CLASSES,),
        }.items()
    ]
    nodes = [
        helper.make_node("Gather", ["words.weight", "ids"], ["embedded"], "look_up"),
        helper.make_node("MatMul", ["embedded", "dense.weight"], ["product"], "dense_product"),
        helper.make_node("Add", ["product", "dense.bias"], ["dense_sum"]),
        helper.make_node("Tanh", ["dense_sum"], ["active"]),
        helper.make_node("Transpose", ["turned.weight"], ["turned_weight"], perm=[1, 0]),
        helper.make_node("MatMul", ["active", "turned_weight"], ["last"]),
    ]
    if quantized:
        initializers += _quantized_weights(generator)
        sizes = {"K": WIDTH, "N": WIDTH, "bits": 4, "block_size": 16}
        nodes[-1].output[0] = "turned"
        nodes += [
            helper.make_node("DequantizeLinear", ["whole.weight", "whole.scales"], ["whole_weight"], axis=1),
            helper.make_node("MatMul", ["turned", "whole_weight"], ["between"]),
            helper.make_node(
                "MatMulNBits", ["between", "packed.weight", "packed.scales"], ["last"], "packed", domain=RUNTIME, **sizes
            ),
        ]
    nodes += [
        helper.make_node("Transpose", ["last"], ["channels"], perm=[0, 2, 1]),
        helper.make_node("Conv", ["channels", "filter.weight", "filter.bias"], ["filtered"], pads=[1, 1], kernel_shape=[3]),
        helper.make_node("Tanh", ["filtered"], ["bounded"]),
        helper.make_node("ReduceMean", ["bounded"], ["pooled"], axes=[2], keepdims=0),
        helper.make_node("Gemm", ["pooled", "head.weight", "head.bias"], ["logits"], "classify", transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "layered",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["N", LENGTH])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", CLASSES])],
        initializers,
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(RUNTIME, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def batch(seed: int = 1, size: int = 4) -> dict[str, np.ndarray]:
    """Indices of words and classes."""
    generator = np.random.default_rng(seed)
    return {"ids": generator.integers(0, WORDS, (size, LENGTH)), "labels": generator.integers(0, CLASSES, size)}


RUNTIME = "com.microsoft"


def _quantized_weights(generator: np.random.Generator) -> list[onnx.TensorProto]:
    arrays = {
        "whole.weight": generator.integers(-127, 128, (WIDTH, WIDTH), dtype=np.int8),
        "whole.scales": generator.uniform(0.004, 0.008, WIDTH).astype(np.float32),
        "packed.weight": generator.integers(0, 256, (WIDTH, 1, 8), dtype=np.uint8),
        "packed.scales": generator.uniform(0.05, 0.15, WIDTH).astype(np.float32),
    }
    return [numpy_helper.from_array(array, name) for name, array in arrays.items()]
