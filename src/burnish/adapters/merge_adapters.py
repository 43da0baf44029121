"""Merging of adapters into weights, for the fastest inference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from burnish.adapters.graph import Adapters, read_adapters
from burnish.adapters.variants import VARIANTS, Adapter, lengths
from burnish.errors import CheckpointError, ModelError
from burnish.graph import Builder, Names, add_initializer, attribute_value, constant_array, output_axis, remove_unread_value
from burnish.graph.constants import constant_result
from burnish.graph.uses import producer_of, remove_unread, replace_uses


def merge_adapters(model: ir.Model) -> bool:
    """Merge each adapter into its weight and remove it, in place.

    The result is computed in float64 and rounded once to the weight's dtype. It replaces the weight under its name, in its
    layout. If the weight has other readers or is quantized, the result is the floating-point ``<layer>.merged_weight``.

    Args:
        model: model with all adapters as initializers; unchanged without adapters.

    Raises:
        ModelError: the nodes of an adapter are not as ``burnish.surgery.lora`` created them.
    """
    adapters = read_adapters(model.metadata_props)
    if not adapters:
        return False
    merging = _Merging(model, adapters.adapters)
    for adapter in adapters.adapters:
        merging.merge(adapter)
    merging.place(adapters)
    Adapters().write(model)
    return True


def weight_operand(adapter: Adapter) -> int:
    """Return the input index of the weight at an adapter's node."""
    return 0 if adapter.operator == "Gather" else 1


def lengths_beside(model: ir.Model, adapter: Adapter) -> np.ndarray:
    """Return the lengths of an adapter's weight per output, in float64: the initial magnitude.

    Raises:
        ModelError: its node is not as ``burnish.surgery.lora`` created it.
    """
    outputs = (output for node in model.graph.all_nodes() for output in node.outputs)
    product = next((output for output in outputs if output.name == adapter.product), None)
    node = None if product is None else product.producer()
    operand = None if node is None or node.op_type != adapter.operator else node.inputs[weight_operand(adapter)]
    weight = None if operand is None else constant_result(operand, model.opset_imports[""])
    if node is None or weight is None:
        raise _changed(adapter, adapter.product)
    factor = attribute_value(node, "alpha", 1.0) if adapter.operator == "Gemm" else 1.0
    return lengths(weight.astype(np.float64) * factor, output_axis(node))


