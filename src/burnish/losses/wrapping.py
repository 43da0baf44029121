"""What losses have in common that change what one other loss reads: its prediction, or the samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from burnish.losses.base import Loss, Reading, Scale
from burnish.settings import PlainSettings


@dataclass(frozen=True, kw_only=True)
class Wrapping(PlainSettings):
    """A loss that reads the outputs that another one reads, and says of them what that one says.

    Attributes:
        loss: the other one.
    """

    loss: Loss

    @property
    def readings(self) -> tuple[Reading, ...]:
        return self.loss.readings

    @property
    def default_metrics(self) -> tuple[str, ...]:
        return self.loss.default_metrics

    @property
    def scale(self) -> Scale | None:
        """What the prediction says, as the inner loss has it."""
        return getattr(self.loss, "scale", None)

    def bind(self, outputs: Sequence[str]) -> Self:
        """Return this around the inner loss bound to outputs of these names."""
        return replace(self, loss=self.loss.bind(outputs))
