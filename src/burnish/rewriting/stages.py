"""The stages of a model between the importer and an engine: RECOGNIZED, LOWERED and STANDARD.

The others stand where what they list is defined: CANONICAL in ``burnish.importer.canonical``, TRAINING and INFERENCE in
``burnish.modes``, DISTRIBUTED in ``burnish.distributed.derivation``, EXPORTED in ``burnish.files.export``, each engine's own in
its package. ``burnish passes`` prints them all.
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
"""Why names are ours."""

UPDATING = ("step", "apply")
"""The graphs that update the state."""


@dataclass(frozen=True)
class Lowering:
    """What the passes that lower a graph are told.

    Attributes:
        target: the runtime that it is lowered for.
        in_float32: whether what is computed in bfloat16, or kept in sixteen bits beside it, is computed in float32.
    """

    target: Target = ONNXRUNTIME
    in_float32: bool = False


def _gathers_blocks(model: ir.Model, context: Lowering) -> bool:
    """An export is made of ``predict``, which keeps its operators."""
    return context.target.gathers_blocks and model.graph.name != "predict"


def _has_no_kernels(model: ir.Model, context: Lowering) -> bool:
    """Kernels of an engine look for scalars as they are."""
    return not context.target.kernels


def _multiplies(model: ir.Model, context: Lowering) -> bool:
    """Integers are computed of convolutions: where that is to come, ``LoweredGraphs`` multiplies after it."""
    graph, target = model.graph, context.target
    is_later = graph.name == "predict" or (graph.name == "evaluate" and simulates_quantization(graph))
    return target.prefers_products and not target.kernels and not is_later


def _joins_updates(model: ir.Model, context: Lowering) -> bool:
    target = context.target
    return model.graph.name in UPDATING and target.joins_updates and not target.kernels


def _is_widened(model: ir.Model, context: Lowering) -> bool:
    """Runtimes have no kernels of bfloat16 on processors."""
    computed = (output for node in model.graph.all_nodes() for output in node.outputs)
    return context.in_float32 and any(value.dtype == ir.DataType.BFLOAT16 for value in (*model.graph.inputs, *computed))


def _is_allowed(model: ir.Model, target: Target) -> bool:
    """Raise UnsupportedOperatorError where it is not; nothing changes."""
    check_allowed(model, target)
    return False


RECOGNIZED: Stage[None] = Stage(
    "RECOGNIZED",
    (
        rewrite(recognize_layer_normalization, operators=("ReduceMean",)),
        rewrite(recognize_gelu, operators=("Div", "Mul")),
        rewrite(recognize_probabilities, operators=("Exp", "Tanh")),
        rewrite(hold_group_normalization_constants, operators=("InstanceNormalization",)),
        # An older model is not raised to this opset: ONNX Runtime has no CPU kernels for what some operators became in opset 22.
        rewrite(
            recognize_rms_normalization,
            operators=("Cast", "Div", "Mul"),
            when=lambda model, _: model.opset_imports[""] >= RMS_OPSET,
        ),
    ),
)
"""What an exporter wrote out in pieces becomes the standard's operators, those that runtimes have kernels for: normalization
layers, GELU, Softmax and Sigmoid. Of a canonical model; parameters keep their names."""

RECOGNIZED_TO_TRAIN: Stage[None] = Stage(
    "RECOGNIZED_TO_TRAIN",
    (
        rewrite(recognize_group_normalization, operators=("InstanceNormalization", "LayerNormalization")),
        rewrite(recognize_rms_normalization, operators=("Cast", "Div", "Mul")),
    ),
)
"""What gets a form of its own in training. The opset may be raised for it: the operators are gone once the graph is bound."""

HOISTED: Stage[None] = Stage("HOISTED", (rewrite(hoist_gather, operators=("Gather",)),))
"""Rows of which the loss needs a few are selected before they are computed. Of a model that is not bound yet."""

RECOGNIZED_IN_MODE: Stage[None] = Stage("RECOGNIZED_IN_MODE", (rewrite(recognize_attention, operators=("Softmax",)),))
"""What is recognized once a graph is bound to training or inference: dropout of probabilities may be gone then."""

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
"""A graph of a program for a target, with nothing that is not read.

Raises UnsupportedOperatorError: it holds what the target does not run.
"""

JOINED: Stage[Lowering] = Stage(
    "JOINED", (rewrite(join_updates, when=_joins_updates), rewrite_graph(separate_names, when=_joins_updates, reason=NAMES))
)
"""After LOWERED, once for a graph that updates the state: small tensors are updated together."""

STANDARD: Stage[Lowering] = Stage(
    "STANDARD",
    (
        *_BECOMES_STANDARD,
        Pass("compute_in_float32", lambda model, _: compute_in_float32(model, keep_outputs=True), when=_is_widened),
        rewrite(complete_axes, operators=("Pad", "Resize")),
        *_IS_RUN,
    ),
)
"""A model with training operators, or of gradients, that is no program: as LOWERED, and nothing is made quicker."""
