"""In-place updates of the state: an optimizer's update is removed from the step's graph, and overwrites its operands.

A graph makes new values and keeps old ones, so a step would need twice the memory of the state. Here, the other operands of an
update, mainly gradients, become outputs of the graph. The runner checks the loss, and then runs all updates in one call, which
also copies small next values, such as the step counter. Most parameters are too small for a call each, and an interrupt arrives
before or after the call, when the state is complete.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import onnx_ir as ir
import torch

from burnish.engines.base import NOTHING
from burnish.engines.torch.translate.dtypes import tensor_of
from burnish.errors import EngineError
from burnish.graph import attribute_value, bodies, constant_array
from burnish.kernels.elementwise import FUSED_ELEMENTWISE
from burnish.kernels.engine_operator import may_share_memory
from burnish.operators.collectives import ALL_REDUCE_FINISH, REDUCE_SCATTER_FINISH
from burnish.program.signature import Entry

Tensors = MutableMapping[str, torch.Tensor]

COUNTERS = (ir.DataType.INT32, ir.DataType.INT64, ir.DataType.UINT32)
MOST_COPIED = 1024
"""The number of elements up to which a state entry's next value is copied over the present one."""


@dataclass(frozen=True)
class Update:
    """A kernel call that overwrites state entries with their next values: one program over many groups.

    Attributes:
        operands: names of state entries or outputs of the graph, group after group.
        width: number of operands per group.
        targets: positions of the written operands in a group, in the order of the program's results.
        constants, program: arguments of the elementwise kernel.
    """

    operands: tuple[str, ...]
    width: int
    targets: tuple[int, ...]
    constants: tuple[float, ...]
    program: tuple[int, ...]

    @property
    def entries(self) -> tuple[str, ...]:
        """The state entries that are written."""
        return tuple(entry for _, written in self.groups for entry in written)

    @property
    def groups(self) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
        """The operands of each group, and those that are written."""
        groups = [self.operands[start : start + self.width] for start in range(0, len(self.operands), self.width)]
        return tuple((group, tuple(group[target] for target in self.targets)) for group in groups)


class StateUpdate:
    """Updates that run in one call.

    Args:
        updates: updates by the elementwise kernel.
        copied: state entry -> output with its next value, which is copied over the present one.
        increments: integer state entry -> number to add.

    Attributes:
        entries: the state entries that are written.
    """

    def __init__(
        self, updates: Sequence[Update], copied: Mapping[str, str] = NOTHING, increments: Mapping[str, torch.Tensor] | None = None
    ):
        self._increments = dict(increments or {})
        self.entries = (*(entry for update in updates for entry in update.entries), *copied, *self._increments)
        self._operands = tuple(name for update in updates for name in update.operands)
        self._copied = dict(copied)
        plan: list[int] = []
        for update in updates:
            groups = len(update.operands) // update.width
            plan += groups, update.width, len(update.targets), len(update.constants), len(update.program)
            plan += *update.targets, *update.program
        self._plan = torch.tensor(plan, dtype=torch.int64)
        self._constants = torch.tensor([number for update in updates for number in update.constants], dtype=torch.float64)

    def run(self, state: Mapping[str, torch.Tensor], results: Mapping[str, torch.Tensor]) -> None:
        operands = [state[name] if name in state else results[name] for name in self._operands]
        entries = [state[name] for name in self._copied]
        values = [results[name] for name in self._copied.values()]
        counters = [state[name] for name in self._increments]
        torch.ops.burnish.update_state_.default(
            operands, self._plan, self._constants, entries, values, counters, list(self._increments.values())
        )


class TakenUpdate(Protocol):
    """An update that was removed from a step's graph, and runs after it.

    Attributes:
        entries: the state entries that are written.
    """

    entries: tuple[str, ...]

    def run(self, state: Mapping[str, torch.Tensor], results: Mapping[str, torch.Tensor]) -> None:
        """Write the next values into the tensors of ``state``."""
        ...


