"""Where a worker's samples stand among those of the batch: their share of it, their masks, and that there may be none.

A worker tells its graph how many samples it has, in an input of their own: a part without samples is run on a stand-in for them
(``runners.parts``), whose numbers count nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Builder, Names, Tensor, describe_node, replace_node, source_of
from burnish.graph.operators import RANDOM_OPERATORS
from burnish.ops.collectives import ALL_GATHER, ALL_GATHER_ROWS, ALL_REDUCE, SAMPLE_SHARE, SCATTER_ROWS, WORKER_RANK, all_gather
from burnish.ops.semantic import semantic_operator
from burnish.program.layout import samples_first
from burnish.program.signature import Entry, Role
from burnish.random import Places
from burnish.sample_axes import sample_inputs

INT64 = ir.DataType.INT64
GUARDED = frozenset({ALL_REDUCE, ALL_GATHER, ALL_GATHER_ROWS, SCATTER_ROWS})
"""Exchanges that a worker without samples gives zeros to, or no rows."""


def sample_axes(data: Sequence[Entry]) -> dict[str, int]:
    """Return the inputs that have samples, each with the axis that they stand along."""
    entries = {entry.name: entry for entry in data if entry.sample_axis is not None and entry.extents}
    extents = {name: samples_first(entry).extents for name, entry in entries.items()}
    return {name: entries[name].sample_axis or 0 for name in sample_inputs(extents)}


def counted_inputs(data: Sequence[Entry]) -> dict[str, int]:
    """Return the inputs whose samples are counted, each of samples of its own, the first with each symbol; and their axes.

    None where a model has no batch of any size: its samples are as many in every step.
    """
    axes, entries = sample_axes(data), {entry.name: entry for entry in data}
    symbols = {name: entries[name].extents[axis] for name, axis in axes.items()}
    if any(isinstance(symbol, int) for symbol in symbols.values()):
        return {}
    first = {symbol: name for name, symbol in reversed(symbols.items())}
    return {name: axis for name, axis in axes.items() if name in first.values()}


class Samples:
    """The samples of a step, counted at its beginning; nothing is emitted before it is asked for.

    Args:
        graph: the training graph, which gets an input for the numbers of samples.
        data: the model's inputs.
        workers: how many there are.

    Attributes:
        entry: the input: int64, one for each of ``counted_inputs``; None where there are none.
    """

    def __init__(self, graph: ir.Graph, data: Sequence[Entry], workers: int):
        self._graph = graph
        self._workers = workers
        self._inputs = {value.name: value for value in graph.inputs}
        self._axes = sample_axes(data)
        self._first = next(iter(self._axes), None)
        self._counted = tuple(counted_inputs(data))
        self._emitted: dict[tuple[str, str], Tensor] = {}
        self.entry: Entry | None = None
        if self._counted:
            self.entry = Entry(Names.of(graph).take("samples"), Role.SAMPLES, INT64, (len(self._counted),))
            self._numbers = ir.Value(name=self.entry.name, type=ir.TensorType(INT64), shape=ir.Shape([len(self._counted)]))
            graph.inputs.append(self._numbers)

    @property
    def is_known(self) -> bool:
        """Whether the model has an input with samples."""
        return self._first is not None

    @cached_property
    def own(self) -> Tensor:
        """How many samples this worker has, int64 [1]."""
        assert self._first is not None
        if not self._counted:
            return self.rows(self._first)
        numbers = self._builder.tensor(self._numbers)
        return numbers if len(self._counted) == 1 else self._builder.op("Slice", numbers, *map(self._integers, (0, 1)), shape=[1])

    def rows(self, name: str) -> Tensor:
        """How many samples the values of this worker's graph are of, int64 [1]: its own, or those of a stand-in."""
        value, axis = self._builder.tensor(self._inputs[name]), self._axes[name]
        return self._once("rows", name, lambda: self._builder.op("Shape", value, start=axis, end=axis + 1, shape=[1]))

    @property
    def total(self) -> Tensor:
        """How many samples the batch has, int64 [1]."""
        assert self._first is not None
        return self.total_of(self._first)

    def total_of(self, name: str) -> Tensor:
        """The same of those of an input."""
        return self._once("total", name, lambda: self._sum(self._counts(name)))

    def start_of(self, name: str) -> Tensor:
        """How many samples of the batch stand before this worker's, int64 [1]; of those of an input."""

        def emit() -> Tensor:
            builder = self._builder
            rank = WORKER_RANK(builder=builder)
            before = builder.cast(builder.op("Less", builder.integers(range(self._workers)), rank), INT64)
            return self._sum(self._counts(name) * before)

        return self._once("start", name, emit)

    @cached_property
    def _gathered(self) -> Tensor:
        """What each worker has, int64 [workers, inputs]."""
        return all_gather(self._builder.tensor(self._numbers) if self._counted else self.own, self._workers, "samples")

    def _counts(self, name: str) -> Tensor:
        """How many each worker has, int64 [workers]."""
        at = self._counted.index(name) if self._counted else 0
        return self._once(
            "counts", name, lambda: self._builder.op("Gather", self._gathered, self._scalar(at), axis=1, shape=[self._workers])
        )

    def _sum(self, counts: Tensor) -> Tensor:
        return self._builder.op("ReduceSum", counts, self._integers(0), keepdims=1, shape=[1])

    def _once(self, what: str, name: str, emit: Callable[[], Tensor]) -> Tensor:
        if (what, name) not in self._emitted:
            self._emitted[what, name] = emit()
        return self._emitted[what, name]

    def _integers(self, number: int) -> Tensor:
        return self._builder.integers([number])

    def _scalar(self, number: int) -> Tensor:
        return self._builder.scalar(number, INT64)

    @cached_property
    def _builder(self) -> Builder:
        """Emits in front of everything."""
        return Builder(self._graph, before=next(iter(self._graph)))


