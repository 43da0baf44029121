"""Where a worker's samples stand among those of the batch: their share of it, their masks, and that there may be none."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import BURNISH_DOMAIN, Builder, Tensor, describe_node, replace_node, static_dimension
from burnish.ops.collectives import all_gather
from burnish.random import PLACES_METADATA

GUARDED = frozenset({"count", "figure", "gradient", "average"})
"""Exchanges of what may be 0 / 0 on a worker without samples; the statistics of layers see to that themselves."""


class Samples:
    """The samples of a step, counted at its beginning; nothing is emitted before it is asked for.

    Args:
        graph: the training graph.
        data: the names of the model's inputs.
        workers: how many there are.
    """

    def __init__(self, graph: ir.Graph, data: Sequence[str], workers: int):
        self._graph = graph
        self._workers = workers
        inputs = [value for value in graph.inputs if value.name in data and value.shape is not None and len(value.shape)]
        self._input = next((value for value in inputs if static_dimension(value.shape, 0) is None), inputs[0] if inputs else None)
        self.symbols = {_symbol(value) for value in inputs} - {None}
        """What the batch is called in the shapes of the inputs."""

    @property
    def is_known(self) -> bool:
        """Whether the model has an input with samples along its first axis."""
        return self._input is not None

    @cached_property
    def own(self) -> Tensor:
        """How many samples this worker has, int64 [1]."""
        assert self._input is not None
        builder = self._first()
        return builder.op("Shape", builder.tensor(self._input), start=0, end=1, shape=[1])

    @cached_property
    def _counts(self) -> Tensor:
        """How many each worker has, int64 [workers]."""
        gathered = all_gather(self.own, self._workers, "samples")
        builder = self.own.builder
        return builder.op("Reshape", gathered, builder.integers([self._workers]), shape=[self._workers])

    @cached_property
    def total(self) -> Tensor:
        """How many samples the batch has, int64 [1]."""
        builder = self.own.builder
        return builder.op("ReduceSum", self._counts, builder.integers([0]), keepdims=1, shape=[1])

    @cached_property
    def start(self) -> Tensor:
        """How many samples of the batch stand before this worker's, int64 [1]."""
        builder = self.own.builder
        rank = builder.op("WorkerRank", domain=BURNISH_DOMAIN, shape=[], dtype=ir.DataType.INT64)
        before = builder.cast(builder.op("Less", builder.integers(range(self._workers)), rank), ir.DataType.INT64)
        return builder.op("ReduceSum", self._counts * before, builder.integers([0]), keepdims=1, shape=[1])

    def _first(self) -> Builder:
        """Emits in front of everything."""
        return Builder(self._graph, before=next(iter(self._graph)))


def place_samples(graph: ir.Graph, data: Sequence[str], workers: int) -> None:
    """Rewrite, in place, what depends on which samples of the batch a worker has.

    Args:
        graph: the training graph.
        data: the names of the model's inputs.
        workers: how many there are.

    Raises:
        ConfigurationError: the samples of the batch cannot be found in a mask's shape.
    """
    samples = Samples(graph, data, workers)
    for node in list(graph):
        if node.domain == BURNISH_DOMAIN and node.op_type == "SampleShare":
            _put_share(graph, node, samples, workers)
        elif PLACES_METADATA in node.metadata_props:
            _shift_places(graph, node, samples)
    for node in list(graph):
        purpose = node.attributes.get("purpose")
        if node.op_type == "AllReduce" and node.domain == BURNISH_DOMAIN and purpose is not None and purpose.value in GUARDED:
            _guard(graph, node, samples)


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


def _shift_places(graph: ir.Graph, node: ir.Node, samples: Samples) -> None:
    """Let places be numbered as those of the whole batch are, where they are of samples."""
    axes = node.metadata_props[PLACES_METADATA].split(",")
    if not samples.is_known:
        return
    behind = samples.symbols.intersection(axes[1:])
    if behind:
        raise ConfigurationError(
            f"{describe_node(node)}: a mask is drawn for a value of the axes [{', '.join(axes)}], in which the batch "
            f"'{behind.pop()}' is not the first: workers cannot draw the masks of their own samples. Let the model keep the "
            "batch in front where it drops out, or train with one worker"
        )
    if axes[0].isdigit() or (axes[0] not in samples.symbols and axes[0] in _other_symbols(graph)):
        return  # the same for every batch
    builder = Builder(graph, before=node)
    first, extent, step = (builder.tensor(value) for value in node.inputs if value is not None)
    own, start = (builder.tensor(tensor.value) for tensor in (samples.own, samples.start))
    before = start * builder.op("Reshape", extent, builder.integers([1])) / builder.op("Max", own, 1)
    before = builder.op("Reshape", before, builder.integers([]), shape=[])
    places = builder.op("Range", first + before, extent + before, step)
    replace_node(node, places)


def _guard(graph: ir.Graph, node: ir.Node, samples: Samples) -> None:
    """Let a worker without samples give zeros."""
    if not samples.is_known or static_dimension(samples.own.value.producer().inputs[0].shape, 0) is not None:  # type: ignore[union-attr]
        return
    node.resize_inputs(len(node.inputs) + 1)
    node.replace_input_with(len(node.inputs) - 1, samples.own.value)
    node.attributes["counted"] = ir.AttrInt64("counted", 1)


def _other_symbols(graph: ir.Graph) -> set[str]:
    """The names of the dimensions of inputs, beside their first ones."""
    return {
        dimension.value
        for value in graph.inputs
        if value.shape is not None
        for dimension in value.shape.dims[1:]
        if isinstance(dimension, ir.SymbolicDim) and dimension.value is not None
    }


def _symbol(value: ir.Value) -> str | None:
    assert value.shape is not None
    dimension = value.shape.dims[0]
    return None if isinstance(dimension, int) else dimension.value
