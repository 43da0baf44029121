"""What a batch normalization layer asks of its operands, and of the batch during training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from burnish.errors import ConfigurationError, ModelError
from burnish.graph import describe_node, static_dimension
from burnish.norms.policies import BatchStatistics, Ghost, NormPolicy, layer_name


@dataclass(frozen=True)
class ExtentRule:
    """What a training step asks of a symbolic dimension, such as the batch, whose extent is known only with the data.

    Attributes:
        dimension: the name of the dimension.
        layer: the batch normalization layer that asks for it.
        multiple: the extent is a multiple of this: the size of a group of ``ghost``.
        minimum: the extent is at least this: 2 where a channel would have a single value.
    """

    dimension: str
    layer: str
    multiple: int = 1
    minimum: int = 1

    def allows(self, extent: int) -> bool:
        """Whether a step takes this extent."""
        return extent % self.multiple == 0 and extent >= self.minimum

    def takes_part(self, extent: int) -> bool:
        """Whether a worker's part of a batch may have this extent: any, but of whole groups."""
        return extent % self.multiple == 0

    @property
    def reason(self) -> str:
        """What the layer asks for, and why."""
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
        """What else than another extent helps."""
        if self.multiple > 1:
            return "compile with another ghost size"
        return f"freeze the layer, norm={{'{self.layer}': 'frozen'}}"


def extent_rules(policies: Mapping[ir.Node, NormPolicy]) -> tuple[ExtentRule, ...]:
    """Return what the layers ask of symbolic dimensions, each rule once, with the first layer that asks for it.

    Raises:
        ConfigurationError: a static shape breaks a rule: nothing in the batch, a single value per channel, a batch that the
            size of a group does not divide.
    """
    rules: dict[tuple[str, int, int], ExtentRule] = {}
    for node, policy in policies.items():
        for rule in _rules(node, policy):
            rules.setdefault((rule.dimension, rule.multiple, rule.minimum), rule)
    return tuple(rules.values())


def check_layer(node: ir.Node) -> None:
    """Check that scale, bias, mean and variance of a batch normalization hold one value per channel.

    Raises:
        ModelError: the node, the operand, its shape and the number of channels.
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
