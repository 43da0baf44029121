"""Averaged stochastic gradient descent: steps at a falling rate, and an average of the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from burnish.graph import Builder, Tensor
from burnish.optim.arithmetic import Tensors, cast_like, double, penalized
from burnish.optim.base import Rate, RatedOptimizer
from burnish.optim.slots import Slot
from burnish.validation import check_not_negative

AVERAGE = Slot("average", is_average=True)


@dataclass(frozen=True)
class ASGD(RatedOptimizer):
    """Averaged stochastic gradient descent, the mathematics of ``torch.optim.ASGD``.

    With parameter p, gradient g, the average a, and the number of past updates s, from 0::

        eta = lr / (1 + lambd * lr * s)^alpha
        g = g + weight_decay * p
        p = p * (1 - lambd * eta) - eta * g
        a = p                                     while s - t0 <= 1
        a = a + (p - a) / (s - t0)                afterwards

    The rate is that of the current step; PyTorch computes eta one step ahead and so follows a changed rate one step later.
    Source: Polyak and Juditsky, "Acceleration of stochastic approximation by averaging", 1992; the falling rate: Bottou,
    "Large-scale machine learning with stochastic gradient descent", 2010. State: ``average/<initializer>``, in the parameter's
    dtype and shape, which starts as the parameter (PyTorch's ``ax``); ``parameters="average"`` evaluates and exports it.

    Args:
        lr: learning rate, or a schedule.
        lambd: decay of the weights and of the rate.
        alpha: power of the falling rate.
        t0: number of updates before averaging begins; until then the average equals the parameters.
        weight_decay: L2 penalty, added to the gradient.

    Raises:
        ConfigurationError: a negative or non-finite number.
    """

    name = "asgd"
    slots = (AVERAGE,)
    lr: Rate = 1e-2
    lambd: float = 1e-4
    alpha: float = 0.75
    t0: float = 1e6
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative(self.name, lambd=self.lambd, alpha=self.alpha, t0=self.t0, weight_decay=self.weight_decay)

    def init(self, builder: Builder, params: Mapping[str, Tensor]) -> Tensors:
        return self.rate_state(builder) | {f"{AVERAGE}/{name}": parameter for name, parameter in params.items()}

    def update(
        self, parameter: Tensor, gradient: Tensor, slots: Mapping[Slot, Tensor], *, step: Tensor, rate: Tensor
    ) -> tuple[Tensor, dict[Slot, Tensor]]:
        builder = parameter.builder
        rate, done = double(rate), double(step)
        eta = rate / builder.op("Pow", rate * self.lambd * done + 1.0, builder.scalar(self.alpha, rate)) if self.lambd else rate
        keep = 1.0 - eta * self.lambd
        values = builder.op("Max", done - self.t0, 1.0)
        is_average = builder.op("Greater", values, 1.0)
        gradient = penalized(gradient, parameter, self.weight_decay)
        decayed = parameter * cast_like(keep, parameter) if self.lambd else parameter
        moved = decayed - gradient * cast_like(eta, parameter)
        average = slots[AVERAGE]
        averaged = average + (moved - average) / cast_like(values, parameter)
        return moved, {AVERAGE: builder.op("Where", is_average, averaged, moved, like=moved)}


asgd = ASGD
