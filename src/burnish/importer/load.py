"""The steps that make a source the canonical model, in their order."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Union

import onnx
import onnx_ir as ir
from numpy.typing import ArrayLike

from burnish.errors import BurnishError, ConfigurationError, ModelError
from burnish.graph import garbage_kept
from burnish.importer.attention_constants import hold_attention_constants
from burnish.importer.bound_inputs import Bind, bind_inputs
from burnish.importer.branches import take_decided_branches
from burnish.importer.built_lists import stack_built_lists
from burnish.importer.cast_like import resolve_cast_like
from burnish.importer.classical import declare_outputs, hold_preprocessing, note_class_labels, replace_classical_operators
from burnish.importer.counted_padding import count_padding_as_data
from burnish.importer.domains import normalize_domains
from burnish.importer.embedding_bags import replace_embedding_bags
from burnish.importer.explicit_pads import write_pads
from burnish.importer.export_notes import restore_parameters, tie_copies
from burnish.importer.exported_functions import restore_exported_functions
from burnish.importer.fixed_axes import fix_layer_axes
from burnish.importer.functions import inline_functions
from burnish.importer.gradients import bind_gradients
from burnish.importer.group_normalization import expand_group_normalization
from burnish.importer.initializers import gather_initializers
from burnish.importer.input_constants import hold_input_constants
from burnish.importer.instance_normalization import restore_instance_normalization
from burnish.importer.large_constants import check_constant_sizes
from burnish.importer.loop_shapes import settle_loop_shapes
from burnish.importer.max_unpool import place_unpooled
from burnish.importer.modules import exported_module
from burnish.importer.names import name_everything
from burnish.importer.newer_forms import write_older_forms
from burnish.importer.nodes import check_nodes, check_operands, check_references
from burnish.importer.open_batch import open_batch
from burnish.importer.opset import OLDEST_CANONICAL, check_opset, declare_opset, upgrade_opset
from burnish.importer.optionals import hold_optional_inputs, resolve_optionals
from burnish.importer.own_statistics import normalize_by_own_statistics
from burnish.importer.range_scalars import make_bounds_scalars
from burnish.importer.range_shapes import settle_range_shapes
from burnish.importer.reading import read_model
from burnish.importer.reshaped_dimensions import name_reshaped_dimensions
from burnish.importer.rounded_pools import drop_windows_in_padding
from burnish.importer.runtime_operators import declare_runtime_outputs, move_runtime_nodes, replace_runtime_operators
from burnish.importer.sequences import resolve_sequences, write_out_maps
from burnish.importer.shape_constants import fold_shape_constants
from burnish.importer.shapes import infer_shapes, name_input_dimensions, open_unknown_dimensions, require_dtypes
from burnish.importer.signal_parts import give_signals_parts
from burnish.importer.simplified_constants import hold_simplified_constants
from burnish.importer.stated_defaults import state_defaults
from burnish.importer.stripped_weights import hold_stripped_weights
from burnish.importer.subgradients import note_subgradients
from burnish.importer.transposed_matrices import join_transpositions
from burnish.importer.untie import separate_statistics, untie_parameters
from burnish.importer.zero_biases import leave_out_zero_biases
from burnish.sample_axes import AskedAxes, ask_sample_axes
from burnish.untrusted import read_in_time

if TYPE_CHECKING:
    import torch

FOLDING_ROUNDS = 4
"""A folded shape makes more shapes known; chains of chains deeper than this are not written by exporters."""

ROUNDS_BEFORE_OPENING = 64
"""The shapes of one sample are to be known everywhere; each block of a Swin transformer that pads its windows makes a chain."""

BATCHES = (None, "open")

Source = Union[str, os.PathLike[str], bytes, onnx.ModelProto, ir.Model, "torch.nn.Module"]


@garbage_kept()
def load(
    source: Source,
    *,
    batch: str | None = None,
    sample_axis: AskedAxes = None,
    bind: Bind = None,
    example_inputs: Any = None,
    dynamic_shapes: Any = None,
    verify: bool = True,
) -> ir.Model:
    """Return the canonical form of a model.

    Args:
        source: the path of an ONNX file, its bytes, a ``ModelProto``, an ``onnx_ir.Model``, or a ``torch.nn.Module`` in training
            mode, with ``example_inputs``. Objects are left as they are.
            Large tensors of a file with external data stay there, and are read when they are asked for; large weights in the file
            itself are read again after a session took them over (``Program.release_weights``). These files stay open: they may be
            moved, replaced or removed, and are refused once they have been written to in place.
        batch: None: the extents of the inputs stay as the model has them. ``open``: a model that was exported at batch 1 takes
            batches of any size. Each input holds samples along its first axis of extent 1, or along its second where a recurrent
            layer begins with it; one without such an axis is the same for all samples. Vectors of a model that takes nothing else
            get an axis for samples in front. What the model computes of a sample does
            not depend on the others beside it, except that batch normalization in training takes statistics of all.
        sample_axis: along which axis of the inputs samples stand, as ``burnish.compile`` takes it: what is said here is noted
            with the inputs, and opened there.
        bind: {input: value}: inputs that are fixed to a value, a number or an array that broadcasts to the input's shape, and
            that the model then no longer has: ``{"sr": 16000, "state": 0}``. What depends on them alone is computed, and an If
            that they decide becomes its branch. Where such an input has an open dimension, it follows the other inputs at run
            time. An open dimension may be fixed too, to an extent: ``{"sequence": 576}``.

        example_inputs: of a module, what it is called with: a tuple of arguments, or a dictionary of those that are given by
            name. What is no tensor in them is fixed.
        dynamic_shapes: of a module, which axes are open, as ``torch.export.export`` takes it. None: those that ``sample_axis``
            names, else the first, of all inputs that have as many samples there as the first input.
        verify: of a module: run it beside its graph on the PyTorch engine, on the examples and on others, in training and
            evaluation, and compare what both return, and the gradients. False skips that.

    Raises:
        ConfigurationError: ``batch`` is neither, or no input has an axis of extent 1; ``bind`` does not fit the inputs; or a
            module comes without examples.
        ModelError: the source is missing, corrupt, not valid ONNX, of an opset before 7 or newer than the installed ``onnx``
            knows, or its external data is missing, too short or outside the model's folder.
        UnsupportedOperatorError: an operator in an old form that has no equivalent today (batch normalization with
            ``spatial=0``, Scan of opset 8); or, where the batch is to be opened, one that cannot take several samples; or a
            module that cannot be exported, or computes something else than its graph: its line and its part are named.
    """
    module = exported_module(source, example_inputs, dynamic_shapes, verify, sample_axis)
    if module is not None:
        source = module.model
    if batch not in BATCHES:
        raise ConfigurationError(f"batch must be None or 'open', not {batch!r}")
    name, size = _file_of(source)
    model = read_in_time(name, size, ModelError, read_model, source)
    weights = (value.const_value for value in model.graph.initializers.values())
    size = max(size, sum(tensor.nbytes for tensor in weights if tensor is not None and tensor.dtype != ir.DataType.STRING))
    try:
        read_in_time(name, size, ModelError, _settle, model, {} if bind is None else bind, batch, sample_axis)
    except BurnishError:
        raise
    except Exception as error:
        # A file whose bits have changed can pass every check of the standard and still be no graph.
        raise ModelError(
            f"the model passes the checks of ONNX and cannot be read all the same ({type(error).__name__}: {error}). "
            "Export the model again; if that does not help, this is a defect of burnish worth reporting"
        ) from error
    return model


def _file_of(source: Source) -> tuple[str, int]:
    """Return what the file of a model is called, and its bytes; 0 of an object, which is copied."""
    if isinstance(source, bytes | bytearray | memoryview):
        return "the bytes", len(source)
    if not isinstance(source, str | os.PathLike):
        return "the model", 0
    try:
        return f"'{os.fspath(source)}'", os.stat(source).st_size
    except (OSError, ValueError):  # which the reader names
        return f"'{os.fspath(source)}'", 0


def _settle(model: ir.Model, bind: Mapping[str, Any], batch: str | None, sample_axis: AskedAxes) -> None:
    """Bring a model that was read into its canonical form, in place."""
    _canonicalize(model, bind)
    ask_sample_axes(model.graph, sample_axis)
    if batch == "open":
        _fold_shapes(model, ROUNDS_BEFORE_OPENING)
        open_batch(model)
        _fold_shapes(model)
        require_dtypes(model)


def with_plain_tensors(model: ir.Model) -> ir.Model:
    """Make what a batch holds of a canonical model tensors, in place: optional inputs, which are there, and optional outputs.

    Raises:
        ConfigurationError: an input is a sequence, or an optional one.
        ModelError: a constant would take more memory than reading the model may.
    """
    check_constant_sizes(model)
    if hold_optional_inputs(model):
        _fold_shapes(model)
        require_dtypes(model)
    for value in model.graph.inputs:
        if isinstance(value.type, ir.SequenceType | ir.OptionalType):
            raise ConfigurationError(
                f"the model's input '{value.name}' is a sequence of tensors, and a batch holds tensors: export the model with a "
                "tensor in its place, or with an input for each element"
            )
    return model


def _canonicalize(model: ir.Model, bind: Mapping[str, ArrayLike]) -> None:
    normalize_domains(model)
    move_runtime_nodes(model)
    check_opset(model)
    check_references(model)
    inline_functions(model)
    declare_opset(model)
    check_nodes(model)
    bind_gradients(model)
    gather_initializers(model)
    hold_stripped_weights(model)
    name_everything(model)
    open_unknown_dimensions(model)
    name_input_dimensions(model)
    state_defaults(model)
    declare_outputs(model)
    declare_runtime_outputs(model)
    _settle_shapes(model)
    check_operands(model)
    rewrites = (
        restore_parameters,
        tie_copies,
        upgrade_opset,
        write_older_forms,
        expand_group_normalization,
        untie_parameters,
        separate_statistics,
        give_signals_parts,
    )
    rewritten = [rewrite(model) for rewrite in rewrites]
    if any(rewritten):
        name_everything(model)
        _settle_shapes(model)
    hold_preprocessing(model)
    if replace_classical_operators(model):
        name_everything(model)
        _settle_shapes(model)
    resolve_cast_like(model)
    if bind:
        bind_inputs(model, bind)
        name_everything(model)
        _settle_shapes(model)
    if replace_runtime_operators(model):
        name_everything(model)
        _settle_shapes(model)
    _fold_shapes(model)
    layers = (restore_instance_normalization, normalize_by_own_statistics, fix_layer_axes, restore_exported_functions)
    if any([restore(model) for restore in layers]):
        name_everything(model)
        _settle_shapes(model)
        _fold_shapes(model)
    leave_out_zero_biases(model)
    name_reshaped_dimensions(model)
    count_padding_as_data(model)
    hold_attention_constants(model)
    hold_simplified_constants(model)
    hold_input_constants(model)
    note_class_labels(model)
    note_subgradients(model)
    require_dtypes(model)


def _fold_shapes(model: ir.Model, rounds: int = FOLDING_ROUNDS) -> None:
    while rounds:
        changed = fold_shape_constants(model)
        changed |= resolve_optionals(model)
        changed |= write_out_maps(model)
        changed |= resolve_sequences(model)
        changed |= replace_embedding_bags(model)
        changed |= join_transpositions(model)
        changed |= place_unpooled(model)
        # The elements' shapes are those that follow from what sequences hold.
        changed = changed or stack_built_lists(model)
        if take_decided_branches(model):
            gather_initializers(model)
        elif changed:
            rounds -= 1
        else:
            break
        name_everything(model)
        _settle_shapes(model)


def _settle_shapes(model: ir.Model) -> None:
    write_pads(model)
    drop_windows_in_padding(model)
    try:
        infer_shapes(model)
    except ModelError:
        if not _make_fit(model):
            raise
        infer_shapes(model)
    settle_loop_shapes(model)
    settle_range_shapes(model)


def _make_fit(model: ir.Model) -> bool:
    """Change, in place, what of a model does not fit and means something all the same; return whether there was any.

    A function of the standard may have a branch for each rank, and those that are never taken do not fit the shapes at hand.
    """
    has_either = any(node.op_type in ("If", "Range") for node in model.graph.all_nodes())
    if model.opset_imports.get("", 0) < OLDEST_CANONICAL or not has_either:
        return False
    infer_shapes(model, strict=False)
    fold_shape_constants(model)
    taken = take_decided_branches(model)
    if taken:
        gather_initializers(model)
        name_everything(model)
        infer_shapes(model, strict=False)
    changed = make_bounds_scalars(model)
    if changed:
        name_everything(model)
    return taken or changed
