"""Fuse elementwise arithmetic: a chain of nodes over tensors of one shape becomes one pass over memory.

Groups grow along the edges of the graph, in its order: a node joins the groups of its operands into one, if no outside operand of
the result depends on it. So a group can run as one node.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import onnx_ir as ir

from burnish.graph import (
    BURNISH_DOMAIN,
    attribute_value,
    constant_array,
    replace_uses,
    source_of,
    typed_attribute,
)
from burnish.graph.annotations import SOURCE
from burnish.graph.uses import read_by
from burnish.kernels.elementwise import FUSED_ELEMENTWISE, FUSED_ELEMENTWISE_GROUPS, FUSED_ELEMENTWISE_SUMS
from burnish.kernels.elementwise.programs import DTYPES, Program, is_supported

FEWEST_ELEMENTS = 1024
FEWEST_SMALL_NODES = 3
"""The number of nodes from which a group over fewer than ``FEWEST_ELEMENTS`` elements is worth a call. Benchmark:
``benchmarks/compare.py --model mlp``.
"""

LONGEST_GROUP = 40
FEWEST_COLUMNS, MOST_COLUMNS = 16, 2**16
"""The range of elements in a sum over leading axes that a group computes."""

SEGMENT = 8192
"""The number of consecutive nodes within which groups form, so that the cost per group does not grow with the graph."""

LONG = 32
"""The number of nodes between two readers of a value beyond which it is recomputed, if that takes no extra pass."""


@dataclass(eq=False)
class _Group:
    """Nodes that run as one.

    Attributes:
        segment: segment of the graph that contains all of its nodes.
        bits: bits of the group and its absorbed groups.
        behind: bits of every group of its segment that it depends on, directly or not.
    """

    shape: ir.Shape
    segment: int
    bits: int
    behind: int = 0
    nodes: list[ir.Node] = field(default_factory=list)


class _Groups:
    """The groups of a graph. They form segment by segment: no path through the graph returns to an earlier segment."""

    def __init__(self) -> None:
        self.of: dict[ir.Node, _Group] = {}
        self._nodes = 0
        self._of_earlier_segments: list[_Group] = []
        self._present: dict[_Group, None] = {}
        self._groups: list[_Group] = []  # by bit: the group, or the group that absorbed it
        self._frontier: dict[ir.Value, int] = {}  # bits of the groups that a value depends on without another in between

    def __iter__(self) -> Iterator[_Group]:
        yield from self._of_earlier_segments
        yield from self._present

    def add(self, node: ir.Node) -> None:
        if self._nodes and self._nodes % SEGMENT == 0:
            self._of_earlier_segments += self._present
            self._present, self._groups, self._frontier = {}, [], {}
        self._nodes += 1
        operands = list(read_by(node))  # a branch or a loop depends on the values that its body reads
        shape = _shape(node)
        group = None
        if shape is not None:
            group = self._join(node, operands, shape)
        reached = 0
        if group is None:
            for value in operands:
                reached |= self._frontier.get(value, 0)
        else:
            reached = group.bits
        for output in node.outputs:
            self._frontier[output] = reached

    def _join(self, node: ir.Node, operands: list[ir.Value], shape: ir.Shape) -> _Group:
        joined = _Group(shape, (self._nodes - 1) // SEGMENT, 1 << len(self._groups), nodes=[node])
        self._groups.append(joined)
        self._present[joined] = None
        joined.behind = self._waits(operands)
        for value in operands:
            producer = value.producer()
            other = None if producer is None else self.of.get(producer)
            if other is None or other is joined or other.shape != shape or other.segment != joined.segment:
                continue
            if len(other.nodes) + len(joined.nodes) <= LONGEST_GROUP and not self._would_cycle(joined, other):
                joined = self._merge(other, joined)
        for member in joined.nodes:
            self.of[member] = joined
        return joined

    def _waits(self, operands: list[ir.Value]) -> int:
        direct = 0
        for value in operands:
            direct |= self._frontier.get(value, 0)
        return self._closure(direct)

    def _closure(self, bits: int) -> int:
        found = 0
        while bits:
            group = self._groups[bits.bit_length() - 1]
            found |= group.bits | group.behind
            bits &= ~group.bits
        return found

    def _would_cycle(self, one: _Group, other: _Group) -> bool:
        """True if joining two groups would make a cycle: a node outside both depends on a group, and a group on the node."""
        both = one.bits | other.bits
        outside = 0
        for node in (*one.nodes, *other.nodes):
            for value in node.inputs:
                producer = None if value is None else value.producer()
                if value is not None and (producer is None or self.of.get(producer) not in (one, other)):
                    outside |= self._frontier.get(value, 0)
        return bool((outside | self._closure(outside)) & both)

    def _merge(self, one: _Group, other: _Group) -> _Group:
        bits = one.bits | other.bits
        behind = (one.behind | other.behind) & ~bits
        is_read = any(node in self.of for node in other.nodes)  # a new node has no readers yet
        changed = is_read or behind & ~one.behind
        taken = other.bits
        while taken:
            self._groups[taken.bit_length() - 1] = one
            taken &= ~(1 << (taken.bit_length() - 1))
        del self._present[other]
        one.nodes += other.nodes
        one.bits, one.behind = bits, behind
        for node in other.nodes:
            self.of[node] = one
        if changed:
            # A group that depends on this one also depends on its dependencies.
            for waiting in self._present:
                if waiting is not one and waiting.behind & bits:
                    waiting.behind |= behind | bits
        return one


def fuse_elementwise(graph: ir.Graph) -> bool:
    """Replace chains of elementwise nodes by ``burnish.FusedElementwise`` nodes, in place; the graph stays sorted.

    If only a sum over leading axes reads a value, such as a widened gradient for the gradient of a bias, the chain sums it and
    does not write it: ``burnish.FusedElementwiseSums``.
    """
    groups = _Groups()
    for node in graph:
        groups.add(node)
    changed = _compute_again(graph, groups)
    replaced: list[ir.Node] = []
    for group in groups:
        sums = [] if _is_small(group.shape) else _sums_of(group)
        enough = len(group.nodes) >= (FEWEST_SMALL_NODES if _is_small(group.shape) else 2)
        if (enough or sums) and _replace(graph, group, sums):
            replaced += group.nodes + sums
    graph.remove(replaced, safe=True)  # individually: each removal takes time in proportion to the graph's outputs
    graph.sort()
    return changed or bool(replaced)


def _compute_again(graph: ir.Graph, groups: _Groups) -> bool:
    """Recompute values that are read much later, like activations in the backward pass, if groups there read their operands.

    A group that reads all operands of a node anyway computes it in the same pass, and shares common parts: the gradient of GELU
    shares its distribution function. Only the operand is kept until then.
    """
    changed = False
    places = {node: place for place, node in enumerate(graph)}
    for node in list(places):
        shape = _shape(node)
        value = node.outputs[0]
        if shape is None or _is_small(shape) or value.is_graph_output():
            continue
        users = sorted({user for user, _ in value.uses() if user in places}, key=places.__getitem__)
        if len(users) < 2:
            continue
        gaps = [places[later] - places[earlier] for earlier, later in pairwise(users)]
        first = max(range(len(gaps)), key=gaps.__getitem__) + 1
        if gaps[first - 1] < LONG or any(user not in places for user, _ in value.uses()):
            continue
        late = users[first:]
        group = _group_that_reads(node, shape, _Later(places, places[users[first - 1]]), groups)
        if group is None or any(groups.of.get(user) is group for user in late):
            continue
        # Values that an earlier segment reads stay in that segment or before it.
        if group.segment > places[late[0]] // SEGMENT or _waits_for(group, late, groups, places):
            continue
        again = ir.Node(node.domain, node.op_type, node.inputs, list(node.attributes.values()), num_outputs=1)
        again.outputs[0].type, again.outputs[0].shape = value.type, value.shape
        graph.insert_before(late[0], again)
        for user in late:
            for position, operand in enumerate(user.inputs):
                if operand is value:
                    user.replace_input_with(position, again.outputs[0])
        group.nodes.append(again)
        groups.of[again] = group
        changed = True
    return changed


@dataclass(frozen=True)
class _Later:
    places: Mapping[ir.Node, int]
    start: int

    def __contains__(self, node: ir.Node) -> bool:
        return self.places.get(node, -1) > self.start


def _group_that_reads(node: ir.Node, shape: ir.Shape, later: _Later, groups: _Groups) -> _Group | None:
    """Return a group of ``later`` nodes that reads the operands of a node over many elements, and has room; else None."""
    operands = [value for value in node.inputs if value is not None and constant_array(value) is None]
    if not operands:
        return None
    # Like the state: an input of the graph with known extents.
    of_state = shape.is_static() and any(value.producer() is None for value in operands)
    for user, _ in operands[0].uses():
        group = groups.of.get(user) if user in later else None
        if group is None or group.shape != shape or len(group.nodes) >= LONGEST_GROUP:
            continue
        # An update of the state runs in place, after all readers of the state: nothing may depend on it.
        if of_state and any(output.is_graph_output() for member in group.nodes for output in member.outputs):
            continue
        reads_all = all(any(value in member.inputs for member in group.nodes) for value in operands)
        if reads_all and all(member in later for member in group.nodes):
            return group
    return None


def _waits_for(group: _Group, nodes: list[ir.Node], groups: _Groups, places: Mapping[ir.Node, int]) -> bool:
    end = (group.segment + 1) * SEGMENT
    seen: set[ir.Node] = set()
    left = list(nodes)
    while left:
        node = left.pop()
        if node in seen or places.get(node, 0) >= end:
            continue
        owner = groups.of.get(node)
        if owner is group:
            return True
        members = [node] if owner is None else owner.nodes
        seen.update(members)
        left += [user for member in members for output in member.outputs for user, _ in output.uses()]
    return False


def _shape(node: ir.Node) -> ir.Shape | None:
    if not is_supported(node):
        return None
    shape = node.outputs[0].shape
    if shape is None or any(not isinstance(extent, int) and extent.value is None for extent in shape.dims):
        return None
    for value in node.inputs:
        if value is None:
            continue
        constant = constant_array(value)
        if constant is not None and constant.size == 1:
            continue
        if value.dtype not in DTYPES or value.shape is None or not _repeats_in_one_place(value.shape, shape):
            return None
    return shape


def _repeats_in_one_place(shape: ir.Shape, target: ir.Shape) -> bool:
    """True if a shape broadcasts to another along adjacent axes only, so that the kernel can read it without a copy."""
    missing = len(target) - len(shape)
    if missing < 0:
        return False
    extents = [1] * missing + list(shape.dims)
    kept = []
    for extent, wanted in zip(extents, target.dims, strict=True):
        if extent == wanted and extent != 1:
            kept.append(True)
        elif extent == 1:
            if wanted != 1:
                kept.append(False)
        else:
            return False
    changes = sum(one != other for one, other in zip([True, *kept], [*kept, True], strict=True))
    return changes <= 2


def _is_small(shape: ir.Shape) -> bool:
    elements = 1
    for extent in shape.dims:
        if not isinstance(extent, int):
            return False
        elements *= extent
    return elements < FEWEST_ELEMENTS


def _sums_of(group: _Group) -> list[ir.Node]:
    """Return the sums over the same leading axes of a group's values that have no other outside readers."""
    # State updates run in place, separately from the graph.
    if any(output.is_graph_output() for node in group.nodes for output in node.outputs):
        return []
    members = set(group.nodes)
    found: list[ir.Node] = []
    summed_axes: set[int] = set()
    for node in group.nodes:
        value = node.outputs[0]
        outside = [user for user, _ in value.uses() if user not in members]
        axes = {_leading_axes(user, group.shape) if user.graph is node.graph else 0 for user in outside}
        if outside and value.dtype == ir.DataType.FLOAT and len(axes | summed_axes) == 1 and 0 not in axes:
            summed_axes |= axes
            found += outside
    return found