class _Merging:
    def __init__(self, model: ir.Model, adapters: Sequence[Adapter]):
        self._graph, self._opset = model.graph, model.opset_imports[""]
        self._names = Names.of(model.graph)
        self._values = {value.name: value for node in model.graph.all_nodes() for value in node.outputs}
        self._nodes: dict[str, set[ir.Node]] = {}
        for adapter in adapters:
            self._nodes.setdefault(adapter.layer, set()).add(self._node(adapter))
        self._merged: dict[tuple[str, ir.Value], np.ndarray] = {}
        self._replaced: list[ir.Node | None] = []

    def merge(self, adapter: Adapter) -> None:
        node = self._node(adapter)
        arrays = {part: self._parameter(adapter, name) for part, name in adapter.parameters.items()}
        operand = self._weight(adapter)
        if (adapter.layer, operand) not in self._merged:
            self._merged[adapter.layer, operand] = self._merged_weight(adapter, node, operand, arrays)
        if "scale" in arrays:
            self._merge_scale(adapter, node, arrays["scale"])
        if adapter.output != adapter.base_output:
            base, output = self._computed(adapter, adapter.base_output), self._computed(adapter, adapter.output)
            self._replaced.append(output.producer())
            replace_uses(output, base)
            output.name, base.name = None, adapter.output

    def place(self, adapters: Adapters) -> None:
        """Remove the adapters' nodes and parameters, and insert the merged weights."""
        for node in self._replaced:
            if node is not None and isinstance(node.graph, ir.Graph):
                remove_unread(node.graph, node)
        for name in adapters.parameters:
            if name in self._graph.initializers:
                remove_unread_value(self._graph, self._graph.initializers[name])
        placed: dict[str, set[ir.Value]] = {}
        for adapter in adapters.adapters:
            operand = self._weight(adapter)
            if operand not in placed.setdefault(adapter.layer, set()):
                placed[adapter.layer].add(self._placed(adapter, operand, self._merged[adapter.layer, operand]))

    def _merged_weight(self, adapter: Adapter, node: ir.Node, operand: ir.Value, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        weight = constant_result(operand, self._opset)
        if weight is None:
            raise _changed(adapter, adapter.weight)
        merged = VARIANTS[adapter.variant].merged(adapter, arrays, weight.astype(np.float64), node).astype(weight.dtype)
        if not np.isfinite(merged.astype(np.float64)).all():
            raise CheckpointError(
                f"the weight '{adapter.weight}' and its adapter come to NaN or infinite values in {weight.dtype}: train with a "
                "smaller learning rate"
            )
        return merged

    def _placed(self, adapter: Adapter, operand: ir.Value, merged: np.ndarray) -> ir.Value:
        source = self._graph.initializers.get(adapter.weight)
        order = None if source is None else _order_from(operand, source)
        nodes = self._nodes[adapter.layer]
        if source is not None and order is not None and _terminal_readers(source) <= nodes:
            source.const_value = ir.Tensor(np.ascontiguousarray(merged.transpose(order)), name=source.name)
            return operand
        name = self._names.take(f"{adapter.layer}.merged_weight")
        value = add_initializer(self._graph, name, np.ascontiguousarray(merged))
        for reader, place in tuple(operand.uses()):
            if reader in nodes:
                reader.replace_input_with(place, value)
        remove_unread(self._graph, operand.producer())
        if operand.is_initializer():
            remove_unread_value(self._graph, operand)
        return value

    def _weight(self, adapter: Adapter) -> ir.Value:
        operand = self._node(adapter).inputs[weight_operand(adapter)]
        if operand is None:
            raise _changed(adapter, adapter.weight)
        return operand

    def _merge_scale(self, adapter: Adapter, node: ir.Node, scale: np.ndarray) -> None:
        if adapter.feedforward:
            product = producer_of(node.inputs[0], "Mul")
            if product is None:
                raise _changed(adapter, adapter.parameters["scale"])
            node.replace_input_with(0, product.inputs[0])
            self._replaced.append(product)
            return
        base = self._computed(adapter, adapter.base_output).producer()
        for place, bias in enumerate(() if base is None or adapter.operator == "Gather" else base.inputs):
            if base is None or bias is None or bias is node.outputs[0] or (base is node and place != 2):
                continue
            array = constant_result(bias, self._opset)
            if array is None:  # it depends on an input
                assert isinstance(base.graph, ir.Graph)
                builder = Builder(base.graph, before=base)
                base.replace_input_with(place, (builder.tensor(bias) * builder.constant(scale)).value)
                continue
            scaled = (array.astype(np.float64) * scale.astype(np.float64)).astype(array.dtype)
            if bias.is_initializer() and len(bias.uses()) == 1 and scaled.shape == array.shape:
                bias.const_value = ir.Tensor(scaled, name=bias.name)
            else:
                name = self._names.take(f"{adapter.layer}.merged_bias")
                base.replace_input_with(place, add_initializer(self._graph, name, scaled))
                remove_unread(self._graph, bias.producer())
                if bias.is_initializer():
                    remove_unread_value(self._graph, bias)

    def _parameter(self, adapter: Adapter, name: str) -> np.ndarray:
        array = constant_array(self._graph.initializers.get(name))
        if array is None:
            raise _changed(adapter, name)
        return array

    def _computed(self, adapter: Adapter, name: str) -> ir.Value:
        if name not in self._values:
            raise _changed(adapter, name)
        return self._values[name]

    def _node(self, adapter: Adapter) -> ir.Node:
        node = self._computed(adapter, adapter.product).producer()
        if node is None or node.op_type != adapter.operator:
            raise _changed(adapter, adapter.product)
        return node


def _order_from(operand: ir.Value, source: ir.Value) -> list[int] | None:
    """Return the axis order that maps an operand back to the initializer it was transposed from; None if it was not."""
    rank = len(operand.shape or ())
    order, value = list(range(rank)), operand
    while value is not source:
        producer = producer_of(value, "Transpose", "Identity")
        if producer is None or producer.inputs[0] is None:
            return None
        if producer.op_type == "Transpose":
            perm = attribute_value(producer, "perm", list(reversed(range(rank))))
            order = [order[int(place)] for place in np.argsort(perm)]
        value = producer.inputs[0]
    return order


def _terminal_readers(source: ir.Value) -> set[ir.Node | None]:
    """Return the readers of a value, also through transpositions; None stands for a graph output."""
    readers: set[ir.Node | None] = set()
    pending = [source]
    while pending:
        value = pending.pop()
        if value.is_graph_output():
            readers.add(None)
        for reader, _ in value.uses():
            if reader.domain == "" and reader.op_type in ("Transpose", "Identity"):
                pending.append(reader.outputs[0])
            else:
                readers.add(reader)
    return readers


def _changed(adapter: Adapter, name: str) -> ModelError:
    return ModelError(
        f"the adapter of the layer '{adapter.layer}' is not as burnish.surgery.lora put it: '{name}' is not there, or is another "
        "value. Put adapters beside the model anew, after it was changed"
    )
