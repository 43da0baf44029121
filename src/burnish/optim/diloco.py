"""The outer optimizer of DiLoCo: what several workers make of the steps that each has taken alone."""

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
    """An optimizer for workers that step alone and meet now and then (``burnish.DataParallel(synchronize_every=H)``).

    In a step the optimizer inside updates, and nothing else happens. Where the workers meet, with p of the last meeting and the
    average q of the workers' parameters, weighted by the samples of each::

        g = p - q
        m = momentum m + g
        p = p - lr (g + momentum m)              Nesterov's momentum, as torch.optim.SGD(nesterov=True) has it

    Source: Douillard et al., "DiLoCo: distributed low-communication training of language models", 2023; its values are the
    defaults. State: ``outer_momentum/<initializer>``, of the parameter's dtype and shape, zeros at first.

    Args:
        optimizer: what updates in each step.
        outer_lr, outer_momentum: of the step where the workers meet.

    Raises:
        ConfigurationError: a negative rate, a momentum outside [0, 1), or the optimizer has an outer one already.
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