def _leading_axes(node: ir.Node, shape: ir.Shape) -> int:
    """Return the number of leading axes that a node sums and removes, if not all; 0 if it does anything else."""
    if node.op_type != "ReduceSum" or node.domain != "" or attribute_value(node, "keepdims", 1) or len(node.inputs) != 2:
        return 0
    operand, axes = node.inputs[0], None if node.inputs[1] is None else constant_array(node.inputs[1])
    if operand is None or operand.shape != shape or axes is None or not 0 < axes.size < len(shape):
        return 0
    count = axes.size
    if sorted(int(axis) % len(shape) for axis in axes.reshape(-1)) != list(range(count)):
        return 0
    columns = 1
    for extent in shape.dims[count:]:
        if not isinstance(extent, int):
            return 0
        columns *= extent
    return count if FEWEST_COLUMNS <= columns <= MOST_COLUMNS else 0


def _replace(graph: ir.Graph, group: _Group, sums: list[ir.Node]) -> bool:
    """Replace a group and its sums by a node of a kernel; return True if possible.

    Their nodes then have no operands and no readers.
    """
    members = {*group.nodes, *sums}
    # In the order of the graph, because absorbing groups breaks it.
    nodes = _in_order(group.nodes, set(group.nodes))
    program = Program()
    results = []
    for node in nodes:
        program.add(node)
        output = node.outputs[0]
        if output.is_graph_output() or any(user not in members for user, _ in output.uses()):
            results.append(output)
    if not results and not sums:  # nothing reads the group
        _detach(nodes)
        return True
    if not program.tensors:
        return False
    summed = [value for node in sums for value in node.inputs[:1] if value is not None]
    assembled, registers = program.assemble(results, summed)
    attributes: dict[str, Any] = {
        "constants": [*program.constants, 0.0],  # an attribute cannot be empty
        "constant_count": len(program.constants),
        "program": assembled,
        "dtypes": [int(value.dtype) for value in results if value.dtype is not None],
    }
    if sums:
        attributes |= {name: [*attributes[name], 0] for name in ("program", "dtypes")}  # nor can these
        attributes |= {"summed": registers, "kept": len(group.shape) - _leading_axes(sums[0], group.shape)}
    results += [node.outputs[0] for node in sums]
    operator = FUSED_ELEMENTWISE_SUMS if sums else FUSED_ELEMENTWISE
    fused = ir.node(
        operator.name,
        list(program.tensors),
        {name: typed_attribute(name, value) for name, value in attributes.items()},
        domain=BURNISH_DOMAIN,
        num_outputs=len(results),
    )
    if (source := source_of(nodes[-1])) is not None:  # the source of the last node, the result of the group
        SOURCE.set(fused, source)
    graph.insert_after(nodes[-1], fused)
    for value, replacement in zip(results, fused.outputs, strict=True):
        replacement.type, replacement.shape = value.type, value.shape
        name = value.name
        replace_uses(value, replacement)
        value.name, replacement.name = None, name
    _detach(nodes + sums)
    return True


