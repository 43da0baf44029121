"""What an optimizer is: a pure graph builder from parameters, gradients and state to the next parameters and state.

Most update one parameter at a time: they are a ``RatedOptimizer`` with a formula, ``update``. What looks at all parameters or
gradients together (clipping, accumulation, averages, groups) goes around such an optimizer as a ``Transform``.
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
"""What it means to update the rows of a table alone that have a gradient: ``exact``, the same as to update all of it; ``lazy``,
the others miss what a step does to a row without a gradient, such as the decay of its momentum."""


@dataclass(frozen=True)
class UpdateInputs:
    """What an update of all parameters reads.

    Attributes:
        builder: emits into the graph.
        params: initializer name -> parameter, floating-point; the update is computed in its dtype.
        gradients: the same keys; dtype and shape of the parameter.
        state: the keys and dtypes that ``Optimizer.init`` gives.
        step: int64 scalar, the number of updates already done: 0 at the first.
        hyperparameters: scalars of the names that ``Optimizer.hyperparameters`` gives, of any floating-point dtype.
        finite: whether all gradients are finite, a boolean scalar, where the graph has found that already.
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

    def apply(self, inputs: UpdateInputs) -> tuple[Tensors, Tensors]:
        """Emit one update of all parameters; the next parameters and the next state, with the same keys."""
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

    def rates(self, inputs: UpdateInputs) -> Tensors:
        """Emit the rates that the graph computes itself; see ``RatedOptimizer.rates``."""
        ...


@dataclass(frozen=True)
class RatedOptimizer(NamedSettings):
    """An optimizer with a learning rate and a formula for one parameter.

    The rate is a number, which a step may override, or a schedule. A subclass adds its settings as fields, and ``update``.
    """

    lr: Rate

    def __post_init__(self) -> None:
        check_rate(self.name, self.lr)

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

    @abstractmethod
    def update(
        self, parameter: Tensor, gradient: Tensor, slots: Mapping[Slot, Tensor], *, step: Tensor, rate: Tensor
    ) -> tuple[Tensor, dict[Slot, Tensor]]:
        """Emit the update of one parameter.

        What is computed of scalars alone is emitted once, however many parameters there are.

        Args:
            parameter: floating-point.
            gradient: of its dtype and shape.
            slots: what is kept of this parameter, and what is kept for all of them.
            step: int64 scalar, the number of updates already done: 0 at the first.
            rate: scalar of any floating-point dtype.

        Returns:
            The next parameter, and the next value of each slot.
        """

    def hyperparameters(self) -> dict[str, float | None]:
        return self.lr.hyperparameters() if isinstance(self.lr, Schedule) else {"lr": self.lr}

    @property
    def end(self) -> int | None:
        """The first step that the schedule is not defined for; None without one, or where it has no end."""
        return self.lr.end if isinstance(self.lr, Schedule) else None

    def rates(self, inputs: UpdateInputs) -> Tensors:
        """Emit the rates that the graph computes itself, by the names under which a step reports them; none without a schedule.

        What ``apply`` has emitted for the rate is not emitted again.
        """
        return {"lr": self.rate(inputs)[0]} if isinstance(self.lr, Schedule) else {}

    def init(self, builder: Builder, params: Mapping[str, Tensor]) -> Tensors:
        """Emit the initial state, as ``Optimizer.init`` does: zeros of each parameter for every slot that each has."""
        return self.rate_state(builder) | zero_slots(params, *(slot for slot in self.slots if slot.per_parameter))

    def rate_state(self, builder: Builder) -> Tensors:
        """Emit what the schedule keeps; part of ``init``."""
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
    """An optimizer around another one, whose hyperparameters and frozen parameters it hands on.

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
        """The first step that a schedule inside is not defined for; None where none has an end."""
        return self.optimizer.end if isinstance(self.optimizer, Scheduled) else None

    def rates(self, inputs: UpdateInputs) -> Tensors:
        """Emit the rates that the graph computes itself; see ``RatedOptimizer.rates``."""
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
    """The optimizer and those inside it, from the outermost."""
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "optimizer", None)


def options_without_effect(optimizer: object, names: Collection[str]) -> list[str]:
    """Return which options of a bound optimizer change nothing of the parameters that it updates, as sentences."""
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
    """Raise ConfigurationError where a transform goes around another of its kind: their state would have the same names."""
    for inner in layers_of(optimizer.optimizer):
        if isinstance(inner, Transform) and isinstance(inner, kind):
            raise ConfigurationError(
                f"{optimizer.name}: the optimizer inside is already wrapped in {inner.name}, and both would keep state of the "
                "same name: leave one of them out"
            )


def is_optimizer(value: object) -> TypeGuard[Optimizer]:
    """Whether something is an optimizer; a class of optimizers is none, although it has the methods."""
    return isinstance(value, Optimizer) and not isinstance(value, type)


def is_schedule(value: object) -> TypeGuard[Schedule]:
    """Whether something is a schedule. An optimizer has what the protocol asks for too, and so has a class of schedules."""
    return isinstance(value, Schedule) and not isinstance(value, type | RatedOptimizer)


def check_rate(optimizer: str, lr: object) -> None:
    """Raise ConfigurationError for what is neither a schedule nor a finite number that is not negative."""
    if is_schedule(lr):
        return
    if not is_number(lr):
        raise ConfigurationError(
            f"{optimizer}: lr must be a finite number that is not negative, or a schedule of burnish.optim.schedules, "
            f"not {lr!r}{call_hint(lr)}"
        )
    check_not_negative(optimizer, lr=lr)


def check_betas(optimizer: str, betas: object) -> tuple[float, ...]:
    """Return the betas as a tuple; raise ConfigurationError for what is not two numbers in [0, 1)."""
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ConfigurationError(f"{optimizer}: betas must be two numbers, not {betas}")
    check_fraction(optimizer, **{f"betas[{index}]": beta for index, beta in enumerate(betas)})
    return tuple(betas)
