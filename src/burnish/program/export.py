"""From a program and its state to an inference model that any runtime loads, under the source's names."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from burnish.errors import CheckpointError
from burnish.passes import fold_batch_normalization, fold_weight_normalization, remove_unused
from burnish.program.persistence import ONE_FILE_LIMIT, constant_bytes
from burnish.program.state import check_state, file_path, replacing

if TYPE_CHECKING:
    from burnish.program.program import Program

SMALLEST_EXTERNAL = 1024
"""Bytes from which a tensor goes into the data file, where there is one."""


def export_inference(program: Program, state: Mapping[str, np.ndarray], fold_norm: bool = True) -> ir.Model:
    """Return the model that predicts what the program does in this state.

    Args:
        program: the program.
        state: arrays by state name; those that are neither ``param/...`` nor ``stat/...`` are not read. The model refers to
            the arrays: pass copies if they change later.
        fold_norm: compute weights under weight normalization once, and fold inference-mode batch normalization into the layers
            beside it.

    Returns:
        A model with the source's inputs and outputs, and its weights and statistics as initializers under their own names.

    Raises:
        CheckpointError: a parameter or statistic is missing, or has another dtype or shape than the program's.
    """
    entries = [entry for entry in program.signature["predict"].inputs if entry.is_state]
    needed = {entry.name: state[entry.name] for entry in entries if entry.name in state}
    check_state(entries, needed, CheckpointError, "The state", "Pass the state of a session of this program")
    model = program.predict.clone()
    graph = model.graph
    inputs = {value.name: value for value in graph.inputs}
    for name, array in needed.items():
        _make_initializer(graph, inputs[name], name.partition("/")[2], np.asarray(array, order="C"))
    if fold_norm:
        fold_weight_normalization(model)
        fold_batch_normalization(model)
    return remove_unused(model)


def _make_initializer(graph: ir.Graph, value: ir.Value, name: str, array: np.ndarray) -> None:
    graph.inputs.remove(value)
    _free_name(graph, name)
    value.name = name
    value.const_value = ir.Tensor(array, name=name)
    graph.register_initializer(value)


def _free_name(graph: ir.Graph, name: str) -> None:
    """Rename the value that took an initializer's name while the initializer was called ``param/<name>``."""
    values = [*graph.initializers.values(), *(output for node in graph.all_nodes() for output in node.outputs)]
    for other in values:
        if other.name == name:
            other.name = f"{name}:value"


def save_inference(model: ir.Model, path: str | os.PathLike[str], one_file_limit: int = ONE_FILE_LIMIT) -> Path:
    """Write a model, whole or not at all: an earlier file is replaced in one step, or stays as it was.

    Args:
        model: the model; not changed. Folders on the way to ``path`` are created.
        path: the ``.onnx`` file. A model of more than ``one_file_limit`` bytes of weights keeps them beside it in
            ``<file name>-<hash of the weights>.data``; data files of earlier saves under this path are then removed.
        one_file_limit: at most 2 GiB, where the format ends.

    Raises:
        CheckpointError: the file cannot be written.
    """
    path = file_path(path, "tuned.onnx")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"'{path.parent}' could not be created: {error}. Choose a folder you can write to") from error
    copy = model.clone()
    data = None
    if constant_bytes(model) > one_file_limit:
        data = _move_weights_out(copy, path)
    else:
        _move_weights_in(copy)
    with replacing(path) as partial:
        partial.write_bytes(ir.to_proto(copy).SerializeToString(deterministic=True))
    _remove_earlier_data(path, keep=data)
    return path


def _move_weights_in(model: ir.Model) -> None:
    """Give, in place, weights that lie in a file of the source to the model itself."""
    for value in model.graph.initializers.values():
        if isinstance(value.const_value, ir.ExternalTensor):
            value.const_value = ir.Tensor(value.const_value.numpy(), value.const_value.dtype, name=value.name)


def _move_weights_out(model: ir.Model, path: Path) -> str:
    """Write the large weights into one file beside ``path`` and let the model, in place, refer to it; returns its name.

    The name carries a hash of the content: the model that is there keeps the data it refers to until it is replaced.
    """
    values = [value for value in model.graph.initializers.values() if _is_large(value)]
    digest = hashlib.sha256()
    for value in values:
        digest.update(value.const_value.tobytes())  # type: ignore[union-attr]
    location = f"{path.name}-{digest.hexdigest()[:16]}.data"
    offset = 0
    with replacing(path.with_name(location)) as partial, partial.open("wb") as file:
        for value in values:
            tensor = value.const_value
            assert tensor is not None
            content = tensor.tobytes()
            file.write(content)
            value.const_value = ir.ExternalTensor(
                location,
                offset,
                len(content),
                tensor.dtype,
                shape=ir.Shape(tensor.shape.numpy()),
                name=value.name or "",
                base_dir=path.parent,
            )
            offset += len(content)
    return location


def _is_large(value: ir.Value) -> bool:
    tensor = value.const_value
    return tensor is not None and tensor.dtype != ir.DataType.STRING and tensor.nbytes >= SMALLEST_EXTERNAL


def _remove_earlier_data(path: Path, keep: str | None) -> None:
    earlier = re.compile(re.escape(path.name) + r"-[0-9a-f]{16}\.data")
    for other in path.parent.iterdir():
        if other.name != keep and earlier.fullmatch(other.name):
            other.unlink(missing_ok=True)
