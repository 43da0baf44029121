"""A worker's samples within the batch: their share of it, their random numbers, and empty parts.

An extra input has the number of a worker's samples. Many operators have no result for zero samples, so an empty part runs on a
stand-in and contributes zeros to every exchange.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import islice

import numpy as np
import onnx_ir as ir

from burnish.distributed.runner import SpreadRunner, as_bytes, from_bytes, gathered
from burnish.engines import ProgramRunner
from burnish.engines.base import Arrays
from burnish.engines.communicator import Communicator
from burnish.engines.row_writes import RowWriter
from burnish.errors import ConfigurationError
from burnish.graph import Builder, Names, Tensor, describe_node, replace_node, source_of
from burnish.graph.inference import RANDOM_OPERATORS
from burnish.operators import collectives
from burnish.operators.semantic import semantic_operator
from burnish.program.layout import samples_first, stand_in
from burnish.program.signature import Entry, GraphSignature, Role
from burnish.random import Places
from burnish.sample_axes import sample_inputs

INT64 = ir.DataType.INT64
GUARDED = frozenset({collectives.ALL_REDUCE, collectives.ALL_GATHER, collectives.ALL_GATHER_ROWS, collectives.SCATTER_ROWS})
"""Exchanges to which a worker without samples contributes zeros, or no rows."""


def sample_axes(data: Sequence[Entry]) -> dict[str, int]:
    entries = {entry.name: entry for entry in data if entry.sample_axis is not None and entry.extents}
    extents = {name: samples_first(entry).extents for name, entry in entries.items()}
    return {name: entries[name].sample_axis or 0 for name in sample_inputs(extents)}


def counted_inputs(data: Sequence[Entry]) -> dict[str, int]:
    """Return the inputs whose samples are counted: the first with each symbolic extent, none if the size is fixed."""
    axes, entries = sample_axes(data), {entry.name: entry for entry in data}
    symbols = {name: entries[name].extents[axis] for name, axis in axes.items()}
    if any(isinstance(symbol, int) for symbol in symbols.values()):
        return {}
    first = {symbol: name for name, symbol in reversed(symbols.items())}
    return {name: axis for name, axis in axes.items() if name in first.values()}


class Samples:
    """The samples of a step, counted at its beginning; nodes are emitted only on demand.

    An input has ``total`` samples in the batch, ``start`` of them before this worker's; counts are int64 [1].
    """

    def __init__(self, graph: ir.Graph, data: Sequence[Entry], workers: int):
        self._graph, self._workers = graph, workers
        self._inputs = {value.name: value for value in graph.inputs}
        self._axes = sample_axes(data)
        self.first = next(iter(self._axes), None)
        self.counted = tuple(counted_inputs(data))
        if self.counted:
            name = Names.of(graph).take("samples")
            self._numbers = ir.Value(name=name, type=ir.TensorType(INT64), shape=ir.Shape([len(self.counted)]))
            graph.inputs.append(self._numbers)

    @cached_property
    def own(self) -> Tensor:
        if not self.counted:
            assert self.first is not None
            return self.rows(self.first)
        numbers, integers = self._builder.tensor(self._numbers), self._builder.integers
        return numbers if len(self.counted) == 1 else self._builder.op("Slice", numbers, integers([0]), integers([1]), shape=[1])

    def rows(self, name: str) -> Tensor:
        """Emit the number of samples of an input in this worker's graph: its own, or a stand-in's."""
        value, axis = self._builder.tensor(self._inputs[name]), self._axes[name]
        return self._builder.once(("rows", name), lambda: self._builder.op("Shape", value, start=axis, end=axis + 1, shape=[1]))

    def total(self, name: str) -> Tensor:
        return self._builder.once(("total", name), lambda: self._sum(self._counts(name)))

    def start(self, name: str) -> Tensor:
        def emit() -> Tensor:
            rank = collectives.WORKER_RANK(builder=self._builder)
            before = self._builder.cast(self._builder.op("Less", self._builder.integers(range(self._workers)), rank), INT64)
            return self._sum(self._counts(name) * before)

        return self._builder.once(("start", name), emit)

    def _counts(self, name: str) -> Tensor:
        def emit() -> Tensor:
            everyone, column = self._gathered, self.counted.index(name) if self.counted else 0
            return self._builder.op("Gather", everyone, self._builder.scalar(column, INT64), axis=1, shape=[self._workers])

        return self._builder.once(("counts", name), emit)

    @cached_property
    def _gathered(self) -> Tensor:
        return collectives.all_gather(self._builder.tensor(self._numbers) if self.counted else self.own, self._workers, "samples")

    def _sum(self, counts: Tensor) -> Tensor:
        return self._builder.op("ReduceSum", counts, self._builder.integers([0]), keepdims=1, shape=[1])

    @cached_property
    def _builder(self) -> Builder:
        return Builder(self._graph, before=next(iter(self._graph)))


def samples_entry(value: ir.Value) -> Entry:
    assert value.shape is not None
    return Entry(value.name or "", Role.SAMPLES, INT64, value.shape.numpy())


def place_samples(graph: ir.Graph, data: Sequence[Entry], workers: int) -> bool:
    """Rewrite, in place, nodes that depend on the position of a worker's samples; a batch of open size gets an input for their
    numbers.
    """
    samples = Samples(graph, data, workers)
    changed = bool(samples.counted)
    if workers > 1:
        _refuse_other_draws(graph)
    for node in list(graph):
        if not collectives.SAMPLE_SHARE.is_of(node):
            if workers > 1 and samples.first is not None and (places := Places.read(node)) is not None:
                _shift_places(graph, node, places, samples)
                changed = True
            continue
        changed, builder = True, Builder(graph, before=node)
        (value,) = builder.tensors(node.inputs)
        if samples.first is None:
            replace_node(node, value * (1.0 / workers))
            continue
        counts = builder.tensors([samples.own.value, samples.total(samples.first).value])
        own, total = (builder.cast(count, value.dtype) for count in counts)
        share = builder.op("Reshape", own / builder.op("Max", total, 1.0), builder.integers([]), shape=[])
        replace_node(node, builder.op("Mul", value, share, like=value))
    if samples.counted:
        for node in [node for node in graph if semantic_operator(node) in GUARDED]:
            node.resize_inputs(len(node.inputs) + 1)
            node.replace_input_with(len(node.inputs) - 1, samples.own.value)
            node.attributes["counted"] = ir.AttrInt64("counted", 1)
    return changed


def _refuse_other_draws(graph: ir.Graph) -> None:
    in_body = next((node for body in graph.subgraphs() for node in body if Places.read(node) is not None), None)
    if in_body is not None:
        raise ConfigurationError(
            f"parallel=...: {source_of(in_body) or describe_node(in_body)} draws random numbers in a branch or a loop, where "
            "workers cannot tell which are those of their own samples. Move it out of there, or train with one worker"
        )
    found = next((node for node in graph.all_nodes() if node.op_type in RANDOM_OPERATORS and node.domain == ""), None)
    if found is not None:
        raise ConfigurationError(
            f"parallel=...: {describe_node(found)} draws random numbers in a branch, a loop or a loss graph: they come from each "
            "worker's own generator, and not from the random key, by which workers draw what one process would. Move it out into "
            "the model's main graph, or train with one worker"
        )


def _shift_places(graph: ir.Graph, node: ir.Node, places: Places, samples: Samples) -> None:
    """Number rows or columns as in the whole batch, if samples are among them.

    A worker's place ``(a n + i) f + b``, of slower place a, the i-th of n samples and faster place b out of f, is ``(a N + s + i)
    f + b`` in the batch of N samples, s of them before the worker's own.
    """
    if places.problem:
        raise ConfigurationError(
            f"parallel=...: {source_of(node) or describe_node(node)} draws random numbers, and workers cannot tell which are "
            f"those of their own samples: {places.problem}. Let the model keep the samples of a batch in order along one axis "
            "where it draws, or train with one worker"
        )
    if places.samples is None:
        return
    builder = Builder(graph, before=node)
    first, extent, step = builder.tensors(node.inputs)
    rows, start = builder.tensors([samples.rows(places.samples).value, samples.start(places.samples).value])
    if places.faster is not None:
        faster = builder.integers([places.faster])
    else:
        assert places.slower is not None
        faster = builder.op("Reshape", extent, builder.integers([1])) / builder.op("Max", rows * places.slower, 1)
    before = builder.op("Reshape", start * faster, builder.integers([]), shape=[])
    if places.slower == 1:
        replace_node(node, builder.op("Range", first + before, extent + before, step))
        return
    total = builder.tensor(samples.total(places.samples).value)
    numbers = builder.op("Range", first, extent, step)
    times = numbers / builder.op("Max", rows * faster, 1)
    replace_node(node, numbers + times * ((total - rows) * faster) + before)


class PartRunner(SpreadRunner):
    """A runner that passes its worker's number of samples to the step, and runs an empty part on the last nonempty one.

    A worker without an earlier part gets another worker's: until then, all exchange the forms of their parts in each step.
    """

    def __init__(self, runner: ProgramRunner, communicator: Communicator, signature: GraphSignature):
        super().__init__(runner, communicator)
        (numbers,) = signature.inputs_of(Role.SAMPLES)
        self._numbers = numbers.name
        self._counted = counted_inputs(signature.inputs_of(Role.DATA))
        self._batch_inputs = signature.inputs_of(Role.DATA, Role.LABEL)
        self._signature = signature
        self._last: Arrays | None = None
        self._all_have_stand_in = communicator.size == 1

    @property
    def row_writer(self) -> RowWriter | None:
        return self._runner.row_writer  # every worker writes the rows of all

    def step(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        counts = np.array([inputs[name].shape[axis] for name, axis in self._counted.items()], np.int64)
        part = {entry.name: inputs[entry.name] for entry in self._batch_inputs}
        self._last = part if counts[0] else self._last
        if not self._all_have_stand_in:
            self._share_stand_in(part)
        if not counts[0]:
            counts[:] = 0
            empty = [entry for entry in self._batch_inputs if not part[entry.name].size]
            part = self._last or part | {entry.name: stand_in(entry, part[entry.name].shape, self._signature) for entry in empty}
        return self._runner.step({**inputs, **part, self._numbers: counts})

    def _share_stand_in(self, part: Arrays) -> None:
        given = self._last or part
        form = [self._last is not None, *(extent for array in given.values() for extent in array.shape)]
        forms = gathered(self._communicator, np.array(form, np.int64))
        has_samples = forms[:, 0]
        self._all_have_stand_in = bool(has_samples.any())
        if has_samples.all() or not has_samples.any():
            return
        first = int(np.argmax(has_samples))
        extents = iter(forms[first, 1:].tolist())
        wanted = {name: (array.dtype, tuple(islice(extents, array.ndim))) for name, array in given.items()}
        if first != self._communicator.rank:
            given = {name: np.zeros(shape, dtype) for name, (dtype, shape) in wanted.items()}
        content = gathered(self._communicator, as_bytes(given))[first]
        self._last = self._last or from_bytes(content, wanted)
