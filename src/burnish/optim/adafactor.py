"""Adafactor: adaptive rates from row and column means of the squared gradient, with far less memory than Adam."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Builder, Tensor, zeros_like
from burnish.optim.arithmetic import (
    Tensors,
    cast_like,
    double,
    epsilon,
    kept_share,
    known_rank,
    known_shape,
    root_mean_square,
    sqrt,
    stepped,
)
from burnish.optim.base import Rate, RatedOptimizer
from burnish.optim.slots import Slot
from burnish.validation import check_finite, check_not_negative, check_positive

ROW_VARIANCE = Slot("row_variance")
COLUMN_VARIANCE = Slot("column_variance")
VARIANCE = Slot("variance")


@dataclass(frozen=True)
class Adafactor(RatedOptimizer):
    """Adafactor, the mathematics of ``torch.optim.Adafactor``.

    With parameter p, gradient g, t = step + 1, and rms(x) the root of the mean of x² over all elements::

        beta2 = 1 - t^beta2_decay
        alpha = max(eps2, rms(p)) * min(lr, 1 / sqrt(t))
        p = p - lr * weight_decay * p
        r = beta2 * r + (1 - beta2) * mean of g² over the last dimension
        c = beta2 * c + (1 - beta2) * mean of g² over the last but one
        v = r * c / max(mean of r over the last but one dimension, eps1)
        u = g / max(sqrt(v), eps1)
        p = p - alpha * u / max(1, rms(u) / clipping_threshold)

    A parameter of fewer than two dimensions has no factors: v = beta2 * v + (1 - beta2) * g². A parameter of more than two is a
    stack of matrices of its last two, as in PyTorch. ``eps = (eps1, eps2)``; an eps1 of None is the spacing of the parameter's
    dtype at 1. Source: Shazeer and Stern, "Adafactor: adaptive learning rates with sublinear memory cost", 2018. Their eps1 is
    inside both means, and their lr is 0.01, the default here; the weight decay is PyTorch's.
    State, in the parameter's dtype: ``row_variance/<initializer>`` and ``column_variance/<initializer>``, in the parameter's
    shape with extent 1 for the averaged dimension, or ``variance/<initializer>`` (PyTorch's ``row_var``, ``col_var``,
    ``variance``).

    If a program updates only the rows of a table that a batch reads, the formulas treat these rows as the whole table: r belongs
    to each row, c to the columns of the rows read, and rms(p), rms(u) and the mean of r are over the rows of the batch. Rows that
    no batch reads keep their values and r.

    Args:
        lr: learning rate, or a schedule. It bounds the change of a step relative to
            the parameter's root mean square; the method lowers it with 1 / sqrt(t).
        beta2_decay: exponent of t in the share of a new squared gradient, 0 or below.
        eps: smallest divisor from the second moment, above 0, or None for the spacing of the dtype at 1; and smallest root mean
            square assumed for a parameter.
        clipping_threshold: largest root mean square of an update, at least 1 (PyTorch's ``d``).
        weight_decay: share of the weight, times lr, subtracted at every step.

    Raises:
        ConfigurationError: a non-finite number, or one outside its range.
    """

    name = "adafactor"
    looks_across_rows = True
    row_form = "lazy"
    slots = (ROW_VARIANCE, COLUMN_VARIANCE, VARIANCE)
    lr: Rate = 1e-2
    beta2_decay: float = -0.8
    eps: tuple[float | None, float] = (None, 1e-3)
    clipping_threshold: float = 1.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_finite(self.name, beta2_decay=self.beta2_decay, clipping_threshold=self.clipping_threshold)
        check_not_negative(self.name, weight_decay=self.weight_decay)
        if self.beta2_decay > 0.0:
            raise ConfigurationError(f"{self.name}: beta2_decay must be 0 or below, not {self.beta2_decay}")
        if self.clipping_threshold < 1.0:
            raise ConfigurationError(f"{self.name}: clipping_threshold must be at least 1, not {self.clipping_threshold}")
        if not isinstance(self.eps, tuple | list) or len(self.eps) != 2:
            raise ConfigurationError(f"{self.name}: eps must be two numbers, the first of which may be None, not {self.eps}")
        smallest, least = self.eps
        if smallest is not None:
            check_positive(self.name, **{"eps[0]": smallest})
        check_not_negative(self.name, **{"eps[1]": least})
        object.__setattr__(self, "eps", (smallest, least))

    def init(self, builder: Builder, params: Mapping[str, Tensor]) -> Tensors:
        state = self.rate_state(builder)
        for name, parameter in params.items():
            if known_rank(parameter) > 1:
                shape = known_shape(parameter)
                state[f"{ROW_VARIANCE}/{name}"] = _zeros(parameter, (*shape[:-1], 1))
                state[f"{COLUMN_VARIANCE}/{name}"] = _zeros(parameter, (*shape[:-2], 1, shape[-1]))
            else:
                state[f"{VARIANCE}/{name}"] = zeros_like(parameter)
        return state

    def update(
        self, parameter: Tensor, gradient: Tensor, slots: Mapping[Slot, Tensor], *, step: Tensor, rate: Tensor
    ) -> tuple[Tensor, dict[Slot, Tensor]]:
        builder = parameter.builder
        rate, t = double(rate), double(step) + 1.0
        share = t**self.beta2_decay
        keep = 1.0 - share
        relative_rate = builder.op("Min", rate, 1.0 / sqrt(t))
        decay = kept_share(rate, self.weight_decay)
        squared = gradient * gradient
        means = {VARIANCE: squared}
        if known_rank(parameter) > 1:
            means = {ROW_VARIANCE: _mean(squared, -1), COLUMN_VARIANCE: _mean(squared, -2)}
        for slot, mean in means.items():
            means[slot] = slots[slot] * cast_like(keep, parameter) + mean * cast_like(share, parameter)
        eps = self._least_root(parameter)
        variance = _estimate(means, epsilon(eps, parameter))
        change = gradient / sqrt(builder.op("Max", variance, epsilon(eps * eps, parameter)))
        excess = builder.op("Max", root_mean_square(change) / self.clipping_threshold, 1.0)
        scale = builder.op("Max", root_mean_square(parameter), self.eps[1])
        rate = cast_like(scale * relative_rate / excess, parameter)
        return stepped(parameter, change, rate, decay), means

    def _least_root(self, parameter: Tensor) -> float:
        eps = self.eps[0]
        return float(np.spacing(np.ones((), parameter.dtype.numpy()))) if eps is None else eps


def _estimate(means: Mapping[Slot, Tensor], eps: Tensor) -> Tensor:
    if VARIANCE in means:
        return means[VARIANCE]
    row, column = means[ROW_VARIANCE], means[COLUMN_VARIANCE]
    # Divide before the product: the fourth power of a small gradient is zero in float32.
    return row / row.builder.op("Max", _mean(row, -2), eps) * column


def _mean(tensor: Tensor, axis: int) -> Tensor:
    """Emit the mean over a dimension; 0 if there are no rows."""
    builder, axes = tensor.builder, tensor.builder.integers([axis])
    dimensions = None if tensor.shape is None else tensor.shape.dims
    if dimensions is not None and isinstance(dimensions[axis], int):
        return builder.op("ReduceMean", tensor, axes, keepdims=1)
    count = builder.op("Gather", builder.op("Shape", tensor), builder.constant(np.asarray(axis, np.int64)), axis=0)
    return builder.op("ReduceSum", tensor, axes, keepdims=1) / builder.cast(builder.op("Max", count, 1), tensor.dtype)


def _zeros(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    value = ir.tensor(np.zeros(1, dtype=like.dtype.numpy()))
    return like.builder.op("ConstantOfShape", like.builder.integers(shape), value=value, shape=shape, dtype=like.dtype)


adafactor = Adafactor
