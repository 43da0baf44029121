"""Tensors as files store them: that each holds what its dims declare, and copies that belong to the loaded model alone."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnx
import onnx_ir as ir

from burnish.errors import ModelError
from burnish.importer.external_data import check_external_proto
from burnish.importer.file_tensors import FileTensor, SourceFile
from burnish.importer.lightweight import payload_bytes
from burnish.importer.payloads import Payload

_REMEDY = "The file is damaged or was written wrongly: export the model again"

_ELEMENT_FIELDS = {
    "FLOAT": "float_data",
    "COMPLEX64": "float_data",
    "DOUBLE": "double_data",
    "COMPLEX128": "double_data",
    "INT64": "int64_data",
    "UINT32": "uint64_data",
    "UINT64": "uint64_data",
    "STRING": "string_data",
}
_OTHER_FIELD = "int32_data"


def check_tensors(proto: onnx.ModelProto, folder: Path | None, apart: Collection[str] = ()) -> None:
    """Check every tensor of a model before memory is taken for it.

    Args:
        proto: the model.
        folder: where its external data may lie; None when the model did not come from a file.
        apart: the graph's initializers whose data is not in the proto, and fits them.

    Raises:
        ModelError: a tensor whose data does not fit its dims, or whose external data is missing, too short or elsewhere.
    """
    for index, graph in enumerate(_graphs(proto)):
        for tensor in _tensors_of_graph(graph, apart if index == 0 else ()):
            _check_tensor(tensor, folder)
    for function in proto.functions:
        for tensor in _tensors_of_nodes(function.node):
            _check_tensor(tensor, folder)


def load_external_data(proto: onnx.ModelProto, folder: Path) -> None:
    """Read, in place, external data into the tensors of the graphs of a model that ``check_tensors`` has passed."""
    for graph in _graphs(proto):
        for tensor in _tensors_of_graph(graph):
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                onnx.external_data_helper.load_external_data_for_tensor(tensor, str(folder))
                tensor.data_location = onnx.TensorProto.DEFAULT
                del tensor.external_data[:]


def _graphs(proto: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    """The graphs of a model: of inference, and of each training step."""
    yield proto.graph
    for info in proto.training_info:
        yield from (info.initialization, info.algorithm)


def fits(tensor: onnx.TensorProto, payload: bytes) -> bool:
    """Whether these are the bytes of the tensor's elements, each of them a whole number of bytes."""
    known = tensor.data_type in ir.DataType.__members__.values() and all(extent >= 0 for extent in tensor.dims)
    dtype = ir.DataType(tensor.data_type) if known else ir.DataType.UNDEFINED
    if dtype in (ir.DataType.UNDEFINED, ir.DataType.STRING) or dtype.bitwidth % 8:
        return False
    return payload_bytes(dtype, list(tensor.dims)) == len(payload)


def own_tensors(model: ir.Model, payloads: Mapping[str, Payload] = MappingProxyType({}), file: SourceFile | None = None) -> None:
    """Replace, in place, every tensor by one that shares no mutable object with where it came from.

    Args:
        model: the model.
        payloads: the data, by name, of the graph's initializers that have none themselves.
        file: where these can be read again.
    """
    for graph in model.graphs():
        for value in graph.initializers.values():
            if value.const_value is not None:
                payload = payloads.get(value.name or "") if graph is model.graph else None
                value.const_value = _own(value.const_value) if payload is None else _filled(value.const_value, payload, file)
                value.type = ir.TensorType(value.const_value.dtype)
                value.shape = ir.Shape(value.const_value.shape.numpy())
    for node in model.graph.all_nodes():
        _own_attributes(node)
    for function in model.functions.values():
        for node in function.all_nodes():
            _own_attributes(node)


