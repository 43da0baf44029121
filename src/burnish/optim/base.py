"""The interface of an optimizer: a pure graph builder from parameters, gradients and state to their next values.

Most optimizers update one parameter at a time: they are a ``RatedOptimizer`` with a formula, ``update``. Operations on all
parameters or gradients together (clipping, accumulation, averages, groups) wrap such an optimizer as a ``Transform``.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, Self, TypeGuard, runtime_checkable

import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Builder, Tensor
from burnish.optim.arithmetic import Tensors, zero_slots
from burnish.optim.parameters import Infos, MayDoNothing, bind, frozen_parameters
from burnish.optim.slots import Slot
from burnish.settings import NamedSettings, call_hint
from burnish.validation import check_fraction, check_not_negative, is_number

RowForm = Literal["exact", "lazy"]
"""Effect of updating only the rows of a table that have a gradient: ``exact``, the same as a full update; ``lazy``, the other
rows miss the part of a step that needs no gradient, such as the decay of momentum.
"""


@dataclass(frozen=True)
class UpdateInputs:
    """The inputs of an update of all parameters.

    Attributes:
        builder: builder of the graph.
        params: initializer name -> parameter, floating-point; the update is computed in its dtype.
        gradients: gradients with the same keys, dtypes and shapes.
        state: state with the keys and dtypes of ``Optimizer.init``.
        step: number of past updates, an int64 scalar: 0 at the first.
        hyperparameters: scalars named by ``Optimizer.hyperparameters``, of any floating-point dtype.
        finite: boolean scalar, True if all gradients are finite, if the graph already computes it.
    """

    builder: Builder
    params: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    step: Tensor
    hyperparameters: Mapping[str, Tensor]
    finite: Tensor | None = None


@runtime_checkable
class Schedule(Protocol):
    """A learning rate computed in the graph from the step, so that the training loop needs no code for it."""

    @property
    def name(self) -> str: ...

    @property
    def end(self) -> int | None:
        """The first step after the schedule; None for a schedule without an end."""
        ...

    def hyperparameters(self) -> dict[str, float | None]:
        """Return the scalar inputs of a step, with their defaults, as in ``Optimizer.hyperparameters``."""
        ...

    def init(self, builder: Builder) -> Tensors:
        """Emit the initial state, if any: ``<slot>`` -> scalar."""
        ...

    def rate(
        self, builder: Builder, step: Tensor, state: Mapping[str, Tensor], hyperparameters: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensors]:
        """Emit the rate of a step.

        Args:
            builder: builder of the graph.
            step: int64 scalar, 0 at the first step.
            state: state that includes the keys of ``init``.
            hyperparameters: scalars named by ``hyperparameters()``, of any floating-point dtype.

        Returns:
            The rate, a float64 scalar, and the next state, with the keys of ``init``.
        """
        ...

    def options(self) -> dict[str, Any]:
        """Return name and settings as JSON-compatible values, from which ``burnish.optim.schedules.get`` rebuilds the
        schedule.
        """
        ...


Rate = float | Schedule


@runtime_checkable
class Optimizer(Protocol):
    """A pure graph builder: (parameters, gradients, state, step) -> (next parameters, next state)."""

    @property
    def name(self) -> str: ...

    def hyperparameters(self) -> dict[str, float | None]:
        """Return the scalar inputs of a step, with their defaults; they become float32 graph inputs.

        An input with default None must be given at every step.
        """
        ...

    def init(self, builder: Builder, params: Mapping[str, Tensor]) -> Tensors:
        """Emit the initial state: ``<slot>/<initializer>`` -> value, or ``<slot>`` for state of no single parameter."""
        ...

    def apply(self, inputs: UpdateInputs) -> tuple[Tensors, Tensors]:
        """Emit one update of all parameters: the next parameters and the next state, with the same keys."""
        ...

    def options(self) -> dict[str, Any]:
        """Return name and settings as JSON-compatible values, from which ``burnish.optim.get`` rebuilds the optimizer."""
        ...


@runtime_checkable
class Scheduled(Protocol):
    """An optimizer whose rates may be schedules, with their end and the rates to report."""

    @property
    def end(self) -> int | None: ...

    def rates(self, inputs: UpdateInputs) -> Tensors: ...


@dataclass(frozen=True)
class RatedOptimizer(NamedSettings):
    """An optimizer with a learning rate and a formula for one parameter.

    The rate is a schedule or a number, the default of the program's input ``lr``, which a step may override. A subclass adds its
    settings as fields, and ``update``.
    """

    lr: Rate

    def __post_init__(self) -> None:
        check_rate(self.name, self.lr)

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The state that the method keeps, without the schedule's."""
        return ()

    @property
    def row_form(self) -> RowForm | None:
        """Effect of updating only some rows of a parameter; None if the method needs whole parameters."""
        return None

    @property
    def looks_across_rows(self) -> bool:
        """True if the update of a row depends on the other updated rows, so that workers need all of them."""
        return False

    @abstractmethod
    def update(
        self, parameter: Tensor, gradient: Tensor, slots: Mapping[Slot, Tensor], *, step: Tensor, rate: Tensor
    ) -> tuple[Tensor, dict[Slot, Tensor]]:
        """Emit the update of one parameter.

        Computations on scalars are emitted once for all parameters.

        Args:
            parameter: floating-point.
            gradient: in the parameter's dtype and shape.
            slots: state of this parameter, and shared state.
            step: number of past updates, an int64 scalar: 0 at the first.
            rate: scalar of any floating-point dtype.

        Returns:
            The next parameter, and the next value of each slot.
        """

    def hyperparameters(self) -> dict[str, float | None]:
        return self.lr.hyperparameters() if isinstance(self.lr, Schedule) else {"lr": self.lr}

    @property
    def end(self) -> int | None:
        """The first step after the schedule; None without a schedule or without an end."""
        return self.lr.end if isinstance(self.lr, Schedule) else None

    def rates(self, inputs: UpdateInputs) -> Tensors:
        """Emit the rates that the graph computes itself, by the names in a step's report; none without a schedule.

        Nodes that ``apply`` already emitted for the rate are reused.
        """
        return {"lr": self.rate(inputs)[0]} if isinstance(self.lr, Schedule) else {}

    def init(self, builder: Builder, params: Mapping[str, Tensor]) -> Tensors:
        """Emit the initial state, as in ``Optimizer.init``: zeros of each parameter for every per-parameter slot."""
        return self.rate_state(builder) | zero_slots(params, *(slot for slot in self.slots if slot.per_parameter))

    def rate_state(self, builder: Builder) -> Tensors:
        return self.lr.init(builder) if isinstance(self.lr, Schedule) else {}

    def apply(self, inputs: UpdateInputs) -> tuple[Tensors, Tensors]:
        rate, next_state = self.rate(inputs)
        next_params: Tensors = {}
        with inputs.builder.each_scalar_once():
            for name, parameter in inputs.params.items():
                entries = {slot: _entry(slot, name) for slot in self.slots}
                slots = {slot: inputs.state[entry] for slot, entry in entries.items() if entry in inputs.state}
                following, kept = self.update(parameter, inputs.gradients[name], slots, step=inputs.step, rate=rate)
                next_params[name] = following
                next_state |= {entries[slot]: value for slot, value in kept.items()}
        return next_params, next_state

    def rate(self, inputs: UpdateInputs) -> tuple[Tensor, Tensors]:
        """Emit the rate of this step, a scalar, and the next state of the schedule; part of ``apply``."""
        state, step, hyperparameters = inputs.state, inputs.step, inputs.hyperparameters
        if not isinstance(self.lr, Schedule):
            return hyperparameters["lr"], {}
        schedule = self.lr
        slots = schedule.init(Builder(ir.Graph([], [], nodes=[], opset_imports=inputs.builder.graph.opset_imports)))
        read = [state[slot].value for slot in slots] + [hyperparameters[name].value for name in schedule.hyperparameters()]
        key = ("rate", json.dumps(schedule.options(), sort_keys=True), step.value, *read)
        rate, following = inputs.builder.once(key, lambda: schedule.rate(inputs.builder, step, state, hyperparameters))
        return rate, dict(following)


