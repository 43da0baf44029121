"""Write a model into one ONNX file, one weight at a time; the bytes are those that protobuf would make in memory.

A message is a sequence of fields in the order of their numbers; a nested message starts with its size (protobuf's wire format).
The parts before and after the weights are small, and protobuf writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import onnx
import onnx_ir as ir

from burnish.errors import ModelError
from burnish.files.file_writing import replacing
from burnish.files.state_file import encoded
from burnish.graph import model_proto, named_failures
from burnish.importer.file_tensors import light_copy, without_payloads
from burnish.program.state import blocks
from burnish.transfer_progress import Transfer

SMALLEST_APART = 1 << 16
"""The size in bytes from which a weight is written separately."""

# Field numbers in onnx.proto.
_GRAPH, _INITIALIZER, _RAW_DATA = 7, 5, 9
_LENGTH_DELIMITED = 2


def write_model(
    model: ir.Model, file: BinaryIO, transfer: Transfer, complete: Callable[[onnx.ModelProto], None] | None = None
) -> None:
    """Write a model.

    Args:
        model: the model; modified: large initializers lose their data.
        file: the output file.
        transfer: progress of the weight bytes.
        complete: a function that changes the written proto, in which large initializers have no data, in place; it must not
            change these.

    Raises:
        ModelError: the model is not valid ONNX; nothing is written.
    """
    apart = {name: value.const_value for name, value in model.graph.initializers.items() if _is_large(value.const_value)}
    for name, tensor in apart.items():
        assert tensor is not None
        model.graph.initializers[name].const_value = ir.ExternalTensor(
            "elsewhere",
            0,
            tensor.nbytes,
            tensor.dtype,
            shape=ir.Shape(tensor.shape.numpy()),
            name=name,
            doc_string=tensor.doc_string,
            metadata_props=dict(tensor.metadata_props),
        )
    proto = model_proto(model)
    if complete is not None:
        complete(proto)
    require_valid(without_payloads(proto, apart), "the file")
    graph = proto.graph
    for initializer in graph.initializer:
        if initializer.name in apart:
            initializer.ClearField("external_data")
            initializer.ClearField("data_location")
    tensors = [_Message.split(initializer, _RAW_DATA) for initializer in graph.initializer]
    contents = [apart.get(initializer.name) for initializer in graph.initializer]
    sizes = [
        message.size + (0 if content is None else _framed_size(_RAW_DATA, content.nbytes))
        for message, content in zip(tensors, contents, strict=True)
    ]
    whole, inner = _Message.split(proto, _GRAPH), _Message.split(graph, _INITIALIZER)
    file.write(whole.before)
    file.write(_frame(_GRAPH, inner.size + sum(_framed_size(_INITIALIZER, size) for size in sizes)))
    file.write(inner.before)
    for message, content, size in zip(tensors, contents, sizes, strict=True):
        file.write(_frame(_INITIALIZER, size))
        file.write(message.before)
        if content is not None:
            file.write(_frame(_RAW_DATA, content.nbytes))
            for part in parts(content):
                file.write(part)
                transfer.advance(len(part))
        file.write(message.after)
    file.write(inner.after)
    file.write(whole.after)


def parts(tensor: ir.TensorProtocol) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a tensor as in files, in parts."""
    if tensor.dtype.bitwidth % 8:
        yield tensor.tobytes()
        return
    for block in blocks(tensor.numpy()):
        yield encoded(block)


def _is_large(tensor: ir.TensorProtocol | None) -> bool:
    """True for a tensor that is written separately: not external ones, and no strings, whose size is unknown."""
    if tensor is None or isinstance(tensor, ir.ExternalTensor) or tensor.dtype == ir.DataType.STRING:
        return False
    return tensor.nbytes >= SMALLEST_APART


class _Message:
    """The encoded fields of a message around a field that is written separately.

    Attributes:
        before, after: the fields, in the order of their numbers.
        size: size of both in bytes.
    """

    def __init__(self, before: bytes, after: bytes):
        self.before, self.after = before, after
        self.size = len(before) + len(after)

    @classmethod
    def split(cls, message: Any, number: int) -> _Message:
        """Return the fields before and after the one of this number; the raw data of a small tensor is among those before."""
        before, after = type(message)(), type(message)()
        for descriptor, value in message.ListFields():
            if descriptor.number == number and number != _RAW_DATA:
                continue
            target = before if descriptor.number <= number else after
            if isinstance(value, bool | int | float | str | bytes):
                setattr(target, descriptor.name, value)
            else:
                getattr(target, descriptor.name).MergeFrom(value)
        return cls(before.SerializeToString(deterministic=True), after.SerializeToString(deterministic=True))


def _frame(number: int, size: int) -> bytes:
    return _varint(number << 3 | _LENGTH_DELIMITED) + _varint(size)


def _framed_size(number: int, size: int) -> int:
    return len(_frame(number, size)) + size


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


ONE_FILE_LIMIT = 1 << 30
"""Bytes of constants above which a graph is written with external data; a protobuf file is limited to 2 GiB."""


def fits_one_file(model: ir.Model) -> bool:
    """True if a model's constants stay well below the 2 GiB limit of protobuf."""
    return constant_bytes(model) <= ONE_FILE_LIMIT


def constant_bytes(model: ir.Model) -> int:
    """Return the size of a model's initializers and constants in bytes."""
    total = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value is not None)
    for node in model.graph.all_nodes():
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.TENSOR and not attribute.is_ref():
                total += attribute.as_tensor().nbytes
    return total


def model_bytes(model: ir.Model) -> bytes:
    """Return a model as a serialized ModelProto, the same bytes for the same model."""
    return model_proto(model).SerializeToString(deterministic=True)


def require_valid(light: onnx.ModelProto, what: str) -> None:
    """Raise ModelError if a model, whose large weights may be left out, fails the checks of the standard."""
    try:
        onnx.checker.check_model(light)
    except Exception as error:  # the checker raises errors of several classes
        raise ModelError(
            f"{what} would not be valid ONNX, and is not written: {' '.join(str(error).split()).rstrip('.')}. This is a defect "
            "of burnish worth reporting, with the model that it was made of"
        ) from error


def save_model(model: ir.Model, path: Path) -> None:
    """Write a model; large constants go into ``<name>.data`` next to it if one file cannot hold them.

    Raises:
        ModelError: the model is not valid ONNX; nothing is written.
        CheckpointError: the file cannot be written; an earlier one is unchanged.
    """
    if fits_one_file(model):
        proto = model_proto(model)
        require_valid(without_payloads(proto), f"'{path}'")
        with replacing(path) as partial:
            partial.write_bytes(proto.SerializeToString(deterministic=True))
        return
    require_valid(model_proto(light_copy(model)), f"'{path}'")
    copy = model.clone()
    ir.passes.common.LiftConstantsToInitializersPass()(copy)
    with named_failures():
        ir.save(copy, path, external_data=f"{path.stem}.data")
