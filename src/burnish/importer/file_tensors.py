"""Tensors that need no memory, as a file holds them, its own or one with external data; copies of models without weights.

A program keeps the weights that training starts from, beside the state that it trains: in memory, they would be there twice. A
model's file, and those with its external data, stay open, so that they may be moved, replaced or removed; only writing over one
in place is noticed, and refused.

Large weights of an ONNX file are read from where they stand in it. The protobuf parser holds a file's bytes, its own copy of
them, and hands out a third. Our reader goes through the fields of a model and of its graph as they are encoded (protobuf's wire
format), takes the raw data of large initializers once, and leaves the rest, small, to the parser.

External data is read only from inside the model's folder, and only when the file holds what the tensor declares.

The functions of ``onnx`` that serialize what they are given get copies of a model without its weights. A serialized proto ends at
2 GB, and none of those functions reads a weight: weights become graph inputs of their dtype and shape in the copy.
"""

from __future__ import annotations

import math
import os
import re
import stat
import sys
import weakref
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir

from burnish.errors import ModelError
from burnish.graph import remove_node

SMALL = 1024
"""Payloads up to this many bytes stay: shapes, axes and scales that inference reads."""

SERIALIZABLE = 2**31 - 1
"""The most bytes a serialized proto can have."""


def without_payloads(proto: onnx.ModelProto, apart: Collection[str] = ()) -> onnx.ModelProto:
    """Return a copy of a proto in which the initializers that are large or external are graph inputs.

    Args:
        proto: the model.
        apart: the initializers whose data is not in the proto.

    Raises:
        ModelError: what is left does not fit into one proto.
    """
    light = without_initializers(proto)
    inputs = {value.name for value in proto.graph.input}
    for tensor in proto.graph.initializer:
        elsewhere = tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.name in apart
        if not elsewhere and tensor.ByteSize() <= SMALL:
            light.graph.initializer.append(tensor)
        elif tensor.name not in inputs:
            light.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    size = light.ByteSize()
    if size > SERIALIZABLE:
        raise ModelError(
            f"the model holds {size / 2**30:.1f} GiB beside its initializers, more than one ONNX proto can: "
            "store the weights that are in Constant nodes as initializers, with external data"
        )
    return light


