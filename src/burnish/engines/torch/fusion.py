"""A program's graph, rewritten for the kernels that this engine has beyond ATen's: each family in its turn.

What is not of a form that a kernel has is left as it is.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from burnish.engines.torch import operators as _operators  # noqa: F401  # registers what kernels take as it is
from burnish.engines.torch.bindings.precision import CONVOLUTIONS, PRODUCTS, read_shapes_before_casts, transpose_narrow, widen
from burnish.engines.torch.whole_sums import sum_whole_rows
from burnish.graph import BURNISH_DOMAIN
from burnish.graph.stage import Pass, Stage, rewrite_graph
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


@dataclass(frozen=True)
class Fusing:
    """What the passes of the engine are told.

    Attributes:
        kernels: whether the engine's own kernels are there; ATen's are.
        winograd: whether convolutions may be computed by Winograd's minimal filtering, by these kernels.
        channels_last: whether images have their channels last in memory.
        narrow: dtypes of sixteen bits whose products are computed in float32: those that the device is slow in.
        attended: dtypes that the kernels of attention take.
        kernel_choice: ``measured``: where no rule is known, the quickest way to compute a convolution is measured as a step runs;
            ``fixed``: it is the usual one; None: convolutions are PyTorch's.
        on_cuda: whether the graph runs on a CUDA device, with PyTorch's kernels of attention there where ``attended`` has any.
    """

    kernels: bool
    winograd: bool = False
    channels_last: bool = True
    narrow: Collection[ir.DataType] = ()
    attended: Collection[ir.DataType] = (ir.DataType.FLOAT,)
    kernel_choice: str | None = None
    on_cuda: bool = False


def _has_kernels(_: ir.Model, context: Fusing) -> bool:
    return context.kernels


def _is_on_cuda(_: ir.Model, context: Fusing) -> bool:
    return context.on_cuda


def _has_kernels_of_images(_: ir.Model, context: Fusing) -> bool:
    return context.kernels and context.channels_last


def _lower_what_no_kernel_takes(model: ir.Model) -> bool:
    left = {node.op_type for node in model.graph if node.domain == BURNISH_DOMAIN} - FUSED
    return lower_semantic_operators(model, keep=left)


TORCH: Stage[Fusing] = Stage(
    "TORCH",
    (
        rewrite_graph(read_shapes_before_casts),
        rewrite_graph(fuse_max_pooling),
        rewrite_graph(fuse_batch_normalization, when=_has_kernels),
        rewrite_graph(fuse_synchronized, when=_has_kernels),
        rewrite_graph(fuse_normalization, when=_has_kernels),
        rewrite_graph(fuse_group_normalization, when=_has_kernels),
        rewrite_graph(replace_whole_nodes, when=_has_kernels),
        rewrite_graph(use_cross_entropy_kernels, when=_has_kernels),
        rewrite_graph(fuse_depthwise, when=_has_kernels),
        Pass("widen_convolutions", lambda model, context: widen(model.graph, CONVOLUTIONS, context.narrow)),
        rewrite_graph(use_winograd, when=lambda _, context: context.kernels and context.winograd),
        rewrite_graph(use_products, when=_has_kernels_of_images),
        rewrite_graph(use_narrow_gradients, when=_has_kernels_of_images),
        Pass(
            "choose_convolutions",
            lambda model, context: choose_convolutions(model.graph, measured=context.kernel_choice == "measured"),
            when=lambda _, context: context.kernel_choice is not None,
        ),
        # A fused layer stands where its activation was: what reads its statistics may have come before.
        Pass("sort", lambda model, _: model.graph.sort(), reason="TopologicalSortPass makes the same call"),
        rewrite_graph(transpose_narrow),
        rewrite_graph(use_linear_gradients, when=_has_kernels),
        Pass("fuse_attention", lambda model, context: fuse_attention(model.graph, context.attended), when=_has_kernels),
        Pass(
            "use_cuda_attention",
            lambda model, context: use_cuda_attention(model.graph, context.attended, model.opset_imports[""]),
            when=_is_on_cuda,
        ),
        Pass("lower_what_no_kernel_takes", lambda model, _: _lower_what_no_kernel_takes(model)),
        rewrite_graph(sum_whole_rows, when=_is_on_cuda),
        rewrite_graph(fuse_linear, when=_has_kernels),
        rewrite_graph(fuse_batched_products, when=_has_kernels),
        Pass("widen_products", lambda model, context: widen(model.graph, PRODUCTS, context.narrow)),
        rewrite_graph(fuse_elementwise, when=_has_kernels),
        rewrite_graph(use_row_kernels, when=_has_kernels),
    ),
    settles=False,
)
"""A graph of a program, with the semantic operators that the engine translates, for the kernels that run it."""


def fuse(model: ir.Model, kernels: bool, **options: Any) -> ir.Model:
    """Rewrite a graph, in place, by the stage TORCH; ``options`` are fields of ``Fusing``. Returns the same model."""
    TORCH.run(model, Fusing(kernels, **options))
    return model
