"""Gradient transforms: pure graph builders that change gradients before an optimizer gets them, combined by ``chain``."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from burnish.errors import ConfigurationError
from burnish.graph import Builder, Tensor
from burnish.optim.arithmetic import Tensors, cast_like, euclidean_norm, sqrt, sum_of_squares
from burnish.optim.base import RowForm, UpdateInputs, layers_of
from burnish.optim.parameters import NO_WEIGHTS, Infos, ParameterInfo, ParameterKind, check_matches, decays, matching
from burnish.settings import NamedSettings
from burnish.validation import check_not_negative, check_positive, require

NORM_GUARD = 1e-6
"""Added to a norm in a denominator, as in ``torch.nn.utils.clip_grad_norm_``."""


@runtime_checkable
class GradientTransform(Protocol):
    """A pure graph builder: (parameters, gradients, state, step) -> (gradients, next state).

    A transform that depends on the roles of the parameters also has a method ``bind`` (``NeedsInfos``).
    """

    @property
    def name(self) -> str: ...

    def init(self, builder: Builder, params: Mapping[str, Tensor]) -> Tensors:
        """Emit the initial state: ``<slot>/<initializer>`` -> value, or ``<slot>`` for state of no single parameter."""
        ...

    def transform(self, inputs: UpdateInputs) -> tuple[Tensors, Tensors]:
        """Emit the transform of ``inputs.gradients``; ``inputs.state`` has the keys of ``init``.

        Returns:
            Gradients and the next state, with the same keys, dtypes and shapes.
        """
        ...

    def options(self) -> dict[str, Any]:
        """Return name and settings as JSON-compatible values, from which ``burnish.optim.get`` rebuilds the transform."""
        ...


@dataclass(frozen=True)
class StatelessTransform(NamedSettings):
    """Base of transforms without a state; a subclass adds its settings as fields, and ``gradients``."""

    @property
    def row_form(self) -> RowForm | None:
        """Effect of transforming only the nonzero rows of a gradient; see ``RatedOptimizer.row_form``."""
        return None

    def init(self, builder: Builder, params: Mapping[str, Tensor]) -> Tensors:
        return {}

    def transform(self, inputs: UpdateInputs) -> tuple[Tensors, Tensors]:
        return self.gradients(inputs.params, inputs.gradients), {}

    @abstractmethod
    def gradients(self, params: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> Tensors:
        """Emit the transformed gradients, with the same keys, dtypes and shapes."""


@dataclass(frozen=True)
class ClipByGlobalNorm(StatelessTransform):
    """Scale down all gradients by one factor if their joint norm exceeds a bound, as ``torch.nn.utils.clip_grad_norm_``.

    With the gradients g of all parameters::

        norm = sqrt(sum of g² over all elements of all gradients)
        g = g * min(1, max_norm / (norm + 1e-6))

    The direction does not change. The norm is summed in float64. Source: Pascanu et al., "On the difficulty of training recurrent
    neural networks", 2013. No state.

    Raises:
        ConfigurationError: ``max_norm`` is not a finite number above 0.
    """

    name = "clip_by_global_norm"
    row_form = "exact"
    max_norm: float

    def __post_init__(self) -> None:
        check_positive(self.name, max_norm=self.max_norm)

    def gradients(self, params: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> Tensors:
        squares = [sum_of_squares(gradient) for gradient in gradients.values()]
        if not squares:
            return {}
        builder = squares[0].builder
        factor = shrinking_factor(sqrt(builder.op("Sum", *squares)), self.max_norm)
        with builder.each_scalar_once():
            return {name: gradient * cast_like(factor, gradient) for name, gradient in gradients.items()}


@dataclass(frozen=True)
class ClipByNorm(StatelessTransform):
    """Scale down each gradient with a norm above a bound, as ``torch.nn.utils.clip_grad_norm_`` for one parameter.

    For each parameter's gradient g: ``g = g * min(1, max_norm / (sqrt(sum of g²) + 1e-6))``, with the norm in float64. No state.

    Raises:
        ConfigurationError: ``max_norm`` is not a finite number above 0.
    """

    name = "clip_by_norm"
    row_form = "exact"
    max_norm: float

    def __post_init__(self) -> None:
        check_positive(self.name, max_norm=self.max_norm)

    def gradients(self, params: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> Tensors:
        return {
            name: gradient * cast_like(shrinking_factor(euclidean_norm(gradient), self.max_norm), gradient)
            for name, gradient in gradients.items()
        }


@dataclass(frozen=True)
class ClipByValue(StatelessTransform):
    """Clip every element g of the gradients, as ``torch.nn.utils.clip_grad_value_``: ``g = max(-value, min(value, g))``.

    No state.

    Raises:
        ConfigurationError: ``value`` is not a finite number above 0.
    """

    name = "clip_by_value"
    row_form = "exact"
    value: float

    def __post_init__(self) -> None:
        check_positive(self.name, value=self.value)

    def gradients(self, params: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> Tensors:
        return {name: tensor.builder.op("Clip", tensor, -self.value, self.value) for name, tensor in gradients.items()}


def shrinking_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Emit ``min(1, max_norm / (norm + 1e-6))``, a float64 scalar."""
    return norm.builder.op("Min", norm.builder.scalar(max_norm, norm) / (norm + NORM_GUARD), 1.0)


