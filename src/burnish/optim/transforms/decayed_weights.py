"""Weight decay through the gradient, on the parameters that it is meant for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from burnish.errors import ConfigurationError
from burnish.graph import Builder, Tensor
from burnish.optim.base import Tensors, check_not_negative
from burnish.optim.parameters import NO_WEIGHTS, Infos, check_matches, decays, matching
from burnish.optim.transforms.base import StatelessTransform


@dataclass(frozen=True)
class AddDecayedWeights(StatelessTransform):
    """Add a share of each parameter to its gradient: the gradient of ``weight_decay / 2 * (sum of p²)``, an L2 penalty.

    With parameter p and gradient g: ``g = g + weight_decay * p``, as the optimizers of ``torch.optim`` do for their
    ``weight_decay``. ``on`` says which parameters: ``all``, ``weights`` (neither bias nor normalization), or shell-style patterns
    of initializer names. No state.
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
            if not isinstance(self.on, list | tuple) or not all(isinstance(pattern, str) for pattern in self.on):
                raise ConfigurationError(f"{self.name}: on must be 'all', 'weights' or a list of patterns, not {self.on!r}")
            object.__setattr__(self, "on", tuple(self.on))

    def bind(self, infos: Infos) -> AddDecayedWeights:
        for pattern in () if isinstance(self.on, str) else self.on:
            check_matches(self.name, pattern, infos)
        return replace(self, infos=infos)

    def without_effect(self, names: Collection[str]) -> list[str]:
        if not self.weight_decay or self._chosen(tuple(names)):
            return []
        return [f"{self.name}: weight_decay acts on none of the parameters that train: on='weights' leaves {NO_WEIGHTS}"]

    def transform(
        self,
        builder: Builder,
        params: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        step: Tensor,
    ) -> tuple[Tensors, Tensors]:
        decayed: Tensors = dict(gradients)
        for name in self._chosen(tuple(gradients)) if self.weight_decay else ():
            decayed[name] = gradients[name] + params[name] * self.weight_decay
        return decayed, {}

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
        ConfigurationError: a negative or non-finite number, or another word for ``on``.
    """
    return AddDecayedWeights(weight_decay, on if isinstance(on, str) else tuple(on))