def _entry(slot: Slot, name: str) -> str:
    return f"{slot}/{name}" if slot.per_parameter else slot


@dataclass(frozen=True)
class Transform(NamedSettings):
    """An optimizer around another one, with the inner one's hyperparameters and frozen parameters.

    A subclass adds its settings as fields, each with a JSON-compatible value, and the methods ``init`` and ``apply``.
    """

    optimizer: Optimizer

    def __post_init__(self) -> None:
        if not is_optimizer(self.optimizer):
            raise ConfigurationError(
                f"{self.name}: it goes around an optimizer of burnish.optim, such as burnish.optim.sgd(), not {self.optimizer!r}"
            )

    def hyperparameters(self) -> dict[str, float | None]:
        return self.optimizer.hyperparameters()

    @property
    def end(self) -> int | None:
        return self.optimizer.end if isinstance(self.optimizer, Scheduled) else None

    def rates(self, inputs: UpdateInputs) -> Tensors:
        return self.optimizer.rates(inputs) if isinstance(self.optimizer, Scheduled) else {}

    def init(self, builder: Builder, params: Mapping[str, Tensor]) -> Tensors:
        return self.optimizer.init(builder, params)

    @abstractmethod
    def apply(self, inputs: UpdateInputs) -> tuple[Tensors, Tensors]: ...

    def options(self) -> dict[str, Any]:
        settings = super().options()
        inside = settings.pop("optimizer")
        return {**settings, "optimizer": inside}

    def bind(self, infos: Infos) -> Self:
        return replace(self, optimizer=bind(self.optimizer, infos))

    @property
    def frozen(self) -> frozenset[str]:
        return frozen_parameters(self.optimizer)


