"""Tensors that belong to the loaded model alone, and are found wherever the process or the model's folder goes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnx_ir as ir

from burnish.importer.external_data import ExternalData
from burnish.importer.file_tensors import Elements, FileTensor, SourceFile
from burnish.importer.payloads import Payload

_Own = Callable[[ir.TensorProtocol, str], ir.TensorProtocol]
"""Gives the tensor of the model, from what was read and the name of what holds it."""


def own_tensors(
    model: ir.Model,
    folder: Path | None = None,
    payloads: Mapping[str, Payload] = MappingProxyType({}),
    file: SourceFile | None = None,
) -> None:
    """Replace, in place, every tensor by one that shares no mutable object with where it came from.

    None of them is found by a path afterwards: external data is in memory, or read from a file that stays open.

    Args:
        model: the model.
        folder: where its external data lies; None where the tensors know it themselves.
        payloads: the data, by name, of the graph's initializers that have none themselves.
        file: where these can be read again.

    Raises:
        ModelError: external data that is missing, too short or outside the folder.
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
    """The tensors of a model, in functions and bodies too, that know no more than a path to their data; and their names."""
    for graph in _graphs(model):
        for value in graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                yield value.name or "", value.const_value
    for name, attributes in _attributes(model):
        for attribute in attributes.values():
            for tensor in _tensors_of(attribute):
                if isinstance(tensor, ir.ExternalTensor):
                    yield tensor.name or name, tensor


def _graphs(model: ir.Model) -> Iterator[ir.Graph]:
    """The graph of a model, and those in its nodes and in its functions' nodes."""
    yield from model.graphs()
    for function in model.functions.values():
        yield from function.subgraphs()


def _attributes(model: ir.Model) -> Iterator[tuple[str, MutableMapping[str, ir.Attr]]]:
    """The attributes of nodes, named by what they compute, and of functions."""
    for function in model.functions.values():
        yield function.name, function.attributes
    for nodes in (model.graph.all_nodes(), *(function.all_nodes() for function in model.functions.values())):
        for node in nodes:
            yield (node.outputs[0].name if node.outputs else node.name) or "", node.attributes


def _tensors_of(attribute: ir.Attr) -> Sequence[ir.TensorProtocol]:
    if attribute.is_ref() or attribute.value is None:
        return ()
    if attribute.type == ir.AttributeType.TENSORS:
        return attribute.as_tensors()
    return (attribute.as_tensor(),) if attribute.type == ir.AttributeType.TENSOR else ()


def _own_attributes(attributes: MutableMapping[str, ir.Attr], name: str, copied: _Own) -> None:
    """Own the tensors among attributes; ``name`` is that of a tensor that has none."""
    for key, attribute in list(attributes.items()):
        tensors = [copied(tensor, name) for tensor in _tensors_of(attribute)]
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
    """The tensor with its data, little-endian as in all ONNX files."""
    dtype = tensor.dtype.numpy()
    elements = np.frombuffer(payload.data, dtype.newbyteorder("<") if sys.byteorder == "big" else dtype)
    array = elements.astype(dtype, copy=False).reshape(tensor.shape.numpy())
    if file is None or sys.byteorder == "big":
        return ir.Tensor(array, tensor.dtype, name=tensor.name)
    return FileTensor(Elements(array, array.shape, tensor.dtype, tensor.name, file, payload.offset))
