"""Rewrite a lowered graph for the engine's own kernels, one family after another.

On a GPU, sums of long rows become one reduction. Lowering sums a row in blocks, and then the block sums, to keep rounding errors
small for sequential addition. A GPU sums a row as a tree, with errors as small, and each stage would be another dependent kernel.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import onnx_ir as ir
import torch

from burnish.engines.torch import operators as _operators  # noqa: F401  # registers what kernels take as it is
from burnish.engines.torch.bindings import attention
from burnish.engines.torch.bindings.attention import cuda
from burnish.engines.torch.bindings.precision import (
    CONVOLUTIONS,
    PRODUCTS,
    narrow_dtypes,
    read_shapes_before_casts,
    transpose_narrow,
    widen,
)
from burnish.engines.torch.translate.rules import translated_operators
from burnish.graph import BURNISH_DOMAIN, Builder, constant_array, replace_node
from burnish.graph.stage import Pass, Stage, rewrite_graph
from burnish.graph.uses import is_read_once, producer_of, remove_unread, sort
from burnish.kernels.attention import fuse_attention, use_cuda_attention
from burnish.kernels.convolution.fusion import (
    choose_convolutions,
    fuse_depthwise,
    use_narrow_gradients,
    use_products,
    use_winograd,
)
from burnish.kernels.elementwise.fusion import fuse_elementwise
from burnish.kernels.indexing import use_row_kernels
from burnish.kernels.linear import fuse_batched_products, fuse_linear, use_linear_gradients
from burnish.kernels.normalization.fusion import (
    SYNCHRONIZED,
    fuse_batch_normalization,
    fuse_group_normalization,
    fuse_synchronized,
)
from burnish.kernels.normalization.row_fusion import fuse_normalization
from burnish.kernels.pooling import fuse_max_pooling
from burnish.kernels.replacements import fused_operators, replace_whole_nodes
from burnish.kernels.softmax import use_cross_entropy_kernels
from burnish.operators.attention import ATTENTION, ATTENTION_GRAD
from burnish.operators.loss import SOFTMAX_CROSS_ENTROPY, SOFTMAX_CROSS_ENTROPY_GRAD
from burnish.operators.normalization.batch import BATCH_NORM_GRAD, BATCH_NORM_TRAINING
from burnish.operators.normalization.standardize import ROOT_MEAN_SQUARE_NORMALIZE, STANDARDIZE, STANDARDIZE_GRAD
from burnish.rewriting.lower_semantic_operators import lower_semantic_operators
from burnish.rewriting.recompute import run_in_order, wait_by_selection

if TYPE_CHECKING:
    from burnish.compiler.lowered_graphs import LoweredGraphs


def sum_whole_rows(graph: ir.Graph) -> bool:
    """Replace block-wise reductions of trailing axes by one reduction, in place."""
    changed = False
    for node in list(graph):
        stages = _stages(node)
        if len(stages) < 2:
            continue
        split = producer_of(stages[-1].inputs[0], "Reshape")
        axes = None if split is None else _split_axes(split, len(stages))
        if split is None or axes is None:
            continue
        builder = Builder(graph, before=node)
        source = split.inputs[0]
        assert source is not None
        total = builder.op(stages[-1].op_type, builder.tensor(source), builder.integers(axes), keepdims=0)
        replace_node(node, builder.op("Unsqueeze", total, builder.integers([-1]), like=builder.tensor(node.outputs[0])))
        remove_unread(graph, *stages[1:], split)
        changed = True
    return changed


def _stages(node: ir.Node) -> list[ir.Node]:
    """Return the chain of reductions over the last axis that ends in this node, the last first; else an empty list."""
    if not _sums_last_axis(node) or not _keeps(node):
        return []
    stages = [node]
    while stages[-1].op_type == "ReduceSum" and (before := producer_of(stages[-1].inputs[0], "ReduceSum", "ReduceSumSquare")):
        if not _sums_last_axis(before) or _keeps(before) or not is_read_once(before.outputs[0]):
            break
        stages.append(before)
    return stages


def _sums_last_axis(node: ir.Node) -> bool:
    if node.op_type not in ("ReduceSum", "ReduceSumSquare") or node.domain != "" or len(node.inputs) != 2:
        return False
    axes = constant_array(node.inputs[1])
    return axes is not None and axes.tolist() == [-1]


def _keeps(node: ir.Node) -> bool:
    return "keepdims" not in node.attributes or node.attributes["keepdims"].as_int() == 1


def _split_axes(split: ir.Node, blocks: int) -> list[int] | None:
    """Return the axes that a Reshape splits into this many blocks; None if it does something else."""
    source, extents = split.inputs[0], constant_array(split.inputs[1])
    if source is None or source.shape is None or extents is None or "allowzero" in split.attributes:
        return None
    leading = len(extents) - blocks
    if leading < 0 or leading >= len(source.shape) or extents[:leading].any() or not (extents[leading:] > 0).all():
        return None
    return list(range(leading, len(source.shape)))


_SHARED = (
    *(BATCH_NORM_TRAINING, BATCH_NORM_GRAD, *SYNCHRONIZED),
    *(STANDARDIZE, STANDARDIZE_GRAD, ROOT_MEAN_SQUARE_NORMALIZE),
    *(SOFTMAX_CROSS_ENTROPY, SOFTMAX_CROSS_ENTROPY_GRAD),
)
"""Graph passes that other engines use too."""

FUSED = fused_operators() | {operator.name for operator in _SHARED}
"""The semantic operators that only fusion creates: ATen has no kernels for them, or only less precise ones."""


@dataclass(frozen=True)
class Fusing:
    """The context of the engine's passes.

    Attributes:
        kernels: True if the engine's own kernels are available; ATen's always are.
        winograd: True if these kernels may compute convolutions by Winograd's minimal filtering.
        channels_last: True if images have channels last in memory.
        narrow: sixteen-bit dtypes whose products are computed in float32, because the device is slow in them.
        attended: dtypes of the attention kernels.
        kernel_choice: ``measured``: without a rule, the fastest way to compute a convolution is measured at run time; ``fixed``:
            the usual way; None: PyTorch's convolutions.
        on_cuda: True if the graph runs on a CUDA device, with PyTorch's attention kernels if ``attended`` is not empty.
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
        # A fused layer takes the place of its activation; readers of its statistics may come before that.
        rewrite_graph(sort, reason="TopologicalSortPass makes the same call"),
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
"""Passes that turn a graph of a program into one for the engine's kernels, with the semantic operators that it translates."""


