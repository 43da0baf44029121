"""Parsing and checking of sources into an ``onnx_ir.Model``, and the original model without its weights.

The new model owns its tensors. The source is kept without large tensors: loading changes the model, and programs are saved with
the original.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import onnx
import onnx_ir as ir

from burnish.errors import ModelError
from burnish.graph import model_proto
from burnish.graph.annotations import Fact
from burnish.graph.protos import graphs_within
from burnish.importer.classical import without_zip_maps
from burnish.importer.file_tensors import (
    SERIALIZABLE,
    SMALL,
    ExternalData,
    Payload,
    SourceFile,
    large_constant,
    light_copy,
    read_in_place,
    take_payloads,
    without_initializers,
    without_payloads,
)
from burnish.importer.limits import check_parts
from burnish.importer.nodes import is_sorted, with_sorted_nodes
from burnish.importer.normalization import hide_deprecated_nodes
from burnish.importer.opset import normalize_proto_domains
from burnish.importer.runtime_operators import STANDARD_NAMES, hide_runtime_nodes
from burnish.importer.tensors import (
    check_tensors,
    fits,
    forget_external_data,
    own_tensors,
    placed_elsewhere,
    with_dense_constants,
)
from burnish.untrusted_files import check_regular

Place = tuple[str, int, int]
"""File next to the model, offset of the data, and number of bytes."""


class SourceModel:
    """A model without the data of its large tensors, and access to the data of some of them.

    Args:
        proto: returns the model; called once. Its tensors without data are marked as external, without a location.
        tensors: data by the name of the initializer or of the Constant's output.
    """

    def __init__(self, proto: Callable[[], onnx.ModelProto], tensors: Mapping[str, ir.TensorProtocol]):
        self._proto, self.tensors = proto, tensors

    @classmethod
    def of_proto(cls, proto: onnx.ModelProto, folder: Path | None, apart: Collection[str]) -> onnx.ModelProto:
        """Return a copy of a model without the data of its large tensors.

        Args:
            proto: a parsed model that passed ``check_tensors``.
            folder: folder of its external data.
            apart: initializers whose data is not in the proto.
        """
        copy = without_initializers(proto)
        for tensor in proto.graph.initializer:
            copy.graph.initializer.append(_empty(tensor) if tensor.name in apart or _is_large(tensor) else tensor)
        for node in copy.graph.node:
            for attribute in node.attribute if node.op_type == "Constant" else ():
                if attribute.HasField("t") and _is_large(attribute.t):
                    attribute.t.CopyFrom(_empty(attribute.t))
        for tensor in placed_elsewhere(copy):  # in bodies and functions
            read_in_place(tensor, folder)
        return copy

    @classmethod
    def of_model(cls, model: ir.Model) -> SourceModel:
        """Return the source for an ``onnx_ir.Model``, which is not changed."""
        tensors, copy = large_tensors(model), model.clone()

        def proto() -> onnx.ModelProto:
            for value in copy.graph.initializers.values():
                if value.name in tensors:
                    value.const_value = _external(tensors[value.name], value.name)
            for node in copy.graph:
                if large_constant(node) is not None:
                    name = node.outputs[0].name or ""
                    node.attributes["value"] = ir.AttrTensor("value", _external(tensors[name], name))
            return model_proto(copy)

        return cls(proto, tensors)

    def beside(self, weights: Mapping[str, ir.TensorProtocol]) -> SourceModel:
        """Return the same model without the data of weights that are unchanged in the state of a program.

        Args:
            weights: the tensors in the state, by name.
        """
        others = {name: tensor for name, tensor in self.tensors.items() if not _is_same(tensor, _in_state(name, weights))}
        return SourceModel(self._proto, others)

    def with_data(self, place: Callable[[str], Place], data: Mapping[str, Place]) -> onnx.ModelProto:
        """Return the complete model: each tensor holds its data or its location.

        Args:
            place: returns the location of a weight in the state.
            data: locations of other data.
        """
        proto = onnx.ModelProto()
        proto.CopyFrom(self.proto)
        for name, tensor in empty_tensors(proto):
            del tensor.external_data[:]
            if name in data or name not in self.tensors:
                for key, value in zip(("location", "offset", "length"), data.get(name) or place(name), strict=True):
                    tensor.external_data.add(key=key, value=str(value))
            else:
                tensor.ClearField("data_location")
                tensor.raw_data = self.tensors[name].tobytes()
        return proto

    @property
    def proto(self) -> onnx.ModelProto:
        made = self._proto()
        self._proto = lambda: made
        return made

    @classmethod
    def read(cls, proto: onnx.ModelProto, folder: Path, state_file: str) -> SourceModel:
        """Return the source from a model that ``with_data`` wrote to a file.

        Raises:
            ModelError: data outside the state is missing, too short or outside the folder.
        """
        external, tensors = ExternalData(folder), {}
        for name, tensor in empty_tensors(proto):
            placed = ir.serde.deserialize_tensor(tensor)
            assert isinstance(placed, ir.ExternalTensor)
            if str(placed.location) != state_file:
                tensors[name] = external.read(placed, name)
            del tensor.external_data[:]
        return cls(lambda: proto, tensors)


def large_tensors(model: ir.Model) -> dict[str, ir.TensorProtocol]:
    """Return the initializers of a model, and its large constants by the names of their outputs."""
    found = {name: value.const_value for name, value in model.graph.initializers.items() if value.const_value is not None}
    constants = ((node.outputs[0].name or "", large_constant(node)) for node in model.graph if node.outputs)
    return found | {name: tensor for name, tensor in constants if tensor is not None}


def empty_tensors(proto: onnx.ModelProto) -> Iterator[tuple[str, onnx.TensorProto]]:
    """Yield the tensors without data, by name."""
    for tensor in proto.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            yield tensor.name, tensor
    for node in proto.graph.node:
        for attribute in node.attribute if node.op_type == "Constant" else ():
            if attribute.HasField("t") and attribute.t.data_location == onnx.TensorProto.EXTERNAL:
                yield node.output[0], attribute.t


def _is_large(tensor: onnx.TensorProto) -> bool:
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        return True
    return tensor.data_type != onnx.TensorProto.STRING and tensor.ByteSize() > SMALL


def _empty(tensor: onnx.TensorProto) -> onnx.TensorProto:
    return onnx.TensorProto(
        name=tensor.name,
        data_type=tensor.data_type,
        dims=tensor.dims,
        doc_string=tensor.doc_string,
        metadata_props=tensor.metadata_props,
        data_location=onnx.TensorProto.EXTERNAL,
    )


def _external(tensor: ir.TensorProtocol, name: str) -> ir.TensorProtocol:
    if tensor.dtype == ir.DataType.STRING or tensor.nbytes <= SMALL:
        return tensor
    return ir.ExternalTensor("", None, None, tensor.dtype, shape=ir.Shape(tensor.shape.numpy()), name=name)


def _in_state(name: str, weights: Mapping[str, ir.TensorProtocol]) -> ir.TensorProtocol | None:
    return weights.get(f"param/{name}") or weights.get(f"stat/{name}")


def _is_same(tensor: ir.TensorProtocol, other: ir.TensorProtocol | None) -> bool:
    if other is None or tensor is other:
        return other is not None
    if tensor.dtype != other.dtype or tensor.shape.numpy() != other.shape.numpy() or tensor.dtype == ir.DataType.STRING:
        return False
    return tensor.tobytes() == other.tobytes()


SOURCE = Fact[SourceModel]("burnish.source")
"""Original of a loaded model."""


_AGAIN = "Export the model again, or check that the file was copied whole"


@dataclass(frozen=True)
class _Read:
    proto: onnx.ModelProto
    folder: Path | None  # folder of external data; None without a file
    name: str  # for messages
    payloads: Mapping[str, Payload] = field(default_factory=dict)  # raw data of initializers missing in the proto, by name
    file: SourceFile | None = None  # file to read these again
    source: onnx.ModelProto | None = None  # parsed model without the data of large tensors
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
    """Return a checked proto, the folder of its external data (None without a file), and its name.

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
    """Read a file without large copies: the proto lacks the raw data of large initializers."""
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
        # Runtimes sort nodes, but the checker stops at a node before its inputs.
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
    return frozenset(node.op_type for body in graphs_within(proto.graph, *proto.functions) for node in body.node)


def _is_text(message: Any) -> bool:
    """True if every string of a protobuf message is UTF-8: the parser accepts others but fails on access."""
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
    """Check a temporary copy without weights. An output may omit its shape, which is inferred later."""
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
    """Raise ModelError for dictionaries (ONNX maps), such as inputs of a DictVectorizer."""
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