def _detach(nodes: list[ir.Node]) -> None:
    for node in nodes:
        for index in range(len(node.inputs)):
            node.replace_input_with(index, None)


def _in_order(nodes: list[ir.Node], members: set[ir.Node]) -> list[ir.Node]:
    ordered: dict[ir.Node, None] = {}

    def visit(node: ir.Node) -> None:
        if node in ordered:
            return
        for value in node.inputs:
            producer = None if value is None else value.producer()
            if producer is not None and producer in members:
                visit(producer)
        ordered[node] = None

    for node in nodes:
        visit(node)
    return list(ordered)


MOST_ELEMENTS = 1 << 16
"""The largest result whose node is joined with others: a larger one fills a call, and frees its operands early."""


def join_groups(graph: ir.Graph) -> bool:
    """Join ``burnish.FusedElementwise`` nodes over few elements whose results are only outputs of the graph, in place.

    Nothing depends on these, so all nodes with one program may run at the end, as one ``burnish.FusedElementwiseGroups``: the
    updates of hundreds of biases and scales, each too small for a call of its own.
    """
    alike: dict[tuple[object, ...], list[ir.Node]] = {}
    for node in graph:
        if FUSED_ELEMENTWISE.is_of(node) and all(_is_small_output(value) for value in node.outputs):
            alike.setdefault(tuple(_program(node)), []).append(node)
    several = [nodes for nodes in alike.values() if len(nodes) > 1]
    for nodes in several:
        _join(graph, nodes)
    return bool(several)


