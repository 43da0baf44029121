"""Adagrad, with a rate per element that falls with its squared gradients, and row-wise Adagrad, with a rate per row.

The row-wise form is for embedding tables whose optimizer state would otherwise fill the memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from burnish.graph import Builder, Tensor, full_like, zeros_like
from burnish.optim.arithmetic import Tensors, double, epsilon, known_rank, penalized, sqrt, stepped
from burnish.optim.base import Rate, RatedOptimizer, RowForm
from burnish.optim.slots import Slot
from burnish.validation import check_not_negative

SUM_OF_SQUARES = Slot("sum_of_squares")
SUM_OF_MEAN_SQUARES = Slot("sum_of_mean_squares")


@dataclass(frozen=True)
class Adagrad(RatedOptimizer):
    """Adagrad, the mathematics of ``torch.optim.Adagrad``.

    With parameter p, gradient g, and the sum of squares s, which starts at initial_accumulator_value::

        g = g + weight_decay * p
        s = s + g²
        p = p - lr / (1 + step * lr_decay) * g / (sqrt(s) + eps)

    Source: Duchi, Hazan and Singer, "Adaptive subgradient methods for online learning and stochastic optimization", 2011.
    State: ``sum_of_squares/<initializer>``, in the parameter's dtype and shape (PyTorch's ``sum``).

    Args:
        lr: learning rate, or a schedule.
        lr_decay: growth of the rate's divisor per step.
        weight_decay: L2 penalty, added to the gradient.
        initial_accumulator_value: initial sum of squares.
        eps: added to the root of the sum of squares.

    Raises:
        ConfigurationError: a negative or non-finite number.
    """

    name = "adagrad"
    slots = (SUM_OF_SQUARES,)
    lr: Rate = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative(
            self.name,
            lr_decay=self.lr_decay,
            weight_decay=self.weight_decay,
            initial_accumulator_value=self.initial_accumulator_value,
            eps=self.eps,
        )

    @property
    def row_form(self) -> RowForm:
        return "lazy" if self.weight_decay else "exact"

    def init(self, builder: Builder, params: Mapping[str, Tensor]) -> Tensors:
        return self.rate_state(builder) | {
            f"{SUM_OF_SQUARES}/{name}": full_like(parameter, self.initial_accumulator_value) for name, parameter in params.items()
        }

    def update(
        self, parameter: Tensor, gradient: Tensor, slots: Mapping[Slot, Tensor], *, step: Tensor, rate: Tensor
    ) -> tuple[Tensor, dict[Slot, Tensor]]:
        if self.lr_decay:
            rate = double(rate) / (double(step) * self.lr_decay + 1.0)
        gradient = penalized(gradient, parameter, self.weight_decay)
        total = slots[SUM_OF_SQUARES] + gradient * gradient
        direction = gradient / (sqrt(total) + epsilon(self.eps, parameter))
        return stepped(parameter, direction, rate), {SUM_OF_SQUARES: total}


@dataclass(frozen=True)
class RowwiseAdagrad(RatedOptimizer):
    """Row-wise Adagrad, the mathematics of FBGEMM's exact row-wise Adagrad.

    With parameter p, gradient g, and an accumulator s for each row i, a row being all elements of one index of the first axis::

        g    = g + weight_decay * p
        s[i] = s[i] + mean(g[i]²)
        p[i] = p[i] - lr * g[i] / (sqrt(s[i]) + eps)

    A parameter of rank 0 or 1 has an accumulator per element, as in ``Adagrad``. A row with gradient zero does not change, unless
    it decays. Sources: ``rowwise_adagrad`` of FBGEMM_GPU's table-batched embeddings; Mudigere et al., "Software-hardware
    co-design for fast and scalable training of deep learning recommendation models", 2022.
    State: ``sum_of_mean_squares/<initializer>``, in the parameter's dtype, one number per row (FBGEMM's ``momentum1``).

    Args:
        lr: learning rate, or a schedule.
        eps: added to the root of the accumulator.
        weight_decay: L2 penalty, added to the gradient.

    Raises:
        ConfigurationError: a negative or non-finite number.
    """

    name = "rowwise_adagrad"
    slots = (SUM_OF_MEAN_SQUARES,)
    lr: Rate = 1e-2
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative(self.name, eps=self.eps, weight_decay=self.weight_decay)

    @property
    def row_form(self) -> RowForm:
        return "lazy" if self.weight_decay else "exact"

    def init(self, builder: Builder, params: Mapping[str, Tensor]) -> Tensors:
        return self.rate_state(builder) | {
            f"{SUM_OF_MEAN_SQUARES}/{name}": _zero_per_row(parameter) for name, parameter in params.items()
        }

    def update(
        self, parameter: Tensor, gradient: Tensor, slots: Mapping[Slot, Tensor], *, step: Tensor, rate: Tensor
    ) -> tuple[Tensor, dict[Slot, Tensor]]:
        builder = parameter.builder
        gradient = penalized(gradient, parameter, self.weight_decay)
        within_row = range(1, known_rank(parameter))
        squares = gradient * gradient
        if within_row:
            squares = builder.op("ReduceMean", squares, builder.integers(within_row), keepdims=0)
        total = slots[SUM_OF_MEAN_SQUARES] + squares
        deviation = sqrt(total) + epsilon(self.eps, parameter)
        if within_row:
            deviation = builder.op("Unsqueeze", deviation, builder.integers(within_row))
        return stepped(parameter, gradient / deviation, rate), {SUM_OF_MEAN_SQUARES: total}


def _zero_per_row(parameter: Tensor) -> Tensor:
    """Emit a zero per row of a parameter, or per element below rank 2."""
    if known_rank(parameter) < 2 or parameter.shape is None:
        return zeros_like(parameter)
    builder = parameter.builder
    zero = ir.tensor([0.0], dtype=parameter.dtype)
    count = builder.op("Shape", parameter, start=0, end=1)
    return builder.op("ConstantOfShape", count, value=zero, shape=parameter.shape.dims[:1], dtype=parameter.dtype)


adagrad = Adagrad
rowwise_adagrad = RowwiseAdagrad
