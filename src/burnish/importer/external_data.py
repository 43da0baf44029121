"""External data: read only from inside the model's folder, and only when the file holds what the tensor declares."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import onnx
import onnx_ir as ir

from burnish.errors import ModelError
from burnish.importer.file_tensors import Elements, FileTensor, SourceFile
from burnish.importer.lightweight import payload_bytes
from burnish.importer.payloads import LARGE

NAMELESS = "(of a Constant node)"
OPEN_FILES = 64
"""How many files of one model stay open. Some exporters write one for each weight, and a process can open about a thousand."""


class ExternalData:
    """The files beside a model that hold data of its tensors, each opened once.

    Args:
        folder: of the model; None where each tensor knows its own (``base_dir``).
    """

    def __init__(self, folder: Path | None = None):
        self._folder = folder
        self._files: dict[Path, SourceFile | None] = {}

    def read(self, tensor: ir.ExternalTensor, name: str) -> ir.TensorProtocol:
        """Return a tensor that is found wherever its file goes: small ones in memory, large ones in the file, which stays open.

        Args:
            tensor: where it lies.
            name: of the tensor that is returned.

        Raises:
            ModelError: its data is missing, too short or outside the folder, or the file has been written to since it was opened.
        """
        path, offset, size = self._place(tensor, name)
        file = self._open(path)
        rereadable = file is not None and tensor.dtype.bitwidth % 8 == 0 and sys.byteorder == "little"
        if file is not None and rereadable and size >= LARGE:
            return FileTensor(Elements(None, tuple(tensor.shape.numpy()), tensor.dtype, name, file, offset))
        content = bytearray(size)
        if file is None:
            with path.open("rb") as opened:
                opened.seek(offset)
                is_whole = opened.readinto(content) == size
        else:
            is_whole = file.read_into(memoryview(content), offset)
        if not is_whole:
            raise ModelError(f"tensor '{name}' keeps its data in '{path}', which is being written to: load the model again")
        proto = onnx.TensorProto(data_type=tensor.dtype.value, dims=tensor.shape.numpy(), raw_data=bytes(content))
        return ir.Tensor(ir.serde.deserialize_tensor(proto).numpy(), tensor.dtype, name=name)

    def _place(self, tensor: ir.ExternalTensor, name: str) -> tuple[Path, int, int]:
        """The file of a tensor, where it begins there, and how many bytes it has."""
        folder = self._folder
        if folder is None and os.fspath(tensor.base_dir):
            folder = Path(tensor.base_dir)
        size = payload_bytes(tensor.dtype, [int(extent) for extent in tensor.shape.numpy()])
        offset = tensor.offset or 0
        return _check(name or NAMELESS, os.fspath(tensor.location), offset, tensor.length, size, folder), offset, size

    def _open(self, path: Path) -> SourceFile | None:
        """The file, kept open; None where it cannot be, or too many are."""
        if path not in self._files:
            self._files[path] = None
            if sum(file is not None for file in self._files.values()) < OPEN_FILES:
                with path.open("rb") as opened:
                    self._files[path] = SourceFile.of(path, opened)
        return self._files[path]


def check_external_proto(tensor: onnx.TensorProto, dtype: ir.DataType, folder: Path | None) -> None:
    """Check where the data of a tensor lies and how much of it there is, without reading it.

    Raises:
        ModelError: the location is unknown, absolute, outside ``folder`` (also through a link), missing or too short.
    """
    name, entries = tensor.name or NAMELESS, {entry.key: entry.value for entry in tensor.external_data}
    if len(entries) < len(tensor.external_data):
        raise ModelError(f"tensor '{name}' says twice where its external data lies: export the model again")
    if tensor.raw_data:
        raise ModelError(f"tensor '{name}' has both external data and data in the model: export the model again")
    location = entries.get("location", "")
    if not location:
        raise ModelError(f"tensor '{name}' has external data without a location: export the model again")
    for key in ("offset", "length"):
        if key in entries and not re.fullmatch(r"-?[0-9]{1,30}", entries[key]):
            raise ModelError(
                f"tensor '{name}' has external data with an offset or length that is not a number ({key} "
                f"{entries[key]!r}): export the model again"
            )
    offset, length = int(entries.get("offset", 0)), int(entries["length"]) if "length" in entries else None
    _check(name, location, offset, length, payload_bytes(dtype, list(tensor.dims)), folder)


def read_in_place(tensor: onnx.TensorProto, folder: Path | None) -> None:
    """Read external data into a tensor, where it has some; ``check_external_proto`` has passed it."""
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        onnx.external_data_helper.load_external_data_for_tensor(tensor, str(folder))
        tensor.data_location = onnx.TensorProto.DEFAULT
        del tensor.external_data[:]


def _check(name: str, location: str, offset: int, length: int | None, expected: int, folder: Path | None) -> Path:
    """Return the file that holds the data of a tensor."""
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
    return path


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
