"""What a gradient transform is: a pure graph builder from gradients to the gradients that the optimizer sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable

from burnish.graph import Builder, Tensor
from burnish.optim.base import RowForm, Tensors
from burnish.settings import PlainSettings

NORM_GUARD = 1e-6
"""Added to a norm that divides, as in ``torch.nn.utils.clip_grad_norm_``."""


@runtime_checkable
class GradientTransform(Protocol):
    """A pure graph builder: (parameters, gradients, state, step) -> (gradients, next state).

    One that has to know what the parameters are has a method ``bind`` too (``burnish.optim.NeedsInfos``).
    """

    @property
    def name(self) -> str:
        """How the transform is asked for."""
        ...

    def init(self, builder: Builder, params: Mapping[str, Tensor]) -> Tensors:
        """Emit the initial state: ``<slot>/<initializer>`` -> value, or ``<slot>`` for what belongs to no single parameter."""
        ...

    def transform(
        self,
        builder: Builder,
        params: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        step: Tensor,
    ) -> tuple[Tensors, Tensors]:
        """Emit the transform.

        Args:
            builder: emits into the graph.
            params: initializer name -> parameter, from before the update.
            gradients: the same keys; dtype and shape of the parameter.
            state: the keys and dtypes that ``init`` gives.
            step: int64 scalar, the number of updates already done.

        Returns:
            Gradients and the next state, with the same keys, dtypes and shapes.
        """
        ...

    def options(self) -> dict[str, Any]:
        """Return name and settings as JSON-compatible values, from which ``burnish.optim.get`` builds it again."""
        ...


@dataclass(frozen=True)
class StatelessTransform(PlainSettings):
    """What transforms without a state share; a subclass adds its settings as fields."""

    @property
    def name(self) -> str:
        raise NotImplementedError

    @property
    def row_form(self) -> RowForm | None:
        """What transforming the rows of a gradient alone that are not zero comes to, as ``RatedOptimizer.row_form``."""
        return None

    def init(self, builder: Builder, params: Mapping[str, Tensor]) -> Tensors:
        return {}

    def options(self) -> dict[str, Any]:
        settings = {field.name: getattr(self, field.name) for field in fields(self) if field.compare}
        return {"name": self.name} | {
            name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()
        }


def shrinking_factor(builder: Builder, norm: Tensor, max_norm: float) -> Tensor:
    """Emit ``min(1, max_norm / (norm + 1e-6))``, a float64 scalar."""
    return builder.op("Min", builder.scalar(max_norm, norm) / (norm + NORM_GUARD), 1.0)
