"""Dtypes and shapes of every value, by the standard's own inference."""

from __future__ import annotations

from collections.abc import Iterator

import onnx
import onnx_ir as ir

from burnish.errors import ModelError
from burnish.graph import describe_node
from burnish.importer.gradients import stand_in_for_gradients
from burnish.importer.lightweight import light_copy
from burnish.importer.names import is_absent

NOT_INFERRED = frozenset({"Compress"})
"""Operators that the standard's inference gives no dtype: what the source declares is all there is."""


def name_input_dimensions(model: ir.Model) -> None:
    """Name, in place, the unnamed dimensions of the inputs: ``batch`` for the first of the first input.

    Other inputs get names of their own: that two unnamed dimensions are equal is not known.
    """
    shapes = [value.shape for value in model.graph.inputs if value.shape is not None]
    names = {dim.value for shape in shapes for dim in shape.dims if isinstance(dim, ir.SymbolicDim) and dim.value is not None}
    for position, value in enumerate(model.graph.inputs):
        if value.shape is None:
            continue
        dims = list(value.shape.dims)
        for axis, dim in enumerate(dims):
            if isinstance(dim, int) or dim.value is not None:
                continue
            name = "batch" if position == 0 and axis == 0 and "batch" not in names else f"{value.name}_dim_{axis}"
            while name in names:
                name += "_"
            names.add(name)
            dims[axis] = ir.SymbolicDim(name)
        value.shape = ir.Shape(dims)


def infer_shapes(model: ir.Model) -> None:
    """Infer, in place, the dtype and shape of every value. Weights are not serialized.

    What the source declares for values in between is not relied on: it may date from another batch size. It stays where
    inference knows nothing.

    Raises:
        ModelError: dtypes or shapes that contradict each other.
    """
    light = light_copy(model)
    stand_in_for_gradients(light.graph)
    for node in light.graph.all_nodes():
        if node.domain not in ("", "ai.onnx"):
            continue
        if node.op_type == "GroupNormalization":
            _stand_in(node)
        for output in node.outputs:
            output.shape = None
            if node.op_type not in NOT_INFERRED:
                output.type = None
    proto = ir.to_proto(light)
    types = dict(_types_of(_infer(proto).graph))
    for graph in model.graphs():
        for value in [*graph.inputs, *(output for node in graph for output in node.outputs)]:
            inferred = types.get(value.name or "")
            if inferred is not None and value not in model.graph.inputs:
                _settle(value, inferred)


def require_dtypes(model: ir.Model) -> None:
    """Raise ModelError for the first value whose dtype is not known."""
    for node in model.graph.all_nodes():
        for output in node.outputs:
            if output.type is None and not is_absent(output):
                raise ModelError(
                    f"the dtype of '{output.name}', output of {describe_node(node)}, cannot be inferred: "
                    "declare it in the model's value_info, or use operators of the ONNX standard"
                )


def _stand_in(node: ir.Node) -> None:
    """Make, in place, a group normalization an Identity of what it normalizes: the standard's inference knows nothing of it."""
    node.op_type = "Identity"
    node.attributes.clear()
    node.resize_inputs(1)


def _infer(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Infer with values of shapes propagated; without, where that is what fails."""
    try:
        return onnx.shape_inference.infer_shapes(proto, check_type=False, strict_mode=True, data_prop=True)
    except Exception:
        try:
            return onnx.shape_inference.infer_shapes(proto, check_type=False, strict_mode=True, data_prop=False)
        except Exception as error:
            raise ModelError(
                f"the dtypes and shapes of the model do not fit together: {str(error).strip()}. Export the model again"
            ) from error


def _types_of(graph: onnx.GraphProto) -> Iterator[tuple[str, onnx.TypeProto]]:
    for info in (*graph.input, *graph.value_info, *graph.output):
        if info.type.WhichOneof("value") is not None:
            yield info.name, info.type
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _types_of(inner)


def _settle(value: ir.Value, proto: onnx.TypeProto) -> None:
    try:
        inferred = ir.serde.deserialize_type_proto_for_type(proto)
    except ValueError:
        return
    if inferred is not None:
        value.type = inferred
    shape = ir.serde.deserialize_type_proto_for_shape(proto)
    if shape is None:
        return
    declared = value.shape
    if value.is_graph_output() and declared is not None and len(declared) == len(shape):
        shape = ir.Shape([known if _is_known(known) else said for known, said in zip(shape.dims, declared.dims, strict=True)])
    value.shape = shape


def _is_known(dim: object) -> bool:
    """Whether inference found the extent or one of the model's own names for it."""
    return isinstance(dim, int) or (
        isinstance(dim, ir.SymbolicDim) and dim.value is not None and not dim.value.startswith("unk__")
    )
