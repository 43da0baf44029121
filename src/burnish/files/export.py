"""Export a program and its state as an inference model that any runtime loads, under the source's names."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from burnish.adapters.graph import read_adapters
from burnish.adapters.merge_adapters import merge_adapters
from burnish.errors import CheckpointError
from burnish.files.digest import DIGEST
from burnish.files.file_writing import file_path, replacing
from burnish.files.metadata import TRAINING, objective_entry
from burnish.files.model_file import ONE_FILE_LIMIT, constant_bytes, parts, write_model
from burnish.graph import Names, remove_node, replace_value
from burnish.graph.annotations import INITIAL, OBJECTIVE
from burnish.graph.stage import Pass, Stage, rewrite
from burnish.graph.uses import remove_unused
from burnish.importer.classical import restore_zip_maps
from burnish.program import Program
from burnish.program.state import ROUNDED, LazyArrays, check_state, chosen
from burnish.rewriting.fold_batch_normalization import fold_batch_normalization
from burnish.rewriting.fold_quantization import fold_quantization
from burnish.rewriting.fold_weights import fold_pruning, fold_weight_normalization
from burnish.transfer_progress import Transfer

SMALLEST_EXTERNAL = 1024
"""The size in bytes from which a tensor goes into the data file, if there is one."""


@dataclass(frozen=True)
class Exporting:
    """The context of an export's passes: options of ``export_inference``."""

    fold_norm: bool = True
    merge: bool = True
    settle: bool = True


def _folds(model: ir.Model, context: Exporting) -> bool:
    """A weight that absorbed a normalization would no longer match its adapter."""
    return context.fold_norm and not read_adapters(model.metadata_props)


def _settles(_: ir.Model, context: Exporting) -> bool:
    return context.settle


EXPORTED: Stage[Exporting] = Stage(
    "EXPORTED",
    (
        rewrite(merge_adapters, when=lambda _, context: context.merge),
        rewrite(fold_weight_normalization, when=_folds),
        rewrite(fold_pruning, when=_settles),
        Pass("fold_quantization", lambda model, context: fold_quantization(model, _folds(model, context)), when=_settles),
        rewrite(fold_batch_normalization, when=_folds),
        rewrite(remove_unused),
    ),
)
"""Passes that turn the graph ``predict`` with its weights into a model for other tools."""


def export_inference(
    program: Program,
    state: Mapping[str, np.ndarray],
    fold_norm: bool = True,
    metadata: Mapping[str, str] | None = None,
    round_weights: bool = True,
    merge: bool = True,
    settle: bool = True,
) -> ir.Model:
    """Return the model with the predictions of a program in this state.

    Args:
        program: the program.
        state: arrays by state name; only ``param/...`` and ``stat/...`` are read. The model refers to the arrays: pass copies if
            they change later. Lazy arrays are made when the model is written.
        fold_norm: compute weights under weight normalization once, and fold inference-mode batch normalization into adjacent
            layers.
        metadata: entries for ``metadata_props``, which override the source's.
        round_weights: round weights to the dtypes of the source's file (to nearest). Otherwise they stay float32 as in the state,
            and the model casts them.
        merge: merge adapters into their weights; otherwise adapters stay separate, and the model's metadata lists them.
        settle: write zeros for masked weights, and integers for quantized weights; otherwise masks and roundings stay in the
            graph.

    Returns:
        A model with the source's inputs and outputs, and its weights and statistics as initializers under their own names.

    Raises:
        CheckpointError: a parameter or statistic is missing, has another dtype or shape than the program's, or is too large for
            the dtype of the source's file.
    """
    entries = [entry for entry in program.signature["predict"].inputs if entry.is_state]
    needed = chosen(state, (entry.name for entry in entries))
    check_state(entries, needed, CheckpointError, "The state", "Pass the state of a session of this program")
    model = program.predict.clone()
    for entry in (TRAINING, DIGEST):  # from a source that was a program in one file
        model.metadata_props.pop(entry, None)
    OBJECTIVE.remove(model)
    INITIAL.remove(model)
    model.metadata_props.update({**objective_entry(program.options), **(metadata or {})})
    graph = model.graph
    _make_initializers(graph, needed)
    if round_weights:
        for name, dtype in program.options.get(ROUNDED, {}).items():
            _round(graph.initializers[name], ir.DataType[dtype.upper()])
    EXPORTED.run(model, Exporting(fold_norm, merge, settle))
    return model


def _make_initializers(graph: ir.Graph, state: Mapping[str, np.ndarray]) -> None:
    """Turn the inputs of these names into initializers with these arrays, in place, named by the part after the ``/``."""
    tensors = {name.partition("/")[2]: _tensor(state, name) for name in state}
    others = (*graph.initializers.values(), *(output for node in graph.all_nodes() for output in node.outputs))
    # They took the names while the initializers were called ``param/<name>``.
    if clashing := [other for other in others if other.name in tensors]:
        names = Names.of(graph)
        for other in clashing:
            other.name = names.take(f"{other.name}:value")
    values = list(graph.inputs)
    graph.inputs.clear()
    graph.inputs.extend(value for value in values if value.name not in state)
    for value in values:
        if value.name in state:
            value.name = (value.name or "").partition("/")[2]
            value.const_value = tensors[value.name]
            graph.register_initializer(value)


