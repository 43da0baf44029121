"""Requirements of batch normalization layers on their operands, and on the batch during training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from burnish.errors import ConfigurationError, ModelError
from burnish.graph import attribute_value, constant_array, describe_node, static_dimension
from burnish.norms.policies import BatchStatistics, Ghost, NormPolicy, layer_name


@dataclass(frozen=True)
class ExtentRule:
    """A requirement of a training step on a symbolic dimension, such as the batch; its extent is known only with the data.

    Attributes:
        dimension: name of the dimension.
        layer: the batch normalization layer with the requirement; for a ``maximum``, the loss with the teacher.
        multiple: the extent must be a multiple of this: the group size of ``ghost``.
        minimum: the extent must be at least this: 2 if a channel would have a single value.
        maximum: the extent must be at most this: 1 for a teacher that takes one sample; 0: no limit.
        cause: why the batch of such a teacher cannot be opened.
    """

    dimension: str
    layer: str
    multiple: int = 1
    minimum: int = 1
    maximum: int = 0
    cause: str = ""

    def allows(self, extent: int) -> bool:
        """True if a step accepts this extent."""
        return self.takes_part(extent) and extent >= self.minimum

    def takes_part(self, extent: int) -> bool:
        """True if a worker's part of a batch may have this extent: whole groups, and no more than the maximum."""
        return extent % self.multiple == 0 and (not self.maximum or extent <= self.maximum)

    @property
    def reason(self) -> str:
        """The requirement of the layer and its cause, as a clause."""
        if self.maximum:
            return (
                f"the teacher of the loss '{self.layer}' takes {self.maximum} at a time, and cannot be opened for more: "
                f"{self.cause.rstrip('.')}"
            )
        if self.multiple > 1:
            return (
                f"batch normalization '{self.layer}' takes its statistics over groups of {self.multiple} "
                f"(norm 'ghost:{self.multiple}'), and asks for a multiple of {self.multiple}"
            )
        return (
            f"batch normalization '{self.layer}' needs {self.minimum} or more: a single value per channel has no variance to "
            "normalize by"
        )

    @property
    def remedy(self) -> str:
        """A remedy if the extent cannot change."""
        if self.maximum:
            return (
                "export the teacher with an open batch, or compute its logits before (teacher_logits in the data, without a "
                "teacher)"
            )
        if self.multiple > 1:
            return "compile with another ghost size"
        return f"freeze the layer, norm={{'{self.layer}': 'frozen'}}"


def extent_rules(policies: Mapping[ir.Node, NormPolicy]) -> tuple[ExtentRule, ...]:
    """Return the requirements on symbolic dimensions, each once, with the first layer that has it.

    Raises:
        ConfigurationError: a static shape breaks a rule: an empty batch, a single value per channel, a batch that is not a
            multiple of the group size.
    """
    rules: dict[tuple[str, int, int], ExtentRule] = {}
    for node, policy in policies.items():
        for rule in _rules(node, policy):
            rules.setdefault((rule.dimension, rule.multiple, rule.minimum), rule)
    return tuple(rules.values())


def check_layer(node: ir.Node) -> None:
    """Check that scale, bias, mean and variance of a batch normalization have one value per channel.

    Raises:
        ModelError: names the node, the operand, its shape and the number of channels.
    """
    x = node.inputs[0]
    operands = dict(zip(("scale", "bias", "mean", "variance"), node.inputs[1:5], strict=True))
    channels = static_dimension(x.shape, 1) if x is not None else None
    source = f"its input '{x.name}' has {channels} channels" if x is not None else ""
    for name, value in operands.items():
        if value is None or value.shape is None:
            continue
        extent = static_dimension(value.shape, 0) if len(value.shape) == 1 else None
        if len(value.shape) != 1 or (channels is not None and extent is not None and extent != channels):
            wanted = "has one value per channel" if channels is None else f"must have shape [{channels}]: {source}"
            shape = ", ".join("?" if not isinstance(size, int) else str(size) for size in value.shape.dims)
            raise ModelError(
                f"{describe_node(node)}: its {name} '{_initializer(value)}' of shape [{shape}] {wanted}. Export the model again"
            )
        if channels is None and extent is not None:
            channels, source = extent, f"its {name} '{_initializer(value)}' has that many values"


def computes_statistics(node: ir.Node) -> bool:
    """True if a batch normalization in inference mode normalizes with statistics computed from its own input.

    PyTorch's exporter writes a layer with ``track_running_stats=False`` like this; the layer always uses the batch.
    """
    if attribute_value(node, "training_mode", 0) or len(node.inputs) < 5:
        return False
    return any(_depends_on(value, node.inputs[0]) for value in node.inputs[3:5])


def _depends_on(value: ir.Value | None, source: ir.Value | None) -> bool:
    seen: set[ir.Value] = set()
    pending = [value]
    while pending:
        value = pending.pop()
        if value is None or value in seen:
            continue
        if value is source:
            return True
        seen.add(value)
        producer = value.producer()
        pending.extend(() if producer is None else producer.inputs)
    return False


