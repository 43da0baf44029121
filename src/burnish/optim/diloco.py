"""The outer optimizer of DiLoCo, which combines the steps that several workers took separately."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from burnish.graph import Builder, Tensor
from burnish.optim.arithmetic import Tensors, zero_slots
from burnish.optim.base import Transform, UpdateInputs, check_once
from burnish.optim.slots import Slot
from burnish.validation import check_fraction, check_not_negative

OUTER_MOMENTUM = Slot("outer_momentum")


@dataclass(frozen=True)
class DiLoCo(Transform):
    """An optimizer for workers that synchronize only from time to time (``burnish.DataParallel(synchronize_every=H)``).

    In a step only the inner optimizer updates. At a synchronization, let p be the parameters after the last one and q the average
    of the workers' parameters, weighted by the samples of each::

        g = p - q
        m = momentum m + g
        p = p - lr (g + momentum m)              Nesterov's momentum, as in torch.optim.SGD(nesterov=True)

    Source: Douillard et al., "DiLoCo: distributed low-communication training of language models", 2023; its values are the
    defaults. State: ``outer_momentum/<initializer>``, in the parameter's dtype and shape, initially zeros.

    Args:
        optimizer: the optimizer of each step.
        outer_lr, outer_momentum: rate and momentum of the synchronization.

    Raises:
        ConfigurationError: a negative rate, a momentum outside [0, 1), or the optimizer already has an outer one.
    """

    name = "diloco"
    slots = (OUTER_MOMENTUM,)
    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative(self.name, outer_lr=self.outer_lr)
        check_fraction(self.name, outer_momentum=self.outer_momentum)
        check_once(self, DiLoCo)

    def init(self, builder: Builder, params: Mapping[str, Tensor]) -> Tensors:
        return self.optimizer.init(builder, params) | zero_slots(params, OUTER_MOMENTUM)

    def apply(self, inputs: UpdateInputs) -> tuple[Tensors, Tensors]:
        following, slots = self.optimizer.apply(inputs)
        kept = {key: value for key, value in inputs.state.items() if key.startswith(f"{OUTER_MOMENTUM}/")}
        return following, slots | kept


diloco = DiLoCo
