"""Dtype and shape inference of every value by the standard's functions."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable

import onnx
import onnx_ir as ir

from burnish.errors import ModelError
from burnish.graph import (
    BURNISH_DOMAIN,
    Builder,
    Names,
    constant_array,
    describe_node,
    has_long_vectors,
    holds_large_integers,
    joins_many_copies,
    quantization_of,
)
from burnish.graph.annotations import UNNAMED_AXES
from burnish.graph.protos import graphs_within
from burnish.importer.classical import CLASSICAL_DOMAIN, stand_in_for_classical
from burnish.importer.file_tensors import light_copy
from burnish.importer.limits import may_have_many_axes, try_inference
from burnish.importer.nodes import is_absent, stand_in_for_gradients
from burnish.importer.runtime_operators.registry import laid_out_for_one_processor

NOT_INFERRED = frozenset({"Compress"})
"""Operators without a dtype in the standard's inference; only the source's declaration counts."""

MOST_ELEMENTS = 2**63 - 1
"""Most elements of a tensor, counted in int64 by the standard."""

INTEGERS = (ir.DataType.INT64, ir.DataType.INT32)
MOST_NUMBERS = 64
"""Most elements of axes or a shape."""

NO_NAME = re.compile(r"\s*|\?+|\*|-1|none|null|nan|undefined|unk(nown)?(_*\d+)?", re.IGNORECASE)
"""Placeholders that exporters write for a dimension's name; tf2onnx numbers its own: ``unk__12``."""


def name_input_dimensions(model: ir.Model) -> bool:
    """Name, in place, the unnamed dimensions of the inputs: ``batch`` for the first dimension of the first input.

    Other inputs get different names: unnamed dimensions are not known to be equal.
    """
    shapes = [value.shape for value in model.graph.inputs if value.shape is not None]
    names = Names(dim.value for shape in shapes for dim in shape.dims if isinstance(dim, ir.SymbolicDim))
    changed = False
    for position, value in enumerate(model.graph.inputs):
        if value.shape is None:
            continue
        dims = list(value.shape.dims)
        for axis, dim in enumerate(dims):
            if isinstance(dim, int) or dim.value is not None:
                continue
            name = "batch" if position == 0 and axis == 0 and "batch" not in names else f"{value.name}_dim_{axis}"
            dims[axis] = ir.SymbolicDim(names.take(name))
            changed = True
            UNNAMED_AXES.set(value, [*(UNNAMED_AXES.get(value) or ()), axis])
        value.shape = ir.Shape(dims)
    return changed


def infer_shapes(model: ir.Model, *, strict: bool = True, known: Collection[str] = ()) -> bool:
    """Infer, in place, the dtype and shape of every value. Weights are not serialized.

    Declarations of intermediate values are not trusted, since they may be from another batch size. They only remain if inference
    fails for a value or, without ``strict``, after a node with unsuitable operands.

    Args:
        model: the model.
        strict: True to require that operands fit their nodes.
        known: names of node outputs that keep their shapes.

    Raises:
        ModelError: dtypes or shapes are contradictory; only with ``strict``.
    """
    light = light_copy(model)
    joins_many = joins_many_copies(light.graph)
    domains = {node.domain for node in light.graph.all_nodes()}
    if BURNISH_DOMAIN in domains:
        stand_in_for_gradients(light.graph)
    if CLASSICAL_DOMAIN in domains:
        stand_in_for_classical(light.graph)
    for node in light.graph.all_nodes():
        if node.domain != "":
            continue
        if node.op_type == "GroupNormalization":
            _stand_in(node)
        for output in node.outputs:
            if output.name in known:
                continue
            output.shape = None
            if node.op_type not in NOT_INFERRED:
                output.type = None
    try:
        inferred_proto = _inferred(light, strict, joins_many)
    except ModelError:
        # The reader of a value without a dtype fails first but is not at fault.
        _require_dtypes(node for node in model.graph.all_nodes() if node.domain not in ("", CLASSICAL_DOMAIN))
        raise
    types = _types_of(inferred_proto.graph)
    declared, changed = set(model.graph.inputs), False
    for graph in model.graphs():
        for value in [*graph.inputs, *(output for node in graph for output in node.outputs)]:
            inferred = types.get(value.name or "")
            if inferred is not None and value not in declared:
                before = value.type, value.shape
                _settle(value, inferred)
                changed |= before != (value.type, value.shape)
                if strict:
                    _require_possible(value)
    return changed


