"""LAMB: Adam with a rate for each layer, for large batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from burnish.graph import Builder, Tensor
from burnish.optim.adam import FIRST_MOMENT, SECOND_MOMENT
from burnish.optim.base import (
    Rate,
    RatedOptimizer,
    Scalars,
    Tensors,
    check_betas,
    check_not_negative,
    check_rate,
    penalized,
    power,
)
from burnish.optim.norms import trust_ratio
from burnish.optim.parameter_shapes import known_rank


@dataclass(frozen=True)
class LAMB(RatedOptimizer):
    """Layer-wise adaptive moments for batch training, the mathematics of ``optax.lamb``.

    With parameter p, gradient g, moments m and v, t = step + 1, and Euclidean norms over the whole parameter::

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g²
        u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * p
        p = p - lr * (|p| / |u|) * u                  or p - lr * u, where |p| or |u| is 0

    Parameters of fewer than two dimensions (biases, scales of normalization) get neither the ratio nor the decay with
    ``adapt_vectors=False``, the usual practice in training with large batches. Source, and of the defaults: You et al.,
    "Large batch optimization for deep learning: training BERT in 76 minutes", 2020. State, of the parameter's dtype and shape:
    ``first_moment/<initializer>`` and ``second_moment/<initializer>``.
    """

    name = "lamb"
    slots = (FIRST_MOMENT, SECOND_MOMENT)
    lr: Rate = 1e-3
    betas: tuple[float, ...] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 1e-2
    adapt_vectors: bool = True

    def __post_init__(self) -> None:
        check_rate(self.name, self.lr)
        check_not_negative(self.name, eps=self.eps, weight_decay=self.weight_decay)
        object.__setattr__(self, "betas", check_betas(self.name, self.betas))

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
        beta1, beta2 = self.betas
        lr, next_state = self.rate(builder, step, state, hyperparameters)
        lr = scalars.double(lr)
        t = scalars.double(step) + 1.0
        # u = m * correction / (sqrt(v) + eps * root), with both corrections as scalars
        root = builder.op("Sqrt", 1.0 - power(builder, beta2, t))
        correction = root / (1.0 - power(builder, beta1, t))
        next_params: Tensors = {}
        for name, parameter in params.items():
            gradient = gradients[name]
            first = state[f"{FIRST_MOMENT}/{name}"] * beta1 + gradient * (1.0 - beta1)
            second = state[f"{SECOND_MOMENT}/{name}"] * beta2 + gradient * gradient * (1.0 - beta2)
            next_state[f"{FIRST_MOMENT}/{name}"] = first
            next_state[f"{SECOND_MOMENT}/{name}"] = second
            direction = first * scalars.of(correction, parameter)
            direction = direction / (builder.op("Sqrt", second) + scalars.epsilon(self.eps, parameter, root))
            rate = lr
            if self.adapt_vectors or known_rank(parameter) > 1:
                direction = penalized(direction, parameter, self.weight_decay)
                rate = rate * trust_ratio(builder, parameter, direction)
            next_params[name] = parameter - direction * scalars.of(rate, parameter)
        return next_params, next_state


def lamb(
    lr: Rate = 1e-3,
    betas: tuple[float, ...] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 1e-2,
    adapt_vectors: bool = True,
) -> LAMB:
    """Return LAMB; see ``LAMB`` for the mathematics.

    Args:
        lr: learning rate, the default of the program's input ``lr``; or a schedule. A step changes every weight by this share
            of its norm.
        betas: share of the first and second moment that is kept from step to step, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: share of the weight that is added to its update, before the ratio is taken.
        adapt_vectors: whether parameters of fewer than two dimensions get the ratio and the decay too.

    Raises:
        ConfigurationError: a negative or non-finite number, or a beta outside [0, 1).
    """
    return LAMB(lr, betas, eps, weight_decay, adapt_vectors)
