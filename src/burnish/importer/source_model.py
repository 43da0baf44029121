"""The model that a program was made of, as it came and without its weights: what loading changes of a model is still in it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import onnx
import onnx_ir as ir

from burnish.graph import model_proto
from burnish.graph.annotations import Fact
from burnish.importer.file_tensors import ExternalData, read_in_place
from burnish.importer.lightweight import SMALL, large_constant, without_initializers
from burnish.importer.tensors import placed_elsewhere

Place = tuple[str, int, int]
"""A file next to the model, the offset of a tensor's data in it, and its bytes."""


class SourceModel:
    """A model whose large tensors have no data, and what knows the data of some of them.

    Args:
        proto: returns the model; called once. Tensors without data say that it is external, and not where.
        tensors: the data, by the name of the initializer or of what the Constant node gives.
    """

    def __init__(self, proto: Callable[[], onnx.ModelProto], tensors: Mapping[str, ir.TensorProtocol]):
        self._proto, self.tensors = proto, tensors

    @classmethod
    def of_proto(cls, proto: onnx.ModelProto, folder: Path | None, apart: Collection[str]) -> onnx.ModelProto:
        """Return a copy of a model without the data of its large tensors.

        Args:
            proto: as it was parsed; ``check_tensors`` has passed it.
            folder: where its external data lies.
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
        """Return what was given as an ``onnx_ir.Model``, which is left as it is."""
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
        """Return the same model, which takes the data of its weights from the state of a program, where they are as they came.

        Args:
            weights: the tensors by state name, as they are in the state.
        """
        others = {name: tensor for name, tensor in self.tensors.items() if not _is_same(tensor, _in_state(name, weights))}
        return SourceModel(self._proto, others)

    def with_data(self, place: Callable[[str], Place], data: Mapping[str, Place]) -> onnx.ModelProto:
        """Return the model, whole: each tensor holds its data, or says where it is.

        Args:
            place: where the state has the weight of this name.
            data: where else data is.
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
        """Return what ``with_data`` returned, read from a file.

        Raises:
            ModelError: data that is not in the state is missing, too short or outside the folder.
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
    """Return the initializers of a model, and its large constants by the name of what they give."""
    found = {name: value.const_value for name, value in model.graph.initializers.items() if value.const_value is not None}
    constants = ((node.outputs[0].name or "", large_constant(node)) for node in model.graph if node.outputs)
    return found | {name: tensor for name, tensor in constants if tensor is not None}


def empty_tensors(proto: onnx.ModelProto) -> Iterator[tuple[str, onnx.TensorProto]]:
    """The tensors of a ``SourceModel`` without data of their own, by name."""
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
    """A tensor without data, in place of a large one."""
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
"""Of a model that was loaded."""
