"""Clipping by the norm of all gradients together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from burnish.graph import Builder, Tensor
from burnish.optim.base import Scalars, Tensors, check_positive
from burnish.optim.norms import sum_of_squares
from burnish.optim.transforms.base import StatelessTransform, shrinking_factor


@dataclass(frozen=True)
class ClipByGlobalNorm(StatelessTransform):
    """Shrink all gradients by one factor where their norm is above a bound, as ``torch.nn.utils.clip_grad_norm_``.

    With the gradients g of all parameters::

        norm = sqrt(sum of g² over all elements of all gradients)
        g = g * min(1, max_norm / (norm + 1e-6))

    The direction stays. The norm is accumulated in float64. Source: Pascanu et al., "On the difficulty of training recurrent
    neural networks", 2013. No state.
    """

    name = "clip_by_global_norm"
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
        squares = [sum_of_squares(builder, gradient) for gradient in gradients.values()]
        if not squares:
            return {}, {}
        norm = builder.op("Sqrt", builder.op("Sum", *squares))
        factor, scalars = shrinking_factor(builder, norm, self.max_norm), Scalars(builder)
        return {name: gradient * scalars.of(factor, gradient) for name, gradient in gradients.items()}, {}


def clip_by_global_norm(max_norm: float) -> ClipByGlobalNorm:
    """Return the transform that bounds the norm of all gradients together; see ``ClipByGlobalNorm``.

    Raises:
        ConfigurationError: ``max_norm`` is not a finite number above 0.
    """
    return ClipByGlobalNorm(max_norm)
