"""Gradient centralization."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from burnish.errors import ConfigurationError
from burnish.graph import Builder, Tensor
from burnish.optim.base import Tensors
from burnish.optim.parameters import NO_WEIGHTS, Infos, ParameterInfo, ParameterKind
from burnish.optim.transforms.base import StatelessTransform
from burnish.optim.wrapper import layers_of


@dataclass(frozen=True)
class Centralize(StatelessTransform):
    """Take its mean off the gradient of each weight, over the inputs of every output.

    For a weight w whose outputs each sum over the axes A (channels and kernel of a convolution, the inputs of a matrix
    product): ``g = g - mean of g over A``, so that the sum of w over A keeps its value. Other parameters are left as they are.
    Which axes these are the graph tells, not the shape, also where a weight is masked, quantized, scaled or transposed on its
    way. Of one that is masked the mean is over what is not, and what is masked keeps a gradient of zero. Source: Yong et al.,
    "Gradient centralization: a new optimization technique for deep neural networks", 2020. No state.
    """

    name = "centralize"
    infos: Infos | None = field(default=None, compare=False, repr=False)

    def bind(self, infos: Infos) -> Centralize:
        return replace(self, infos=infos)

    def without_effect(self, names: Collection[str]) -> list[str]:
        infos = self.infos or {}
        if any(infos[name].kind is ParameterKind.WEIGHT for name in names):
            return []
        return [f"{self.name}: it acts on none of the parameters that train: it leaves {NO_WEIGHTS}"]

    def transform(
        self,
        builder: Builder,
        params: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        step: Tensor,
    ) -> tuple[Tensors, Tensors]:
        if self.infos is None:
            raise ConfigurationError(
                "centralize: which axes an output sums over is not known yet: call burnish.optim.bind with what each parameter is"
            )
        centred: Tensors = {}
        for name, gradient in gradients.items():
            info = self.infos[name]
            centred[name] = gradient
            if info.kind is ParameterKind.WEIGHT and info.input_axes:
                centred[name] = gradient - _mean(params[name], gradient, info)
        return centred, {}


def _mean(parameter: Tensor, gradient: Tensor, info: ParameterInfo) -> Tensor:
    """Emit what is taken off a gradient."""
    builder, axes = gradient.builder, gradient.builder.integers(info.input_axes)
    if info.masked == "no":
        return builder.op("ReduceMean", gradient, axes, keepdims=1)
    is_absent = builder.op("Equal", gradient, 0.0)
    if info.masked == "fixed":
        is_absent = builder.op("And", is_absent, builder.op("Equal", parameter, 0.0))
    present = builder.cast(builder.op("Not", is_absent), gradient.dtype)
    total, count = (builder.op("ReduceSum", summed, axes, keepdims=1) for summed in (gradient, present))
    return present * (total / builder.op("Max", count, 1.0))


def centralizes(optimizer: object) -> bool:
    """Whether an optimizer has this transform in it."""
    transforms = (transform for layer in layers_of(optimizer) for transform in getattr(layer, "transforms", ()))
    return any(isinstance(transform, Centralize) for transform in transforms)


def uncentred(infos: Infos) -> list[str]:
    """Return the weights, other than one number per channel, whose gradients it leaves as they are."""
    weights = (info for info in infos.values() if info.kind is ParameterKind.WEIGHT and not info.input_axes)
    return [info.name for info in weights if math.prod(info.shape) > max(info.shape, default=1)]


def centralize() -> Centralize:
    """Return the transform that takes the mean over its inputs off the gradient of each weight; see ``Centralize``."""
    return Centralize()
