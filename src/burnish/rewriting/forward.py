"""The forward part of a training graph: what the backward reads of it, what may run a second time, and what that costs."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

import onnx_ir as ir

from burnish.analysis.memory_plan import Task, peak_of
from burnish.graph import BURNISH_DOMAIN, NEVER_REPEATED_METADATA, attribute_value, bodies
from burnish.graph.inference import RANDOM_OPERATORS
from burnish.graph.uses import captured_by, read_by
from burnish.operators import semantic_operators
from burnish.operators.collectives import ALL_REDUCE

NEGLIGIBLE_SHARE = 16
"""What is this much smaller than the operand it was computed from, a reduction, is kept: that costs little and saves a pass."""
OPERATIONS_PER_BYTE = 5
"""Multiplications and additions that a CPU does in a matrix product while an elementwise pass moves one byte."""

MEASURES = frozenset({"Shape", "Size"})
PRODUCTS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
COPIES_OF_NOTHING = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})


class Forward:
    """A training graph with the number of every value, and what is known of its forward nodes.

    Args:
        graph: a lowered training graph, with semantic operators where the engine has kernels for them: everything up to the node
            that computes the loss is forward.
        loss: the loss; where workers add up what is reported of it, this worker's part.
        data: the inputs whose values activations depend on.
        keys: the inputs that random draws come from.
        sizes: the bytes of every value.

    Attributes:
        nodes: the nodes of the graph in its order.
        values: the values by number; inputs first.
        sizes: their bytes.
        end: how many of the nodes are forward.
        reads, writes: for every node, the numbers of its operands and outputs.
        activations: the values that depend on data or on random draws.
        droppable: the forward values that may be computed a second time.
        saved: the droppable values that the backward reads, in the order they are computed.
    """

    def __init__(
        self, graph: ir.Graph, loss: ir.Value, data: Collection[str], keys: Collection[str], sizes: dict[ir.Value, int | None]
    ):
        self.nodes = list(graph)
        self.values = [*graph.inputs, *(value for node in self.nodes for value in node.outputs)]
        self.number = {value: index for index, value in enumerate(self.values)}
        self.sizes = [sizes.get(value) or 0 for value in self.values]
        self.outputs = {self.number[value] for value in graph.outputs if value in self.number}
        self.reads = [tuple(self.number[v] for v in read_by(node) if v in self.number) for node in self.nodes]
        self.writes = [tuple(self.number[v] for v in node.outputs) for node in self.nodes]
        self._tasks = [Task(*task) for task in zip(self.nodes, self.reads, self.writes, strict=True)]
        self.producer = {value: index for index, written in enumerate(self.writes) for value in written}
        self.end = self.producer[self.number[_before_exchange(loss)]] + 1
        of_data = self._reached_from([self.number[v] for v in graph.inputs if v.name in data])
        drawn = self._drawn([self.number[v] for v in graph.inputs if v.name in keys], of_data)
        self.activations = of_data | self._reached_from(drawn)
        read_in_bodies = {self.number[v] for node in self.nodes for v in captured_by(node) if v in self.number}
        self.droppable: set[int] = set()
        for index in range(self.end):
            if not self._may_repeat(index):
                continue
            for value in self.writes[index]:
                is_once_only = value in drawn or value in read_in_bodies
                if value in self.activations and not is_once_only and not self._is_negligible(index, value):
                    self.droppable.add(value)
        late = {value for read in self.reads[self.end :] for value in read}
        self.saved = sorted(value for value in self.droppable if value in late)

    def cost(self, index: int) -> float:
        """What running a node again costs, in bytes moved."""
        node = self.nodes[index]
        if node.op_type in COPIES_OF_NOTHING:
            return 0.0
        read, written = self.reads[index], self.writes[index]
        moved = sum(self.sizes[value] for value in (*read, *written))
        if node.op_type not in PRODUCTS:
            return float(moved)
        return moved + self._operations(node, written[0]) / OPERATIONS_PER_BYTE

    def repeated_for(self, value: int, dropped: Collection[int], done: Collection[int] = ()) -> list[int]:
        """The nodes that give a dropped value again, in order; ``done`` holds values that were given again already."""
        needed: set[int] = set()
        pending = [value]
        while pending:
            current = pending.pop()
            index = self.producer.get(current)
            if current not in dropped or current in done or index is None or index in needed:
                continue
            needed.add(index)
            pending.extend(self.reads[index])
        return sorted(needed)

    def schedule(self, dropped: Collection[int]) -> list[Task]:
        """The order of work when ``dropped`` values are given again right before the backward first needs them.

        A value that is given again has its number plus the number of values.
        """
        count = len(self.values)
        done: set[int] = set()

        def renamed(index: int) -> tuple[int, ...]:
            reads = self.reads[index]
            return reads if done.isdisjoint(reads) else tuple(number + count if number in done else number for number in reads)

        tasks = self._tasks[: self.end]
        for index in range(self.end, len(self.nodes)):
            for value in self.reads[index]:
                if value not in dropped or value in done:
                    continue
                for repeated in self.repeated_for(value, dropped, done):
                    operands = renamed(repeated)
                    written = self.writes[repeated]
                    # All that a gradient reads of a semantic operator is of one run of it, so that a kernel can take in both.
                    is_semantic = self.nodes[repeated].domain == BURNISH_DOMAIN
                    done.update(value for value in written if is_semantic or value in dropped)
                    tasks.append(Task(self.nodes[repeated], operands, tuple(number + count for number in written)))
            read = renamed(index)
            tasks.append(self._tasks[index] if read is self.reads[index] else Task(self.nodes[index], read, self.writes[index]))
        return tasks

    def peak_of(self, tasks: Sequence[Task]) -> int:
        """The planned peak of a schedule, inputs left out."""
        return peak_of(tasks, [*self.sizes, *self.sizes], self.outputs)

    def cost_of(self, tasks: Sequence[Task]) -> float:
        """What a schedule computes a second time costs, in bytes moved."""
        count = len(self.values)
        again = (task.outputs[0] - count for task in tasks if task.outputs and task.outputs[0] >= count)
        return sum(self.cost(self.producer[value]) for value in again)

    def _reached_from(self, roots: Iterable[int]) -> set[int]:
        """The values that depend on the values of ``roots``, and not on their shapes alone."""
        reached = set(roots)
        for node, read, written in zip(self.nodes, self.reads, self.writes, strict=True):
            if node.op_type not in MEASURES and any(value in reached for value in read):
                reached.update(written)
        return reached

    def _drawn(self, keys: Iterable[int], of_data: Collection[int]) -> set[int]:
        """The values that are random draws, from the words of the key up to the masks or numbers that meet activations.

        What is made of a mask (a factor per element) is no draw any more: it is given again from the mask.
        """
        drawn = set(keys)
        for node, read, written in zip(self.nodes, self.reads, self.writes, strict=True):
            draws = [value for value in read if value in drawn]
            if not draws or any(value in of_data for value in read):
                continue
            of_masks = all(self.values[value].dtype == ir.DataType.BOOL for value in draws)
            if not of_masks or node.outputs[0].dtype == ir.DataType.BOOL:
                drawn.update(written)
        return drawn

    def _may_repeat(self, index: int) -> bool:
        node = self.nodes[index]
        if node.op_type in RANDOM_OPERATORS or node.op_type in MEASURES or node.op_type == "Constant":
            return False
        if NEVER_REPEATED_METADATA in node.metadata_props:
            return False
        if node.domain == BURNISH_DOMAIN and node.op_type not in semantic_operators():
            return False
        if bodies(node):
            return False
        return not _updates_statistics(node)

    def _is_negligible(self, index: int, value: int) -> bool:
        largest = max((self.sizes[read] for read in self.reads[index]), default=0)
        return self.sizes[value] <= largest / NEGLIGIBLE_SHARE

    def _operations(self, node: ir.Node, output: int) -> float:
        """Multiplications and additions of a matrix product or convolution, from the sizes of its result and its weight."""
        weight, dtype = node.inputs[1], self.values[output].dtype
        shape = None if weight is None else weight.shape
        if shape is None or dtype is None:
            return 0.0
        elements = self.sizes[output] / dtype.itemsize
        extents = [extent if isinstance(extent, int) else 1 for extent in shape.dims]
        if node.op_type in ("MatMul", "Gemm"):
            is_transposed = node.op_type == "Gemm" and attribute_value(node, "transB", 0)
            return 2 * elements * (extents[-1 if is_transposed else -2] if len(extents) > 1 else 1)
        return 2 * elements * math.prod(extents[1:] if node.op_type == "Conv" else extents[:1] + extents[2:])


def _before_exchange(loss: ir.Value) -> ir.Value:
    """What a worker adds to a loss that is summed over the workers: the sum itself may be taken at the end of the step."""
    producer = loss.producer()
    while ALL_REDUCE.is_of(producer):
        assert producer is not None
        part = producer.inputs[list(producer.outputs).index(loss)]
        assert part is not None
        loss, producer = part, part.producer()
    return loss


def _updates_statistics(node: ir.Node) -> bool:
    """Whether a node blends statistics of the batch into running ones; with momentum 0 it only gives those of the batch."""
    is_training = node.op_type == "BatchNormalization" and attribute_value(node, "training_mode", 0)
    return bool(is_training) and attribute_value(node, "momentum", 0.9) != 0
