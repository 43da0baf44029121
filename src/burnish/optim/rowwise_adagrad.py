"""Row-wise Adagrad: one accumulator per row, for embedding tables whose optimizer state would fill the memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from burnish.graph import Builder, Tensor, zeros_like
from burnish.optim.base import Rate, RatedOptimizer, RowForm, Scalars, Tensors, check_not_negative, check_rate, penalized
from burnish.optim.parameter_shapes import known_rank
from burnish.optim.slots import Slot

SUM_OF_MEAN_SQUARES = Slot("sum_of_mean_squares")


@dataclass(frozen=True)
class RowwiseAdagrad(RatedOptimizer):
    """Row-wise Adagrad, the mathematics of FBGEMM's exact row-wise Adagrad.

    With parameter p, gradient g, and an accumulator s for each row i, a row being all elements of one index of the first axis::

        g    = g + weight_decay * p
        s[i] = s[i] + mean(g[i]²)
        p[i] = p[i] - lr * g[i] / (sqrt(s[i]) + eps)

    A parameter of rank 0 or 1 has an accumulator for each element, which makes it ``Adagrad``. A row whose gradient is zero
    stays as it is, unless it decays. Sources: ``rowwise_adagrad`` of FBGEMM_GPU's table-batched embeddings; Mudigere et al.,
    "Software-hardware co-design for fast and scalable training of deep learning recommendation models", 2022.
    State: ``sum_of_mean_squares/<initializer>``, of the parameter's dtype, one number per row (FBGEMM's ``momentum1``).
    """

    name = "rowwise_adagrad"
    slots = (SUM_OF_MEAN_SQUARES,)
    lr: Rate = 1e-2
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_rate(self.name, self.lr)
        check_not_negative(self.name, eps=self.eps, weight_decay=self.weight_decay)

    @property
    def row_form(self) -> RowForm:
        return "lazy" if self.weight_decay else "exact"

    def init(self, builder: Builder, params: Mapping[str, Tensor]) -> Tensors:
        return self.rate_state(builder) | {
            f"{SUM_OF_MEAN_SQUARES}/{name}": _zero_per_row(parameter) for name, parameter in params.items()
        }

    def update(
        self,
        builder: Builder,
        params: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        step: Tensor,
        hyperparameters: Mapping[str, Tensor],
    ) -> tuple[Tensors, Tensors]:
        scalars = Scalars(builder)
        lr, next_state = self.rate(builder, step, state, hyperparameters)
        next_params: Tensors = {}
        for name, parameter in params.items():
            gradient = penalized(gradients[name], parameter, self.weight_decay)
            slot = f"{SUM_OF_MEAN_SQUARES}/{name}"
            within_row = range(1, known_rank(parameter))
            squares = gradient * gradient
            if within_row:
                squares = builder.op("ReduceMean", squares, builder.integers(within_row), keepdims=0)
            total = next_state[slot] = state[slot] + squares
            deviation = builder.op("Sqrt", total) + scalars.epsilon(self.eps, parameter)
            if within_row:
                deviation = builder.op("Unsqueeze", deviation, builder.integers(within_row))
            next_params[name] = parameter - gradient / deviation * scalars.of(lr, parameter)
        return next_params, next_state


def _zero_per_row(parameter: Tensor) -> Tensor:
    """Emit a zero for every row of a parameter; for every element below rank 2."""
    if known_rank(parameter) < 2 or parameter.shape is None:
        return zeros_like(parameter)
    builder = parameter.builder
    zero = ir.tensor([0.0], dtype=parameter.dtype)
    count = builder.op("Shape", parameter, start=0, end=1)
    return builder.op("ConstantOfShape", count, value=zero, shape=parameter.shape.dims[:1], dtype=parameter.dtype)


def rowwise_adagrad(lr: Rate = 1e-2, eps: float = 1e-8, weight_decay: float = 0.0) -> RowwiseAdagrad:
    """Return row-wise Adagrad; see ``RowwiseAdagrad`` for the mathematics.

    Args:
        lr: learning rate, the default of the program's input ``lr``; or a schedule.
        eps: added to the root of the accumulator.
        weight_decay: L2 penalty, added to the gradient.

    Raises:
        ConfigurationError: a negative or non-finite number.
    """
    return RowwiseAdagrad(lr, eps, weight_decay)
