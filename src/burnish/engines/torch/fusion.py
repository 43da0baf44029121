"""A program's graph, rewritten for the kernels that this engine has beyond ATen's: each family in its turn.

What is not of a form that a kernel has is left as it is.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from burnish.engines.torch import operators as _operators  # noqa: F401  # registers what kernels take as it is
from burnish.engines.torch.bindings.precision import CONVOLUTIONS, PRODUCTS, read_shapes_before_casts, transpose_narrow, widen
from burnish.engines.torch.whole_sums import sum_whole_rows
from burnish.graph import BURNISH_DOMAIN
from burnish.kernels.attention.fusion import fuse_attention, use_cuda_attention
from burnish.kernels.convolution.depthwise_fusion import fuse_depthwise
from burnish.kernels.convolution.fusion import choose_convolutions, use_narrow_gradients, use_products, use_winograd
from burnish.kernels.elementwise.fusion import fuse_elementwise
from burnish.kernels.indexing.fusion import use_row_kernels
from burnish.kernels.linear.fusion import fuse_batched_products, fuse_linear, use_linear_gradients
from burnish.kernels.normalization.batch_fusion import fuse_batch_normalization
from burnish.kernels.normalization.group_fusion import fuse_group_normalization
from burnish.kernels.normalization.row_fusion import fuse_normalization
from burnish.kernels.normalization.synchronized_fusion import SYNCHRONIZED, fuse_synchronized
from burnish.kernels.pooling.fusion import fuse_max_pooling
from burnish.kernels.replacements import fused_operators, replace_whole_nodes
from burnish.kernels.softmax.fusion import use_cross_entropy_kernels
from burnish.operators.loss import SOFTMAX_CROSS_ENTROPY, SOFTMAX_CROSS_ENTROPY_GRAD
from burnish.operators.normalization.batch import BATCH_NORM_GRAD, BATCH_NORM_TRAINING
from burnish.operators.normalization.standardize import ROOT_MEAN_SQUARE_NORMALIZE, STANDARDIZE, STANDARDIZE_GRAD
from burnish.rewriting.lower_semantic_operators import lower_semantic_operators

_SHARED = (
    *(BATCH_NORM_TRAINING, BATCH_NORM_GRAD, *SYNCHRONIZED),
    *(STANDARDIZE, STANDARDIZE_GRAD, ROOT_MEAN_SQUARE_NORMALIZE),
    *(SOFTMAX_CROSS_ENTROPY, SOFTMAX_CROSS_ENTROPY_GRAD),
)
"""Those of the graph passes that other engines call too."""

FUSED = fused_operators() | {operator.name for operator in _SHARED}
"""The semantic operators that only fusion takes: ATen has no kernels of them, or none that keep as many digits."""


def fuse(
    model: ir.Model,
    kernels: bool,
    winograd: bool = False,
    channels_last: bool = True,
    narrow: Collection[ir.DataType] = (),
    attended: Collection[ir.DataType] = (ir.DataType.FLOAT,),
    kernel_choice: str | None = None,
    on_cuda: bool = False,
) -> ir.Model:
    """Rewrite a graph, in place.

    Args:
        model: a graph of the program, with the semantic operators that the engine translates.
        kernels: whether the engine's own kernels are there; ATen's are.
        winograd: whether convolutions may be computed by Winograd's minimal filtering, by these kernels.
        channels_last: whether images have their channels last in memory.
        narrow: dtypes of sixteen bits whose products are computed in float32: those that the device is slow in.
        attended: dtypes that the kernels of attention take.
        kernel_choice: ``measured``: where no rule is known, the quickest way to compute a convolution is measured as a step runs;
            ``fixed``: it is the usual one; None: convolutions are PyTorch's.
        on_cuda: whether the graph runs on a CUDA device, with PyTorch's kernels of attention there where ``attended`` has any.

    Returns:
        The same model. Batch normalization that no kernel takes is lowered.
    """
    graph = model.graph
    read_shapes_before_casts(graph)
    fuse_max_pooling(graph)
    if kernels:
        fuse_batch_normalization(graph)
        fuse_synchronized(graph)
        fuse_normalization(graph)
        fuse_group_normalization(graph)
        replace_whole_nodes(graph)
        use_cross_entropy_kernels(graph)
        fuse_depthwise(graph)
    widen(graph, CONVOLUTIONS, narrow)
    if kernels and winograd:
        use_winograd(graph)
    if kernels and channels_last:
        use_products(graph)
        use_narrow_gradients(graph)
    if kernel_choice is not None:
        choose_convolutions(graph, measured=kernel_choice == "measured")
    # A fused layer stands where its activation was: what reads its statistics may have come before.
    graph.sort()
    transpose_narrow(graph)
    if kernels:
        use_linear_gradients(graph)
        fuse_attention(graph, attended)
    if on_cuda:
        use_cuda_attention(graph, attended, model.opset_imports[""])
    left = {node.op_type for node in graph if node.domain == BURNISH_DOMAIN} - FUSED
    lower_semantic_operators(model, keep=left)
    if on_cuda:
        sum_whole_rows(graph)
    if kernels:
        fuse_linear(graph)
        fuse_batched_products(graph)
    widen(graph, PRODUCTS, narrow)
    if kernels:
        fuse_elementwise(graph)
        use_row_kernels(graph)
    return model
