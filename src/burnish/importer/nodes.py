"""Nodes that the standard's checks let pass and that are none: operands left out, or of dtypes that an operator does not take."""

from __future__ import annotations

import math
from functools import cache

import onnx
import onnx_ir as ir

from burnish.errors import ModelError
from burnish.graph import attribute_value, constant_array, describe_node, static_shape
from burnish.graph.inference import operator_schema

_REMEDY = "Export the model again"
_ONE_NUMBER = {("Clip", 1), ("Clip", 2), ("CumSum", 1), ("OneHot", 1), ("TopK", 1), ("Trilu", 1)}
"""Operators and the indices of their operands that are single numbers; the standard's checks let others pass."""
_Option = onnx.defs.OpSchema.FormalParameterOption


def check_references(model: ir.Model) -> None:
    """Raise ModelError for a node outside of functions, in bodies too, with an attribute that refers to one of a function."""
    for node in model.graph.all_nodes():
        for attribute in node.attributes.values():
            if attribute.is_ref():
                raise ModelError(
                    f"{describe_node(node)} takes its attribute '{attribute.name}' from the attribute "
                    f"'{attribute.ref_attr_name}' of a function, and stands in none. {_REMEDY}"
                )


def check_nodes(model: ir.Model) -> None:
    """Check every node of a model without functions, bodies included, before dtypes are inferred.

    Raises:
        ModelError: a node without an input that its operator needs, or that splits into more or fewer pieces than it has outputs;
            a constant with more or fewer values than one; a node with more outputs than its operator has.
    """
    opset = model.opset_imports.get("", 1)
    for node in model.graph.all_nodes():
        if node.domain != "":
            continue
        schema = operator_schema(node.op_type, opset)
        if schema is not None and len(node.outputs) > schema.max_output:
            raise ModelError(
                f"{describe_node(node)} has {len(node.outputs)} outputs, and its operator {schema.max_output} at most. {_REMEDY}"
            )
        if node.op_type == "Constant" and len(node.attributes) != 1:
            attributes = ", ".join(f"'{name}'" for name in node.attributes) or "none"
            raise ModelError(f"{describe_node(node)} has the attributes {attributes}, and a constant has one value. {_REMEDY}")
        if node.op_type == "Split":
            _check_split(node)
        for index, formal in enumerate(_formal_inputs(node.op_type, opset)):
            if formal.option == _Option.Single and (index >= len(node.inputs) or node.inputs[index] is None):
                raise ModelError(
                    f"{describe_node(node)} leaves out its input '{formal.name}', which its operator needs. {_REMEDY}"
                )


def check_operands(model: ir.Model) -> None:
    """Check the dtypes of what every node reads, where they are known.

    The checks of the standard's inference are not enough: they go into functions that stand for operators, some of which are
    wrong in other dtypes than float32.

    Raises:
        ModelError: an operand of a dtype that the operator does not take, or that differs from one that it must agree with; or
            of several numbers where it takes one.
    """
    opset = model.opset_imports.get("", 1)
    for node in model.graph.all_nodes():
        if node.domain != "":
            continue
        bound: dict[str, tuple[str, str]] = {}
        formals = _formal_inputs(node.op_type, opset)
        for index, value in enumerate(node.inputs):
            if not formals or value is None or value.type is None:
                continue
            formal = formals[min(index, len(formals) - 1)]
            kind = _type_name(value.type)
            name = f"{describe_node(node)} takes '{value.name}' of type {kind} as its input '{formal.name}'"
            if kind is None or (formal.option == _Option.Variadic and not formal.is_homogeneous):
                continue
            if formal.types and kind not in formal.types and not _takes_later(node, index, kind):
                raise ModelError(f"{name}, which can be {', '.join(sorted(formal.types))}. {_REMEDY}")
            other, other_kind = bound.setdefault(formal.type_str, (value.name or "", kind))
            if other_kind != kind:
                raise ModelError(f"{name}, beside '{other}' of type {other_kind}, and both have to be of one. {_REMEDY}")
            shape = static_shape(value) if (node.op_type, index) in _ONE_NUMBER else ()
            if shape is not None and math.prod(shape) != 1:
                raise ModelError(
                    f"{describe_node(node)} takes '{value.name}' of shape {list(shape)} as its input '{formal.name}', which is a "
                    f"single number. {_REMEDY}"
                )
        if node.op_type == "PRelu":
            _check_slope(node)


def _check_slope(node: ir.Node) -> None:
    """Raise ModelError for a slope that does not broadcast to its input, which the standard's inference does not look at."""
    x, slope = node.inputs[0], node.inputs[1]
    if x is None or slope is None or x.shape is None or slope.shape is None:
        return
    pairs = zip(reversed(x.shape.dims), reversed(slope.shape.dims), strict=False)
    fits = len(slope.shape) <= len(x.shape) and all(
        low == 1 or low == extent or not (isinstance(low, int) and isinstance(extent, int)) for extent, low in pairs
    )
    if not fits:
        raise ModelError(
            f"{describe_node(node)} has the slope '{slope.name}' of shape {slope.shape}, which does not broadcast to the shape "
            f"{x.shape} of its input '{x.name}'. Before opset 7 a slope had one number for each channel: give it the shape "
            "[C, 1, ...], with a one for each axis behind the channels, or export the model again"
        )


def _takes_later(node: ir.Node, index: int, kind: str) -> bool:
    """Whether a later version of an operator takes bfloat16: exporters write it at opsets that do not have it there yet."""
    formals = _formal_inputs(node.op_type, onnx.defs.onnx_opset_version())
    return kind == "tensor(bfloat16)" and bool(formals) and kind in formals[min(index, len(formals) - 1)].types


def _check_split(node: ir.Node) -> None:
    """Raise ModelError for pieces that are not as many as the outputs: the standard's inference would end the process."""
    count, sizes = attribute_value(node, "num_outputs", None), attribute_value(node, "split", None)
    operand = constant_array(node.inputs[1]) if len(node.inputs) > 1 else None
    pieces = {len(sizes) if sizes else None, count, None if operand is None else operand.size} - {None, len(node.outputs)}
    if pieces:
        raise ModelError(f"{describe_node(node)} cuts {pieces.pop()} pieces and has {len(node.outputs)} outputs. {_REMEDY}")


@cache
def _formal_inputs(op_type: str, opset: int) -> tuple[onnx.defs.OpSchema.FormalParameter, ...]:
    """The inputs of a standard operator as its schema has them, none where there is no such operator."""
    schema = operator_schema(op_type, opset)
    return () if schema is None else tuple(schema.inputs)


def _type_name(kind: object) -> str | None:
    """A type as schemas write it: ``tensor(float)``, ``seq(tensor(int64))``."""
    if isinstance(kind, ir.TensorType):
        return f"tensor({kind.dtype.name.lower()})"
    prefix = "seq" if isinstance(kind, ir.SequenceType) else "optional" if isinstance(kind, ir.OptionalType) else None
    inner = _type_name(kind.elem_type) if isinstance(kind, ir.SequenceType | ir.OptionalType) else None
    return None if inner is None else f"{prefix}({inner})"
