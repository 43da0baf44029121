"""Simulated quantization for differentiation: integers become floating-point numbers of equal value.

Only floating-point numbers carry gradients. A chain from QuantizeLinear to DequantizeLinear is computed in the dtype of the
quantized value; operators between, such as Reshape, MaxPool, Clip or MatMulInteger, give the same results on whole numbers. For
the gradient of rounding see ``burnish.operators.quantization``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import onnx_ir as ir

from burnish.errors import GradientError
from burnish.graph import FLOATING, Builder, Tensor, bodies, describe_node, replace_value
from burnish.graph.constants import is_quantized
from burnish.graph.uses import copy_of, read_by
from burnish.importer.operands import QUANTIZES, may_hold_integers
from burnish.operators import Operation
from burnish.operators.quantization import (
    SATURATE,
    STRAIGHT_THROUGH,
    Grid,
    check_digits,
    dequantized,
    quantized,
    range_of,
    saturates,
)

COUNTS_OR_COMPARES = frozenset("ArgMax ArgMin Equal Greater GreaterOrEqual Less LessOrEqual NonZero Shape Size".split())
"""Operators whose result has derivative zero."""

PRODUCTS = {"MatMulInteger": "MatMul", "ConvInteger": "Conv"}


def simulate_quantization(graph: ir.Graph, wrt: Collection[ir.Value]) -> dict[ir.Value, ir.Node]:
    """Replace quantized arithmetic by floating-point arithmetic if a gradient is needed, in place.

    Args:
        graph: graph of a canonical model, with dtypes. Parts that do not depend on ``wrt`` stay.
        wrt: the values to differentiate with respect to.

    Returns:
        Integers that were replaced by floating-point numbers -> a reader without a gradient, which keeps reading the integers.

    Raises:
        GradientError: quantization along an axis of a value of unknown rank, or to integers that the dtype cannot hold.
    """
    simulation = _Simulation(wrt)
    if is_quantized(graph):
        simulation.place(graph)
    return simulation.stopped


def refuse_lost_gradients(stopped: Mapping[ir.Value, ir.Node], wrt: Collection[ir.Value], target: ir.Value) -> None:
    """Check that no node that stops a quantization's gradient lies between ``wrt`` and ``target``.

    Args:
        stopped: the result of ``simulate_quantization``.
        wrt: the values whose gradients would be incomplete.
        target: the differentiated value.

    Raises:
        GradientError: one does.
    """
    if not stopped:
        return
    leading = _leading_to([target])
    for value, node in stopped.items():
        if any(output in leading for output in node.outputs):
            lost = _leading_to([value]).intersection(wrt)
            if lost:
                raise GradientError(
                    f"{describe_node(node)} computes with the integers of a quantization, which no gradient passes there, and "
                    f"'{min(item.name or '' for item in lost)}' is differentiated through it. Export the model with "
                    "QuantizeLinear and DequantizeLinear around operators of floating-point numbers (the format QDQ)"
                )


def _leading_to(values: Iterable[ir.Value]) -> set[ir.Value]:
    leading: set[ir.Value] = set()
    pending = list(values)
    while pending:
        value = pending.pop()
        if value not in leading:
            leading.add(value)
            if (producer := value.producer()) is not None:
                pending.extend(read_by(producer))
    return leading


class _Simulation:
    def __init__(self, wrt: Collection[ir.Value]):
        self.stopped: dict[ir.Value, ir.Node] = {}
        self._dependent = set(wrt)
        self._numbers: dict[ir.Value, ir.Value] = {}

    def place(self, graph: ir.Graph) -> None:
        nodes = list(graph)
        for node, following in zip(nodes, [*nodes[1:], None], strict=True):
            if not any(value in self._dependent for value in read_by(node)):
                continue
            self._dependent.update(node.outputs)
            if bodies(node):
                self._place_bodies(node)
            elif node.domain != "":
                self._note_stopped(node)
            elif node.op_type in QUANTIZES:
                self._quantize(node, Builder(graph, before=following))
            else:
                self._place_between(node, Builder(graph, before=node))

    def _place_bodies(self, node: ir.Node) -> None:
        """Walk through subgraphs. Integers do not cross their bounds as numbers, and stops inside count as stops at the node."""
        earlier = dict(self.stopped)
        returned: list[ir.Value] = []
        for body in bodies(node):
            self._dependent.update(body.inputs)
            self.place(body)
            returned.extend(list(body.outputs))
        self.stopped |= dict.fromkeys(self.stopped.keys() - earlier.keys(), node)
        passed = (value for value in (*node.inputs, *returned) if value is not None)
        self.stopped |= {value: node for value in passed if value in self._numbers}

    def _quantize(self, node: ir.Node, builder: Builder) -> None:
        x, output = node.inputs[0], node.outputs[0]
        if x is not None and x.dtype in FLOATING and output.dtype is not None:
            op = Operation(node, builder)
            if node.op_type == "DynamicQuantizeLinear":
                grid = Grid(self._held_scale(node, builder), op.outputs[2], 0, 0, node)
            else:
                grid = Grid.of(op)
            self._numbers[output] = quantized(op.input, grid, output.dtype, saturates(node)).value

    def _held_scale(self, node: ir.Node, builder: Builder) -> Tensor:
        chosen = node.outputs[1]
        readers = tuple(chosen.uses())
        scale = builder.tensor(chosen)
        held = STRAIGHT_THROUGH(builder.scalar(0.0, scale), scale)
        self._dependent.add(held.value)
        for reader, index in readers:
            reader.replace_input_with(index, held.value)
        return held

    def _place_between(self, node: ir.Node, builder: Builder) -> None:
        held = [index for index, value in enumerate(node.inputs) if value in self._numbers]
        if node.op_type == "DequantizeLinear":
            if held or node.inputs[1] in self._dependent:
                self._replace(node, self._dequantized(Operation(node, builder)))
        elif not all(may_hold_integers(node, index) for index in held):
            self._note_stopped(node)
        elif held:
            for output, result in zip(node.outputs, self._computed(node, builder), strict=False):
                if output.dtype in FLOATING:
                    self._replace(node, result)
                else:
                    self._numbers[output] = result.value

    def _note_stopped(self, node: ir.Node) -> None:
        if node.domain == "" and node.op_type in COUNTS_OR_COMPARES:
            return
        self.stopped |= {value: node for value in read_by(node) if value in self._numbers}

    def _replace(self, node: ir.Node, result: Tensor) -> None:
        output = node.outputs[0]
        assert output.dtype is not None
        result = result.builder.cast(result, output.dtype)
        if output.shape is not None:
            result.value.shape = ir.Shape(output.shape.dims)
        self._dependent.add(result.value)
        replace_value(output, result.value)

    def _number(self, builder: Builder, value: ir.Value, dtype: ir.DataType) -> Tensor:
        array = builder.tensor(value).array
        if value in self._numbers or array is None:
            return builder.cast(builder.tensor(self._numbers.get(value, value)), dtype)
        return builder.constant(array.astype(dtype.numpy()))

    def _dequantized(self, op: Operation) -> Tensor:
        integers, dtype = op.input.value, op.output.dtype
        if integers not in self._numbers:
            check_digits(dtype, op.input.dtype, op.node)
        return dequantized(self._number(op.builder, integers, dtype), Grid.of(op))

    def _computed(self, node: ir.Node, builder: Builder) -> list[Tensor]:
        dtype = next(number.dtype for value in node.inputs if (number := self._numbers.get(value)) is not None)  # type: ignore[arg-type]
        assert dtype is not None
        if node.op_type in PRODUCTS:
            return [self._product(node, builder, dtype)]
        operands = [
            self._number(builder, value, dtype).value if value is not None and may_hold_integers(node, index) else value
            for index, value in enumerate(node.inputs)
        ]
        if node.op_type == "Cast":
            return [builder.tensor(operands[0])]  # type: ignore[arg-type]
        if node.op_type == "Clip":
            return [self._limited(node, builder.tensor(operands[0]))]  # type: ignore[arg-type]
        copy = copy_of(node, operands)
        copy.metadata_props.update(node.metadata_props)
        if node.op_type != "Split":
            copy.resize_outputs(1)
        for output in copy.outputs:
            output.type = ir.TensorType(dtype)
        builder.graph.insert_before(node, copy)
        return [builder.tensor(output) for output in copy.outputs]

    def _limited(self, node: ir.Node, number: Tensor) -> Tensor:
        builder, integers = number.builder, node.inputs[0]
        assert integers is not None
        assert integers.dtype is not None
        bounds = (*node.inputs[1:3], None, None)[:2]
        low, high = (
            builder.scalar(widest, number) if bound is None else self._number(builder, bound, number.dtype)
            for bound, widest in zip(bounds, range_of(integers.dtype), strict=True)
        )
        return SATURATE(number, low, high)

    def _product(self, node: ir.Node, builder: Builder, dtype: ir.DataType) -> Tensor:
        factors = []
        for index in range(2):
            value = node.inputs[index]
            assert value is not None
            factor = self._number(builder, value, dtype)
            zero_point = node.inputs[index + 2] if index + 2 < len(node.inputs) else None
            if zero_point is not None:
                offset = self._number(builder, zero_point, dtype)
                is_by_row = index == 0 if node.op_type == "MatMulInteger" else index == 1
                if is_by_row and offset.rank == 1 and offset.dimension(0) != 1:
                    rank = 2 if node.op_type == "MatMulInteger" else factor.rank or 0
                    offset = builder.op("Unsqueeze", offset, builder.integers(range(1, rank)))
                factor = factor - offset
            factors.append(factor)
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        return builder.op(PRODUCTS[node.op_type], *factors, **attributes)
