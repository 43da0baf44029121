"""Tensors of files: checked against their dims, made dense, and owned by the loaded model.

Sparse constants become dense; sparse weights are refused, since training would fill them. Owned tensors do not depend on the
working directory or the model's folder.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnx
import onnx_ir as ir

from burnish.errors import ModelError
from burnish.graph import FLOATING
from burnish.graph.protos import Body, graphs_within
from burnish.importer.file_tensors import (
    SERIALIZABLE,
    Elements,
    ExternalData,
    FileTensor,
    Payload,
    SourceFile,
    check_external_proto,
    payload_bytes,
    read_in_place,
)

_REMEDY = "The file is damaged or was written wrongly: export the model again"

MOST_ELEMENTS = 1 << 60
"""More than any address space holds; also bounds the product of many dims."""

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


def check_tensors(proto: onnx.ModelProto, folder: Path | None, apart: Collection[str] = ()) -> None:
    """Check every tensor of a model before allocating memory for it.

    Args:
        proto: the model.
        folder: folder of its external data; None if the model did not come from a file.
        apart: the graph's initializers whose data is not in the proto but is known to fit.

    Raises:
        ModelError: a tensor's data does not fit its dims, or its external data is missing, too short or elsewhere.
    """
    for tensor in _tensors(proto, apart):
        _check_tensor(tensor, folder)


def load_external_data(proto: onnx.ModelProto, folder: Path) -> None:
    """Load, in place, external data into the tensors of a model that passed ``check_tensors``."""
    for tensor in _tensors(proto):
        read_in_place(tensor, folder)


def forget_data_locations(proto: onnx.ModelProto) -> None:
    """Clear, in place, explicit default data locations, which readers of external data leave behind."""
    for tensor in _tensors(proto):
        if tensor.data_location == onnx.TensorProto.DEFAULT:
            tensor.ClearField("data_location")


def forget_external_data(proto: onnx.ModelProto) -> None:
    """Make every tensor with external data empty, in place.

    The standard's checker looks for the files in the working directory, but does not use their contents.
    """
    for tensor in _tensors(proto):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            tensor.data_location = onnx.TensorProto.DEFAULT
            del tensor.external_data[:]
            tensor.dims[:] = [0]
            tensor.raw_data = b""


def fits(tensor: onnx.TensorProto, payload: bytes) -> bool:
    """True if the payload has exactly the bytes of the tensor's elements, each a whole number of bytes."""
    known = tensor.data_type in ir.DataType.__members__.values() and all(extent >= 0 for extent in tensor.dims)
    dtype = ir.DataType(tensor.data_type) if known else ir.DataType.UNDEFINED
    if dtype in (ir.DataType.UNDEFINED, ir.DataType.STRING) or dtype.bitwidth % 8:
        return False
    return payload_bytes(dtype, list(tensor.dims)) == len(payload)


def _tensors(proto: onnx.ModelProto, apart: Collection[str] = ()) -> Iterator[onnx.TensorProto]:
    """Yield the tensors of a model, including functions and training steps, except the graph's initializers in ``apart``."""
    steps = (graph for info in proto.training_info for graph in (info.initialization, info.algorithm))
    for graph in graphs_within(proto.graph, *steps, *proto.functions):
        if isinstance(graph, onnx.GraphProto):
            is_main = graph is proto.graph
            yield from (tensor for tensor in graph.initializer if not is_main or tensor.name not in apart)
            yield from _parts_of(graph.sparse_initializer)
        else:
            yield from _tensors_of(graph.attribute_proto)
        for node in graph.node:
            yield from _tensors_of(node.attribute)


