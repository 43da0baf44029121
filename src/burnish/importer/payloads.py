"""Large weights of an ONNX file, read from where they stand in it.

The protobuf parser holds a file's bytes, its own copy of them, and hands out a third. This reader goes through the fields of a
model and of its graph as they are encoded (protobuf's wire format), takes the raw data of large initializers once, and leaves the
rest, small, to the parser.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

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
