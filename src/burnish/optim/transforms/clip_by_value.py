"""Clipping of each element of the gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from burnish.graph import Builder, Tensor
from burnish.optim.base import Tensors, check_positive
from burnish.optim.transforms.base import StatelessTransform


@dataclass(frozen=True)
class ClipByValue(StatelessTransform):
    """Bound every element g of the gradients, as ``torch.nn.utils.clip_grad_value_``: ``g = max(-value, min(value, g))``.

    No state.
    """

    name = "clip_by_value"
    row_form = "exact"
    value: float

    def __post_init__(self) -> None:
        check_positive(self.name, value=self.value)

    def transform(
        self,
        builder: Builder,
        params: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        step: Tensor,
    ) -> tuple[Tensors, Tensors]:
        return {name: builder.op("Clip", gradient, -self.value, self.value) for name, gradient in gradients.items()}, {}


def clip_by_value(value: float) -> ClipByValue:
    """Return the transform that bounds every element of the gradients; see ``ClipByValue``.

    Raises:
        ConfigurationError: ``value`` is not a finite number above 0.
    """
    return ClipByValue(value)
