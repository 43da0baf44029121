"""Tensors that stay in files instead of memory, and copies of models without weights.

A program keeps the initial weights next to the trained state, which would double the memory. So a model's files stay open. They
may be moved, replaced or removed; writing over them in place is detected and refused.

The protobuf parser holds a file's bytes and its own copy, and returns a third. So our reader walks over the encoded fields of a
model and its graph (protobuf's wire format), reads the raw data of large initializers once, and parses only the small rest.

External data is read only from inside the model's folder, and only if the file is as long as the tensor requires.

A serialized proto is limited to 2 GB, so the functions of ``onnx`` that serialize get copies in which weights, which they do not
read, are graph inputs.
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
"""Largest payload that is kept, in bytes: shapes, axes and scales that inference reads."""

SERIALIZABLE = 2**31 - 1
"""Largest serialized proto in bytes."""


def without_payloads(proto: onnx.ModelProto, apart: Collection[str] = ()) -> onnx.ModelProto:
    """Return a copy of a proto with large or external initializers as graph inputs.

    Args:
        proto: the model.
        apart: initializers whose data is not in the proto.

    Raises:
        ModelError: the rest does not fit into one proto.
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
    """Return a copy of a proto without the initializers of its graph."""
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
    """Return a copy of a model with large initializers and Constant nodes as graph inputs."""
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
    """Return the tensor of a Constant node if it is large."""
    attribute = node.attributes.get("value") if node.op_type == "Constant" else None
    if attribute is None or attribute.type != ir.AttributeType.TENSOR or attribute.is_ref():
        return None
    tensor: ir.TensorProtocol = attribute.value  # as_tensor() counts bytes, which fails for texts
    return tensor if _is_large(tensor) else None


def _is_large(tensor: ir.TensorProtocol) -> bool:
    return tensor.dtype != ir.DataType.STRING and tensor.nbytes > SMALL


def payload_bytes(dtype: ir.DataType, dimensions: list[int]) -> int:
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
    """A file that is kept open for later reads, as long as nobody writes to it.

    Args:
        path: its name.
        file: the file, open for reading.
    """

    def __init__(self, path: Path, file: BinaryIO):
        self.path = path
        self._descriptor = os.dup(file.fileno())
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self._opened_as = self._state()

    @classmethod
    def of(cls, path: Path, file: BinaryIO) -> SourceFile | None:
        """Return the file if it can be read later; None on systems on which open files cannot be replaced."""
        if not hasattr(os, "preadv") or not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return None
        try:
            return cls(path, file)
        except OSError:  # too many open files
            return None

    def is_unchanged(self) -> bool:
        """True if the file has not been written to since it was opened."""
        return self._state() == self._opened_as

    def read_into(self, buffer: memoryview, offset: int) -> bool:
        """Fill a buffer from an offset in the file; return False if the file has changed."""
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
    """The elements of a tensor, in memory or in the file.

    Attributes:
        array: the elements as stored; None to read them on demand.
        shape, dtype, name: of the tensor; each element has whole bytes.
        file: the file.
        offset: position of the first byte.
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
        try:
            array = np.empty(self.shape, self.dtype.numpy())
        except MemoryError as error:
            raise self._unreadable(error) from error
        self._fill(array.reshape(-1), self.offset)
        return array

    def parts(self, size: int) -> Iterator[np.ndarray]:
        """Yield the elements in flat parts of ``size`` bytes, in a reused buffer."""
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
    """A tensor that is read from a file on demand, unless its elements are in memory."""

    def __init__(self, elements: Elements):
        self._elements = elements
        super().__init__(elements, elements.dtype, ir.Shape(elements.shape), name=elements.name)

    def copy(self) -> FileTensor:
        """Return another tensor with the same elements, which keeps them in memory if this one releases them."""
        return FileTensor(replace(self._elements, name=self.name))

    def own_array(self) -> np.ndarray:
        """Return the elements in a new array.

        Raises:
            ModelError: the file cannot be read or has been written to.
        """
        elements = self._elements
        return elements.read() if elements.array is None else elements.array.copy()

    def parts(self, size: int) -> Iterator[np.ndarray]:
        """Yield the elements in flat parts of ``size`` bytes; the next part may overwrite the last.

        Raises:
            ModelError: as for ``own_array``.
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
        if self._elements.file.is_unchanged():
            self._elements.array = None


