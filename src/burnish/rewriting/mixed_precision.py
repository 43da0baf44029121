"""Mixed precision: casts to sixteen bits for operators that gain from it, and back to float32 if digits matter.

The record of an operator (``Precision``) decides; operators without one compute in float32.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Builder, bodies, constant_array
from burnish.graph.inference import operator_schema
from burnish.graph.uses import producer_of
from burnish.graph.versions import raise_opset
from burnish.operators.registry import Precision, find_record, records
from burnish.settings import matches_pattern, nearest

OPSET_OF_BFLOAT16 = 22
"""First opset with bfloat16 convolutions and pooling."""


def mix_precision(model: ir.Model, dtype: ir.DataType, weights: Collection[ir.Value], keep: Sequence[str] = ()) -> None:
    """Make a graph compute in sixteen bits if little is lost, in place; its inputs and outputs keep their dtypes.

    Only float32 is narrowed, and no value is cast twice to the same dtype. Values that depend only on weights and constants stay
    float32, like the weights, and are cast where they meet an activation; the gradient of that cast is float32. A constant that
    the narrow dtype cannot hold keeps its operator in float32. Branches and loop bodies follow the same rules; their inputs and
    outputs are float32.

    Args:
        model: a model not yet bound to a mode. For bfloat16 its opset is raised to 22 if every node keeps its meaning; otherwise
            convolutions and pooling stay in float32.
        dtype: FLOAT16 or BFLOAT16.
        weights: graph inputs that are parameters or statistics.
        keep: shell-style patterns of layers to keep in float32: the name of a node or of its weight, or the weight's name without
            its last part.

    Raises:
        ConfigurationError: a pattern matches no layer, or no operator would compute in ``dtype``.
    """
    excluded = _kept_nodes(model.graph, {*weights, *model.graph.initializers.values()}, keep)
    if dtype == ir.DataType.BFLOAT16:
        raise_opset(model.graph, OPSET_OF_BFLOAT16)
    mixing = _Mixing(model.graph, dtype, weights, excluded)
    mixing.place_all()
    if not mixing.computed:
        name = dtype.name.lower()
        computed = sorted({key[1] for key, versions in records().items() if versions[0].precision is Precision.NARROW})
        raise ConfigurationError(
            f"precision: nothing in the model would be computed in {name}: it has no {', '.join(computed)} of float32 "
            f"that keep={list(keep)} leaves; compile it with precision='float32'"
        )


class _Mixing:
    """State of one walk over a graph, in order; each body has its own.

    Values keep their identity. A value computed in sixteen bits changes its dtype (``narrowed``); its other version is a cast
    before the first reader.

    Args:
        graph: graph or body.
        dtype: the sixteen-bit dtype.
        weights: outer values computed only from weights and constants.
        excluded: nodes that stay in float32.
    """

    def __init__(self, graph: ir.Graph, dtype: ir.DataType, weights: Collection[ir.Value], excluded: Collection[ir.Node]):
        self.graph = graph
        self.dtype = dtype
        self.excluded = excluded
        self.computed = 0
        self.fixed = {*weights, *graph.initializers.values()}
        self.narrowed: set[ir.Value] = set()
        self.read_narrow: set[ir.Value] = set()  # values that following operators read in sixteen bits
        self._versions: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}

    def place_all(self) -> None:
        for node in list(self.graph):
            self._place(node)
        self._restore_outputs()

    def _place(self, node: ir.Node) -> None:
        operands = self._operands(node)
        activations = [value for value in operands.values() if value not in self.fixed]
        is_standard = node.domain == ""
        if is_standard and self._is_fixed(node):
            self.fixed.update(node.outputs)
            return
        follows = bool(activations) and all(value in self.read_narrow for value in activations)
        record = find_record(node) if is_standard and node not in self.excluded else None
        precision = None if record is None else record.precision
        is_computed = precision is Precision.NARROW and bool(activations)
        is_following = precision is Precision.FOLLOWS and follows
        if (is_computed or is_following) and self._takes(node) and all(map(self._holds, operands.values())):
            self.computed += is_computed
            self._narrow(node, operands)
            return
        self._widen(node)
        self._place_bodies(node)
        if precision is Precision.WIDENED and follows and node.outputs[0].dtype == ir.DataType.FLOAT:
            self.read_narrow.add(node.outputs[0])

    def _place_bodies(self, node: ir.Node) -> None:
        """Choose the dtypes inside a node. Captured values are cast inside, so that loops sum their gradients in float32."""
        for body in bodies(node):
            body.opset_imports.update(self.graph.opset_imports)
            inner = _Mixing(body, self.dtype, self.fixed, self.excluded)
            inner.place_all()
            self.computed += inner.computed

    def _restore_outputs(self) -> None:
        for value in dict.fromkeys(self.graph.outputs):
            if value in self.narrowed:
                restored, name = self._version(value, ir.DataType.FLOAT, None), value.name
                value.name, restored.name = f"{name}:{self.dtype.name.lower()}", name
                for index, output in enumerate(self.graph.outputs):
                    if output is value:
                        self.graph.outputs[index] = restored

    def _is_fixed(self, node: ir.Node) -> bool:
        if node.op_type.startswith("Random") or bodies(node):
            return False
        return all(value in self.fixed for value in node.inputs if value is not None)

    def _operands(self, node: ir.Node) -> dict[int, ir.Value]:
        schema = operator_schema(node.op_type, self.graph.opset_imports[""]) if node.domain == "" else None
        if schema is None:
            return {}
        kind = schema.outputs[0].type_str
        return {
            index: value
            for index, value in enumerate(node.inputs)
            if value is not None and _type_of(schema.inputs, index) == kind and self._is_single(value)
        }

    def _narrow(self, node: ir.Node, operands: dict[int, ir.Value]) -> None:
        self._widen(node, besides=operands)
        for index, value in operands.items():
            node.replace_input_with(index, self._version(value, self.dtype, node))
        schema = operator_schema(node.op_type, self.graph.opset_imports[""])
        assert schema is not None
        for index, output in enumerate(node.outputs):
            if _type_of(schema.outputs, index) == schema.outputs[0].type_str:
                output.type = ir.TensorType(self.dtype)
                self.narrowed.add(output)
                self.read_narrow.add(output)

    def _widen(self, node: ir.Node, besides: Collection[int] = ()) -> None:
        for index, value in enumerate(node.inputs):
            if value in self.narrowed and index not in besides:
                node.replace_input_with(index, self._version(value, ir.DataType.FLOAT, node))
        for body in bodies(node):
            for inside in body.all_nodes():
                for index, value in enumerate(inside.inputs):
                    if value in self.narrowed:
                        inside.replace_input_with(index, self._version(value, ir.DataType.FLOAT, node))

    def _version(self, value: ir.Value, dtype: ir.DataType, before: ir.Node | None) -> ir.Value:
        if value.dtype == dtype:
            return value
        key = (value, dtype)
        if key not in self._versions:
            builder, array = Builder(self.graph, before=before), constant_array(value)
            if array is None:
                before_cast = _before_cast(value, dtype) if value in self.fixed else None
                self._versions[key] = before_cast or builder.cast(builder.tensor(value), dtype).value
            else:
                self._versions[key] = builder.constant(array.astype(dtype.numpy())).value
        return self._versions[key]

    def _is_single(self, value: ir.Value) -> bool:
        return value.dtype == ir.DataType.FLOAT or value in self.narrowed

    def _takes(self, node: ir.Node) -> bool:
        schema = operator_schema(node.op_type, self.graph.opset_imports[""])
        assert schema is not None
        allowed = {constraint.type_param_str: constraint.allowed_type_strs for constraint in schema.type_constraints}
        return f"tensor({self.dtype.name.lower()})" in allowed.get(schema.outputs[0].type_str, ())

    def _holds(self, value: ir.Value) -> bool:
        """True if no number of a constant becomes infinite or zero in the narrow dtype."""
        array = constant_array(value)
        if array is None:
            return True
        with np.errstate(over="ignore", under="ignore"):
            narrow = array.astype(self.dtype.numpy()).astype(array.dtype)
        return bool((np.isfinite(narrow) == np.isfinite(array)).all() and ((narrow == 0) == (array == 0)).all())


def _before_cast(value: ir.Value, dtype: ir.DataType) -> ir.Value | None:
    """Return the source of a cast to float32 if it has the narrow dtype: a frozen weight from a float16 file."""
    cast = producer_of(value, "Cast")
    source = None if cast is None else cast.inputs[0]
    return source if source is not None and source.dtype == dtype else None


def _kept_nodes(graph: ir.Graph, weights: Collection[ir.Value], keep: Sequence[str]) -> set[ir.Node]:
    names = {node: _names(node, weights) for node in graph.all_nodes()}
    excluded: set[ir.Node] = set()
    for pattern in keep:
        matched = {node for node, aliases in names.items() if any(matches_pattern(name, pattern) for name in aliases)}
        if not matched:
            known = sorted({name for aliases in names.values() for name in aliases})
            hint = nearest(pattern, known)
            raise ConfigurationError(f"precision: keep: '{pattern}' matches no layer of the model; did you mean {hint}?")
        excluded |= matched
        excluded.update(inside for node in matched for body in bodies(node) for inside in body.all_nodes())
    return excluded


def _names(node: ir.Node, weights: Collection[ir.Value]) -> set[str]:
    read = [(value.name or "").removeprefix("param/") for value in node.inputs if value is not None and value in weights]
    return {name for name in (node.name or "", *read, *(name.rsplit(".", 1)[0] for name in read)) if name}


def _type_of(parameters: Sequence[onnx.defs.OpSchema.FormalParameter], index: int) -> str:
    """Return the type of a formal parameter; the last one covers variadic ones."""
    return parameters[min(index, len(parameters) - 1)].type_str