def fuse(model: ir.Model, kernels: bool, **options: Any) -> ir.Model:
    """Rewrite a graph by the stage TORCH, in place, and return it; ``options`` are fields of ``Fusing``."""
    TORCH.run(model, Fusing(kernels, **options))
    return model


Compilation = Literal["regions", "inductor", "none"]
KernelChoice = Literal["measured", "fixed"]


def prepared(
    graphs: LoweredGraphs,
    name: str,
    device: torch.device,
    fused: bool,
    *,
    compilation: Compilation = "regions",
    channels_last: bool = True,
    winograd: bool = True,
    kernel_choice: KernelChoice = "measured",
) -> ir.Model:
    """Return a rewritten copy of a graph of a program.

    Args:
        graphs: graphs of the program, lowered to the engine's target.
        name: name of the graph.
        device: device that it runs on.
        fused: True for the engine's own kernels, False for ATen's.
        compilation, channels_last, winograd, kernel_choice: as for ``TorchEngine``.
    """
    attended = cuda.dtypes(device) if device.type == "cuda" and compilation != "none" else ()
    if not fused:
        kernels = graphs.target.kernels & translated_operators(BURNISH_DOMAIN)
        if attended:
            kernels |= {ATTENTION.name, ATTENTION_GRAD.name}
        graphs = graphs.with_kernels(kernels)
    # Recomputation of activations waits for the backward pass; the mechanism depends on who orders the nodes.
    place_waits = wait_by_selection if compilation == "inductor" else run_in_order
    chooses = compilation == "regions" and device.type == "cpu" and channels_last
    model = graphs.copy_of(name)
    place_waits(model)
    return fuse(
        model,
        fused,
        winograd=winograd and channels_last,
        channels_last=channels_last,
        narrow=narrow_dtypes(device),
        attended=attended if device.type == "cuda" else attention.dtypes(),
        kernel_choice=kernel_choice if chooses else None,
        on_cuda=device.type == "cuda",
    )