def run_taken(update: TakenUpdate, state: Mapping[str, torch.Tensor], results: Mapping[str, torch.Tensor]) -> None:
    """Run an update that was removed from the step's graph.

    Raises:
        EngineError: it failed, and may have changed a part of the state.
    """
    try:
        update.run(state, results)
    except (RuntimeError, MemoryError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise EngineError(
            f"PyTorch {torch.__version__} failed while it updated the state at '{update.entries[0]}': {reason}. "
            "A part of the state has changed already: restore the last checkpoint, and use a smaller batch or model"
        ) from error


def copied_entries(entries: Iterable[Entry], following: Mapping[str, str]) -> dict[str, str]:
    """Return the state entries to copy the next value over, each with its output.

    Args:
        entries: state entries without an update.
        following: state entry -> output with its next value.
    """
    return {entry.name: following[entry.name] for entry in entries if entry.name in following and _is_small(entry)}


def _is_small(entry: Entry) -> bool:
    """True if an entry has few elements; images and kernels are excluded because they have their own memory layout."""
    extents = [extent for extent in entry.extents if isinstance(extent, int)]
    return len(extents) == len(entry.extents) < 4 and math.prod(extents) <= MOST_COPIED


def take_updates(graph: ir.Graph, names: list[str], updates: Mapping[str, str]) -> list[Update]:
    """Remove the nodes that update state entries by elementwise arithmetic from a step's graph, in place.

    Args:
        graph: the fused graph of a step; its inputs have the names of the state entries.
        names: names of the graph's outputs, in order; updated.
        updates: state entry -> output with its next value.

    Returns:
        The updates. In the graph, their operands replace their results as outputs.
    """
    following = {output: entry for entry, output in updates.items()}
    named = list(zip(graph.outputs, names, strict=True))
    single = _once(graph.outputs)
    written = {value: following[name] for value, name in named if name in following and value in single}
    inputs = {value.name or "": value for value in graph.inputs}
    chosen: dict[ir.Node, list[str]] = {}
    for node in graph:
        entries = _entries(node, written, inputs)
        if entries is not None:
            chosen[node] = entries
    chosen = _independent(chosen, inputs)
    gone = {output for node in chosen for output in node.outputs}
    kept = [(value, name) for value, name in named if value not in gone]
    outputs = dict(kept)
    added = 0
    taken = []
    for node, entries in chosen.items():
        operands: list[str] = []
        for value in node.inputs:
            assert value is not None
            entry = value.name or ""
            if entry in updates and inputs.get(entry) is value:
                operands.append(entry)
                continue
            if value not in outputs:
                name = f"operand:{added}"
                added += 1
                outputs[value] = name
                kept.append((value, name))
            operands.append(outputs[value])
        constants = tuple(attribute_value(node, "constants", ()))[: attribute_value(node, "constant_count", 0)]
        targets = tuple(operands.index(entry) for entry in entries)
        taken.append(Update(tuple(operands), len(operands), targets, constants, tuple(attribute_value(node, "program", ()))))
    graph.outputs.clear()
    graph.outputs.extend(value for value, _ in kept)
    names[:] = [name for _, name in kept]
    graph.remove(list(chosen), safe=True)
    return _joined(taken)


def take_increments(graph: ir.Graph, names: list[str], updates: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Remove the nodes that add a constant to integers of the state, such as the step counter, from a step's graph, in place.

    Args:
        graph, names, updates: as for ``take_updates``; the graph loses the removed outputs.

    Returns:
        The number to add to each of these entries.
    """
    following = {output: entry for entry, output in updates.items()}
    named = list(zip(graph.outputs, names, strict=True))
    single = _once(graph.outputs)
    taken: dict[str, torch.Tensor] = {}
    gone = set()
    for value, name in named:
        node, entry = value.producer(), following.get(name)
        if node is None or entry is None or value not in single or value.uses():
            continue
        added = _added(node, entry)
        if added is not None:
            taken[entry] = added
            gone.add(value)
    kept = [(value, name) for value, name in named if value not in gone]
    graph.outputs.clear()
    graph.outputs.extend(value for value, _ in kept)
    names[:] = [name for _, name in kept]
    graph.remove([value.producer() for value in gone], safe=True)  # type: ignore[misc]
    return taken


def _added(node: ir.Node, entry: str) -> torch.Tensor | None:
    """Return the constant that a node adds to the present value of an integer state entry; None for other nodes."""
    if node.op_type != "Add" or node.domain != "":
        return None
    for present, other in (node.inputs, node.inputs[::-1]):
        if present is None or other is None or not present.is_graph_input() or present.name != entry:
            continue
        added = constant_array(other)
        if present.dtype in COUNTERS and added is not None and present.shape is not None and present.dtype == other.dtype:
            return tensor_of(added, present.dtype) if tuple(present.shape) == added.shape else None
    return None


def _once(values: Iterable[ir.Value]) -> set[ir.Value]:
    return {value for value, count in Counter(values).items() if count == 1}


def lying_in_inputs(graph: ir.Graph, names: list[str], written: Collection[str]) -> list[str]:
    """Return the outputs, by ``names``, that may share the memory of an input in ``written``: as itself, or as a view."""
    return _lying_in(graph, names, {value for value in graph.inputs if value.name in written})


def lying_in_exchange_buffers(graph: ir.Graph, names: list[str]) -> list[str]:
    """Return the outputs, by ``names``, that may share a buffer of an exchange, which the next step overwrites."""
    finishing = [node for node in graph if ALL_REDUCE_FINISH.is_of(node) or REDUCE_SCATTER_FINISH.is_of(node)]
    return _lying_in(graph, names, {value for node in finishing for value in node.outputs})


def _lying_in(graph: ir.Graph, names: list[str], sharing: set[ir.Value]) -> list[str]:
    for node in graph:
        if not may_share_memory(node):
            continue
        # Bodies read values that are not inputs of their node.
        has_bodies = bool(bodies(node))
        if has_bodies or any(value in sharing for value in node.inputs):
            sharing.update(node.outputs)
    return [name for value, name in zip(graph.outputs, names, strict=True) if value in sharing]


def copy_out_of(state: Iterable[torch.Tensor], results: Tensors, names: Iterable[str]) -> None:
    """Copy the ``results`` with these names that share the memory of ``state``, which is about to be overwritten."""
    storages = {tensor.untyped_storage().data_ptr() for tensor in state}
    for name in names:
        if name in results and results[name].untyped_storage().data_ptr() in storages:
            results[name] = results[name].clone()


def _entries(node: ir.Node, written: Mapping[ir.Value, str], inputs: Mapping[str, ir.Value]) -> list[str] | None:
    """Return the state entries whose next values a node computes from their present ones, if it does nothing else."""
    if not FUSED_ELEMENTWISE.is_of(node):
        return None
    entries = []
    for output in node.outputs:
        entry = None if output.uses() else written.get(output)
        present = None if entry is None else inputs.get(entry)
        if entry is None or present is None or not any(value is present for value in node.inputs):
            return None
        if present.dtype != output.dtype or present.shape is None or present.shape != output.shape:
            return None
        entries.append(entry)
    return entries


def _independent(chosen: dict[ir.Node, list[str]], inputs: Mapping[str, ir.Value]) -> dict[ir.Node, list[str]]:
    """Remove updates whose operands another one overwrites: they run inside the graph, before any."""
    owners = {entry: node for node, entries in chosen.items() for entry in entries}
    present = {inputs[entry]: owner for entry, owner in owners.items()}
    return {
        node: entries
        for node, entries in chosen.items()
        if all(value is None or present.get(value, node) is node for value in node.inputs)
    }


def _joined(updates: list[Update]) -> list[Update]:
    alike: dict[tuple[object, ...], list[Update]] = {}
    for update in updates:
        # Compared as text: zeros of different sign differ, and NaN equals NaN.
        key = (update.width, update.targets, tuple(map(repr, update.constants)), update.program)
        alike.setdefault(key, []).append(update)
    return [
        replace(members[0], operands=tuple(name for member in members for name in member.operands)) for members in alike.values()
    ]
