"""Gradient centralization."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from burnish.errors import ConfigurationError
from burnish.graph import Builder, Tensor
from burnish.optim.base import Tensors
from burnish.optim.parameters import Infos, ParameterKind
from burnish.optim.transforms.base import StatelessTransform


@dataclass(frozen=True)
class Centralize(StatelessTransform):
    """Take its mean off the gradient of each weight, over the inputs of every output.

    For a weight w whose outputs each sum over the axes A (channels and kernel of a convolution, the inputs of a matrix
    product): ``g = g - mean of g over A``, so that the sum of w over A keeps its value. Other parameters are left as they are.
    Which axes these are the graph tells, not the shape. Source: Yong et al., "Gradient centralization: a new optimization
    technique for deep neural networks", 2020. No state.
    """

    name = "centralize"
    infos: Infos | None = field(default=None, compare=False, repr=False)

    def bind(self, infos: Infos) -> Centralize:
        return replace(self, infos=infos)

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
                axes = builder.integers(info.input_axes)
                centred[name] = gradient - builder.op("ReduceMean", gradient, axes, keepdims=1)
        return centred, {}


def centralize() -> Centralize:
    """Return the transform that takes the mean over its inputs off the gradient of each weight; see ``Centralize``."""
    return Centralize()