def _tensor(state: Mapping[str, np.ndarray], name: str) -> ir.TensorProtocol:
    """Return an array as a tensor; a lazy array is made at each access to the tensor's elements."""
    called = name.partition("/")[2]
    if not isinstance(state, LazyArrays):
        return ir.Tensor(np.asarray(state[name], order="C"), name=called)
    dtype, shape = state.kind(name)
    return ir.LazyTensor(
        lambda: ir.Tensor(np.asarray(state[name], order="C"), name=called),
        ir.DataType.from_numpy(dtype),
        ir.Shape(shape),
        name=called,
    )


def _round(value: ir.Value, dtype: ir.DataType) -> None:
    """Round a float32 initializer to the dtype that the model casts it to, and remove the cast."""
    assert value.const_value is not None
    array = value.const_value.numpy()
    with np.errstate(over="ignore"):
        rounded = array.astype(dtype.numpy())
    overflowed = np.isinf(rounded) & np.isfinite(array)
    if overflowed.any():
        raise CheckpointError(
            f"'{value.name}' holds {array[overflowed].flat[0]:g}, too large for {dtype.name.lower()}, its dtype in the source's "
            f"file, which ends at {dtype.max:g}. Train with a smaller learning rate or with weight decay, or a file in float32"
        )
    value.const_value, value.type = ir.Tensor(rounded, name=value.name), ir.TensorType(dtype)
    for node, _ in tuple(value.uses()):
        assert node.op_type == "Cast"
        replace_value(node.outputs[0], value)
        remove_node(node)


def save_inference(model: ir.Model, path: str | os.PathLike[str], one_file_limit: int = ONE_FILE_LIMIT) -> Path:
    """Write a model atomically: an earlier file is replaced in one step, or stays unchanged.

    Outputs that were dictionaries in the source's file (ZipMap) become dictionaries again.

    Args:
        model: the model; not modified.
        path: the ``.onnx`` file; missing folders are created. A model with more than ``one_file_limit`` bytes of weights keeps
            them in ``<file name>-<hash of the weights>.data`` next to it; data files of earlier saves under this path are then
            removed.
        one_file_limit: at most 2 GiB, the limit of the format.

    Raises:
        CheckpointError: the file cannot be written.
    """
    path = file_path(path, "tuned.onnx")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"'{path.parent}' could not be created: {error}. Choose a folder you can write to") from error
    copy = model.clone()
    data = _move_weights_out(copy, path) if constant_bytes(model) > one_file_limit else None
    with replacing(path) as partial, partial.open("wb") as file:
        write_model(copy, file, Transfer(f"writing '{path}'", constant_bytes(copy)), restore_zip_maps)
    _remove_earlier_data(path, keep=data)
    return path


def _move_weights_out(model: ir.Model, path: Path) -> str:
    """Write the large weights into one file next to ``path`` and make the model refer to it, in place; return its name.

    The name contains a hash of the content, so that an existing model keeps its data until it is replaced.
    """
    values = [value for value in model.graph.initializers.values() if _is_large(value)]
    transfer = Transfer(f"writing '{path}'", sum(value.const_value.nbytes for value in values if value.const_value is not None))
    digest = hashlib.sha256()
    offsets = {}

    def location() -> str:
        return f"{path.name}-{digest.hexdigest()[:16]}.data"

    unnamed = path.with_name(f"{path.name}.data")
    with replacing(unnamed, lambda: path.with_name(location())) as partial, partial.open("wb") as file:
        for value in values:
            assert value.const_value is not None
            offsets[value] = file.tell()
            for part in parts(value.const_value):
                digest.update(part)
                file.write(part)
                transfer.advance(len(part))
    for value, offset in offsets.items():
        tensor = value.const_value
        assert tensor is not None
        value.const_value = ir.ExternalTensor(
            location(),
            offset,
            tensor.nbytes,
            tensor.dtype,
            shape=ir.Shape(tensor.shape.numpy()),
            name=value.name or "",
            base_dir=path.parent,
        )
    return location()


def _is_large(value: ir.Value) -> bool:
    tensor = value.const_value
    return tensor is not None and tensor.dtype != ir.DataType.STRING and tensor.nbytes >= SMALLEST_EXTERNAL


def _remove_earlier_data(path: Path, keep: str | None) -> None:
    earlier = re.compile(re.escape(path.name) + r"-[0-9a-f]{16}\.data")
    for other in path.parent.iterdir():
        if other.name != keep and earlier.fullmatch(other.name):
            other.unlink(missing_ok=True)
