"""Optimizer state in shares: each worker keeps and computes that of its parameters alone, and gives the others what they become.

Rajbhandari, Rasley, Ruwase and He, "ZeRO: memory optimizations toward training trillion parameter models", 2020, stage 1. Every
worker has the whole gradients, so that clipping and whatever else looks at all of them is left as it is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from burnish.distributed.graphs.worker_program import WorkerProgram, rewritten
from burnish.errors import ConfigurationError
from burnish.graph import Builder
from burnish.ops.collectives import gather_parameters
from burnish.optim.average import AVERAGE
from burnish.passes import remove_unused
from burnish.program import Program
from burnish.program.signature import Entry, GraphSignature, Role, Signature


@dataclass(frozen=True)
class Shares:
    """Who keeps what.

    Attributes:
        owners: rank by parameter, named as in the state.
        slots: for every state entry that one worker alone keeps, its parameter.
    """

    owners: Mapping[str, int]
    slots: Mapping[str, str]

    def of(self, rank: int) -> frozenset[str]:
        """The state entries that this worker alone keeps."""
        return frozenset(slot for slot, parameter in self.slots.items() if self.owners[parameter] == rank)

    def not_of(self, rank: int) -> frozenset[str]:
        """The state entries that others keep."""
        return frozenset(self.slots) - self.of(rank)


def shares_of(signature: Signature, workers: int, whole: Collection[str] = (AVERAGE,)) -> Shares:
    """Divide the parameters that train among workers, so that each has about as many bytes of optimizer state.

    Args:
        signature: of the program.
        workers: how many there are.
        whole: slots that stay on all workers, as averages of parameters do, which are evaluated with.
    """
    trained = {name for name in signature["step"].updates if name.startswith("param/")}
    slots: dict[str, str] = {}
    size = dict.fromkeys(sorted(trained), 0)
    for entry in signature.state:
        kind, _, name = entry.name.removeprefix("opt/").partition("/")
        if entry.role is Role.OPTIMIZER and kind not in whole and f"param/{name}" in trained:
            slots[entry.name] = f"param/{name}"
            size[f"param/{name}"] += bytes_of(entry)
    owners, load = {}, [0] * workers
    for name in sorted(size, key=lambda name: (-size[name], name)):
        owners[name] = load.index(min(load))
        load[owners[name]] += max(1, size[name])
    return Shares(owners, slots)


def bytes_of(entry: Entry) -> int:
    """The size of a state entry."""
    return int(math.prod(extent for extent in entry.extents if isinstance(extent, int)) * entry.dtype.itemsize)


def sharded(program: Program, shares: Shares, rank: int) -> WorkerProgram:
    """Return the program as one worker runs it; the signature of its step has no state that others keep."""
    others = shares.not_of(rank)
    step = program.signature["step"]
    own = replace(
        step,
        inputs=tuple(entry for entry in step.inputs if entry.name not in others),
        outputs=tuple(entry for entry in step.outputs if entry.updates not in others),
    )
    graphs: dict[str, GraphSignature] = {**program.signature.graphs, "step": own}
    return rewritten(program, lambda model: shard_step(model, shares, rank), signature=Signature(graphs))


def shard_step(model: ir.Model, shares: Shares, rank: int) -> None:
    """Leave, in place, the updates of one worker's share in a step's graph, and gather the parameters behind them.

    Raises:
        ConfigurationError: what the others keep is needed for more than their own updates.
    """
    graph = model.graph
    others = shares.not_of(rank)
    _leave_out(graph, others)
    inputs = {value.name or "": value for value in graph.inputs}
    following = {(value.name or "").removeprefix("next:"): value for value in graph.outputs}
    parameters = [name for name in shares.owners if following[name].producer() is not None]
    exchanges = [node for node in graph if node.op_type == "AllReduceFinish"]
    for dtype in dict.fromkeys(inputs[name].dtype for name in parameters):
        _gather(graph, [name for name in parameters if inputs[name].dtype == dtype], inputs, following, shares, rank)
    graph.sort()
    _keep_exchanges(graph, exchanges)
    remove_unused(model)
    for value in list(graph.inputs):
        if value.name not in others:
            continue
        if value.uses():
            raise ConfigurationError(
                f"shard_optimizer=True: the optimizer reads '{value.name}', which one worker alone keeps, for more than the "
                f"update of '{shares.slots[value.name]}': leave shard_optimizer out, or take an optimizer that updates each "
                "parameter by itself"
            )
        graph.inputs.remove(value)


def _leave_out(graph: ir.Graph, others: Collection[str]) -> None:
    """Take away the outputs that others compute."""
    kept = [value for value in graph.outputs if (value.name or "").removeprefix("next:") not in others]
    graph.outputs.clear()
    graph.outputs.extend(kept)


def _gather(
    graph: ir.Graph,
    names: Sequence[str],
    inputs: Mapping[str, ir.Value],
    following: Mapping[str, ir.Value],
    shares: Shares,
    rank: int,
) -> None:
    """Put what their owners made of parameters, of one dtype, in the place of what this worker would."""
    builder = Builder(graph)
    owners = [shares.owners[name] for name in names]
    # Of what others update, the present value says the shape.
    own = [following[name] if owner == rank else inputs[name] for name, owner in zip(names, owners, strict=True)]
    gathered = gather_parameters(tuple(builder.tensor(value) for value in own), owners)
    for name, owner, result in zip(names, owners, gathered, strict=True):
        output = following[name]
        if owner == rank:
            continue
        text = output.name
        output.replace_all_uses_with(result.value, replace_graph_outputs=True)
        output.name, result.value.name = None, text


def _keep_exchanges(graph: ir.Graph, exchanges: Sequence[ir.Node]) -> None:
    """Let this worker take part in exchanges whose results others alone read."""
    live: set[ir.Node] = set()
    pending = [value.producer() for value in graph.outputs]
    while pending:
        node = pending.pop()
        if node is None or node in live:
            continue
        live.add(node)
        pending.extend(value.producer() for value in node.inputs if value is not None)
        pending.extend(
            value.producer()
            for attribute in node.attributes.values()
            if attribute.type == ir.AttributeType.GRAPH
            for inner in attribute.as_graph().all_nodes()
            for value in inner.inputs
            if value is not None
        )
    last = next(node for node in reversed(graph) if node.op_type == "GatherParameters")
    for node in exchanges:
        if node not in live:
            last.resize_inputs(len(last.inputs) + 1)
            last.replace_input_with(len(last.inputs) - 1, node.outputs[0])
    graph.sort()
