"""The steps that make a source the canonical model, in their order."""

from __future__ import annotations

import os

import onnx
import onnx_ir as ir

from burnish.errors import BurnishError, ModelError
from burnish.importer.branches import take_decided_branches
from burnish.importer.cast_like import resolve_cast_like
from burnish.importer.domains import normalize_domains
from burnish.importer.embedding_bags import replace_embedding_bags
from burnish.importer.functions import inline_functions
from burnish.importer.gradients import bind_gradients
from burnish.importer.group_normalization import expand_group_normalization
from burnish.importer.initializers import gather_initializers
from burnish.importer.names import name_everything
from burnish.importer.opset import check_opset, upgrade_opset
from burnish.importer.reading import read_model
from burnish.importer.sequences import resolve_sequences
from burnish.importer.shape_constants import fold_shape_constants
from burnish.importer.shapes import infer_shapes, name_input_dimensions, require_dtypes
from burnish.importer.transposed_matrices import join_transpositions
from burnish.importer.untie import untie_parameters

FOLDING_ROUNDS = 4
"""A folded shape makes more shapes known; chains of chains deeper than this are not written by exporters."""

Source = str | os.PathLike[str] | bytes | onnx.ModelProto | ir.Model


def load(source: Source) -> ir.Model:
    """Return the canonical form of a model.

    Args:
        source: the path of an ONNX file, its bytes, a ``ModelProto`` or an ``onnx_ir.Model``. Objects are left as they are.
            Large weights of a file with external data stay on disk, mapped into memory when they are read; those in the file
            itself are read again after a session took them over (``Program.release_weights``).

    Raises:
        ModelError: the source is missing, corrupt, not valid ONNX, of an opset before 7 or newer than the installed ``onnx``
            knows, or its external data is missing, too short or outside the model's folder.
        UnsupportedOperatorError: an operator in an old form that has no equivalent today (batch normalization with
            ``spatial=0``, Scan of opset 8).
    """
    model = read_model(source)
    try:
        _canonicalize(model)
    except BurnishError:
        raise
    except Exception as error:
        # A file whose bits have changed can pass every check of the standard and still be no graph.
        raise ModelError(
            f"the model passes the checks of ONNX and cannot be read all the same ({type(error).__name__}: {error}). "
            "Export the model again; if that does not help, this is a defect of burnish worth reporting"
        ) from error
    return model


def _canonicalize(model: ir.Model) -> None:
    normalize_domains(model)
    check_opset(model)
    inline_functions(model)
    bind_gradients(model)
    gather_initializers(model)
    name_everything(model)
    name_input_dimensions(model)
    infer_shapes(model)
    upgrade_opset(model)
    expand_group_normalization(model)
    untie_parameters(model)
    name_everything(model)
    infer_shapes(model)
    resolve_cast_like(model)
    for _ in range(FOLDING_ROUNDS):
        changed = fold_shape_constants(model)
        changed |= resolve_sequences(model)
        changed |= replace_embedding_bags(model)
        changed |= join_transpositions(model)
        if take_decided_branches(model):
            gather_initializers(model)
        elif not changed:
            break
        name_everything(model)
        infer_shapes(model)
    require_dtypes(model)