def uses_the_batch(node: ir.Node) -> bool:
    """True if a layer computes its statistics from the batch: mean and population variance of each channel."""
    if not computes_statistics(node):
        return False
    x, mean, variance = (node.inputs[index] for index in (0, 3, 4))
    squares = _averaged(variance, x)
    square = None if squares is None else squares.producer()
    if _averaged(mean, x) is not x or square is None or square.domain != "":
        return False
    first, second = square.inputs[0], square.inputs[1] if len(square.inputs) > 1 else None
    power = constant_array(second) if square.op_type == "Pow" and second is not None else None
    is_square = (square.op_type == "Mul" and first is second) or (power is not None and bool((power == 2).all()))
    centred = None if first is None else first.producer()
    if not is_square or centred is None or centred.op_type != "Sub" or centred.inputs[0] is not x:
        return False
    return _averaged(centred.inputs[1], x) is x


def _averaged(value: ir.Value | None, x: ir.Value | None) -> ir.Value | None:
    """Return the tensor that a value is the mean of, over all axes of ``x`` except the channels; None if it is no such mean."""
    node = None if value is None else value.producer()
    while node is not None and node.domain == "" and node.op_type in ("Identity", "Reshape", "Squeeze", "Unsqueeze"):
        value = node.inputs[0]
        node = None if value is None else value.producer()
    if node is None or node.op_type != "ReduceMean" or len(node.inputs) < 2 or x is None or x.shape is None:
        return None
    axes = None if node.inputs[1] is None else constant_array(node.inputs[1])
    rank = len(x.shape)
    over = set() if axes is None else {int(axis) % rank for axis in axes.reshape(-1)}
    return node.inputs[0] if over == {*range(rank)} - {1} else None


def never_updated(node: ir.Node) -> bool:
    """True if the running statistics of a batch normalization have their initial values: means 0 and variances 1."""
    for value, number in zip(node.inputs[3:5], (0, 1), strict=True):
        array = None if value is None else constant_array(value)
        if array is None or (array != number).any():
            return False
    return True


def normalizes_by_batch(node: ir.Node) -> bool:
    """True if a batch normalization is in training mode in the file."""
    return bool(attribute_value(node, "training_mode", 0))


def frozen_by_mode(nodes: Iterable[ir.Node]) -> set[ir.Node]:
    """Return the layers in inference mode if others are in training mode: the file was exported during training."""
    by_mode: dict[bool, set[ir.Node]] = {False: set(), True: set()}
    for node in nodes:
        by_mode[normalizes_by_batch(node)].add(node)
    return by_mode[False] if by_mode[True] else set()


def _rules(node: ir.Node, policy: NormPolicy) -> Iterable[ExtentRule]:
    x = node.inputs[0]
    if not isinstance(policy, BatchStatistics) or x is None or x.shape is None:
        return
    layer = layer_name(node)
    dimensions = [static_dimension(x.shape, axis) for axis in range(len(x.shape))]
    shape = ", ".join("?" if extent is None else str(extent) for extent in dimensions)
    if 0 in dimensions:
        raise ConfigurationError(
            f"{describe_node(node)}: its input '{x.name}' of shape [{shape}] is empty, and an empty batch has no statistics: "
            "declare the model's inputs with a batch of 1 or more, or a symbolic one"
        )
    batch = dimensions[0]
    if isinstance(policy, Ghost):
        if batch is not None and batch % policy.size:
            raise ConfigurationError(
                f"norm: '{policy}' takes statistics over groups of {policy.size} samples, and the batch of '{layer}' is {batch} "
                f"({describe_node(node)}): choose a size that divides {batch}, or export the model with another batch"
            )
        if batch is None and (name := _symbol(x.shape, 0)) is not None and policy.size > 1:
            yield ExtentRule(name, layer, multiple=policy.size)
        dimensions[0] = policy.size
    counted = {axis: extent for axis, extent in enumerate(dimensions) if axis != 1}
    unknown = [axis for axis, extent in counted.items() if extent is None]
    if math.prod(extent for extent in counted.values() if extent is not None) > 1:
        return
    if not unknown:
        group = f"with '{policy}', " if isinstance(policy, Ghost) else ""
        raise ConfigurationError(
            f"{describe_node(node)}: {group}a channel of its input '{x.name}' of shape [{shape}] has a single value, which has "
            f"no variance to normalize by: give a larger batch, or freeze the layer, norm={{'{layer}': 'frozen'}}"
        )
    if len(unknown) == 1 and (name := _symbol(x.shape, unknown[0])) is not None:
        yield ExtentRule(name, layer, minimum=2)


def _symbol(shape: ir.Shape, axis: int) -> str | None:
    dimension = shape.dims[axis]
    return None if isinstance(dimension, int) else dimension.value


def _initializer(value: ir.Value) -> str:
    return (value.name or "").removeprefix("param/").removeprefix("stat/")
