"""Resilient backpropagation: steps by the sign of the gradient, with a step size per element that adapts to sign changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from burnish.errors import ConfigurationError
from burnish.graph import Builder, Tensor
from burnish.optim.arithmetic import Tensors, cast_like, double, number
from burnish.optim.base import Rate, RatedOptimizer
from burnish.optim.slots import Slot
from burnish.validation import check_finite, check_positive

PREVIOUS_GRADIENT = Slot("previous_gradient")
STEP_SIZE = Slot("step_size")
FIRST_STEP_SIZE = Slot("first_step_size", per_parameter=False)


@dataclass(frozen=True)
class Rprop(RatedOptimizer):
    """Resilient backpropagation, the mathematics of ``torch.optim.Rprop``.

    With parameter p, gradient g, the previous gradient q, and the step size s, which starts at lr, for each element separately::

        s = min(s * etas[1], step_sizes[1])              if g q > 0
        s = max(s * etas[0], step_sizes[0]); g = 0       if g q < 0
        p = p - s * sign(g)
        q = g

    It needs gradients of whole data sets: with batches, signs change by chance. The rate is the first step size. PyTorch ignores
    later rates; here a schedule's later rates multiply the steps: ``s * lr / s0``, with s0 the first step size, the first rate
    clipped to step_sizes. Source: Riedmiller and Braun, "A direct adaptive method for faster backpropagation learning: the RPROP
    algorithm", 1993, without taking steps back. State: ``previous_gradient/<initializer>`` and ``step_size/<initializer>``, in
    the parameter's dtype and shape (PyTorch's ``prev`` and ``step_size``), initially zeros; and the float64 scalar
    ``first_step_size``, zero before the first update.

    Args:
        lr: the first step size, or a schedule.
        etas: factors of the step size if the gradient's sign changes, and if it stays.
        step_sizes: smallest and largest step size.

    Raises:
        ConfigurationError: a negative or non-finite rate, factors that are not on both sides of 1, or step_sizes that are not a
            range.
    """

    name = "rprop"
    slots = (PREVIOUS_GRADIENT, STEP_SIZE, FIRST_STEP_SIZE)
    lr: Rate = 1e-2
    etas: tuple[float, ...] = (0.5, 1.2)
    step_sizes: tuple[float, ...] = (1e-6, 50.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in ("etas", "step_sizes"):
            pair = getattr(self, option)
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise ConfigurationError(f"{self.name}: {option} must be two numbers, not {pair!r}")
            check_finite(self.name, **{f"{option}[{index}]": number for index, number in enumerate(pair)})
            object.__setattr__(self, option, tuple(pair))
        if not 0.0 < self.etas[0] < 1.0 < self.etas[1]:
            raise ConfigurationError(
                f"{self.name}: etas must be a factor between 0 and 1, where the sign changes, and one above 1, not {self.etas}"
            )
        check_positive(self.name, **{"step_sizes[0]": self.step_sizes[0]})
        if self.step_sizes[0] > self.step_sizes[1]:
            raise ConfigurationError(f"{self.name}: step_sizes must be the smallest and the largest one, not {self.step_sizes}")

    def init(self, builder: Builder, params: Mapping[str, Tensor]) -> Tensors:
        return super().init(builder, params) | {FIRST_STEP_SIZE: number(builder, 0.0)}

    def update(
        self, parameter: Tensor, gradient: Tensor, slots: Mapping[Slot, Tensor], *, step: Tensor, rate: Tensor
    ) -> tuple[Tensor, dict[Slot, Tensor]]:
        builder = parameter.builder
        rate = double(rate)
        is_first = builder.op("Equal", slots[FIRST_STEP_SIZE], 0.0)
        first = builder.op("Where", is_first, builder.op("Clip", rate, *self.step_sizes), slots[FIRST_STEP_SIZE])
        share = rate / first
        # Multiply signs: the product of small gradients may underflow.
        sign = builder.op("Sign", gradient)
        agreement = sign * builder.op("Sign", slots[PREVIOUS_GRADIENT])
        has_turned, goes_on = builder.op("Less", agreement, 0.0), builder.op("Greater", agreement, 0.0)
        size = builder.op("Where", is_first, cast_like(first, parameter), slots[STEP_SIZE], like=parameter)
        shorter = builder.op("Where", has_turned, size * self.etas[0], size, like=size)
        resized = builder.op("Where", goes_on, size * self.etas[1], shorter, like=size)
        resized = builder.op("Clip", resized, *self.step_sizes, like=size)
        taken = builder.op("Where", has_turned, builder.scalar(0.0, sign), sign, like=sign)
        following = parameter - taken * resized * cast_like(share, parameter)
        previous = builder.op("Where", has_turned, builder.scalar(0.0, gradient), gradient, like=gradient)
        return following, {FIRST_STEP_SIZE: first, STEP_SIZE: resized, PREVIOUS_GRADIENT: previous}


rprop = Rprop
