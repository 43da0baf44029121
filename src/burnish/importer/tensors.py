"""Tensors as files store them: that each holds what its dims declare."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import onnx
import onnx_ir as ir

from burnish.errors import ModelError
from burnish.graph.protos import graphs_within
from burnish.importer.external_data import check_external_proto, read_in_place
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


def check_tensors(proto: onnx.ModelProto, folder: Path | None, apart: Collection[str] = ()) -> None:
    """Check every tensor of a model before memory is taken for it.

    Args:
        proto: the model.
        folder: where its external data may lie; None when the model did not come from a file.
        apart: the graph's initializers whose data is not in the proto, and fits them.

    Raises:
        ModelError: a tensor whose data does not fit its dims, or whose external data is missing, too short or elsewhere.
    """
    for tensor in _tensors(proto, apart):
        _check_tensor(tensor, folder)


def load_external_data(proto: onnx.ModelProto, folder: Path) -> None:
    """Read, in place, external data into the tensors of a model that ``check_tensors`` has passed."""
    for tensor in _tensors(proto):
        read_in_place(tensor, folder)


def forget_data_locations(proto: onnx.ModelProto) -> None:
    """Clear, in place, what says that data lies where it lies by default; readers of external data leave it there."""
    for tensor in _tensors(proto):
        if tensor.data_location == onnx.TensorProto.DEFAULT:
            tensor.ClearField("data_location")


def forget_external_data(proto: onnx.ModelProto) -> None:
    """Make, in place, every tensor with external data an empty one.

    The standard's checker looks for the files in the folder that the process is in; what they hold is of no interest to it.
    """
    for tensor in _tensors(proto):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            tensor.data_location = onnx.TensorProto.DEFAULT
            del tensor.external_data[:]
            tensor.dims[:] = [0]
            tensor.raw_data = b""


def fits(tensor: onnx.TensorProto, payload: bytes) -> bool:
    """Whether these are the bytes of the tensor's elements, each of them a whole number of bytes."""
    known = tensor.data_type in ir.DataType.__members__.values() and all(extent >= 0 for extent in tensor.dims)
    dtype = ir.DataType(tensor.data_type) if known else ir.DataType.UNDEFINED
    if dtype in (ir.DataType.UNDEFINED, ir.DataType.STRING) or dtype.bitwidth % 8:
        return False
    return payload_bytes(dtype, list(tensor.dims)) == len(payload)


def _tensors(proto: onnx.ModelProto, apart: Collection[str] = ()) -> Iterator[onnx.TensorProto]:
    """The tensors of a model, in its functions and training steps too, without the initializers of its graph that are apart."""
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
    """The tensors of a model that say where their external data is."""
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
