"""Stages between the importer and an engine: RECOGNIZED, LOWERED and STANDARD.

Others: CANONICAL in ``burnish.importer.canonical``, TRAINING and INFERENCE in ``burnish.modes``, DISTRIBUTED in
``burnish.distributed.derivation``, EXPORTED in ``burnish.files.export``, and engine stages in their packages. ``burnish passes``
prints them all.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from burnish.graph.names import separate_names
from burnish.graph.stage import Pass, Stage, rewrite, rewrite_graph
from burnish.graph.uses import remove_unused
from burnish.quantization.graph import simulates_quantization
from burnish.rewriting.change_dtypes import compute_in_float32, compute_without_float64, widen_reductions
from burnish.rewriting.complete_axes import complete_axes
from burnish.rewriting.concatenate_padded_parts import concatenate_padded_parts
from burnish.rewriting.further_outputs import WITH_FURTHER_OUTPUTS, compute_further_outputs
from burnish.rewriting.gather_reordered_blocks import gather_reordered_blocks
from burnish.rewriting.hoist_gather import hoist_gather
from burnish.rewriting.join_updates import join_updates
from burnish.rewriting.lower_semantic_operators import lower_semantic_operators, write_out_newer
from burnish.rewriting.merge_equal_nodes import merge_casts, merge_scalars
from burnish.rewriting.multiply_depthwise_rows import multiply_depthwise_rows
from burnish.rewriting.raise_scalar_ranks import raise_scalar_ranks
from burnish.rewriting.recognize_attention import recognize_attention
from burnish.rewriting.recognize_gelu import recognize_gelu
from burnish.rewriting.recognize_group_normalization import hold_group_normalization_constants, recognize_group_normalization
from burnish.rewriting.recognize_layer_normalization import recognize_layer_normalization
from burnish.rewriting.recognize_probabilities import recognize_probabilities
from burnish.rewriting.recognize_rms_normalization import OPSET as RMS_OPSET
from burnish.rewriting.recognize_rms_normalization import recognize_rms_normalization
from burnish.targets import ONNXRUNTIME, Target, check_allowed, settle_opset

NAMES = "NameFixPass renames values of the main graph too, by which signatures know them"
UPDATING = ("step", "apply")
"""Graphs that update the state."""


@dataclass(frozen=True)
class Lowering:
    """Context of the lowering passes.

    Attributes:
        target: the runtime.
        in_float32: True to compute bfloat16, and other sixteen-bit values next to it, in float32.
    """

    target: Target = ONNXRUNTIME
    in_float32: bool = False


def _gathers_blocks(model: ir.Model, context: Lowering) -> bool:
    """Exclude ``predict``, whose operators an export keeps."""
    return context.target.gathers_blocks and model.graph.name != "predict"


def _has_no_kernels(model: ir.Model, context: Lowering) -> bool:
    """Kernels of an engine match unmodified scalars."""
    return not context.target.kernels


def _multiplies(model: ir.Model, context: Lowering) -> bool:
    """Exclude graphs whose convolutions become integers later; ``LoweredGraphs`` multiplies after that."""
    graph, target = model.graph, context.target
    is_later = graph.name == "predict" or (graph.name == "evaluate" and simulates_quantization(graph))
    return target.prefers_products and not target.kernels and not is_later


def _joins_updates(model: ir.Model, context: Lowering) -> bool:
    target = context.target
    return model.graph.name in UPDATING and target.joins_updates and not target.kernels


def _is_widened(model: ir.Model, context: Lowering) -> bool:
    """Runtimes have no bfloat16 kernels on CPUs."""
    computed = (output for node in model.graph.all_nodes() for output in node.outputs)
    return context.in_float32 and any(value.dtype == ir.DataType.BFLOAT16 for value in (*model.graph.inputs, *computed))


def _is_allowed(model: ir.Model, target: Target) -> bool:
    """Raise UnsupportedOperatorError for an unsupported node; never changes the model."""
    check_allowed(model, target)
    return False


RECOGNIZED: Stage[None] = Stage(
    "RECOGNIZED",
    (
        rewrite(recognize_layer_normalization, operators=("ReduceMean",)),
        rewrite(recognize_gelu, operators=("Div", "Mul")),
        rewrite(recognize_probabilities, operators=("Exp", "Tanh")),
        rewrite(hold_group_normalization_constants, operators=("InstanceNormalization",)),
        # Older models are not raised: ONNX Runtime has no CPU kernels for some operators of opset 22.
        rewrite(
            recognize_rms_normalization,
            operators=("Cast", "Div", "Mul"),
            when=lambda model, _: model.opset_imports[""] >= RMS_OPSET,
        ),
    ),
)
"""Replaces layers that an exporter wrote out by standard operators with kernels: normalization layers, GELU, Softmax and Sigmoid.
For canonical models; parameters keep their names.
"""

RECOGNIZED_TO_TRAIN: Stage[None] = Stage(
    "RECOGNIZED_TO_TRAIN",
    (
        rewrite(recognize_group_normalization, operators=("InstanceNormalization", "LayerNormalization")),
        rewrite(recognize_rms_normalization, operators=("Cast", "Div", "Mul")),
    ),
)
"""Recognizes operators with a training form. It may raise the opset: the operators are gone once the graph is bound."""

HOISTED: Stage[None] = Stage("HOISTED", (rewrite(hoist_gather, operators=("Gather",)),))
"""Selects rows before computing them if the loss needs only a few. For models not yet bound to a mode."""

RECOGNIZED_IN_MODE: Stage[None] = Stage("RECOGNIZED_IN_MODE", (rewrite(recognize_attention, operators=("Softmax",)),))
"""Recognition after binding to a mode, which may remove the dropout of probabilities."""

_BECOMES_STANDARD: tuple[Pass[Lowering], ...] = (
    Pass("write_out_newer", lambda model, context: write_out_newer(model, context.target)),
    Pass("lower_semantic_operators", lambda model, context: lower_semantic_operators(model, keep=context.target.kernels)),
)
_IS_RUN: tuple[Pass[Lowering], ...] = (
    rewrite(remove_unused),
    Pass("settle_opset", lambda model, context: settle_opset(model, context.target)),
    Pass("check_allowed", lambda model, context: _is_allowed(model, context.target)),
    rewrite_graph(separate_names, reason=NAMES),
)

LOWERED: Stage[Lowering] = Stage(
    "LOWERED",
    (
        *_BECOMES_STANDARD,
        rewrite(complete_axes, operators=("Pad", "Resize")),
        rewrite(widen_reductions),
        Pass(
            "compute_further_outputs",
            lambda model, context: compute_further_outputs(model, context.target.output_limits),
            operators=WITH_FURTHER_OUTPUTS,
        ),
        rewrite(compute_without_float64, when=lambda _, context: not context.target.float64),
        rewrite(
            merge_casts,
            operators=("Cast",),
            reason="CommonSubexpressionEliminationPass merges any equal nodes; activations would live longer",
        ),
        rewrite(concatenate_padded_parts, operators=("Pad",)),
        rewrite(gather_reordered_blocks, operators=("Concat",), when=_gathers_blocks),
        rewrite(
            merge_scalars,
            when=_has_no_kernels,
            reason="CommonSubexpressionEliminationPass merges any equal nodes; activations would live longer",
        ),
        rewrite(raise_scalar_ranks, when=_has_no_kernels),
        rewrite(multiply_depthwise_rows, operators=("Conv",), when=_multiplies),
        *_IS_RUN,
    ),
)
"""Makes a program's graph run on a target and removes unread parts.

Raises UnsupportedOperatorError: the target does not run a node.
"""

JOINED: Stage[Lowering] = Stage(
    "JOINED", (rewrite(join_updates, when=_joins_updates), rewrite_graph(separate_names, when=_joins_updates, reason=NAMES))
)
"""Joins the updates of small tensors, after LOWERED, in graphs that update the state."""

STANDARD: Stage[Lowering] = Stage(
    "STANDARD",
    (
        *_BECOMES_STANDARD,
        Pass("compute_in_float32", lambda model, _: compute_in_float32(model, keep_outputs=True), when=_is_widened),
        rewrite(complete_axes, operators=("Pad", "Resize")),
        *_IS_RUN,
    ),
)
"""Lowers a model with training operators or gradients that is not a program: like LOWERED without optimizations."""
