"""Stages of the importer, from a model as read to the canonical one.

READ comes before dtypes and shapes are known, SHAPES infers them, and CANONICAL rewrites. RESTORED names and infers what the
rewrites leave open.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from burnish.errors import ModelError
from burnish.graph.stage import Fallback, Pass, Repeat, Stage, note, rewrite
from burnish.importer.bound_inputs import bind_inputs
from burnish.importer.classical import (
    CLASSICAL_DOMAIN,
    CONVERTERS,
    declare_outputs,
    hold_preprocessing,
    note_class_labels,
    replace_classical_operators,
)
from burnish.importer.classical.inference import OF_FLOATS
from burnish.importer.dimensions import fix_layer_axes, name_reshaped_dimensions, settle_loop_shapes, settle_range_shapes
from burnish.importer.embedding_bags import replace_embedding_bags
from burnish.importer.export_notes import restore_parameters, separate_statistics, tie_copies, untie_parameters
from burnish.importer.exporter_forms import (
    join_transpositions,
    leave_out_zero_biases,
    note_subgradients,
    restore_exported_functions,
)
from burnish.importer.held_constants import hold_attention_constants, hold_input_constants, hold_simplified_constants
from burnish.importer.inlining import inline_functions, take_decided_branches
from burnish.importer.nodes import bind_gradients, check_nodes, check_operands, check_references, name_everything
from burnish.importer.normalization import expand_group_normalization, normalize_by_own_statistics, restore_instance_normalization
from burnish.importer.open_batch import open_batch
from burnish.importer.operands import gather_initializers, hold_stripped_weights
from burnish.importer.operator_forms import (
    give_signals_parts,
    make_bounds_scalars,
    place_unpooled,
    resolve_cast_like,
    state_defaults,
    write_older_forms,
)
from burnish.importer.opset import OLDEST_CANONICAL, check_opset, declare_opset, normalize_domains, upgrade_opset
from burnish.importer.padding import CONVOLUTIONS, POOLS, count_padding_as_data, drop_windows_in_padding, write_pads
from burnish.importer.runtime_operators import (
    RUNTIME_DOMAIN,
    STANDARD_INTEGER_PRODUCTS,
    STANDARD_NAMES,
    declare_runtime_outputs,
    move_runtime_nodes,
    replace_runtime_operators,
)
from burnish.importer.sequences import resolve_optionals, resolve_sequences, stack_built_lists, write_out_maps
from burnish.importer.shape_constants import fold_shape_constants
from burnish.importer.shapes import infer_shapes, name_input_dimensions, open_unknown_dimensions, require_dtypes
from burnish.sample_axes import AskedAxes, ask_sample_axes

FOLDING_ROUNDS = 4
"""Folding a shape can make other shapes known; exporters write no deeper chains."""

RUNTIME_OPERATORS = (RUNTIME_DOMAIN, *STANDARD_INTEGER_PRODUCTS)
"""Operators that may belong to a runtime; ``rewritten_operators`` lists them by name."""

NAMES = "NameFixPass makes names of nodes unique in each graph alone; messages name a node of the whole model"
ROUNDS_BEFORE_OPENING = 64
"""Limit if one sample's shapes must be known everywhere; each window-padding block of a Swin transformer forms a chain."""


@dataclass(frozen=True)
class Import:
    """Context of the importer's passes: the options of ``burnish.load``."""

    bind: Mapping[str, Any] = field(default_factory=dict)
    sample_axis: AskedAxes = None
    batch: str | None = None


def opens_batch(_: ir.Model, context: Import) -> bool:
    return context.batch == "open"


def is_of_pytorch(model: ir.Model, _: Import) -> bool:
    return (model.producer_name or "").lower() == "pytorch"


def take_branches(model: ir.Model) -> bool:
    """Replace each decided If by its branch; return True if there were any."""
    taken = take_decided_branches(model)
    if taken:
        gather_initializers(model)
    return taken


def make_fit(model: ir.Model) -> bool:
    """Repair, in place, nodes that do not fit their operands but have a clear meaning; return True if there were any.

    A standard function may have a branch per rank, and its unused branches do not fit the actual shapes.
    """
    has_either = any(node.op_type in ("If", "Range") for node in model.graph.all_nodes())
    if model.opset_imports.get("", 0) < OLDEST_CANONICAL or not has_either:
        return False
    infer_shapes(model, strict=False)
    fold_shape_constants(model)
    taken = take_branches(model)
    if taken:
        name_everything(model)
        infer_shapes(model, strict=False)
    changed = make_bounds_scalars(model)
    if changed:
        name_everything(model)
    return taken or changed


