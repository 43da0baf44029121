"""Sparse constants become dense ones; sparse weights are refused, as training would fill them up."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from burnish.errors import ModelError
from burnish.graph import FLOATING
from burnish.graph.protos import Body, graphs_within
from burnish.importer.external_data import read_in_place
from burnish.importer.lightweight import SERIALIZABLE, payload_bytes


def with_dense_constants(proto: onnx.ModelProto, folder: Path | None) -> onnx.ModelProto:
    """Return a model whose sparse initializers and constants are dense: itself where it has none, else a copy.

    Args:
        proto: a model that ``check_tensors`` has passed.
        folder: where its external data lies.

    Raises:
        ModelError: a sparse tensor of floating-point elements, which may be a weight; one that is damaged, or too large.
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
    """The graph, the functions, and what is inside their nodes."""
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
