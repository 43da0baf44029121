"""A proximal term, which keeps the parameters close to an anchor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from burnish.graph import Builder, Tensor
from burnish.optim.arithmetic import Tensors
from burnish.optim.base import Transform, UpdateInputs, check_once
from burnish.optim.slots import Slot
from burnish.validation import check_not_negative

ANCHOR = Slot("anchor", is_anchor=True, of_method=False)


@dataclass(frozen=True)
class Proximal(Transform):
    """An optimizer with the added gradient of ``mu / 2`` times the parameters' squared distance from an anchor.

    With the parameter p, its gradient g and the anchor a::

        g = g + mu (p - a)                       then the update of the optimizer inside

    The anchor is the initial parameter, so a fine-tuned model stays close to the original (Li et al., "Explicit inductive bias
    for transfer learning with convolutional networks", 2018). Federated clients set it to the parameters at the start of a round
    (Li et al., "Federated optimization in heterogeneous networks", 2020: FedProx). The reported loss excludes the term. State:
    ``anchor/<initializer>``, in the parameter's dtype and shape.

    Args:
        optimizer: the optimizer that updates the parameters.
        mu: strength of the pull, 0 or more.

    Raises:
        ConfigurationError: a negative strength, or an optimizer that is already proximal.
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

    def apply(self, inputs: UpdateInputs) -> tuple[Tensors, Tensors]:
        anchors = {f"{ANCHOR}/{name}": inputs.state[f"{ANCHOR}/{name}"] for name in inputs.params}
        pulled = {
            name: inputs.gradients[name] + (parameter - anchors[f"{ANCHOR}/{name}"]) * self.mu
            for name, parameter in inputs.params.items()
        }
        following, slots = self.optimizer.apply(replace(inputs, gradients=pulled))
        return following, slots | anchors


proximal = Proximal