def _is_small_output(value: ir.Value) -> bool:
    if value.uses() or not value.is_graph_output() or value.shape is None or not value.shape.is_static():
        return False
    return math.prod(value.shape.numpy()) <= MOST_ELEMENTS


def _program(node: ir.Node) -> Iterator[object]:
    """Yield the properties that must be equal for two nodes to share a program."""
    yield len(node.inputs)
    for name in ("program", "constants", "constant_count", "dtypes"):
        yield str(node.attributes[name].value)
    for value in node.inputs:
        yield None if value is None else value.dtype


def _join(graph: ir.Graph, nodes: list[ir.Node]) -> None:
    joined = ir.node(
        FUSED_ELEMENTWISE_GROUPS.name,
        [value for node in nodes for value in node.inputs],
        {"operands": len(nodes[0].inputs)},
        domain=BURNISH_DOMAIN,
        num_outputs=sum(len(node.outputs) for node in nodes),
    )
    for attribute in nodes[0].attributes.values():
        joined.attributes.add(attribute)
    ((source, _),) = Counter(map(source_of, nodes)).most_common(1)
    if source is not None:  # the most frequent source, for most of the time
        SOURCE.set(joined, source)
    graph.append(joined)
    for value, replacement in zip((value for node in nodes for value in node.outputs), joined.outputs, strict=True):
        replacement.type, replacement.shape = value.type, value.shape
        name = value.name
        replace_uses(value, replacement)
        value.name, replacement.name = None, name
    graph.remove(nodes, safe=True)