@dataclass(frozen=True)
class AddDecayedWeights(StatelessTransform):
    """Add a share of each parameter to its gradient: the gradient of ``weight_decay / 2 * (sum of p²)``, an L2 penalty.

    With parameter p and gradient g: ``g = g + weight_decay * p``, as for ``weight_decay`` in ``torch.optim``. ``on`` selects the
    parameters: ``all``, ``weights`` (neither bias nor normalization), or shell-style patterns of initializer names. No state.
    """

    name = "add_decayed_weights"
    row_form = "lazy"
    weight_decay: float
    on: str | tuple[str, ...] = "all"
    infos: Infos | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_not_negative(self.name, weight_decay=self.weight_decay)
        if isinstance(self.on, str) and self.on not in ("all", "weights"):
            raise ConfigurationError(f"{self.name}: on must be 'all', 'weights' or a list of patterns, not '{self.on}'")
        if not isinstance(self.on, str):
            are_patterns = isinstance(self.on, list | tuple) and all(isinstance(pattern, str) for pattern in self.on)
            require(are_patterns, self.name, "on", self.on, "'all', 'weights' or a list of patterns")
            object.__setattr__(self, "on", tuple(self.on))

    def bind(self, infos: Infos) -> AddDecayedWeights:
        for pattern in () if isinstance(self.on, str) else self.on:
            check_matches(self.name, pattern, infos)
        return replace(self, infos=infos)

    def without_effect(self, names: Collection[str]) -> list[str]:
        if not self.weight_decay or self._chosen(tuple(names)):
            return []
        return [f"{self.name}: weight_decay acts on none of the parameters that train: on='weights' leaves {NO_WEIGHTS}"]

    def gradients(self, params: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> Tensors:
        decayed: Tensors = dict(gradients)
        for name in self._chosen(tuple(gradients)) if self.weight_decay else ():
            decayed[name] = gradients[name] + params[name] * self.weight_decay
        return decayed

    def _chosen(self, names: Sequence[str]) -> list[str]:
        if not isinstance(self.on, str):
            chosen = {name for pattern in self.on for name in matching(pattern, names)}
            return [name for name in names if name in chosen]
        return [name for name in names if self.on == "all" or decays(self.name, name, self.infos)]


def add_decayed_weights(weight_decay: float, on: str | Sequence[str] = "all") -> AddDecayedWeights:
    """Return the transform that adds a share of the parameters to their gradients; see ``AddDecayedWeights``.

    Args:
        weight_decay: the share.
        on: ``all``, ``weights`` (neither bias nor normalization), or patterns of initializer names.

    Raises:
        ConfigurationError: a negative or non-finite number, or another value of ``on``.
    """
    return AddDecayedWeights(weight_decay, on if isinstance(on, str) else tuple(on))


@dataclass(frozen=True)
class Centralize(StatelessTransform):
    """Subtract from each weight's gradient its mean over the inputs of every output.

    For a weight w whose outputs each sum over the axes A (channels and kernel of a convolution, the inputs of a matrix product):
    ``g = g - mean of g over A``, so that the sum of w over A stays constant. Other parameters do not change. The graph determines
    the axes, not the shape, even if a weight is masked, quantized, scaled or transposed before use. For a masked weight the mean
    is over the unmasked elements, and masked ones keep a gradient of zero. Source: Yong et al., "Gradient centralization: a new
    optimization technique for deep neural networks", 2020. No state.
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

    def gradients(self, params: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> Tensors:
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
        return centred


def _mean(parameter: Tensor, gradient: Tensor, info: ParameterInfo) -> Tensor:
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
    """True if an optimizer contains ``Centralize``."""
    transforms = (transform for layer in layers_of(optimizer) for transform in getattr(layer, "transforms", ()))
    return any(isinstance(transform, Centralize) for transform in transforms)


def uncentred(infos: Infos) -> list[str]:
    """Return the weights, except per-channel numbers, with gradients that ``Centralize`` does not change."""
    weights = (info for info in infos.values() if info.kind is ParameterKind.WEIGHT and not info.input_axes)
    return [info.name for info in weights if math.prod(info.shape) > max(info.shape, default=1)]


def centralize() -> Centralize:
    """Return the transform that centralizes the gradient of each weight; see ``Centralize``."""
    return Centralize()


clip_by_global_norm = ClipByGlobalNorm
clip_by_norm = ClipByNorm
clip_by_value = ClipByValue