def _inferred(light: ir.Model, strict: bool, joins_many: bool) -> onnx.ModelProto:
    """Infer with constants that bodies capture; without them if a branch that is never taken does not fit them."""
    plain = ir.to_proto(light) if any(True for _ in light.graph.subgraphs()) else None
    _hold_captured_numbers(light.graph)
    proto = ir.to_proto(light)
    if may_have_many_axes(light.graph):
        try_inference(proto, data_prop=not joins_many)
    if not strict:
        return onnx.shape_inference.infer_shapes(proto, data_prop=not joins_many)
    try:
        return _infer(proto, joins_many)
    except ModelError:
        if plain is None or plain == proto:
            raise
        return _infer(plain, joins_many)


def open_unknown_dimensions(model: ir.Model) -> bool:
    """Replace, in place, exporters' placeholders for unknown extents by distinct unknown dimensions.

    Placeholders are -1, as for runtimes; a name that means none (``''``, ``?``, ``None``, ``unk__12``), which different
    dimensions may share; and 0 in an input if no data would fit: as the first of several axes, or more than once. A single 0 in
    another axis stays: an empty cache.

    Raises:
        ModelError: a declared extent below -1.
    """
    changed, inputs = False, set(model.graph.inputs)
    for graph in model.graphs():
        values = [*graph.inputs, *graph.outputs, *(output for node in graph for output in node.outputs)]
        for value in dict.fromkeys(values):
            if value.shape is None:
                continue
            dims = list(value.shape.dims)
            if any(isinstance(extent, int) and extent < -1 for extent in dims):
                raise ModelError(
                    f"'{value.name}' is declared with the shape {value.shape}, and no extent can be below zero: "
                    "export the model again"
                )
            opened = [None if _is_unknown(extent) else extent for extent in dims]
            if value in inputs and len(dims) > 1 and (dims[0] == 0 or dims.count(0) > 1):
                opened = [None if extent == 0 else extent for extent in opened]
            if opened != dims:
                value.shape = ir.Shape(opened)
                changed = True
    return changed


def _is_unknown(extent: int | ir.SymbolicDim) -> bool:
    """True if an extent is an exporter's placeholder."""
    return extent == -1 if isinstance(extent, int) else extent.value is not None and bool(NO_NAME.fullmatch(extent.value))


def require_dtypes(model: ir.Model) -> None:
    """Raise ModelError for the first value of unknown dtype; the message tells if its node is quantized."""
    _require_dtypes(model.graph.all_nodes())


def _require_dtypes(nodes: Iterable[ir.Node]) -> None:
    for node in nodes:
        for output in node.outputs:
            if output.type is None and not is_absent(output):
                raise ModelError(
                    quantization_of(node)
                    or laid_out_for_one_processor(node)
                    or f"the dtype of '{output.name}', output of {describe_node(node)}, cannot be inferred: "
                    "declare it in the model's value_info, or use operators of the ONNX standard"
                )


def _hold_captured_numbers(graph: ir.Graph) -> None:
    """Copy captured axes and shapes into bodies, in place: inference only sees constants of its own graph."""
    for number, body in enumerate(graph.subgraphs()):
        held: dict[ir.Value, ir.Value] = {}
        for node in list(body):
            for index, value in enumerate(node.inputs):
                producer = None if value is None else value.producer()
                if value is None or value.graph is body or value.dtype not in INTEGERS or (producer and producer.graph is body):
                    continue
                array = constant_array(value)
                if array is None or array.size > MOST_NUMBERS:
                    continue
                if value not in held:
                    builder = Builder(body, before=next(iter(body)))
                    held[value] = builder.constant(array).value
                    held[value].name = f"{value.name}:held:{number}"
                node.replace_input_with(index, held[value])


