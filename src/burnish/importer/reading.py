"""Sources to ``onnx_ir.Model``: parsing, the standard's checks, and tensors that belong to the new model alone."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import onnx
import onnx_ir as ir

from burnish.errors import ModelError
from burnish.graph import model_proto
from burnish.graph.protos import graphs_within
from burnish.importer.classical import without_zip_maps
from burnish.importer.file_tensors import Payload, SourceFile, take_payloads
from burnish.importer.lightweight import SERIALIZABLE, light_copy, without_payloads
from burnish.importer.limits import check_parts
from burnish.importer.nodes import is_sorted, with_sorted_nodes
from burnish.importer.normalization import hide_deprecated_nodes
from burnish.importer.opset import normalize_proto_domains
from burnish.importer.runtime_operators import STANDARD_NAMES, hide_runtime_nodes
from burnish.importer.source_model import SOURCE, SourceModel, large_tensors
from burnish.importer.tensors import check_tensors, fits, forget_external_data, own_tensors, with_dense_constants
from burnish.untrusted import check_regular

_AGAIN = "Export the model again, or check that the file was copied whole"


@dataclass(frozen=True)
class _Read:
    proto: onnx.ModelProto
    folder: Path | None  # where its external data lies; None when it did not come from a file
    name: str  # what it is called
    payloads: Mapping[str, Payload] = field(default_factory=dict)  # raw data of initializers, by name, that is not in the proto
    file: SourceFile | None = None  # where these can be read again
    source: onnx.ModelProto | None = None  # what was parsed, without the data of large tensors
    size: int | None = None  # bytes of the file


def read_model(source: object) -> ir.Model:
    """Return a checked model that shares nothing mutable with its source.

    Raises:
        ModelError: see ``burnish.importer.load``.
    """
    if isinstance(source, ir.Model):
        return _read_ir(source)
    read = _read_apart(Path(os.fspath(source))) if isinstance(source, (str, os.PathLike)) else _read_proto(source)
    proto = without_zip_maps(read.proto) if "ZipMap" in _operators(read.proto) else read.proto
    _refuse_maps(proto, read.name)
    try:
        model = ir.from_proto(proto)
        own_tensors(model, read.folder, read.payloads, read.file)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{read.name}: the model cannot be read ({_first_line(error)}). {_AGAIN}") from error
    as_it_came = read.source
    assert as_it_came is not None
    SOURCE.set(model, SourceModel(lambda: as_it_came, large_tensors(model)))
    return model


def read_proto(source: object) -> tuple[onnx.ModelProto, Path | None, str]:
    """Return a checked proto, where its external data lies (None when it did not come from a file), and what it is called.

    Raises:
        ModelError: see ``burnish.importer.load``.
    """
    read = _read_proto(source)
    return read.proto, read.folder, read.name


def _read_proto(source: object) -> _Read:
    if isinstance(source, onnx.ModelProto):
        read = _Read(source, None, "the ModelProto")
    elif isinstance(source, (bytes, bytearray, memoryview)):
        read = _Read(_parse(bytes(source), "the bytes"), None, "the bytes", size=len(source))
    elif isinstance(source, (str, os.PathLike)):
        path = Path(os.fspath(source))
        with _opened(path) as (file, _):
            content = file.read()
        read = _Read(_parse(content, f"'{path}'"), path.parent, f"'{path}'", size=len(content))
        del content
    else:
        raise ModelError(
            f"a model cannot be loaded from {type(source).__name__}: give the path of an ONNX file, its bytes, "
            "an onnx.ModelProto, an onnx_ir.Model or a torch.nn.Module"
        )
    return _checked(read)


def _read_apart(path: Path) -> _Read:
    """Read a file without large copies: the raw data of large initializers is not in the proto."""
    with _opened(path) as (file, size):
        again = SourceFile.of(path, file)
        taken = take_payloads(file, size)
    if taken is not None:
        light, payloads = taken
        proto = _parse(light, f"'{path}'")
        names = Counter(tensor.name for tensor in proto.graph.initializer)
        if all(names[name] == 1 for name in payloads):
            for tensor in proto.graph.initializer:
                if tensor.name in payloads and not fits(tensor, payloads[tensor.name].data):
                    tensor.raw_data = payloads.pop(tensor.name).data
            return _checked(_Read(proto, path.parent, f"'{path}'", payloads, again, size=size))
    return _read_proto(path)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """A file that may be a model, and its size."""
    try:
        if path.is_dir():
            raise ModelError(f"'{path}' is a folder: give the path of the .onnx file in it")
        check_regular(path)
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > SERIALIZABLE:
                raise ModelError(
                    f"'{path}' is larger than {SERIALIZABLE / 2**30:.0f} GiB, where an ONNX file ends: "
                    "save the model with external data"
                )
            yield file, size
    except FileNotFoundError as error:
        raise ModelError(f"there is no file '{path}': check the path") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"'{path}' cannot be read: {error}. Check the path and its permissions") from error


def _parse(content: bytes, name: str) -> onnx.ModelProto:
    if not content:
        raise ModelError(f"{name}: the model is empty (0 bytes). {_AGAIN}")
    try:
        proto = onnx.ModelProto.FromString(content)
    except Exception as error:
        raise ModelError(f"{name}: not an ONNX model, or a corrupt one ({error}). {_AGAIN}") from error
    return proto


def _checked(read: _Read) -> _Read:
    """What was read, with dense constants, where it passes the checks."""
    check_parts(read.proto, read.name, read.size)
    if not _is_text(read.proto):
        raise ModelError(f"{read.name}: corrupt, a name in it is not UTF-8 text. {_AGAIN}")
    if not read.proto.HasField("graph"):
        raise ModelError(f"{read.name}: not an ONNX model (it holds no graph). {_AGAIN}")
    check_tensors(read.proto, read.folder, read.payloads)
    source = SourceModel.of_proto(read.proto, read.folder, read.payloads)
    read = replace(read, proto=with_dense_constants(read.proto, read.folder), source=source)
    try:
        _check_light(read)
    except ModelError:
        # Runtimes sort nodes; the check refuses a file in which one stands before what it reads, and then says no more.
        ordered = with_sorted_nodes(read.proto)
        if ordered is read.proto:
            raise
        read = replace(read, proto=ordered)
        _check_light(read)
    return read


def _check_light(read: _Read) -> None:
    light = without_payloads(read.proto, read.payloads)
    forget_external_data(light)
    _check(light, read.name)


def _operators(proto: onnx.ModelProto) -> frozenset[str]:
    """The types of all nodes, in bodies and functions too."""
    return frozenset(node.op_type for body in graphs_within(proto.graph, *proto.functions) for node in body.node)


def _is_text(message: Any) -> bool:
    """Whether every string of a protobuf message is UTF-8: the parser lets others pass, and fails when they are read."""
    try:
        fields = message.ListFields()
    except UnicodeDecodeError:
        return False
    for descriptor, value in fields:
        if descriptor.type == descriptor.TYPE_STRING:
            try:
                texts = [value] if isinstance(value, (str, bytes)) else list(value)
            except UnicodeDecodeError:
                return False
            if any(isinstance(text, bytes) for text in texts):
                return False
        elif descriptor.type == descriptor.TYPE_MESSAGE:
            messages = [value] if hasattr(value, "ListFields") else value
            if not all(_is_text(inner) for inner in messages):
                return False
    return True


def _read_ir(source: ir.Model) -> ir.Model:
    name = "the onnx_ir.Model"
    for value in source.graph.initializers.values():
        if value.const_value is None:
            raise ModelError(f"{name}: initializer '{value.name}' has no data: load the weights before the model is used")
    try:
        if not is_sorted(source.graph) or not all(map(is_sorted, source.functions.values())):
            return read_model(model_proto(source))
        model = source.clone()
        own_tensors(model)
        light = ir.to_proto(light_copy(model))
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{name}: the model cannot be copied ({_first_line(error)}): is it valid ONNX?") from error
    _check(light, name)
    SOURCE.set(model, SourceModel.of_model(model))
    return model


def _check(light: onnx.ModelProto, name: str) -> None:
    """Check a copy without weights; it is changed. An output may leave out its shape, which is inferred later."""
    twice = next((output for output, count in Counter(output.name for output in light.graph.output).items() if count > 1), None)
    if twice is not None:
        raise ModelError(f"{name}: not valid ONNX: the graph lists its output '{twice}' more than once. Export the model again")
    for output in light.graph.output:
        if output.type.HasField("tensor_type"):
            output.type.tensor_type.shape.SetInParent()
    normalize_proto_domains(light)
    operators = _operators(light)
    if not operators.isdisjoint(STANDARD_NAMES):
        hide_runtime_nodes(light)
    if "GroupNormalization" in operators:
        hide_deprecated_nodes(light)
    try:
        onnx.checker.check_model(light)
    except Exception as error:
        raise ModelError(f"{name}: not valid ONNX: {str(error).strip().rstrip('.')}. Export the model again") from error


def _refuse_maps(proto: onnx.ModelProto, name: str) -> None:
    """Raise ModelError for what a graph of tensors cannot hold: dictionaries, as a DictVectorizer reads."""
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        kind = value.type
        while kind.WhichOneof("value") in ("sequence_type", "optional_type"):
            kind = getattr(kind, kind.WhichOneof("value")).elem_type
        if kind.WhichOneof("value") == "map_type":
            maker = next((node for node in proto.graph.node if value.name in node.output), None)
            by = "" if maker is None else f" of {maker.op_type} '{maker.name or maker.output[0]}'"
            remedy = "export the model without it" if maker is not None else "export the part of the model behind it, of tensors"
            raise ModelError(f"{name}: '{value.name}'{by} is a map (a dictionary), and burnish knows tensors: {remedy}")


def _first_line(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
