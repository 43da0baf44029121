"""Updates of the state in place: an optimizer's update is taken out of the step's graph, and writes over what it reads.

A graph makes new values and leaves old ones alone; with a copy of every parameter and slot beside the new one, a step takes twice
the state's memory. What an update reads beside the state, gradients above all, becomes an output of the graph instead. The runner
looks at the loss, and then runs the updates, when nothing reads the old values any more. An optimizer does the same to every
parameter: updates of one program run in one call, since most parameters of a model are too small to be worth a call each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, replace

import onnx_ir as ir
import torch

from burnish.graph import BURNISH_DOMAIN, attribute_value

Tensors = MutableMapping[str, torch.Tensor]

# Operators whose results always have memory of their own; others may give a view, or what they were given.
OWN_RESULTS = {
    BURNISH_DOMAIN: {"FusedElementwise", "FusedLinear", "FusedLinearWeightGrad"},
    "": {"Add", "Conv", "MatMul", "Mul", "Sub"},
}


@dataclass(frozen=True)
class Update:
    """A call of the kernel that computes the next values of state entries over their present ones: one program over many groups.

    Attributes:
        operands: names of state entries, or of outputs of the graph: those of each group, one group after another.
        width: the number of operands of a group.
        targets: which operands of a group are written, in the order of the program's results.
        constants, program: as the elementwise kernel takes them.
        last: the graph's outputs that no later update reads.
    """

    operands: tuple[str, ...]
    width: int
    targets: tuple[int, ...]
    constants: tuple[float, ...]
    program: tuple[int, ...]
    last: tuple[str, ...] = ()

    @property
    def entries(self) -> tuple[str, ...]:
        """The state entries that are written."""
        return tuple(
            self.operands[start + target] for start in range(0, len(self.operands), self.width) for target in self.targets
        )

    def run(self, state: Mapping[str, torch.Tensor], results: Tensors) -> None:
        """Write the next values into the tensors of ``state``; what of ``results`` is not needed any more is taken out of it."""
        tensors = [state[name] if name in state else results[name] for name in self.operands]
        torch.ops.burnish.elementwise_.default(tensors, self.constants, self.program, self.width, self.targets)
        for name in self.last:
            results.pop(name, None)


def take_updates(graph: ir.Graph, names: list[str], updates: Mapping[str, str]) -> list[Update]:
    """Take the nodes that update state entries by elementwise arithmetic out of a step's graph, in place.

    Args:
        graph: the fused graph of a step; its inputs have the names of the state entries that they are.
        names: of the graph's outputs, in their order; changed with them.
        updates: for state entries, the output that is their next value.

    Returns:
        The updates. The graph has lost the outputs that they compute, and gained those that they read.
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
    added: set[str] = set()
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
                name = f"operand:{len(added)}"
                added.add(name)
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
    return _released(_joined(taken), added)


def _once(values: Iterable[ir.Value]) -> set[ir.Value]:
    """The values that are there once."""
    return {value for value, count in Counter(values).items() if count == 1}


def may_share(graph: ir.Graph, names: list[str]) -> list[str]:
    """The outputs, by their ``names``, that may lie in the memory of an input: they are one, or a view of one through others."""
    return _lying_in(graph, names, set(graph.inputs))


def lent(graph: ir.Graph, names: list[str]) -> list[str]:
    """The outputs, by their ``names``, that may lie in a buffer of an exchange, which the next step writes over."""
    finishing = [node for node in graph if node.op_type in ("AllReduceFinish", "ReduceScatterFinish")]
    return _lying_in(graph, names, {value for node in finishing for value in node.outputs})


def _lying_in(graph: ir.Graph, names: list[str], sharing: set[ir.Value]) -> list[str]:
    for node in graph:
        if node.op_type in OWN_RESULTS.get(node.domain, ()):
            continue
        # Bodies read values that are no inputs of their node.
        has_bodies = any(attribute.type == ir.AttributeType.GRAPH for attribute in node.attributes.values())
        if has_bodies or any(value in sharing for value in node.inputs):
            sharing.update(node.outputs)
    return [name for value, name in zip(graph.outputs, names, strict=True) if value in sharing]


def apart_from(state: Iterable[torch.Tensor], results: Tensors, names: Iterable[str]) -> None:
    """Copy what of ``results``, of those with these names, lies in the memory of ``state``, which is about to be written over."""
    held = {tensor.untyped_storage().data_ptr() for tensor in state}
    for name in names:
        if name in results and results[name].untyped_storage().data_ptr() in held:
            results[name] = results[name].clone()


def _entries(node: ir.Node, written: Mapping[ir.Value, str], inputs: Mapping[str, ir.Value]) -> list[str] | None:
    """The state entries that a node computes the next values of, where it reads their present ones and does nothing else."""
    if node.op_type != "FusedElementwise" or node.domain != BURNISH_DOMAIN:
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
    """Leave out updates that read what another one writes over: they run with the graph, before any."""
    owners = {entry: node for node, entries in chosen.items() for entry in entries}
    present = {inputs[entry]: owner for entry, owner in owners.items()}
    return {
        node: entries
        for node, entries in chosen.items()
        if all(value is None or present.get(value, node) is node for value in node.inputs)
    }


def _joined(updates: list[Update]) -> list[Update]:
    """Updates that run the same program over operands of their own as one."""
    alike: dict[tuple[object, ...], list[Update]] = {}
    for update in updates:
        # By their digits: zeros of both signs differ, NaN is the same.
        key = (update.width, update.targets, tuple(map(repr, update.constants)), update.program)
        alike.setdefault(key, []).append(update)
    return [
        replace(members[0], operands=tuple(name for member in members for name in member.operands)) for members in alike.values()
    ]


def _released(updates: list[Update], results: set[str]) -> list[Update]:
    """Note with every update what of ``results`` it is the last to read."""
    left = set(results)
    noted = []
    for update in reversed(updates):
        last = tuple(name for name in dict.fromkeys(update.operands) if name in left)
        left.difference_update(last)
        noted.append(replace(update, last=last))
    return noted[::-1]