def _stand_in(node: ir.Node) -> None:
    """Replace a group normalization by an Identity of its input, in place: the standard's inference does not support it."""
    node.op_type = "Identity"
    node.attributes.clear()
    node.resize_inputs(1)


def _infer(proto: onnx.ModelProto, joins_many: bool) -> onnx.ModelProto:
    """Infer with propagated shape values; without them if that fails or would not end."""
    if joins_many or holds_large_integers(proto.graph):
        plain = _infer_plainly(proto)
        if has_long_vectors(plain.graph, together=joins_many):
            return plain
    try:
        return onnx.shape_inference.infer_shapes(proto, check_type=False, strict_mode=True, data_prop=True)
    except Exception:
        return _infer_plainly(proto)


def _infer_plainly(proto: onnx.ModelProto) -> onnx.ModelProto:
    try:
        return onnx.shape_inference.infer_shapes(proto, check_type=False, strict_mode=True, data_prop=False)
    except Exception as error:
        reason = " ".join(str(error).split()).rstrip(".")
        if "node name: " not in reason:
            reason = f"{_first_failing(proto)}: {reason}"
        raise ModelError(f"the dtypes and shapes of the model do not fit together: {reason}. Export the model again") from error


def _first_failing(proto: onnx.ModelProto) -> str:
    nodes = list(proto.graph.node)
    passing, failing = 0, len(nodes)
    part = onnx.ModelProto()
    part.CopyFrom(proto)
    part.graph.ClearField("output")
    while failing - passing > 1:
        middle = (passing + failing) // 2
        part.graph.ClearField("node")
        part.graph.node.extend(nodes[:middle])
        try:
            onnx.shape_inference.infer_shapes(part, check_type=False, strict_mode=True, data_prop=False)
            passing = middle
        except Exception:  # any exception of the library
            failing = middle
    return describe_node(ir.from_proto(nodes[passing])) if nodes else f"graph '{proto.graph.name}'"


def _types_of(proto: onnx.GraphProto) -> dict[str, onnx.TypeProto]:
    infos = (info for graph in graphs_within(proto) for info in (*graph.input, *graph.value_info, *graph.output))
    return {info.name: info.type for info in infos if info.type.WhichOneof("value") is not None}


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
        # A name that an earlier inference invented may now have another extent.
        pairs = zip(shape.dims, declared.dims, strict=True)
        shape = ir.Shape([said if _is_known(said) and not _is_known(dim) else dim for dim, said in pairs])
    value.shape = shape


def _require_possible(value: ir.Value) -> None:
    """Raise ModelError for an impossible value: no element type, a negative extent, or too many elements."""
    producer = value.producer()
    maker = "" if producer is None else f", output of {describe_node(producer)},"
    if value.type is not None and value.dtype == ir.DataType.UNDEFINED:
        raise ModelError(f"'{value.name}'{maker} would have elements of no type: export the model again")
    extents = [extent for extent in value.shape.dims if isinstance(extent, int)] if value.shape is not None else []
    if any(extent < 0 for extent in extents):
        raise ModelError(
            f"'{value.name}'{maker} would have the shape {value.shape}, and no extent can be below zero: export the model again"
        )
    if math.prod(extents) > MOST_ELEMENTS:
        raise ModelError(
            f"'{value.name}'{maker} would have the shape {value.shape}, more elements than an int64 counts: export it again"
        )


def _is_known(dim: object) -> bool:
    """True if an extent is an integer or one of the model's own names."""
    return isinstance(dim, int) or (
        isinstance(dim, ir.SymbolicDim) and dim.value is not None and not dim.value.startswith("unk__")
    )
