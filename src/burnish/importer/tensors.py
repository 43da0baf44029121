"""Tensors as files store them: that each holds what its dims declare."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import onnx
import onnx_ir as ir

from burnish.errors import ModelError
from burnish.importer.external_data import check_external_proto
from burnish.importer.lightweight import payload_bytes

_REMEDY = "The file is damaged or was written wrongly: export the model again"

MOST_ELEMENTS = 1 << 60
"""What no address space holds; also the product of many dims, a number of thousands of digits."""

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
    for tensor in _tensors_of_functions(proto):
        _check_tensor(tensor, folder)


def load_external_data(proto: onnx.ModelProto, folder: Path) -> None:
    """Read, in place, external data into the tensors of a model that ``check_tensors`` has passed."""
    tensors = [tensor for graph in _graphs(proto) for tensor in _tensors_of_graph(graph)]
    for tensor in (*tensors, *_tensors_of_functions(proto)):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            onnx.external_data_helper.load_external_data_for_tensor(tensor, str(folder))
            tensor.data_location = onnx.TensorProto.DEFAULT
            del tensor.external_data[:]


def forget_external_data(proto: onnx.ModelProto) -> None:
    """Make, in place, every tensor with external data that is no initializer of the main graph an empty one.

    The standard's checker looks for the files in the folder that the process is in; what they hold is of no interest to it.
    """
    for tensor in (*_tensors_of_nodes(proto.graph.node), *_tensors_of_functions(proto)):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            tensor.data_location = onnx.TensorProto.DEFAULT
            del tensor.external_data[:]
            tensor.dims[:] = [0]
            tensor.raw_data = b""


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


def _tensors_of_graph(graph: onnx.GraphProto, apart: Collection[str] = ()) -> Iterator[onnx.TensorProto]:
    yield from (tensor for tensor in graph.initializer if tensor.name not in apart)
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from _tensors_of_nodes(graph.node)


def _tensors_of_functions(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    for function in proto.functions:
        yield from _tensors_of_attributes(function.attribute_proto)
        yield from _tensors_of_nodes(function.node)


def _tensors_of_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    for node in nodes:
        yield from _tensors_of_attributes(node.attribute)


def _tensors_of_attributes(attributes: Iterable[onnx.AttributeProto]) -> Iterator[onnx.TensorProto]:
    for attribute in attributes:
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
        sparse_tensors = (attribute.sparse_tensor,) if attribute.HasField("sparse_tensor") else ()
        for sparse in (*sparse_tensors, *attribute.sparse_tensors):
            yield from (sparse.values, sparse.indices)
        for graph in (attribute.g,) if attribute.HasField("g") else ():
            yield from _tensors_of_graph(graph)
        for graph in attribute.graphs:
            yield from _tensors_of_graph(graph)


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
