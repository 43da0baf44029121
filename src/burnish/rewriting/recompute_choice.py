"""Forward part of a training graph, and the choice of values to recompute: segments, or as few as fit a budget."""

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
"""Results smaller than their operand by this factor, reductions, are kept: they cost little memory and save a pass."""
OPERATIONS_PER_BYTE = 5
"""Operations of a CPU's matrix product in the time of an elementwise pass over one byte."""

MEASURES = frozenset({"Shape", "Size"})
PRODUCTS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
COPIES_OF_NOTHING = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})


class Forward:
    """A training graph with numbered values, and properties of its forward nodes.

    Args:
        graph: a lowered training graph, with semantic operators that the engine has kernels for. The forward part ends at the
            node that computes the loss.
        loss: the loss; this worker's part if workers add up their losses.
        data: inputs that activations depend on.
        keys: inputs of random draws.
        sizes: bytes of every value.

    Attributes:
        nodes: nodes of the graph in order.
        values: values by number; inputs first.
        sizes: bytes by number.
        end: number of forward nodes.
        reads, writes: numbers of the operands and outputs of every node.
        activations: values that depend on data or random draws.
        droppable: forward values that may be recomputed.
        saved: droppable values that the backward pass reads, in order of computation.
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
        """Return the cost of repeating a node, in bytes moved."""
        node = self.nodes[index]
        if node.op_type in COPIES_OF_NOTHING:
            return 0.0
        read, written = self.reads[index], self.writes[index]
        moved = sum(self.sizes[value] for value in (*read, *written))
        if node.op_type not in PRODUCTS:
            return float(moved)
        return moved + self._operations(node, written[0]) / OPERATIONS_PER_BYTE

    def repeated_for(self, value: int, dropped: Collection[int], done: Collection[int] = ()) -> list[int]:
        """Return the nodes that recompute a dropped value, in order; ``done`` holds values that were recomputed already."""
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
        """Return the order of work if ``dropped`` values are recomputed just before the backward pass first needs them.

        A recomputed value has its number plus the number of values.
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
                    # A gradient reads all outputs of a semantic operator from the same run, so that a kernel can fuse both.
                    is_semantic = self.nodes[repeated].domain == BURNISH_DOMAIN
                    done.update(value for value in written if is_semantic or value in dropped)
                    tasks.append(Task(self.nodes[repeated], operands, tuple(number + count for number in written)))
            read = renamed(index)
            tasks.append(self._tasks[index] if read is self.reads[index] else Task(self.nodes[index], read, self.writes[index]))
        return tasks

    def peak_of(self, tasks: Sequence[Task]) -> int:
        """Return the planned peak of a schedule without inputs."""
        return peak_of(tasks, [*self.sizes, *self.sizes], self.outputs)

    def cost_of(self, tasks: Sequence[Task]) -> float:
        """Return the cost of a schedule's recomputation, in bytes moved."""
        count = len(self.values)
        again = (task.outputs[0] - count for task in tasks if task.outputs and task.outputs[0] >= count)
        return sum(self.cost(self.producer[value]) for value in again)

    def _reached_from(self, roots: Iterable[int]) -> set[int]:
        reached = set(roots)
        for node, read, written in zip(self.nodes, self.reads, self.writes, strict=True):
            if node.op_type not in MEASURES and any(value in reached for value in read):
                reached.update(written)
        return reached

    def _drawn(self, keys: Iterable[int], of_data: Collection[int]) -> set[int]:
        """Return the random draws, from the words of the key to the masks or numbers that meet activations.

        Values computed from a mask (a factor per element) are no draws: they are recomputed from the mask.
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
        """Return the multiplications and additions of a product or convolution, from the sizes of its result and weight."""
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
    """Return a worker's own term of a loss summed over workers; the sum may be taken at the end of the step."""
    producer = loss.producer()
    while ALL_REDUCE.is_of(producer):
        assert producer is not None
        part = producer.inputs[list(producer.outputs).index(loss)]
        assert part is not None
        loss, producer = part, part.producer()
    return loss


def _updates_statistics(node: ir.Node) -> bool:
    """True if a node updates running statistics; with momentum 0 it only returns batch statistics."""
    is_training = node.op_type == "BatchNormalization" and attribute_value(node, "training_mode", 0)
    return bool(is_training) and attribute_value(node, "momentum", 0.9) != 0


SEGMENT_SIZES = 24
PREFIXES = 24
NEARLY_LEAST = 1.05
"""The cheapest plan is chosen among those with peaks within this factor of the least."""


@dataclass(frozen=True)
class Plan:
    """Values to drop after the forward pass and recompute.

    Attributes:
        dropped: the values by number.
        peak: the planned peak, without inputs, in the sizes of the forward part.
        cost: cost of recomputation, in bytes moved.
    """

    dropped: frozenset[int]
    peak: int
    cost: float


def plan(forward: Forward, dropped: set[int]) -> Plan:
    tasks = forward.schedule(dropped)
    return Plan(frozenset(dropped), forward.peak_of(tasks), forward.cost_of(tasks))


def layers(forward: Forward) -> Plan:
    """Keep checkpoints at narrow places of the forward pass and recompute the segments between them.

    Boundaries minimize the checkpoint bytes for a largest segment, whose size is chosen for the least planned peak (the sweep of
    Chen et al. 2016, "Training deep nets with sublinear memory cost", section 4).
    """
    plans = [plan(forward, set()), *(plan(forward, dropped) for dropped in _segmentations(forward))]
    least = min(candidate.peak for candidate in plans)
    return min((p for p in plans if p.peak <= least * NEARLY_LEAST), key=lambda p: (p.cost, p.peak))


def fitting(forward: Forward, fits: Callable[[Plan], bool]) -> tuple[Plan | None, Plan]:
    """Return the cheapest plan that fits, or None, and the plan with the least peak.

    Candidates drop the values with the most bytes saved per cost, one more at a time, or segments.
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
    """Return saved values in the order of a greedy choice.

    The cost of recomputing a value grows when the values it depends on are dropped first.
    """
    held = set(forward.saved)
    order: list[int] = []
    ratios = {value: _ratio(forward, value, held) for value in held}
    while ratios:
        best = max(ratios, key=lambda value: (ratios[value], -value))
        # Ratios only fall as values are dropped, so it is enough to update the best one and look again.
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
        # Values after the last checkpoint are needed at once: dropping them saves nothing.
        held.update(value for value in forward.saved if forward.producer[value] >= last)
        dropped = frozenset(forward.droppable - held)
        if dropped not in seen:
            seen.add(dropped)
            yield set(dropped)


@dataclass(frozen=True)
class _Cut:
    """A place between two forward nodes, the values kept for the work after it, and their bytes."""

    position: int
    values: tuple[int, ...]
    bytes: int


def _narrow_cuts(forward: Forward) -> list[_Cut]:
    """Return the places that fewer bytes pass than at both neighbours, or as few as anywhere, including start and end."""
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
    """Return the cuts with the fewest bytes between which at most ``largest`` bytes are saved, or None.

    This is the shortest path over the cuts.
    """
    places = [0, *saved_before]
    best: list[tuple[float, int]] = [(0.0, -1)]
    # Possible predecessors of the next cut: a sliding window that keeps only those that may still be best.
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