def _filled(tensor: ir.TensorProtocol, payload: Payload, file: SourceFile | None) -> ir.TensorProtocol:
    """The tensor with its data, little-endian as in all ONNX files."""
    dtype = tensor.dtype.numpy()
    elements = np.frombuffer(payload.data, dtype.newbyteorder("<") if sys.byteorder == "big" else dtype)
    array = elements.astype(dtype, copy=False).reshape(tensor.shape.numpy())
    if file is None or sys.byteorder == "big":
        return ir.Tensor(array, tensor.dtype, name=tensor.name)
    return FileTensor(array, tensor.dtype, tensor.name, file, payload.offset)


def _own_attributes(node: ir.Node) -> None:
    for name, attribute in list(node.attributes.items()):
        if attribute.type == ir.AttributeType.TENSOR and not attribute.is_ref():
            node.attributes[name] = ir.AttrTensor(name, _own(attribute.as_tensor()), doc_string=attribute.doc_string)


def _own(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    if isinstance(tensor, ir.ExternalTensor):
        return ir.ExternalTensor(
            tensor.location,
            tensor.offset,
            tensor.length,
            tensor.dtype,
            shape=ir.Shape(tensor.shape.numpy()),
            name=tensor.name,
            base_dir=tensor.base_dir,
        )
    if tensor.dtype == ir.DataType.STRING:
        return ir.StringTensor(tensor.numpy(), shape=ir.Shape(tensor.shape.numpy()), name=tensor.name)
    return ir.Tensor(tensor.numpy(), tensor.dtype, name=tensor.name)


def _tensors_of_graph(graph: onnx.GraphProto, apart: Collection[str] = ()) -> Iterator[onnx.TensorProto]:
    yield from (tensor for tensor in graph.initializer if tensor.name not in apart)
    for sparse in graph.sparse_initializer:
        name = sparse.values.name
        raise ModelError(f"initializer '{name}' is sparse: store it as a dense tensor, which is what training needs")
    yield from _tensors_of_nodes(graph.node)


def _tensors_of_nodes(nodes: object) -> Iterator[onnx.TensorProto]:
    for node in nodes:  # type: ignore[attr-defined]
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            if attribute.HasField("g"):
                yield from _tensors_of_graph(attribute.g)
            for graph in attribute.graphs:
                yield from _tensors_of_graph(graph)


def _check_tensor(tensor: onnx.TensorProto, folder: Path | None) -> None:
    name = tensor.name or "(of a Constant node)"
    dims = list(tensor.dims)
    if any(dim < 0 for dim in dims):
        raise ModelError(f"tensor '{name}' declares the negative dims {dims}. {_REMEDY}")
    try:
        dtype = ir.DataType(tensor.data_type)
    except ValueError as error:
        raise ModelError(f"tensor '{name}' has the unknown element type {tensor.data_type}. {_REMEDY}") from error
    if dtype == ir.DataType.UNDEFINED:
        raise ModelError(f"tensor '{name}' has no element type. {_REMEDY}")
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        check_external_proto(tensor, dtype, folder)
        return
    if tensor.HasField("raw_data"):
        expected, found, unit = payload_bytes(dtype, dims), len(tensor.raw_data), "bytes"
    else:
        expected, found, unit = _expected_elements(dtype, dims), len(getattr(tensor, _field(dtype))), "elements"
    if expected != found:
        raise ModelError(f"tensor '{name}' declares dims {dims} of {dtype.name}, {expected} {unit}, and holds {found}. {_REMEDY}")


def _field(dtype: ir.DataType) -> str:
    return _ELEMENT_FIELDS.get(dtype.name, _OTHER_FIELD)


def _expected_elements(dtype: ir.DataType, dims: list[int]) -> int:
    count = 1
    for dim in dims:
        count *= dim
    if dtype in (ir.DataType.COMPLEX64, ir.DataType.COMPLEX128):
        return 2 * count
    if dtype.name in ("INT4", "UINT4", "FLOAT4E2M1", "INT2", "UINT2"):
        return payload_bytes(dtype, dims)
    return count
