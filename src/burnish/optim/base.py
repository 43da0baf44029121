"""What an optimizer is: a pure graph builder from parameters, gradients and state to the next parameters and state."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol, TypeGuard, runtime_checkable

import numpy as np
import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Builder, Tensor, zeros_like
from burnish.optim.slots import Slot
from burnish.settings import PlainSettings, call_hint, is_number, is_whole

Tensors = dict[str, Tensor]
RowForm = Literal["exact", "lazy"]
"""What it means to update the rows of a table alone that have a gradient: ``exact``, the same as to update all of it; ``lazy``,
the others miss what a step does to a row without a gradient, such as the decay of its momentum."""


@runtime_checkable
class Schedule(Protocol):
    """A learning rate computed in the graph from the step, so that whoever runs it needs no code of its own for that."""

    @property
    def name(self) -> str:
        """How the schedule is asked for."""
        ...

    @property
    def end(self) -> int | None:
        """The first step that it is not defined for; None for one without an end."""
        ...

    def hyperparameters(self) -> dict[str, float | None]:
        """Return the scalars that a step takes, with their defaults, as ``Optimizer.hyperparameters`` does."""
        ...

    def init(self, builder: Builder) -> Tensors:
        """Emit the initial state of a schedule that has some: ``<slot>`` -> scalar."""
        ...

    def rate(
        self, builder: Builder, step: Tensor, state: Mapping[str, Tensor], hyperparameters: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensors]:
        """Emit the rate of a step.

        Args:
            builder: emits into the graph.
            step: int64 scalar, 0 at the first step.
            state: the keys that ``init`` gives, among others.
            hyperparameters: scalars of the names that ``hyperparameters()`` gives, of any floating-point dtype.

        Returns:
            The rate, a float64 scalar, and the next state of the schedule, with the keys that ``init`` gives.
        """
        ...

    def options(self) -> dict[str, Any]:
        """Return name and settings as JSON-compatible values; ``burnish.optim.schedules.get`` builds it from them again."""
        ...


Rate = float | Schedule


@runtime_checkable
class Optimizer(Protocol):
    """A pure graph builder: (parameters, gradients, state, step) -> (next parameters, next state)."""

    @property
    def name(self) -> str:
        """How the optimizer is asked for."""
        ...

    def hyperparameters(self) -> dict[str, float | None]:
        """Return the scalars that a step takes, with their defaults; they become float32 graph inputs.

        One whose default is None has to be given with every step.
        """
        ...

    def init(self, builder: Builder, params: Mapping[str, Tensor]) -> Tensors:
        """Emit the initial state: ``<slot>/<initializer>`` -> value, or ``<slot>`` for what belongs to no single parameter."""
        ...

    def update(
        self,
        builder: Builder,
        params: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        step: Tensor,
        hyperparameters: Mapping[str, Tensor],
    ) -> tuple[Tensors, Tensors]:
        """Emit one update.

        Args:
            builder: emits into the graph.
            params: initializer name -> parameter, floating-point; the update is computed in its dtype.
            gradients: the same keys; dtype and shape of the parameter.
            state: the keys and dtypes that ``init`` gives.
            step: int64 scalar, the number of updates already done: 0 at the first.
            hyperparameters: scalars of the names that ``hyperparameters()`` gives, of any floating-point dtype.

        Returns:
            The next parameters and the next state, with the same keys.
        """
        ...

    def options(self) -> dict[str, Any]:
        """Return name and settings as JSON-compatible values; ``burnish.optim.get`` builds the optimizer from them again."""
        ...


@runtime_checkable
class Scheduled(Protocol):
    """An optimizer whose rates may be schedules: what a program reports of them, and where they end."""

    @property
    def end(self) -> int | None:
        """The first step that a schedule is not defined for; None where none has an end."""
        ...

    def rates(
        self, builder: Builder, step: Tensor, state: Mapping[str, Tensor], hyperparameters: Mapping[str, Tensor]
    ) -> Tensors:
        """Emit the rates that the graph computes itself; see ``RatedOptimizer.rates``."""
        ...


@dataclass(frozen=True)
class RatedOptimizer(PlainSettings):
    """What optimizers with a learning rate share: the rate is a number, which a step may override, or a schedule."""

    @property
    def slots(self) -> tuple[Slot, ...]:
        """What the method keeps; the schedule's own are not among them."""
        return ()

    @property
    def row_form(self) -> RowForm | None:
        """What updating rows of a parameter alone comes to; None where the method looks at whole parameters."""
        return None

    @property
    def looks_across_rows(self) -> bool:
        """Whether updating rows of a parameter alone looks at all of these rows for each: workers then need all of them."""
        return False

    lr: Rate

    @property
    def name(self) -> str:
        raise NotImplementedError

    def hyperparameters(self) -> dict[str, float | None]:
        return self.lr.hyperparameters() if isinstance(self.lr, Schedule) else {"lr": self.lr}

    @property
    def end(self) -> int | None:
        """The first step that the schedule is not defined for; None without one, or where it has no end."""
        return self.lr.end if isinstance(self.lr, Schedule) else None

    def rates(
        self, builder: Builder, step: Tensor, state: Mapping[str, Tensor], hyperparameters: Mapping[str, Tensor]
    ) -> Tensors:
        """Emit the rates that the graph computes itself, by the names under which a step reports them; none without a schedule.

        The arguments are those of ``update``. What ``update`` has emitted for the rate is not emitted again.
        """
        return {"lr": self.rate(builder, step, state, hyperparameters)[0]} if isinstance(self.lr, Schedule) else {}

    def options(self) -> dict[str, Any]:
        return {"name": self.name, **{field.name: as_option(getattr(self, field.name)) for field in fields(self)}}

    def update(
        self,
        builder: Builder,
        params: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        step: Tensor,
        hyperparameters: Mapping[str, Tensor],
    ) -> tuple[Tensors, Tensors]:
        raise NotImplementedError

    def init(self, builder: Builder, params: Mapping[str, Tensor]) -> Tensors:
        """Emit the initial state, as ``Optimizer.init`` does: zeros of each parameter for every slot that each has."""
        return self.rate_state(builder) | zero_slots(params, *(slot for slot in self.slots if slot.per_parameter))

    def rate_state(self, builder: Builder) -> Tensors:
        """Emit what the schedule keeps; part of ``init``."""
        return self.lr.init(builder) if isinstance(self.lr, Schedule) else {}

    def rate(
        self, builder: Builder, step: Tensor, state: Mapping[str, Tensor], hyperparameters: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensors]:
        """Emit the rate of this step, a scalar, and the next state of the schedule; part of ``update``."""
        if not isinstance(self.lr, Schedule):
            return hyperparameters["lr"], {}
        schedule = self.lr
        slots = schedule.init(Builder(ir.Graph([], [], nodes=[], opset_imports=builder.graph.opset_imports)))
        read = [state[slot].value for slot in slots] + [hyperparameters[name].value for name in schedule.hyperparameters()]
        key = ("rate", json.dumps(schedule.options(), sort_keys=True), step.value, *read)
        rate, following = builder.once(key, lambda: schedule.rate(builder, step, state, hyperparameters))
        return rate, dict(following)


