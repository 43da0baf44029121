"""The forward part of a training graph, and what of it to compute a second time: segments, or as little as fits a budget."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from burnish.analysis.memory_plan import Task, peak_of
from burnish.graph import BURNISH_DOMAIN, attribute_value, bodies
from burnish.graph.annotations import NEVER_REPEATED
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
        if NEVER_REPEATED.is_on(node):
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


SEGMENT_SIZES = 24
PREFIXES = 24
NEARLY_LEAST = 1.05
"""The cheapest plan is taken among those whose peaks lie within this factor of the least."""


@dataclass(frozen=True)
class Plan:
    """What is dropped after the forward pass and computed again.

    Attributes:
        dropped: the values by number.
        peak: the planned peak with it, inputs left out, in the sizes that the forward part was given.
        cost: of computing them again, in bytes moved.
    """

    dropped: frozenset[int]
    peak: int
    cost: float


def plan(forward: Forward, dropped: set[int]) -> Plan:
    tasks = forward.schedule(dropped)
    return Plan(frozenset(dropped), forward.peak_of(tasks), forward.cost_of(tasks))


def layers(forward: Forward) -> Plan:
    """Keep checkpoints where the forward pass is narrow, and compute the segments between them again.

    The boundaries are those with the fewest bytes of checkpoints for a largest segment, and the largest segment is the one of the
    least planned peak (the sweep of Chen et al. 2016, "Training deep nets with sublinear memory cost", section 4).
    """
    plans = [plan(forward, set()), *(plan(forward, dropped) for dropped in _segmentations(forward))]
    least = min(candidate.peak for candidate in plans)
    return min((p for p in plans if p.peak <= least * NEARLY_LEAST), key=lambda p: (p.cost, p.peak))


def fitting(forward: Forward, fits: Callable[[Plan], bool]) -> tuple[Plan | None, Plan]:
    """The cheapest of the plans that fit, None when none does; and the plan of the least peak.

    Plans are: the values that save the most bytes for the work of giving them again, one more at a time; and segments.
    """
    plans = [plan(forward, set())]
    if fits(plans[0]):
        return plans[0], plans[0]
    order = _by_bytes_saved_per_cost(forward)
    counts = sorted({max(1, round(len(order) * share / PREFIXES)) for share in range(1, PREFIXES + 1)} if order else set())
    plans += [plan(forward, forward.droppable - (set(forward.saved) - set(order[:count]))) for count in counts]
    plans += [plan(forward, dropped) for dropped in _segmentations(forward)]
    least = min(plans, key=lambda p: (p.peak, p.cost))
    return min((p for p in plans if fits(p)), key=lambda p: p.cost, default=None), least


def _by_bytes_saved_per_cost(forward: Forward) -> list[int]:
    """Saved values in the order in which a greedy choice drops them.

    The work of giving a value again grows when what it was to be computed from is dropped before it.
    """
    held = set(forward.saved)
    order: list[int] = []
    ratios = {value: _ratio(forward, value, held) for value in held}
    while ratios:
        best = max(ratios, key=lambda value: (ratios[value], -value))
        current = _ratio(forward, best, held)
        if current < ratios[best]:
            ratios[best] = current
            continue
        del ratios[best]
        held.discard(best)
        order.append(best)
    return order


def _ratio(forward: Forward, value: int, held: set[int]) -> float:
    dropped = forward.droppable - (held - {value})
    cost = sum(forward.cost(index) for index in forward.repeated_for(value, dropped))
    return forward.sizes[value] / max(cost, 1.0)


def _segmentations(forward: Forward) -> Iterator[set[int]]:
    """What is dropped for different sizes of the largest segment, from whole to small."""
    cuts = _narrow_cuts(forward)
    saved_before = _saved_bytes_before(forward, [cut.position for cut in cuts])
    total = saved_before[-1] if saved_before else 0
    seen: set[frozenset[int]] = set()
    for step in range(1, SEGMENT_SIZES + 1):
        chosen = _fewest_checkpoint_bytes(cuts, saved_before, total / step)
        if chosen is None:
            return
        held = {value for cut in chosen for value in cut.values}
        last = chosen[-1].position if chosen else 0
        # What follows the last checkpoint is needed at once: dropping it saves nothing.
        held.update(value for value in forward.saved if forward.producer[value] >= last)
        dropped = frozenset(forward.droppable - held)
        if dropped not in seen:
            seen.add(dropped)
            yield set(dropped)


@dataclass(frozen=True)
class _Cut:
    """A place between two forward nodes: the values that have to be kept for the work after it, and their bytes."""

    position: int
    values: tuple[int, ...]
    bytes: int


def _narrow_cuts(forward: Forward) -> list[_Cut]:
    """The places where less passes through than at both sides, or no more than at any of them; beginning and end are such."""
    last: dict[int, int] = {}
    for index in range(forward.end):
        last.update(dict.fromkeys(forward.reads[index], index))
    ending: dict[int, list[int]] = {}
    for value, index in last.items():
        if value in forward.droppable:
            ending.setdefault(index, []).append(value)
    passing: dict[int, None] = {}
    cuts: list[_Cut] = []
    for index in range(forward.end):
        for value in ending.get(index, ()):
            passing.pop(value, None)
        passing.update({v: None for v in forward.writes[index] if v in forward.droppable and last.get(v, index) > index})
        if passing:
            cuts.append(_Cut(index + 1, tuple(passing), sum(forward.sizes[value] for value in passing)))
    return [
        cut
        for before, cut, after in zip([None, *cuts], cuts, [*cuts[1:], None], strict=False)
        if (before is None or cut.bytes <= before.bytes) and (after is None or cut.bytes <= after.bytes)
    ]


def _saved_bytes_before(forward: Forward, positions: list[int]) -> list[int]:
    """For every position, the bytes of the saved values computed before it; and last of all, of all of them."""
    result, total = [], 0
    saved = iter([*((forward.producer[value], forward.sizes[value]) for value in forward.saved), (forward.end + 1, 0)])
    position, size = next(saved)
    for boundary in positions:
        while position < boundary:
            total += size
            position, size = next(saved)
        result.append(total)
    return [*result, sum(forward.sizes[value] for value in forward.saved)]


def _fewest_checkpoint_bytes(cuts: list[_Cut], saved_before: list[int], largest: float) -> list[_Cut] | None:
    """The cuts with the fewest bytes between which no more than ``largest`` bytes are saved; None where there are none.

    The shortest path over the cuts, from the beginning to the end.
    """
    places = [0, *saved_before]
    best: list[tuple[float, int]] = [(0.0, -1)]
    # The places that may lie before the next one: a window that moves on, of which those remain that may still be the best.
    window: deque[int] = deque([0])
    for end in range(1, len(places)):
        weight = cuts[end - 1].bytes if end <= len(cuts) else 0
        while window and places[end] - places[window[0]] > largest:
            window.popleft()
        best.append((best[window[0]][0] + weight, window[0]) if window else (float("inf"), -1))
        while window and best[window[-1]][0] > best[end][0]:
            window.pop()
        window.append(end)
    if best[-1][0] == float("inf"):
        return None
    chosen = []
    place = best[-1][1]
    while place > 0:
        chosen.append(cuts[place - 1])
        place = best[place][1]
    return chosen[::-1]
