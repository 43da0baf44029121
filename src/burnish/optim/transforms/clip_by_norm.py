"""Clipping of each gradient by its own norm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from burnish.graph import Builder, Tensor
from burnish.optim.base import Tensors, check_positive
from burnish.optim.norms import euclidean_norm
from burnish.optim.transforms.base import StatelessTransform, shrinking_factor


@dataclass(frozen=True)
class ClipByNorm(StatelessTransform):
    """Shrink each gradient whose own norm is above a bound, as ``torch.nn.utils.clip_grad_norm_`` over one parameter.

    For each parameter's gradient g: ``g = g * min(1, max_norm / (sqrt(sum of g²) + 1e-6))``, the norm in float64. No state.
    """

    name = "clip_by_norm"
    row_form = "exact"
    max_norm: float

    def __post_init__(self) -> None:
        check_positive(self.name, max_norm=self.max_norm)

    def transform(
        self,
        builder: Builder,
        params: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        step: Tensor,
    ) -> tuple[Tensors, Tensors]:
        clipped: Tensors = {}
        for name, gradient in gradients.items():
            norm = euclidean_norm(builder, gradient)
            clipped[name] = gradient * builder.cast(shrinking_factor(builder, norm, self.max_norm), gradient.dtype)
        return clipped, {}


def clip_by_norm(max_norm: float) -> ClipByNorm:
    """Return the transform that bounds the norm of each parameter's gradient; see ``ClipByNorm``.

    Raises:
        ConfigurationError: ``max_norm`` is not a finite number above 0.
    """
    return ClipByNorm(max_norm)