def is_schedule(value: object) -> TypeGuard[Schedule]:
    """Whether something is a schedule. An optimizer has what the protocol asks for too, and so has a class of schedules."""
    return isinstance(value, Schedule) and not isinstance(value, type | RatedOptimizer)


def as_option(value: Any) -> Any:
    """Return a setting as a JSON-compatible value."""
    if isinstance(value, Schedule):
        return value.options()
    return list(value) if isinstance(value, tuple) else value


class Scalars:
    """Scalars of an update in the dtype of each parameter, each emitted once per graph, however many parameters there are.

    They are computed in float64: ``1 - 0.999`` has four correct digits in float32, and it divides every element.
    """

    def __init__(self, builder: Builder):
        self._builder = builder
        self._cast: dict[tuple[ir.Value, ir.DataType], Tensor] = {}
        self._epsilons: dict[tuple[ir.Value, float, ir.DataType], Tensor] = {}

    def double(self, tensor: Tensor) -> Tensor:
        """Cast a scalar to float64."""
        return self._builder.cast(tensor, ir.DataType.DOUBLE)

    def of(self, scalar: Tensor, like: Tensor) -> Tensor:
        """Return ``scalar`` in the dtype of ``like``."""
        key = (scalar.value, like.dtype)
        if key not in self._cast:
            self._cast[key] = self._builder.cast(scalar, like.dtype)
        return self._cast[key]

    def epsilon(self, eps: float, like: Tensor, factor: Tensor | None = None) -> Tensor:
        """Return ``eps``, times a float64 scalar where one is given, in the dtype of ``like``; not rounded to zero.

        Most values of eps are zero in float16, and a gradient of zero would be divided by it.
        """
        smallest = np.nextafter(np.zeros((), like.dtype.numpy()), np.ones((), like.dtype.numpy()))
        if factor is None:
            number = np.asarray(eps, like.dtype.numpy())
            return self._builder.constant(smallest if eps and not number else number)
        key = (factor.value, eps, like.dtype)
        if key not in self._epsilons:
            product = self._builder.cast(factor * eps, like.dtype)
            if eps and like.dtype == ir.DataType.FLOAT16:
                product = self._builder.op("Max", product, self._builder.constant(smallest))
            self._epsilons[key] = product
        return self._epsilons[key]


