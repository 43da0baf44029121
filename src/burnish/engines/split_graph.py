"""Exchanges of a graph for several workers, in one order; for a runtime without exchanges, the graph is cut at them.

The nodes between two exchanges form a separate model. A node is in the first part that needs its result, so a forward pass is in
the same part as its backward pass, and kernels can fuse them. Every worker cuts the same graph in the same way.

Exchanges are numbered when a program is prepared for several workers, and all workers must run them in that order: two workers
that start different exchanges wait for each other forever. An engine that sorts its graph again must keep that order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from burnish.engines.base import Arrays, LoadedModel
from burnish.engines.communicator import GRADIENTS, Communicator, array_of, buffer_of
from burnish.errors import EngineError
from burnish.graph import BURNISH_DOMAIN, attribute_value, describe_node
from burnish.graph.uses import read_by
from burnish.operators.collectives import (
    ALL_GATHER,
    ALL_GATHER_ROWS,
    ALL_REDUCE,
    ALL_REDUCE_FINISH,
    ALL_REDUCE_START,
    OWN_GRADIENTS,
    WORKER_RANK,
)

Operands = Sequence[np.ndarray]


@dataclass(frozen=True)
class Terms:
    """The attributes of an exchange.

    Attributes:
        counted: True if the operands are followed by the number of this worker's samples.
        conditional: True if the last operand is a boolean that is false in a step without this exchange.
        group, channel: as for the communicator.
    """

    counted: bool
    conditional: bool
    group: int
    channel: str

    @classmethod
    def of(cls, node: ir.Node) -> Terms:
        """Read the attributes of a node."""
        channel = GRADIENTS if attribute_value(node, "purpose", "") == "gradient" else "statistics"
        counted, conditional = (bool(attribute_value(node, name, 0)) for name in ("counted", "conditional"))
        return cls(counted, conditional, int(attribute_value(node, "group", 0)), channel)

    def travelling(self, operands: Operands) -> tuple[Operands, bool]:
        """Return the operands to exchange, and True if this worker has samples."""
        count = len(operands) - self.counted - self.conditional
        return operands[:count], not self.counted or bool(operands[count].any())


Exchange = Callable[[Terms, Operands, Communicator], Operands]


def flat_operands(tensors: Operands, has_samples: bool, out: np.ndarray | None = None) -> np.ndarray:
    """Return the operands of an exchange in one new vector, or in ``out``; zeros without samples."""
    flat = np.concatenate(
        [tensor.reshape(-1) for tensor in tensors], out=out, dtype=None if out is not None else dtype_of(tensors)
    )
    if not has_samples:
        flat[...] = 0
    return flat


def dtype_of(tensors: Operands) -> np.dtype:
    """Return the common dtype for an exchange of tensors."""
    dtypes = {tensor.dtype for tensor in tensors}
    return dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float64)


def parted(flat: np.ndarray, like: Operands) -> list[np.ndarray]:
    """Split a vector, or rows of vectors, into parts of these shapes and dtypes."""
    parts, begin = [], 0
    for tensor in like:
        part = np.ascontiguousarray(flat[..., begin : begin + tensor.size])
        parts.append(part.reshape((*flat.shape[:-1], *tensor.shape)).astype(tensor.dtype, copy=False))
        begin += tensor.size
    return parts


def _summed(terms: Terms, tensors: Operands, has_samples: bool, communicator: Communicator) -> np.ndarray:
    buffer = buffer_of(communicator, flat_operands(tensors, has_samples))
    communicator.all_reduce(buffer, group=terms.group, channel=terms.channel).wait()
    return array_of(buffer)


def _all_reduce(terms: Terms, operands: Operands, communicator: Communicator) -> Operands:
    tensors, has_samples = terms.travelling(operands)
    return parted(_summed(terms, tensors, has_samples, communicator), tensors)


def _all_reduce_start(terms: Terms, operands: Operands, communicator: Communicator) -> Operands:
    tensors, has_samples = terms.travelling(operands)
    if terms.conditional and not operands[-1]:
        return [np.empty(0, tensors[0].dtype)]
    return [_summed(terms, tensors, has_samples, communicator)]


def _all_reduce_finish(terms: Terms, operands: Operands, communicator: Communicator) -> Operands:
    buffer, *tensors = operands
    is_left_out = not buffer.size and any(tensor.size for tensor in tensors)
    return tensors if is_left_out else parted(buffer, tensors)


def _all_gather(terms: Terms, operands: Operands, communicator: Communicator) -> Operands:
    tensors, has_samples = terms.travelling(operands)
    buffer = buffer_of(communicator, flat_operands(tensors, has_samples))
    return parted(array_of(communicator.all_gather(buffer, group=terms.group)), tensors)


def _all_gather_rows(terms: Terms, operands: Operands, communicator: Communicator) -> Operands:
    tensors, has_samples = terms.travelling(operands)
    own = [tensor if has_samples else tensor[:0] for tensor in tensors]
    counts = array_of(communicator.all_gather(buffer_of(communicator, np.array([len(tensor) for tensor in own], np.int64))))
    results = []
    for index, tensor in enumerate(own):
        most = int(counts[:, index].max())
        padded = np.zeros((most, *tensor.shape[1:]), tensor.dtype)
        padded[: len(tensor)] = tensor
        content = buffer_of(communicator, padded.reshape(-1).view(np.uint8))
        rows = array_of(communicator.all_gather(content)) if most else np.zeros((len(counts), 0), np.uint8)
        width = math.prod(tensor.shape[1:]) * tensor.itemsize
        parts = [
            np.ascontiguousarray(row[: int(count) * width]).view(tensor.dtype).reshape(int(count), *tensor.shape[1:])
            for row, count in zip(rows, counts[:, index], strict=True)
        ]
        results.append(np.concatenate(parts))
    return results


def _own_gradients(terms: Terms, operands: Operands, communicator: Communicator) -> Operands:
    tensors, has_samples = terms.travelling(operands)
    return tensors if has_samples else [np.zeros_like(tensor) for tensor in tensors]


def _worker_rank(terms: Terms, operands: Operands, communicator: Communicator) -> Operands:
    return [np.asarray(communicator.rank, np.int64)]


MADE: Mapping[str, Exchange] = {
    ALL_REDUCE.name: _all_reduce,
    ALL_REDUCE_START.name: _all_reduce_start,
    ALL_REDUCE_FINISH.name: _all_reduce_finish,
    ALL_GATHER.name: _all_gather,
    ALL_GATHER_ROWS.name: _all_gather_rows,
    OWN_GRADIENTS.name: _own_gradients,
    WORKER_RANK.name: _worker_rank,
}
"""The function that makes each exchange between two parts, by operator name."""
BETWEEN_PARTS = frozenset(MADE)


@dataclass(frozen=True)
class _Part:
    """The nodes between two exchanges, as a model: its input names, and its callable; None without nodes."""

    reads: tuple[str, ...]
    run: LoadedModel | None


class SplitGraph:
    """A graph that is cut at its exchanges; a callable like any loaded model.

    Args:
        model: a model lowered to a target whose collectives are among ``BETWEEN_PARTS``; do not modify it while it is in use.
        load: a function that loads a part.
        communicator: connection to the other workers.
        loaded: names of burnish's own operators that ``load`` knows in addition to standard ones.

    Raises:
        EngineError: an exchange is in the body of a control flow operator, or is not supported between parts.
    """

    def __init__(
        self,
        model: ir.Model,
        load: Callable[[ir.Model], LoadedModel],
        communicator: Communicator,
        loaded: Collection[str] = (),
    ):
        self._communicator = communicator
        graph = model.graph
        check_exchanges(graph, loaded)
        stages = _stages(graph)
        self._outputs = [value.name or "" for value in graph.outputs]
        last = max(stages.values(), default=0)
        self._parts = [_part(model, stages, number, load) for number in range(last + 1)]
        self._exchanges = [
            [(node, Terms.of(node)) for node, stage in stages.items() if stage == number and is_exchange(node)]
            for number in range(last + 1)
        ]
        self._constants = {
            name: value.const_value.numpy() for name, value in graph.initializers.items() if value.const_value is not None
        }

    def __call__(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        values = {**self._constants, **inputs}
        for part, exchanges in zip(self._parts, self._exchanges, strict=True):
            if part.run is not None:
                values |= part.run({name: values[name] for name in part.reads})
            for node, terms in exchanges:
                # ascontiguousarray would turn a scalar into an array of shape [1].
                operands = [np.asarray(values[value.name or ""], order="C") for value in node.inputs if value is not None]
                results = MADE[node.op_type](terms, operands, self._communicator)
                values |= {output.name or "": result for output, result in zip(node.outputs, results, strict=True)}
        return {name: values[name] for name in self._outputs}


def is_exchange(node: ir.Node) -> bool:
    return node.domain == BURNISH_DOMAIN and node.op_type in MADE


def _stages(graph: ir.Graph) -> dict[ir.Node, int]:
    stages = _earliest_stages(graph)
    needed_by: dict[ir.Node, int] = {}
    for node in reversed(list(graph)):
        if not is_exchange(node):
            # Values that are only outputs are computed as early as possible.
            stages[node] = max(stages[node], needed_by.get(node, 0))
        for value in read_by(node):
            producer = value.producer()
            if producer in stages:
                assert producer is not None
                needed_by[producer] = min(stages[node], needed_by.get(producer, stages[node]))
    return stages


def _earliest_stages(graph: ir.Graph) -> dict[ir.Node, int]:
    stages: dict[ir.Node, int] = {}
    for node in graph:
        stage = 0
        for value in read_by(node):
            producer = value.producer()
            if producer in stages:
                assert producer is not None
                is_after = is_exchange(producer) and not is_exchange(node)
                stage = max(stage, stages[producer] + is_after)
        stages[node] = stage
    return stages


def _part(model: ir.Model, stages: Mapping[ir.Node, int], number: int, load: Callable[[ir.Model], LoadedModel]) -> _Part:
    own = {node for node, stage in stages.items() if stage == number and not is_exchange(node)}
    if not own:
        return _Part((), None)
    produced = [output for node in stages if node in own for output in node.outputs]
    read_elsewhere = {value for node in stages if node not in own for value in read_by(node)}
    results = [value for value in produced if value.is_graph_output() or value in read_elsewhere]
    inside = set(produced)
    read = dict.fromkeys(value for node in stages if node in own for value in read_by(node) if value not in inside)
    inputs = [value for value in read if not value.is_initializer()]
    extracted = ir.convenience.extract(model.graph, inputs, results)
    part = ir.Model(extracted, ir_version=model.ir_version, functions=list(model.functions.values()))
    return _Part(tuple(value.name or "" for value in inputs), load(part))


def check_exchanges(graph: ir.Graph, loaded: Collection[str]) -> None:
    for node in graph.all_nodes():
        if node.domain != BURNISH_DOMAIN or (node.op_type in loaded and node.op_type not in MADE):
            continue
        if node.op_type not in MADE:
            raise EngineError(
                f"{describe_node(node)} is an exchange that this engine cannot make: leave out shard_optimizer and shard_tables, "
                "or train with engine='torch'"
            )
        if node.graph is not graph:
            raise EngineError(
                f"{describe_node(node)} exchanges values in a branch or a loop, where this engine cannot: train with "
                "engine='torch'"
            )


def keep_exchange_order(graph: ir.Graph) -> None:
    """Reorder the nodes of a graph so that its exchanges are in the order of their numbers, in place.

    A graph in the right order is not changed. Otherwise, the nodes that an exchange needs are moved before it.

    Args:
        graph: a topologically sorted graph.

    Raises:
        EngineError: an exchange needs the result of one with a higher number.
    """
    exchanges = [node for node in graph if _number(node) is not None]
    ordered = sorted(exchanges, key=lambda node: _number(node) or 0)
    if exchanges == ordered:
        return
    placed: dict[ir.Node, None] = {}
    for exchange in ordered:
        for node in _with_what_it_needs(exchange, placed):
            number = _number(node)
            if number is not None and node is not exchange:
                raise EngineError(
                    f"Exchange {_number(exchange)} between workers ('{exchange.name}') needs the result of exchange "
                    f"{number} ('{node.name}'), which comes after it: open the session with DataParallel(share=False), and "
                    "report the model"
                )
            placed[node] = None
    rest = [node for node in graph if node not in placed]
    nodes = [*placed, *rest]
    graph.remove(nodes)
    graph.extend(nodes)


def _number(node: ir.Node) -> int | None:
    return attribute_value(node, "order", None) if node.domain == BURNISH_DOMAIN else None


def _with_what_it_needs(node: ir.Node, placed: dict[ir.Node, None]) -> Iterator[ir.Node]:
    """Yield the unplaced nodes that a node needs, in topological order, and the node itself last."""
    seen: set[ir.Node] = set()
    stack: list[tuple[ir.Node, bool]] = [(node, False)]
    while stack:
        current, complete = stack.pop()
        if complete:
            yield current
            continue
        if current in seen or current in placed:
            continue
        seen.add(current)
        stack.append((current, True))
        stack += [(producer, False) for producer in _producers(current) if producer.graph is node.graph]


def _producers(node: ir.Node) -> Iterator[ir.Node]:
    return (producer for value in read_by(node) if (producer := value.producer()) is not None)