def without_initializers(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a proto but for the initializers of its graph."""
    copy = onnx.ModelProto()
    for descriptor, value in proto.ListFields():
        if descriptor.name != "graph":
            _copy_field(copy, descriptor.name, value)
    for descriptor, value in proto.graph.ListFields():
        if descriptor.name != "initializer":
            _copy_field(copy.graph, descriptor.name, value)
    copy.graph.SetInParent()
    return copy


def light_copy(model: ir.Model) -> ir.Model:
    """Return a copy of a model in which initializers and Constant nodes that are large are graph inputs."""
    light = model.clone()
    graph = light.graph
    inputs = set(graph.inputs)
    for value in list(graph.initializers.values()):
        tensor = value.const_value
        if tensor is None or _is_large(tensor):
            graph.initializers.pop(value.name or "")
            value.const_value = None
            if value not in inputs:
                graph.inputs.append(value)
    for node in list(graph):
        tensor = large_constant(node)
        if tensor is not None and not node.outputs[0].is_graph_output():
            _replace_by_input(graph, node, tensor)
    return light


def large_constant(node: ir.Node) -> ir.TensorProtocol | None:
    """Return the tensor of a Constant node when it is large."""
    attribute = node.attributes.get("value") if node.op_type == "Constant" else None
    if attribute is None or attribute.type != ir.AttributeType.TENSOR or attribute.is_ref():
        return None
    tensor: ir.TensorProtocol = attribute.value  # as_tensor() counts the bytes, which texts have not
    return tensor if _is_large(tensor) else None


def _is_large(tensor: ir.TensorProtocol) -> bool:
    """Whether a tensor has more bytes than inference reads; texts, whose bytes nothing counts, are small."""
    return tensor.dtype != ir.DataType.STRING and tensor.nbytes > SMALL


def payload_bytes(dtype: ir.DataType, dimensions: list[int]) -> int:
    """Return how many bytes the elements of a tensor take, packed."""
    return -(-math.prod(dimensions) * dtype.bitwidth // 8)


def _replace_by_input(graph: ir.Graph, node: ir.Node, tensor: ir.TensorProtocol) -> None:
    output = node.outputs[0]
    name, output.name = output.name, None
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy()))
    output.replace_all_uses_with(value)
    graph.inputs.append(value)
    remove_node(node)


def _copy_field(target: object, name: str, value: object) -> None:
    if isinstance(value, (bool, int, float, str, bytes)):
        setattr(target, name, value)
    elif hasattr(value, "CopyFrom"):
        getattr(target, name).CopyFrom(value)
    else:
        getattr(target, name).extend(value)


class SourceFile:
    """A file that is kept open to be read again, as long as nobody writes to it.

    Args:
        path: what it is called.
        file: the file, open for reading.
    """

    def __init__(self, path: Path, file: BinaryIO):
        self.path = path
        self._descriptor = os.dup(file.fileno())
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self._opened_as = self._state()

    @classmethod
    def of(cls, path: Path, file: BinaryIO) -> SourceFile | None:
        """The file, if it is one that can be read again; None on a system where an open file cannot be replaced."""
        if not hasattr(os, "preadv") or not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return None
        try:
            return cls(path, file)
        except OSError:  # too many are open
            return None

    def is_unchanged(self) -> bool:
        """Whether nobody has written to the file since it was opened."""
        return self._state() == self._opened_as

    def read_into(self, buffer: memoryview, offset: int) -> bool:
        """Fill a buffer of bytes from a place in the file on; return whether they are those that the file was opened with."""
        while buffer:
            count = os.preadv(self._descriptor, [buffer], offset)
            if count == 0:
                return False
            buffer, offset = buffer[count:], offset + count
        return self.is_unchanged()

    def _state(self) -> tuple[int, int]:
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns


@dataclass(eq=False)
class Elements:
    """The elements of a tensor: those that are in memory, or read from the file.

    Attributes:
        array: the elements, as the file has them; None to read them when they are asked for.
        shape, dtype, name: of the tensor; each element is a whole number of bytes.
        file: where it is read.
        offset: of its first byte in the file.
    """

    array: np.ndarray | None
    shape: tuple[int, ...]
    dtype: ir.DataType
    name: str | None
    file: SourceFile
    offset: int

    def __call__(self) -> ir.Tensor:
        array = self.array
        if array is None:
            array = self.read()
            array.flags.writeable = False
        return ir.Tensor(array, self.dtype, name=self.name)

    def read(self) -> np.ndarray:
        """Return a new array of what the file holds."""
        try:
            array = np.empty(self.shape, self.dtype.numpy())
        except MemoryError as error:
            raise self._unreadable(error) from error
        self._fill(array.reshape(-1), self.offset)
        return array

    def parts(self, size: int) -> Iterator[np.ndarray]:
        """The elements in flat parts of so many bytes, of which there is one at a time."""
        dtype = self.dtype.numpy()
        offset, left = self.offset, math.prod(self.shape)
        buffer = np.empty(max(1, size // dtype.itemsize), dtype)
        while left:
            part = buffer[:left]
            self._fill(part, offset)
            yield part
            offset, left = offset + part.nbytes, left - part.size

    def _fill(self, flat: np.ndarray, offset: int) -> None:
        try:
            is_same = self.file.read_into(flat.view(np.uint8).data, offset)
        except (OSError, MemoryError) as error:
            raise self._unreadable(error) from error
        if not is_same:
            raise ModelError(
                f"the tensor '{self.name}' is to be read from '{self.file.path}', and that file has been written to since "
                "the model was loaded: load or compile the model again, and write other models to files of their own"
            )

    def _unreadable(self, error: Exception) -> ModelError:
        return ModelError(
            f"the tensor '{self.name}' cannot be read from '{self.file.path}': {error}. Check the disk, and that there is "
            "memory for it"
        )


class FileTensor(ir.LazyTensor):
    """A tensor of a file, which is read there when it is asked for and its elements are not in memory."""

    def __init__(self, elements: Elements):
        self._elements = elements
        super().__init__(elements, elements.dtype, ir.Shape(elements.shape), name=elements.name)

    def copy(self) -> FileTensor:
        """Another tensor of the same elements, which keeps those in memory that are there, whatever this one lets go."""
        return FileTensor(replace(self._elements, name=self.name))

    def own_array(self) -> np.ndarray:
        """Return its elements in an array that no one else has.

        Raises:
            ModelError: they are to be read, and the file cannot be, or has been written to.
        """
        elements = self._elements
        return elements.read() if elements.array is None else elements.array.copy()

    def parts(self, size: int) -> Iterator[np.ndarray]:
        """Its elements in flat parts of so many bytes, which the next part may lie over.

        Raises:
            ModelError: as ``own_array``.
        """
        elements = self._elements
        if elements.array is None:
            yield from elements.parts(size)
            return
        flat = elements.array.reshape(-1)
        step = max(1, size // flat.itemsize)
        for begin in range(0, flat.size, step):
            yield flat[begin : begin + step]

    def release(self) -> None:
        """Let the memory go, where the file is as it was."""
        if self._elements.file.is_unchanged():
            self._elements.array = None


LARGE = 1 << 16
"""From this many bytes on, raw data is read apart from the rest."""

# Numbers of fields in onnx.proto.
_GRAPH, _INITIALIZER, _NAME, _RAW_DATA, _EXTERNAL_DATA, _DATA_LOCATION = 7, 5, 8, 9, 13, 14
# How a field is encoded: the kinds that ONNX uses.
_VARINT, _EIGHT_BYTES, _LENGTH, _FOUR_BYTES = 0, 1, 2, 5


class Payload(NamedTuple):
    """Raw data of an initializer, and where it begins in the file."""

    data: bytes
    offset: int


class _Unknown(Exception):
    """The file is not encoded as expected: the parser is to say what is wrong, or to read what is merely unusual."""


@dataclass(frozen=True)
class _Field:
    number: int
    kind: int
    start: int  # of the field's tag
    content: int  # where its content starts
    end: int


def take_payloads(file: BinaryIO, size: int) -> tuple[bytes, dict[str, Payload]] | None:
    """Read a file as a model without the raw data of its large initializers, and that data by the initializers' names.

    Args:
        file: of ``size`` bytes, open for reading from its start.
        size: how far it may be read.

    Returns:
        The encoded model and the data; None where the file is not one graph of differently named tensors, or damaged.

    Raises:
        OSError: the file cannot be read.
    """
    payloads: dict[str, Payload] = {}
    try:
        fields = list(_fields(file, 0, size))
        (graph,) = (field for field in fields if field.number == _GRAPH and field.kind == _LENGTH)
        encoded = []
        for field in _fields(file, graph.content, graph.end):
            if field.number == _INITIALIZER and field.kind == _LENGTH and field.end - field.content >= LARGE:
                encoded.append(_encoded(_INITIALIZER, _take(file, field, payloads)))
            else:
                encoded.append(_bytes(file, field.start, field.end))
        light = b"".join(encoded)
        parts = [_encoded(_GRAPH, light) if field is graph else _bytes(file, field.start, field.end) for field in fields]
    except (_Unknown, ValueError):
        return None
    return b"".join(parts), payloads


def _take(file: BinaryIO, tensor: _Field, payloads: dict[str, Payload]) -> bytes:
    """An encoded tensor without its raw data, which goes to ``payloads`` if it is large."""
    fields = list(_fields(file, tensor.content, tensor.end))
    numbers = [field.number for field in fields]
    raw = next((field for field in fields if field.number == _RAW_DATA and field.kind == _LENGTH), None)
    if raw is None or raw.end - raw.content < LARGE or not {_EXTERNAL_DATA, _DATA_LOCATION}.isdisjoint(numbers):
        return _bytes(file, tensor.content, tensor.end)
    (named,) = (field for field in fields if field.number == _NAME and field.kind == _LENGTH)
    name = _bytes(file, named.content, named.end).decode("utf-8")
    if name in payloads or numbers.count(_RAW_DATA) > 1:
        raise _Unknown
    payloads[name] = Payload(_bytes(file, raw.content, raw.end), raw.content)
    return b"".join(_bytes(file, field.start, field.end) for field in fields if field is not raw)


def _fields(file: BinaryIO, start: int, end: int) -> Iterator[_Field]:
    """The fields of an encoded message; what is read between them does not disturb."""
    position = start
    while position < end:
        head = _bytes(file, position, min(position + 20, end))  # a tag and a length have at most ten bytes each
        tag, content = _varint(head, 0)
        number, kind = tag >> 3, tag & 7
        if kind == _LENGTH:
            length, content = _varint(head, content)
            after = position + content + length
        elif kind == _VARINT:
            after = position + _varint(head, content)[1]
        elif kind in (_EIGHT_BYTES, _FOUR_BYTES):
            after = position + content + (8 if kind == _EIGHT_BYTES else 4)
        else:
            raise _Unknown
        if after > end or number == 0:
            raise _Unknown
        yield _Field(number, kind, position, position + content, after)
        position = after


def _bytes(file: BinaryIO, start: int, end: int) -> bytes:
    file.seek(start)
    content = file.read(end - start)
    if len(content) != end - start:
        raise _Unknown
    return content


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """A number in groups of seven bits, the lowest first, and where it ends."""
    value = shift = 0
    while position < len(data) and shift < 70:
        byte = data[position]
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position
    raise _Unknown


def _encoded(number: int, content: bytes) -> bytes:
    """A field of bytes as it is encoded."""
    return bytes(_groups(number << 3 | _LENGTH)) + bytes(_groups(len(content))) + content


def _groups(value: int) -> Iterator[int]:
    while value >= 128:
        yield value & 127 | 128
        value >>= 7
    yield value


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