def zero_slots(params: Mapping[str, Tensor], *slots: str) -> Tensors:
    """Emit ``<slot>/<initializer>`` for every slot and parameter: zeros of its dtype and shape; part of ``init``."""
    return {f"{slot}/{name}": zeros_like(parameter) for slot in slots for name, parameter in params.items()}


def penalized(gradient: Tensor, parameter: Tensor, weight_decay: float) -> Tensor:
    """Emit the gradient with that of an L2 penalty on the weights added: ``gradient + weight_decay * parameter``."""
    return gradient + parameter * weight_decay if weight_decay else gradient


def check_rate(optimizer: str, lr: object) -> None:
    """Raise ConfigurationError for what is neither a schedule nor a finite number that is not negative."""
    if not is_schedule(lr):
        if not is_number(lr):
            raise ConfigurationError(
                f"{optimizer}: lr must be a finite number that is not negative, or a schedule of burnish.optim.schedules, "
                f"not {lr!r}{call_hint(lr)}"
            )
        check_not_negative(optimizer, lr=lr)


def check_betas(optimizer: str, betas: object, count: int = 2) -> tuple[float, ...]:
    """Return the betas as a tuple; raise ConfigurationError for what is not ``count`` numbers in [0, 1)."""
    if not isinstance(betas, tuple | list) or len(betas) != count:
        number = {2: "two", 3: "three"}[count]
        raise ConfigurationError(f"{optimizer}: betas must be {number} numbers, not {betas}")
    check_fraction(optimizer, **{f"betas[{index}]": beta for index, beta in enumerate(betas)})
    return tuple(betas)


def power(builder: Builder, base: float, exponent: Tensor) -> Tensor:
    """Emit ``base ** exponent`` for a float64 scalar exponent."""
    return builder.op("Pow", builder.scalar(base, exponent), exponent)


def check_finite(optimizer: str, **numbers: float) -> None:
    """Raise ConfigurationError, naming the argument, for what is not a finite number."""
    for name, number in numbers.items():
        if not is_number(number):
            raise ConfigurationError(f"{optimizer}: {name} must be a finite number, not {number!r}")


def check_not_negative(optimizer: str, **numbers: float) -> None:
    """Raise ConfigurationError, naming the argument, for what is not a finite number or is negative."""
    for name, number in numbers.items():
        if not is_number(number) or number < 0.0:
            raise ConfigurationError(f"{optimizer}: {name} must be a finite number that is not negative, not {number!r}")


def check_positive(optimizer: str, **numbers: float) -> None:
    """Raise ConfigurationError, naming the argument, for what is not a finite number or is not above 0."""
    for name, number in numbers.items():
        if not is_number(number) or number <= 0.0:
            raise ConfigurationError(f"{optimizer}: {name} must be a finite number above 0, not {number!r}")


def check_fraction(optimizer: str, **numbers: float) -> None:
    """Raise ConfigurationError, naming the argument, for what is not a number in [0, 1)."""
    for name, number in numbers.items():
        if not is_number(number) or not 0.0 <= number < 1.0:
            raise ConfigurationError(f"{optimizer}: {name} must be at least 0 and less than 1, not {number!r}")


def check_count(optimizer: str, **numbers: int) -> None:
    """Raise ConfigurationError, naming the argument, for what is not a whole number of at least 1, or is too large for int64."""
    for name, number in numbers.items():
        if not is_whole(number) or number < 1:
            raise ConfigurationError(f"{optimizer}: {name} must be a whole number of at least 1, not {number!r}")
        if number >= 2**62:
            raise ConfigurationError(f"{optimizer}: {name} must be below 2^62, not {number}: give a smaller one")