def layers_of(optimizer: object) -> Iterator[object]:
    """Yield the optimizer and those inside it, from the outermost."""
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "optimizer", None)


def options_without_effect(optimizer: object, names: Collection[str]) -> list[str]:
    """Return the options of a bound optimizer that do not affect the parameters it updates, as sentences."""
    parts = [part for layer in layers_of(optimizer) for part in (layer, *getattr(layer, "transforms", ()))]
    found = [sentence for part in parts if isinstance(part, MayDoNothing) for sentence in part.without_effect(names)]
    methods = next((part.methods for part in parts if hasattr(part, "methods")), parts[-1:])
    for method in methods:
        for setting, needed in getattr(method, "needs", {}).items():
            is_read = any(getattr(each, setting, 0) and getattr(each, needed, 0) for each in methods)
            if getattr(method, setting) and not is_read:
                found.append(f"{method.name}: {setting} changes nothing without {needed}: give both, or neither")
    return [*dict.fromkeys(found)]


def check_once(optimizer: Transform, kind: type) -> None:
    """Raise ConfigurationError if a transform wraps another of its kind: their state would have the same names."""
    for inner in layers_of(optimizer.optimizer):
        if isinstance(inner, Transform) and isinstance(inner, kind):
            raise ConfigurationError(
                f"{optimizer.name}: the optimizer inside is already wrapped in {inner.name}, and both would keep state of the "
                "same name: leave one of them out"
            )


def is_optimizer(value: object) -> TypeGuard[Optimizer]:
    """True for an optimizer object; False for an optimizer class, although it has the methods."""
    return isinstance(value, Optimizer) and not isinstance(value, type)


def is_schedule(value: object) -> TypeGuard[Schedule]:
    """True for a schedule object; False for optimizers and for classes of schedules, although they match the protocol."""
    return isinstance(value, Schedule) and not isinstance(value, type | RatedOptimizer)


def check_rate(optimizer: str, lr: object) -> None:
    """Raise ConfigurationError for anything but a schedule or a finite number of at least 0."""
    if is_schedule(lr):
        return
    if not is_number(lr):
        raise ConfigurationError(
            f"{optimizer}: lr must be a finite number that is not negative, or a schedule of burnish.optim.schedules, "
            f"not {lr!r}{call_hint(lr)}"
        )
    check_not_negative(optimizer, lr=lr)


def check_betas(optimizer: str, betas: object) -> tuple[float, ...]:
    """Return the betas as a tuple; raise ConfigurationError unless they are two numbers in [0, 1)."""
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ConfigurationError(f"{optimizer}: betas must be two numbers, not {betas}")
    check_fraction(optimizer, **{f"betas[{index}]": beta for index, beta in enumerate(betas)})
    return tuple(betas)
