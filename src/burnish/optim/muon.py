"""Muon: momentum with orthogonalized matrices, and another optimizer for the other parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from burnish.errors import ConfigurationError
from burnish.graph import Builder, Tensor
from burnish.optim.adam import adam
from burnish.optim.arithmetic import (
    Tensors,
    cast_like,
    double,
    epsilon,
    euclidean_norm,
    kept_share,
    known_rank,
    known_shape,
    stepped,
    zero_slots,
)
from burnish.optim.base import Rate, RatedOptimizer, UpdateInputs
from burnish.optim.registry import get
from burnish.optim.slots import Slot, slots_of
from burnish.validation import check_finite, check_fraction, check_not_negative, check_positive, is_whole, require

MOMENTUM = Slot("momentum")
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ADJUSTMENTS = ("original", "match_rms_adamw")


@dataclass(frozen=True)
class Muon(RatedOptimizer):
    """Muon, the mathematics of ``torch.optim.Muon``.

    For a matrix p of m rows and n columns, with gradient g and momentum buffer b::

        b = momentum * b + (1 - momentum) * g
        d = b                                        or, with nesterov, momentum * b + (1 - momentum) * g
        x = d / max(|d|, eps)                        |d| the root of the sum of squares
        x = c0 * x + (c1 * a + c2 * a²) x            ns_steps times, with a = x xᵀ and ns_coefficients = (c0, c1, c2)
        p = (1 - lr * weight_decay) * p - lr * adjustment * x

    The loop is a Newton-Schulz iteration: it keeps the singular vectors of d and moves its singular values close to 1. The
    adjustment is ``sqrt(max(1, m / n))`` ("original", also None) or ``0.2 * sqrt(max(m, n))`` ("match_rms_adamw", for rates and
    decay tuned for AdamW). The iteration runs in the parameter's dtype, not in bfloat16 as in PyTorch: runtimes for CPUs have no
    bfloat16 matrix product, and every runtime then computes the same formula. If m > n it multiplies from the right, with the
    smaller of the two Gram matrices, for the same x.

    Muon is meant for the matrices of hidden layers. Parameters of other ranks go to the optimizer ``others``, with the rate lr
    times others_lr_scale instead of its own. With ``flatten_kernels``, parameters of more than two dimensions, such as
    convolution kernels, count as matrices of their first extent by the product of the others. Embeddings and the last layer are
    matrices by shape; Muon's author uses AdamW for them too, which needs parameter groups (``burnish.optim.groups``).

    Sources: Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024; Liu et al., "Muon is scalable for LLM
    training", 2025. The defaults are PyTorch's. State: ``momentum/<initializer>`` in the matrix's dtype and shape (PyTorch's
    ``momentum_buffer``), and the state of ``others``.
    """

    name = "muon"
    lr: Rate = 1e-3
    momentum: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.1
    ns_coefficients: tuple[float, ...] = COEFFICIENTS
    ns_steps: int = 5
    eps: float = 1e-7
    adjust_lr_fn: str | None = None
    flatten_kernels: bool = False
    others: RatedOptimizer | None = field(default_factory=adam)
    others_lr_scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction(self.name, momentum=self.momentum)
        check_not_negative(self.name, weight_decay=self.weight_decay)
        check_positive(self.name, eps=self.eps)
        if not isinstance(self.ns_coefficients, tuple | list) or len(self.ns_coefficients) != 3:
            raise ConfigurationError(f"{self.name}: ns_coefficients must be three numbers, not {self.ns_coefficients}")
        check_finite(self.name, **{f"ns_coefficients[{index}]": number for index, number in enumerate(self.ns_coefficients)})
        object.__setattr__(self, "ns_coefficients", tuple(self.ns_coefficients))
        is_few = is_whole(self.ns_steps) and 1 <= self.ns_steps < 100
        require(is_few, self.name, "ns_steps", self.ns_steps, "a whole number from 1 to 99")
        known = f"one of {', '.join(ADJUSTMENTS)}, or None"
        require(self.adjust_lr_fn in (None, *ADJUSTMENTS), self.name, "adjust_lr_fn", self.adjust_lr_fn, known)
        if self.others is not None and (isinstance(self.others, Muon) or not isinstance(self.others, RatedOptimizer)):
            raise _refused(self.others)
        check_not_negative(self.name, others_lr_scale=self.others_lr_scale)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (MOMENTUM, *slots_of(self.others))

    def options(self) -> dict[str, Any]:
        return super().options() | {"others": None if self.others is None else _without_rate(self.others.options())}

    def init(self, builder: Builder, params: Mapping[str, Tensor]) -> Tensors:
        matrices, rest = self._divide(params)
        state = self.rate_state(builder) | zero_slots(matrices, MOMENTUM)
        if self.others is not None and rest:
            state |= self.others.init(builder, rest)
        return state

    def rate(self, inputs: UpdateInputs) -> tuple[Tensor, Tensors]:
        """Emit the rate of this step in float64, once for matrices and other parameters."""
        rate, following = super().rate(inputs)
        return inputs.builder.once((Muon, rate.value), lambda: double(rate)), following

    def apply(self, inputs: UpdateInputs) -> tuple[Tensors, Tensors]:
        matrices, rest = self._divide(inputs.params)
        next_params, next_state = super().apply(replace(inputs, params=matrices))
        if self.others is not None and rest:
            rate, _ = self.rate(inputs)
            if self.others_lr_scale != 1.0:
                rate = rate * self.others_lr_scale
            changed, slots = self.others.apply(replace(inputs, params=rest, hyperparameters={"lr": rate}))
            next_params |= changed
            next_state |= slots
        return {name: next_params[name] for name in inputs.params}, next_state

    def update(
        self, parameter: Tensor, gradient: Tensor, slots: Mapping[Slot, Tensor], *, step: Tensor, rate: Tensor
    ) -> tuple[Tensor, dict[Slot, Tensor]]:
        rows, columns = _extents(parameter)
        keep = kept_share(rate, self.weight_decay)
        momentum = self._averaged(slots[MOMENTUM], gradient)
        direction = self._averaged(momentum, gradient) if self.nesterov else momentum
        orthogonal = self._orthogonalized(direction, epsilon(self.eps, parameter), rows, columns)
        adjustment = self._adjustment(rows, columns)
        if adjustment != 1.0:
            rate = rate * adjustment
        return stepped(parameter, orthogonal, rate, keep), {MOMENTUM: momentum}

    def _divide(self, params: Mapping[str, Tensor]) -> tuple[Tensors, Tensors]:
        matrices: Tensors = {}
        rest: Tensors = {}
        for name, parameter in params.items():
            rank = known_rank(parameter)
            is_matrix = rank == 2 or (self.flatten_kernels and rank > 2)
            (matrices if is_matrix else rest)[name] = parameter
        if rest and self.others is None:
            raise ConfigurationError(
                f"{self.name}: {len(rest)} of {len(params)} parameters are no matrices, such as '{next(iter(rest))}', "
                "and others is None; give an optimizer for them as others"
            )
        return matrices, rest

    def _averaged(self, average: Tensor, value: Tensor) -> Tensor:
        return average * self.momentum + value * (1.0 - self.momentum)

    def _orthogonalized(self, direction: Tensor, eps: Tensor, rows: int, columns: int) -> Tensor:
        builder = direction.builder
        matrix = direction / builder.op("Max", cast_like(euclidean_norm(direction), direction), eps)
        flat = direction.rank != 2
        if flat:
            matrix = builder.op("Reshape", matrix, builder.integers([rows, columns]))
        c0, c1, c2 = self.ns_coefficients
        for _ in range(self.ns_steps):
            transposed = builder.op("Transpose", matrix, perm=[1, 0])
            left = rows <= columns
            gram = builder.op("MatMul", matrix, transposed) if left else builder.op("MatMul", transposed, matrix)
            # The signs keep c2 separate: ONNX Runtime would fuse a scalar into the product, rounded to float32.
            factor = gram * c1 + -builder.op("MatMul", gram, gram) * -c2
            product = builder.op("MatMul", factor, matrix) if left else builder.op("MatMul", matrix, factor)
            matrix = matrix * c0 + product
        return builder.op("Reshape", matrix, builder.op("Shape", direction), like=direction) if flat else matrix

    def _adjustment(self, rows: int, columns: int) -> float:
        if self.adjust_lr_fn == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1.0, rows / columns))


def _extents(parameter: Tensor) -> tuple[int, int]:
    """Return the extents of a parameter as a matrix: the first, and the product of the others."""
    rows, *extents = known_shape(parameter)
    return rows, math.prod(extents)


def muon(
    lr: Rate = 1e-3,
    momentum: float = 0.95,
    nesterov: bool = True,
    weight_decay: float = 0.1,
    ns_coefficients: tuple[float, ...] = COEFFICIENTS,
    ns_steps: int = 5,
    eps: float = 1e-7,
    adjust_lr_fn: str | None = None,
    flatten_kernels: bool = False,
    others: str | Mapping[str, Any] | None = "adam",
    others_lr_scale: float = 1.0,
) -> Muon:
    """Return Muon; see ``Muon`` for the mathematics.

    Args:
        lr: learning rate of the matrices, or a schedule.
        momentum: decay factor of the buffer, in [0, 1).
        nesterov: True to look ahead along the buffer.
        weight_decay: share of a matrix, times lr, subtracted at every step.
        ns_coefficients: coefficients of x, (x xᵀ) x and (x xᵀ)² x in the Newton-Schulz iteration.
        ns_steps: steps of the iteration, 1 to 99.
        eps: smallest norm that a matrix is divided by, above 0.
        adjust_lr_fn: dependence of lr on a matrix's extents: "original", "match_rms_adamw", or None for the first.
        flatten_kernels: True to treat parameters of more than two dimensions as matrices too.
        others: optimizer of the other parameters: a name, or options such as ``{"name": "adamw", "eps": 1e-6}``, without a rate.
            The default is Adam, without weight decay because most of them are biases and scales. None refuses them.
        others_lr_scale: factor of lr for them.

    Raises:
        ConfigurationError: a negative or non-finite number, or one outside its range; an unknown adjust_lr_fn or optimizer. At
            compilation: with others None, a parameter that is not a matrix.
    """
    return Muon(
        lr,
        momentum,
        nesterov,
        weight_decay,
        ns_coefficients,
        ns_steps,
        eps,
        adjust_lr_fn,
        flatten_kernels,
        _optimizer_of_others(others),
        others_lr_scale,
    )


def _optimizer_of_others(others: object) -> Any:
    """Return the optimizer of a name or options; refuse an object, because its rate would not be used."""
    if others is None:
        return None
    if not isinstance(others, str | Mapping):
        raise _refused(others)
    if "lr" in others and not isinstance(others, str):
        raise ConfigurationError("muon: others takes muon's own rate; leave out its lr, and give others_lr_scale instead")
    return get(others)


def _refused(others: object) -> ConfigurationError:
    return ConfigurationError(
        "muon: others must be the name or the options, without lr, of a plain optimizer for parameters of every shape, or None, "
        f"not {others!r}"
    )


def _without_rate(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key != "lr"}