def place_samples(graph: ir.Graph, data: Sequence[Entry], workers: int) -> Entry | None:
    """Rewrite, in place, what depends on which samples of the batch a worker has.

    Args:
        graph: the training graph.
        data: the model's inputs.
        workers: how many there are.

    Returns:
        The input that the graph got, for the numbers of samples; None where they are as many in every step.

    Raises:
        ConfigurationError: workers cannot draw for their samples what one process would.
    """
    samples = Samples(graph, data, workers)
    _refuse_other_draws(graph, workers)
    for node in list(graph):
        if SAMPLE_SHARE.is_of(node):
            _put_share(graph, node, samples, workers)
        elif (places := Places.read(node)) is not None and samples.is_known and workers > 1:
            _shift_places(graph, node, places, samples)
    for node in list(graph):
        if samples.entry is not None and semantic_operator(node) in GUARDED:
            _guard(node, samples)
    return samples.entry


def _refuse_other_draws(graph: ir.Graph, workers: int) -> None:
    """Raise ConfigurationError where a body draws, or a loss graph does, from the runtime's own generator."""
    in_body = next((node for body in graph.subgraphs() for node in body if Places.read(node) is not None), None)
    if in_body is not None and workers > 1:
        raise ConfigurationError(
            f"parallel=...: {source_of(in_body) or describe_node(in_body)} draws random numbers in a branch or a loop, where "
            "workers cannot tell which are those of their own samples. Move it out of there, or train with one worker"
        )
    found = next((node for node in graph.all_nodes() if node.op_type in RANDOM_OPERATORS and node.domain == ""), None)
    if found is not None and workers > 1:
        raise ConfigurationError(
            f"parallel=...: {describe_node(found)} draws random numbers in a branch, a loop or a loss graph: they come from each "
            "worker's own generator, and not from the random key, by which workers draw what one process would. Move it out into "
            "the model's main graph, or train with one worker"
        )


def _put_share(graph: ir.Graph, node: ir.Node, samples: Samples, workers: int) -> None:
    builder = Builder(graph, before=node)
    assert node.inputs[0] is not None
    value = builder.tensor(node.inputs[0])
    if not samples.is_known:
        replace_node(node, value * (1.0 / workers))
        return
    own, total = (builder.cast(builder.tensor(tensor.value), value.dtype) for tensor in (samples.own, samples.total))
    share = builder.op("Reshape", own / builder.op("Max", total, 1.0), builder.integers([]), shape=[])
    replace_node(node, builder.op("Mul", value, share, like=value))


def _shift_places(graph: ir.Graph, node: ir.Node, places: Places, samples: Samples) -> None:
    """Let rows or columns be numbered as those of the whole batch are, where samples are among them.

    A worker's place ``(a n + i) f + b``, of slower place a, the i-th of its n samples and faster place b out of f, is
    ``(a N + s + i) f + b`` among those of all N samples, of which s stand before the worker's own.
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
    first, extent, step = (builder.tensor(value) for value in node.inputs if value is not None)
    rows, start = (builder.tensor(tensor.value) for tensor in (samples.rows(places.samples), samples.start_of(places.samples)))
    faster = _faster(builder, places, extent, rows)
    before = builder.op("Reshape", start * faster, builder.integers([]), shape=[])
    if places.slower == 1:
        replace_node(node, builder.op("Range", first + before, extent + before, step))
        return
    total = builder.tensor(samples.total_of(places.samples).value)
    numbers = builder.op("Range", first, extent, step)
    times = numbers / builder.op("Max", rows * faster, 1)
    replace_node(node, numbers + times * ((total - rows) * faster) + before)


def _faster(builder: Builder, places: Places, extent: Tensor, rows: Tensor) -> Tensor:
    """How many places of one sample stand side by side, int64 [1]."""
    if places.faster is not None:
        return builder.integers([places.faster])
    assert places.slower is not None
    return builder.op("Reshape", extent, builder.integers([1])) / builder.op("Max", rows * places.slower, 1)


def _guard(node: ir.Node, samples: Samples) -> None:
    """Let a worker without samples give zeros to an exchange."""
    node.resize_inputs(len(node.inputs) + 1)
    node.replace_input_with(len(node.inputs) - 1, samples.own.value)
    node.attributes["counted"] = ir.AttrInt64("counted", 1)
