"""External data: read only from inside the model's folder, and only when the file holds what the tensor declares."""

from __future__ import annotations

import os
from pathlib import Path

import onnx
import onnx_ir as ir

from burnish.errors import ModelError
from burnish.importer.lightweight import payload_bytes


def check_external_proto(tensor: onnx.TensorProto, dtype: ir.DataType, folder: Path | None) -> None:
    """Check where the data of a tensor lies and how much of it there is, without reading it.

    Raises:
        ModelError: the location is unknown, absolute, outside ``folder`` (also through a link), missing or too short.
    """
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    name = tensor.name or "(of a Constant node)"
    if not location:
        raise ModelError(f"tensor '{name}' has external data without a location: export the model again")
    try:
        offset = int(entries.get("offset") or 0)
        length = int(entries["length"]) if entries.get("length") else None
    except ValueError as error:
        raise ModelError(
            f"tensor '{name}' has external data with an offset or length that is not a number ({error}): export the model again"
        ) from error
    _check(name, location, offset, length, payload_bytes(dtype, list(tensor.dims)), folder)


def check_external_tensor(tensor: ir.ExternalTensor) -> None:
    """The same for a tensor of an ``onnx_ir.Model``, whose folder is the tensor's ``base_dir``."""
    dims = [int(dim) for dim in tensor.shape.numpy()]
    folder = Path(tensor.base_dir) if os.fspath(tensor.base_dir) else None
    expected = payload_bytes(tensor.dtype, dims)
    _check(tensor.name, os.fspath(tensor.location), tensor.offset or 0, tensor.length, expected, folder)


def _check(name: str, location: str, offset: int, length: int | None, expected: int, folder: Path | None) -> None:
    if folder is None:
        raise ModelError(
            f"tensor '{name}' keeps its data in the file '{location}', and the folder of the model is not known: "
            "load the model by its path"
        )
    path = _inside(folder, location, name)
    if offset < 0 or (length is not None and length < 0):
        raise ModelError(f"tensor '{name}' has external data at offset {offset} of length {length}: export the model again")
    if length is not None and length != expected:
        raise ModelError(
            f"tensor '{name}' declares {expected} bytes by its dims and {length} bytes of external data in '{location}': "
            "export the model again"
        )
    try:
        size = path.stat().st_size
    except OSError as error:
        raise ModelError(
            f"tensor '{name}' keeps its data in '{location}', which is not in '{folder}': copy it beside the model"
        ) from error
    if not path.is_file():
        raise ModelError(f"tensor '{name}' keeps its data in '{location}', which is not a regular file: export the model again")
    if offset + expected > size:
        raise ModelError(
            f"tensor '{name}' needs '{location}' to have {offset + expected} bytes, and it has {size}: "
            "the file is cut short; copy it again"
        )


def _inside(folder: Path, location: str, name: str) -> Path:
    outside = ModelError(
        f"tensor '{name}' points to external data outside the model's folder: '{location}'. "
        "It is not read; copy the file into the folder and name it by a relative path"
    )
    if os.path.isabs(location) or "\\" in location or ":" in location or "\0" in location or ".." in Path(location).parts:
        raise outside
    path = folder / location
    try:
        inside = path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError) as error:
        raise outside from error
    if not inside:
        raise outside
    return path
