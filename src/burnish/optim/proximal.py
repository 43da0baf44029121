"""A proximal term: an optimizer that holds the parameters near an anchor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from burnish.graph import Builder, Tensor
from burnish.optim.base import Optimizer, Tensors, check_not_negative
from burnish.optim.slots import Slot
from burnish.optim.wrapper import Wrapper, check_once

ANCHOR = Slot("anchor", is_anchor=True, of_method=False)


@dataclass(frozen=True)
class Proximal(Wrapper):
    """An optimizer that also sees the gradient of ``mu / 2`` times the squared distance of the parameters from an anchor.

    With the parameter p, its gradient g and the anchor a::

        g = g + mu (p - a)                       then the update of the optimizer inside

    The anchor is the first value of the parameter: a model that is fine-tuned stays near the one that it was (Li et al.,
    "Explicit inductive bias for transfer learning with convolutional networks", 2018). Federated clients set it to the
    parameters that a round begins with (Li et al., "Federated optimization in heterogeneous networks", 2020: FedProx). The loss
    that a step reports is without the term. State: ``anchor/<initializer>``, of the parameter's dtype and shape.
    """

    name = "proximal"
    slots = (ANCHOR,)
    mu: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative(self.name, mu=self.mu)
        check_once(self, Proximal)

    def init(self, builder: Builder, params: Mapping[str, Tensor]) -> Tensors:
        anchors = {f"{ANCHOR}/{name}": parameter for name, parameter in params.items()}
        return self.optimizer.init(builder, params) | anchors

    def update(
        self,
        builder: Builder,
        params: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        step: Tensor,
        hyperparameters: Mapping[str, Tensor],
    ) -> tuple[Tensors, Tensors]:
        anchors = {key: state[key] for key in (f"{ANCHOR}/{name}" for name in params)}
        pulled = {
            name: gradients[name] + (parameter - anchors[f"{ANCHOR}/{name}"]) * self.mu for name, parameter in params.items()
        }
        following, slots = self.optimizer.update(builder, params, pulled, state, step, hyperparameters)
        return following, slots | anchors


def proximal(optimizer: Optimizer, mu: float = 0.01) -> Proximal:
    """Return an optimizer that holds the parameters near where they began; see ``Proximal``.

    Args:
        optimizer: what updates.
        mu: strength of the pull, 0 or more.

    Raises:
        ConfigurationError: a negative strength, or the optimizer holds them already.
    """
    return Proximal(optimizer, mu)
