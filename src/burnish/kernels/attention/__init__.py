"""Attention without a matrix of probabilities: the operators that a graph pass puts in its place."""

from burnish.kernels.engine_operator import EngineOperator

HEADS = ("query", "key", "value")
FUSED_ATTENTION = EngineOperator("FusedAttention", (*HEADS, "mask"), ("result", "logarithms"))
FUSED_ATTENTION_GRAD = EngineOperator(
    "FusedAttentionGrad", ("flow", *HEADS, "result", "logarithms", "mask"), ("dquery", "dkey", "dvalue")
)
CUDA_ATTENTION = EngineOperator("CudaAttention", (*HEADS, "mask"), ("result", "logarithms", "seed", "offset"))
CUDA_ATTENTION_GRAD = EngineOperator(
    "CudaAttentionGrad", ("flow", *HEADS, "result", "logarithms", "seed", "offset", "mask"), ("dquery", "dkey", "dvalue")
)