READ: Stage[Import] = Stage(
    "READ",
    (
        rewrite(normalize_domains),
        rewrite(move_runtime_nodes, operators=STANDARD_NAMES),
        note(check_opset),
        note(check_references),
        rewrite(
            inline_functions,
            when=lambda model, _: bool(model.functions),
            reason="InlinePass needs calls without cycles, and does not bound what a file expands to",
        ),
        rewrite(declare_opset),
        note(check_nodes),
        rewrite(bind_gradients, operators=("Gradient",)),
        rewrite(gather_initializers, reason="LiftConstantsToInitializersPass goes by size; here a layer reads it as a weight"),
        rewrite(hold_stripped_weights, operators=("ConstantOfShape",)),
        rewrite(name_everything, reason=NAMES),
        rewrite(open_unknown_dimensions),
        rewrite(name_input_dimensions),
        rewrite(
            state_defaults,
            operators=("MeanVarianceNormalization", "STFT", "SplitToSequence"),
            reason="AddDefaultAttributesPass states every default, and not those that its schemas lack",
        ),
        rewrite(declare_outputs, operators=OF_FLOATS),
        rewrite(declare_runtime_outputs, operators=RUNTIME_OPERATORS),
    ),
    settles=False,
)

SHAPES: Stage[Import] = Stage(
    "SHAPES",
    (
        rewrite(write_pads, operators=(*CONVOLUTIONS, *POOLS)),
        rewrite(drop_windows_in_padding, operators=POOLS),
        Fallback(
            rewrite(infer_shapes, reason="ShapeInferencePass does not say why inference fails, and keeps what a file declares"),
            ModelError,
            (rewrite(make_fit),),
        ),
        rewrite(settle_loop_shapes, operators=("Loop",)),
        rewrite(settle_range_shapes, operators=("Range",)),
    ),
    settles=False,
)

RESTORED: Stage[Import] = Stage(
    "RESTORED",
    (
        rewrite(name_everything, reason=NAMES),
        *SHAPES.passes,
    ),
    settles=False,
)

FOLDING: tuple[Pass[Import], ...] = (
    rewrite(fold_shape_constants),
    rewrite(resolve_optionals, operators=("Optional", "OptionalGetElement", "OptionalHasElement")),
    rewrite(write_out_maps, operators=("SequenceMap",)),
    rewrite(resolve_sequences, operators=("ConcatFromSequence", "SequenceAt", "SequenceLength")),
    rewrite(replace_embedding_bags, operators=("Loop",)),
    rewrite(join_transpositions, operators=("Reshape",)),
    rewrite(place_unpooled, operators=("MaxUnpool",)),
    # Element shapes follow from the contents of sequences.
    rewrite(stack_built_lists, operators=("Loop",), settled=True),
    rewrite(take_branches, operators=("If",), counted=False),
)

FOLDED: Stage[Import] = Stage("FOLDED", (Repeat(FOLDING, FOLDING_ROUNDS), note(require_dtypes)), restores=RESTORED)
"""Stage after a rewrite that makes more shapes known."""

CANONICAL: Stage[Import] = Stage(
    "CANONICAL",
    (
        note(check_operands),
        Repeat(
            (
                rewrite(restore_parameters),
                rewrite(tie_copies),
                rewrite(upgrade_opset),
                rewrite(write_older_forms, operators=("Mod", "Range", "SpaceToDepth")),
                rewrite(expand_group_normalization, operators=("GroupNormalization",)),
                rewrite(untie_parameters),
                rewrite(separate_statistics),
                rewrite(give_signals_parts, operators=("STFT",)),
            ),
            at_most=1,
        ),
        rewrite(hold_preprocessing, when=lambda model, _: model.producer_name in CONVERTERS, local=True),
        rewrite(replace_classical_operators, operators=(CLASSICAL_DOMAIN,)),
        rewrite(resolve_cast_like, operators=("CastLike",), local=True),
        Pass("bind_inputs", lambda model, context: bind_inputs(model, context.bind), when=lambda _, context: bool(context.bind)),
        rewrite(replace_runtime_operators, operators=RUNTIME_OPERATORS),
        Repeat(FOLDING, FOLDING_ROUNDS),
        Repeat(
            (
                rewrite(restore_instance_normalization, operators=("BatchNormalization",)),
                rewrite(normalize_by_own_statistics, operators=("BatchNormalization",)),
                rewrite(fix_layer_axes),
                rewrite(restore_exported_functions, when=is_of_pytorch),
            ),
            at_most=1,
        ),
        Repeat(FOLDING, FOLDING_ROUNDS),
        rewrite(leave_out_zero_biases, operators=("Conv", "ConvTranspose"), local=True),
        rewrite(name_reshaped_dimensions, operators=("Flatten", "Reshape"), local=True),
        rewrite(count_padding_as_data, operators=("AveragePool",), local=True),
        note(hold_attention_constants),
        note(hold_simplified_constants),
        note(hold_input_constants),
        note(note_class_labels, operators=("ArgMax", "Greater")),
        note(note_subgradients, when=is_of_pytorch),
        note(require_dtypes),
        Pass("ask_sample_axes", lambda model, context: ask_sample_axes(model.graph, context.sample_axis), local=True),
        Repeat(FOLDING, ROUNDS_BEFORE_OPENING, when=opens_batch),
        rewrite(open_batch, local=True, when=opens_batch),
        Repeat(FOLDING, FOLDING_ROUNDS, when=opens_batch),
        note(require_dtypes, when=opens_batch),
    ),
    restores=RESTORED,
)


def canonicalize(model: ir.Model, context: Import) -> None:
    """Bring a model into canonical form, in place."""
    for stage in (READ, SHAPES, CANONICAL):
        stage.run(model, context)