def placed_elsewhere(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Return the tensors of a model with external data locations."""
    return (tensor for tensor in _tensors(proto) if len(tensor.external_data))


def _tensors_of(attributes: Iterable[onnx.AttributeProto]) -> Iterator[onnx.TensorProto]:
    for attribute in attributes:
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
        if attribute.HasField("sparse_tensor"):
            yield from _parts_of([attribute.sparse_tensor])
        yield from _parts_of(attribute.sparse_tensors)


def _parts_of(tensors: Iterable[onnx.SparseTensorProto]) -> Iterator[onnx.TensorProto]:
    for sparse in tensors:
        yield from (sparse.values, sparse.indices)


def _check_tensor(tensor: onnx.TensorProto, folder: Path | None) -> None:
    name = tensor.name or "(of a Constant node)"
    dims = list(tensor.dims)
    if any(dim < 0 for dim in dims):
        raise ModelError(f"tensor '{name}' declares the negative dims {dims}. {_REMEDY}")
    if math.prod(dims) > MOST_ELEMENTS:
        raise ModelError(
            f"tensor '{name}' declares dims of {len(dims)} dimensions, {dims[:4]} to begin with: more elements than any memory "
            f"holds. {_REMEDY}"
        )
    try:
        dtype = ir.DataType(tensor.data_type)
    except ValueError as error:
        raise ModelError(f"tensor '{name}' has the unknown element type {tensor.data_type}. {_REMEDY}") from error
    if dtype == ir.DataType.UNDEFINED:
        raise ModelError(f"tensor '{name}' has no element type. {_REMEDY}")
    if dtype == ir.DataType.STRING and (tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.HasField("raw_data")):
        raise ModelError(
            f"tensor '{name}' holds text as raw or external data, which the standard keeps as string_data. {_REMEDY}"
        )
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        check_external_proto(tensor, dtype, folder)
        return
    if tensor.HasField("raw_data"):
        expected, length, unit = payload_bytes(dtype, dims), len(tensor.raw_data), "bytes"
    else:
        elements = getattr(tensor, _ELEMENT_FIELDS.get(dtype.name, "int32_data"))
        expected, length, unit = _expected_elements(dtype, dims), len(elements), "elements"
    if expected != length:
        raise ModelError(
            f"tensor '{name}' declares dims {dims} of {dtype.name}, {expected} {unit}, and holds {length}. {_REMEDY}"
        )


def _expected_elements(dtype: ir.DataType, dims: list[int]) -> int:
    count = math.prod(dims)
    if dtype in (ir.DataType.COMPLEX64, ir.DataType.COMPLEX128):
        return 2 * count
    if dtype.name in ("INT4", "UINT4", "FLOAT4E2M1", "INT2", "UINT2"):
        return payload_bytes(dtype, dims)
    return count


def with_dense_constants(proto: onnx.ModelProto, folder: Path | None) -> onnx.ModelProto:
    """Return a model with dense initializers and constants: itself if it has no sparse ones, else a copy.

    Args:
        proto: a model that passed ``check_tensors``.
        folder: folder of its external data.

    Raises:
        ModelError: a sparse tensor is floating-point and may be a weight, is damaged, or is too large.
    """
    if not any(_has_sparse(body) for body in _bodies(proto)):
        return proto
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for body in _bodies(copy):
        if isinstance(body, onnx.GraphProto):
            for sparse in body.sparse_initializer:
                name = sparse.values.name
                body.initializer.append(_dense(sparse, f"initializer '{name}'", name, folder))
            del body.sparse_initializer[:]
        for node in body.node:
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.SPARSE_TENSOR and node.op_type == "Constant":
                    name = node.output[0]
                    dense = _dense(attribute.sparse_tensor, f"the Constant with the output '{name}'", name, folder)
                    attribute.CopyFrom(onnx.helper.make_attribute("value", dense))
    return copy


def _bodies(proto: onnx.ModelProto) -> list[Body]:
    return list(graphs_within(proto.graph, *proto.functions))


def _has_sparse(body: Body) -> bool:
    attributes: Iterable[onnx.AttributeProto] = (attribute for node in body.node for attribute in node.attribute)
    is_graph = isinstance(body, onnx.GraphProto)
    return (is_graph and len(body.sparse_initializer) > 0) or any(
        attribute.type == onnx.AttributeProto.SPARSE_TENSOR for attribute in attributes
    )


def _dense(sparse: onnx.SparseTensorProto, what: str, name: str, folder: Path | None) -> onnx.TensorProto:
    dtype = ir.DataType(sparse.values.data_type)
    if dtype in FLOATING:
        raise ModelError(f"{what} is sparse: store it as a dense tensor, which is what training needs")
    if dtype in (ir.DataType.UNDEFINED, ir.DataType.STRING):
        raise ModelError(f"{what} is sparse, with elements of the type {dtype.name}: store numbers, or export the model again")
    for tensor in (sparse.values, sparse.indices):
        read_in_place(tensor, folder)
    if payload_bytes(dtype, list(sparse.dims)) > SERIALIZABLE:
        raise ModelError(
            f"{what} is sparse, of the dims {list(sparse.dims)}, and too large as a dense tensor: export the model again"
        )
    try:
        onnx.checker.check_sparse_tensor(sparse)
    except onnx.checker.ValidationError as error:
        raise ModelError(f"{what} is no valid sparse tensor: {str(error).strip()}. Export the model again") from error
    values, indices = (onnx.numpy_helper.to_array(tensor) for tensor in (sparse.values, sparse.indices))
    elements = np.zeros(math.prod(sparse.dims), values.dtype)
    elements[indices if indices.ndim == 1 else np.ravel_multi_index(tuple(indices.T), tuple(sparse.dims))] = values
    return onnx.numpy_helper.from_array(elements.reshape(tuple(sparse.dims)), name)


_Own = Callable[[ir.TensorProtocol, str], ir.TensorProtocol]
"""Returns the model's tensor from the source's tensor and the name of its holder."""


def own_tensors(
    model: ir.Model,
    folder: Path | None = None,
    payloads: Mapping[str, Payload] = MappingProxyType({}),
    file: SourceFile | None = None,
) -> None:
    """Replace, in place, every tensor by one that shares no mutable object with its source.

    No tensor is found by path afterwards: external data is in memory or in a file that stays open.

    Args:
        model: the model.
        folder: folder of its external data; None if the tensors know it.
        payloads: data of the graph's initializers that have none, by name.
        file: file to read these again.

    Raises:
        ModelError: external data is missing, too short or outside the folder.
    """
    external = ExternalData(folder)

    def own(tensor: ir.TensorProtocol, name: str) -> ir.TensorProtocol:
        return external.read(tensor, tensor.name or name) if isinstance(tensor, ir.ExternalTensor) else _own(tensor)

    for graph in _graphs(model):
        for value in graph.initializers.values():
            if value.const_value is not None:
                payload = payloads.get(value.name or "") if graph is model.graph else None
                if payload is None:
                    value.const_value = own(value.const_value, value.name or "")
                else:
                    value.const_value = _filled(value.const_value, payload, file)
                value.type = ir.TensorType(value.const_value.dtype)
                value.shape = ir.Shape(value.const_value.shape.numpy())
    for name, attributes in _attributes(model):
        _own_attributes(attributes, name, own)


def external_tensors(model: ir.Model) -> Iterator[tuple[str, ir.ExternalTensor]]:
    """Yield the tensors of a model, including functions and bodies, that only have a path to their data, with names."""
    for graph in _graphs(model):
        for value in graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                yield value.name or "", value.const_value
    for name, attributes in _attributes(model):
        for attribute in attributes.values():
            for tensor in _attribute_tensors(attribute):
                if isinstance(tensor, ir.ExternalTensor):
                    yield tensor.name or name, tensor


def _graphs(model: ir.Model) -> Iterator[ir.Graph]:
    yield from model.graphs()
    for function in model.functions.values():
        yield from function.subgraphs()


def _attributes(model: ir.Model) -> Iterator[tuple[str, MutableMapping[str, ir.Attr]]]:
    for function in model.functions.values():
        yield function.name, function.attributes
    for nodes in (model.graph.all_nodes(), *(function.all_nodes() for function in model.functions.values())):
        for node in nodes:
            yield (node.outputs[0].name if node.outputs else node.name) or "", node.attributes


def _attribute_tensors(attribute: ir.Attr) -> Sequence[ir.TensorProtocol]:
    if attribute.is_ref() or attribute.value is None:
        return ()
    if attribute.type == ir.AttributeType.TENSORS:
        return attribute.as_tensors()
    return (attribute.as_tensor(),) if attribute.type == ir.AttributeType.TENSOR else ()


def _own_attributes(attributes: MutableMapping[str, ir.Attr], name: str, copied: _Own) -> None:
    for key, attribute in list(attributes.items()):
        tensors = [copied(tensor, name) for tensor in _attribute_tensors(attribute)]
        if tensors:
            is_list = attribute.type == ir.AttributeType.TENSORS
            owned = ir.AttrTensors(key, tensors) if is_list else ir.AttrTensor(key, tensors[0])
            owned.doc_string = attribute.doc_string
            attributes[key] = owned


def _own(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    if isinstance(tensor, FileTensor):
        return tensor.copy()
    if tensor.dtype == ir.DataType.STRING:
        return ir.StringTensor(tensor.numpy(), shape=ir.Shape(tensor.shape.numpy()), name=tensor.name)
    return ir.Tensor(tensor.numpy(), tensor.dtype, name=tensor.name)


def _filled(tensor: ir.TensorProtocol, payload: Payload, file: SourceFile | None) -> ir.TensorProtocol:
    dtype = tensor.dtype.numpy()
    elements = np.frombuffer(payload.data, dtype.newbyteorder("<") if sys.byteorder == "big" else dtype)
    array = elements.astype(dtype, copy=False).reshape(tensor.shape.numpy())
    if file is None or sys.byteorder == "big":
        return ir.Tensor(array, tensor.dtype, name=tensor.name)
    return FileTensor(Elements(array, array.shape, tensor.dtype, tensor.name, file, payload.offset))
