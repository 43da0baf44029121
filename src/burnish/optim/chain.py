"""A chain of gradient transforms followed by an optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from burnish.errors import ConfigurationError
from burnish.graph import Builder, Tensor
from burnish.optim.arithmetic import Tensors
from burnish.optim.base import Optimizer, Transform, UpdateInputs, is_optimizer, layers_of
from burnish.optim.gradient_transforms import (
    GradientTransform,
    add_decayed_weights,
    centralize,
    clip_by_global_norm,
    clip_by_norm,
    clip_by_value,
)
from burnish.optim.parameters import Infos, bind
from burnish.registry import Registry

TRANSFORMS: Registry[GradientTransform] = Registry(
    "gradient transform",
    {
        "add_decayed_weights": add_decayed_weights,
        "centralize": centralize,
        "clip_by_global_norm": clip_by_global_norm,
        "clip_by_norm": clip_by_norm,
        "clip_by_value": clip_by_value,
    },
    home="burnish.optim",
    is_made=lambda given: isinstance(given, GradientTransform),
)


@dataclass(frozen=True)
class Chain(Transform):
    """An optimizer that gets its gradients through transforms, applied in order.

    State: that of the optimizer, and of transforms with state: ``<slot>`` of the i-th as ``<slot>:<transform>:<i>``, counted from
    1, innermost chain first.
    """

    name = "chain"
    transforms: tuple[GradientTransform, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for transform in self.transforms:
            if isinstance(transform, type) or not isinstance(transform, GradientTransform):
                hint = "an optimizer comes last" if isinstance(transform, Optimizer) else "such as clip_by_norm(1.0)"
                raise ConfigurationError(
                    f"chain: before the optimizer come gradient transforms of burnish.optim, not {transform!r}: {hint}"
                )

    def options(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "transforms": [transform.options() for transform in self.transforms],
            "optimizer": self.optimizer.options(),
        }

    def bind(self, infos: Infos) -> Chain:
        transforms = tuple(bind(transform, infos) for transform in self.transforms)
        return replace(self, optimizer=bind(self.optimizer, infos), transforms=transforms)

    def init(self, builder: Builder, params: Mapping[str, Tensor]) -> Tensors:
        state = self.optimizer.init(builder, params)
        for place, transform in self._placed():
            state |= {_key_outside(key, place): value for key, value in transform.init(builder, params).items()}
        return state

    def apply(self, inputs: UpdateInputs) -> tuple[Tensors, Tensors]:
        kept: Tensors = {}
        given = inputs
        for place, transform in self._placed():
            own = {inside: value for key, value in inputs.state.items() if (inside := _key_inside(key, place)) is not None}
            gradients, following = transform.transform(replace(given, state=own))
            given = replace(given, gradients=gradients)
            kept |= {_key_outside(key, place): value for key, value in following.items()}
        next_params, next_state = self.optimizer.apply(given)
        return next_params, next_state | kept

    def _placed(self) -> Iterator[tuple[str, GradientTransform]]:
        inside = sum(len(inner.transforms) for inner in layers_of(self.optimizer) if isinstance(inner, Chain))
        for index, transform in enumerate(self.transforms, inside + 1):
            yield f":{transform.name}:{index}", transform


def _key_outside(key: str, place: str) -> str:
    slot, slash, name = key.partition("/")
    return f"{slot}{place}{slash}{name}"


def _key_inside(key: str, place: str) -> str | None:
    slot, slash, name = key.partition("/")
    return f"{slot.removesuffix(place)}{slash}{name}" if slot.endswith(place) else None


def chain(*parts: GradientTransform | Optimizer) -> Chain:
    """Return an optimizer that first transforms the gradients: ``chain(clip_by_global_norm(1.0), sgd(lr=0.1))``.

    Args:
        parts: gradient transforms in order of application, then the optimizer.

    Raises:
        ConfigurationError: the last part is not an optimizer, or another is not a transform.
    """
    if not parts or not is_optimizer(parts[-1]):
        last = f", not {parts[-1]!r}" if parts else ""
        raise ConfigurationError(f"chain: the last part must be an optimizer of burnish.optim, such as burnish.optim.sgd(){last}")
    return Chain(parts[-1], parts[:-1])  # type: ignore[arg-type]