LARGE = 1 << 16
"""Smallest raw data that is read separately, in bytes."""

# field numbers in onnx.proto
_GRAPH, _INITIALIZER, _NAME, _RAW_DATA, _EXTERNAL_DATA, _DATA_LOCATION = 7, 5, 8, 9, 13, 14
# wire types that ONNX uses
_VARINT, _EIGHT_BYTES, _LENGTH, _FOUR_BYTES = 0, 1, 2, 5


class Payload(NamedTuple):
    """Raw data of an initializer and its offset in the file."""

    data: bytes
    offset: int


class _Unknown(Exception):
    """The encoding is unexpected: the parser must report the problem or read the unusual form."""


@dataclass(frozen=True)
class _Field:
    number: int
    kind: int
    start: int  # of the field's tag
    content: int  # of its content
    end: int


def take_payloads(file: BinaryIO, size: int) -> tuple[bytes, dict[str, Payload]] | None:
    """Read an encoded model without the raw data of large initializers, and that data by initializer name.

    Args:
        file: the file of ``size`` bytes, open for reading at its start.
        size: number of bytes to read.

    Returns:
        The encoded model and the data; None if the file is damaged or not a graph with unique tensor names.

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
    """Yield the fields of an encoded message; the caller may read from the file in between."""
    position = start
    while position < end:
        head = _bytes(file, position, min(position + 20, end))  # a tag and a length of up to ten bytes each
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
    """Decode a number in groups of seven bits, lowest first; also return its end."""
    value = shift = 0
    while position < len(data) and shift < 70:
        byte = data[position]
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position
    raise _Unknown


def _encoded(number: int, content: bytes) -> bytes:
    return bytes(_groups(number << 3 | _LENGTH)) + bytes(_groups(len(content))) + content


def _groups(value: int) -> Iterator[int]:
    while value >= 128:
        yield value & 127 | 128
        value >>= 7
    yield value


NAMELESS = "(of a Constant node)"
OPEN_FILES = 64
"""Number of open files per model. Some exporters write one per weight, and a process can open about a thousand."""


class ExternalData:
    """External data files of a model, each opened once.

    Args:
        folder: folder of the model; None to use each tensor's ``base_dir``.
    """

    def __init__(self, folder: Path | None = None):
        self._folder = folder
        self._files: dict[Path, SourceFile | None] = {}

    def read(self, tensor: ir.ExternalTensor, name: str) -> ir.TensorProtocol:
        """Return a tensor that stays readable if its file is moved: in memory if small, else from the open file.

        Args:
            tensor: the external tensor.
            name: name of the result.

        Raises:
            ModelError: its data is missing, too short or outside the folder, or the file has changed since it was opened.
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
        folder = self._folder
        if folder is None and os.fspath(tensor.base_dir):
            folder = Path(tensor.base_dir)
        size = payload_bytes(tensor.dtype, [int(extent) for extent in tensor.shape.numpy()])
        offset = tensor.offset or 0
        return _check(name or NAMELESS, os.fspath(tensor.location), offset, tensor.length, size, folder), offset, size

    def _open(self, path: Path) -> SourceFile | None:
        if path not in self._files:
            self._files[path] = None
            if sum(file is not None for file in self._files.values()) < OPEN_FILES:
                with path.open("rb") as opened:
                    self._files[path] = SourceFile.of(path, opened)
        return self._files[path]


def check_external_proto(tensor: onnx.TensorProto, dtype: ir.DataType, folder: Path | None) -> None:
    """Check location and size of a tensor's data without reading it.

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
    """Load any external data into a tensor that passed ``check_external_proto``."""
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        onnx.external_data_helper.load_external_data_for_tensor(tensor, str(folder))
        tensor.data_location = onnx.TensorProto.DEFAULT
        del tensor.external_data[:]


def _check(name: str, location: str, offset: int, length: int | None, expected: int, folder: Path | None) -> Path:
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
