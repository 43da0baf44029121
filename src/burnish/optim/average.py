"""Averages of the parameters along the way, which often predict better than where the way ends."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from burnish.errors import ConfigurationError
from burnish.graph import Builder, Tensor
from burnish.optim.accumulate import Accumulate
from burnish.optim.arithmetic import Tensors, cast_like, count, double, number
from burnish.optim.base import Transform, UpdateInputs, check_once, layers_of
from burnish.optim.slots import Slot, slots_of
from burnish.validation import check_count, check_fraction

AVERAGE = Slot("average", is_average=True, of_method=False)
COUNT = Slot("average_count", per_parameter=False, of_method=False)


@dataclass(frozen=True)
class ParameterAverage(Transform):
    """An optimizer that also keeps an average of the parameters; training itself does not see it.

    State: ``average/<initializer>``, of the parameter's dtype and shape, which starts as the parameter; and, where the average
    needs it, the int64 scalar ``average_count``: how many values are in it.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check_once(self, ParameterAverage)
        if any(slot.is_average for slot in slots_of(self.optimizer)):
            raise ConfigurationError(
                f"{self.name}: the optimizer inside keeps an average of the parameters itself, and both would keep state of the "
                f"same name: leave {self.name} out"
            )

    @property
    @abstractmethod
    def counts(self) -> bool:
        """Whether the average depends on how many values are in it."""

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (AVERAGE, *((COUNT,) if self.counts else ()))

    def init(self, builder: Builder, params: Mapping[str, Tensor]) -> Tensors:
        averages = {f"{AVERAGE}/{name}": parameter for name, parameter in params.items()}
        counter = {COUNT: count(builder, 0)} if self.counts else {}
        return self.optimizer.init(builder, params) | averages | counter

    def apply(self, inputs: UpdateInputs) -> tuple[Tensors, Tensors]:
        builder, state = inputs.builder, inputs.state
        next_params, next_state = self.optimizer.apply(inputs)
        counted = state.get(COUNT)
        share, taken = self.share(inputs.step, counted)
        with builder.each_scalar_once():
            for name, parameter in next_params.items():
                average = state[f"{AVERAGE}/{name}"]
                moved = average + (parameter - average) * cast_like(share, parameter)
                next_state[f"{AVERAGE}/{name}"] = moved if taken is None else builder.op("Where", taken, moved, average)
        if counted is not None:
            next_state[COUNT] = self.next_count(inputs.step, counted)
        return next_params, next_state

    @abstractmethod
    def share(self, step: Tensor, counted: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Emit how far the average moves to the new parameters, a float64 scalar, and whether it does; None where always."""

    def next_count(self, step: Tensor, counted: Tensor) -> Tensor:
        return counted + 1


@dataclass(frozen=True)
class ExponentialAverage(ParameterAverage):
    """An exponential moving average, the mathematics of ``torch.optim.swa_utils.get_ema_avg_fn``, corrected.

    With the average a, the updated parameter p, and t the number of values in the average, that one included::

        a = a + (1 - decay) / (1 - decay^t) * (p - a)
        a = decay * a + (1 - decay) * p                  without bias_correction, starting from the first parameters

    With bias_correction the first parameters have no share in it: it is the average from zero, divided by ``1 - decay^t``, as
    Kingma and Ba, "Adam: a method for stochastic optimization", 2015, correct their moments. Without it they keep the share
    ``decay^t``, nine tenths after 100 updates at 0.999. The method: Polyak and Juditsky, "Acceleration of stochastic
    approximation by averaging", 1992.

    Args:
        optimizer: what updates.
        decay: share of the average that is kept at every update, in [0, 1).
        bias_correction: leave the first parameters out of the average, which they dominate where updates are few.

    Raises:
        ConfigurationError: a decay outside [0, 1), or an optimizer that keeps an average already.
    """

    name = "ema"
    decay: float = 0.999
    bias_correction: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction(self.name, decay=self.decay)

    @property
    def counts(self) -> bool:
        return self.bias_correction

    def share(self, step: Tensor, counted: Tensor | None) -> tuple[Tensor, Tensor | None]:
        share = number(step.builder, 1.0 - self.decay)
        if counted is not None:
            share = share / (1.0 - self.decay ** (double(counted) + 1.0))
        return share, None


@dataclass(frozen=True)
class StochasticWeightAverage(ParameterAverage):
    """The equal average of the parameters after the updates ``start``, ``start + every``, and so on; until then, the parameters.

    With n values in the average a, and the updated parameter p: ``a = a + (p - a) / (n + 1)``, the mathematics of
    ``torch.optim.swa_utils.AveragedModel``. Source: Izmailov et al., "Averaging weights leads to wider optima and better
    generalization", 2018. The learning rate of the method is a schedule's; running statistics are those of training: for an
    average that is far from the parameters, recalibrate the exported model's batch normalization.

    Args:
        optimizer: what updates.
        start: the first update whose parameters are in the average, counted from 1.
        every: updates from one value in the average to the next.

    Raises:
        ConfigurationError: no whole numbers of at least 1, or an optimizer that keeps an average already.
    """

    name = "swa"
    counts = True
    start: int = 1
    every: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self.name, start=self.start, every=self.every)

    def share(self, step: Tensor, counted: Tensor | None) -> tuple[Tensor, Tensor | None]:
        assert counted is not None
        builder = step.builder
        # Before the start there is no value in the average, and it moves to the parameters as a whole.
        share = 1.0 / (double(counted) + 1.0)
        is_before = builder.op("Less", step + 1, self.start)
        return share, builder.op("Or", is_before, self._is_taken(step))

    def next_count(self, step: Tensor, counted: Tensor) -> Tensor:
        return step.builder.op("Where", self._is_taken(step), counted + 1, counted)

    def _is_taken(self, step: Tensor) -> Tensor:
        """Emit whether the parameters after this update belong to the average; bool scalar."""
        builder = step.builder
        since = step + (1 - self.start)
        is_on = builder.op("GreaterOrEqual", since, 0)
        return builder.op("And", is_on, builder.op("Equal", builder.op("Mod", since, self.every), 0))


def share_of_first(optimizer: object, steps: int) -> float:
    """Return how much of the average that an optimizer keeps is still its first value; 0 where it keeps none.

    Args:
        optimizer: what updates, with whatever goes around it.
        steps: how many steps were taken.
    """
    updates = steps
    for layer in layers_of(optimizer):
        if isinstance(layer, Accumulate):
            updates //= layer.every
        elif isinstance(layer, ExponentialAverage):
            return 0.0 if layer.bias_correction and updates > 0 else layer.decay**updates
    return 0.0


ema = ExponentialAverage
swa = StochasticWeightAverage
