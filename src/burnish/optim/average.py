"""Averages of the parameters during training, which often predict better than the final parameters."""

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
    """An optimizer that also keeps an average of the parameters, without an effect on training.

    State: ``average/<initializer>``, in the parameter's dtype and shape, which starts as the parameter; and, if the average needs
    it, the int64 scalar ``average_count``, the number of values in it.
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
        """True if the average depends on the number of values in it."""

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
        """Emit how far the average moves to the new parameters, a float64 scalar, and a condition for moving; None for always."""

    def next_count(self, step: Tensor, counted: Tensor) -> Tensor:
        return counted + 1


@dataclass(frozen=True)
class ExponentialAverage(ParameterAverage):
    """An exponential moving average, the mathematics of ``torch.optim.swa_utils.get_ema_avg_fn``, bias-corrected.

    With the average a, the updated parameter p, and t the number of values in the average including p::

        a = a + (1 - decay) / (1 - decay^t) * (p - a)
        a = decay * a + (1 - decay) * p                  without bias_correction, starting from the first parameters

    With bias_correction the initial parameters have no share in the average: it starts at zero and is divided by ``1 - decay^t``,
    as in Kingma and Ba, "Adam: a method for stochastic optimization", 2015. Without it they keep the share ``decay^t``, nine
    tenths after 100 updates at 0.999. Method: Polyak and Juditsky, "Acceleration of stochastic approximation by averaging", 1992.

    Args:
        optimizer: the optimizer that updates the parameters.
        decay: share of the average kept at every update, in [0, 1).
        bias_correction: True to leave the initial parameters out of the average, which they dominate after few updates.

    Raises:
        ConfigurationError: a decay outside [0, 1), or an optimizer that already keeps an average.
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
    """The mean of the parameters after the updates ``start``, ``start + every``, and so on; before that, the parameters.

    With n values in the average a, and the updated parameter p: ``a = a + (p - a) / (n + 1)``, the mathematics of
    ``torch.optim.swa_utils.AveragedModel``. Source: Izmailov et al., "Averaging weights leads to wider optima and better
    generalization", 2018. Use a schedule for the method's learning rate. Running statistics are those of training: if the average
    is far from the parameters, recalibrate the exported model's batch normalization.

    Args:
        optimizer: the optimizer that updates the parameters.
        start: first update in the average, counted from 1.
        every: number of updates between values in the average.

    Raises:
        ConfigurationError: ``start`` or ``every`` is not a whole number of at least 1, or the optimizer already keeps an average.
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
        # Before the start the average is empty (share 1), so it follows the parameters.
        share = 1.0 / (double(counted) + 1.0)
        is_before = builder.op("Less", step + 1, self.start)
        return share, builder.op("Or", is_before, self._is_taken(step))

    def next_count(self, step: Tensor, counted: Tensor) -> Tensor:
        return step.builder.op("Where", self._is_taken(step), counted + 1, counted)

    def _is_taken(self, step: Tensor) -> Tensor:
        builder = step.builder
        since = step + (1 - self.start)
        is_on = builder.op("GreaterOrEqual", since, 0)
        return builder.op("And", is_on, builder.op("Equal", builder.op("Mod", since, self.every), 0))


def share_of_first(optimizer: object, steps: int) -> float:
    """Return the share of the initial value in the average that an optimizer keeps; 0 without an average.

    Args:
        optimizer: the optimizer, including wrappers.
        steps: number of steps taken.
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
