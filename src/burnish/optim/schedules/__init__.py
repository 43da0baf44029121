"""Learning-rate schedules, computed in the graph from ``step``: one file per family, pure builders of float64 scalars.

Give one as the ``lr`` of an optimizer. What an optimizer does with a rate, and who refuses a step past a schedule's end, is
not here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from burnish.errors import ConfigurationError
from burnish.optim.base import Schedule, is_schedule
from burnish.optim.schedules.constant import Constant, constant
from burnish.optim.schedules.cosine import Cosine, CosineRestarts, cosine, cosine_restarts
from burnish.optim.schedules.cyclic import Cyclic, cyclic
from burnish.optim.schedules.exponential import Exponential, exponential
from burnish.optim.schedules.inverse_square_root import InverseSquareRoot, inverse_square_root
from burnish.optim.schedules.linear import Linear, linear
from burnish.optim.schedules.one_cycle import OneCycle, one_cycle
from burnish.optim.schedules.piecewise import Piecewise, piecewise
from burnish.optim.schedules.plateau import Plateau, plateau
from burnish.optim.schedules.polynomial import Polynomial, polynomial
from burnish.optim.schedules.step import Step, step
from burnish.optim.schedules.warmup import Warmup, warmup
from burnish.settings import call_hint, with_settings

SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "constant": constant,
    "cosine": cosine,
    "cosine_restarts": cosine_restarts,
    "cyclic": cyclic,
    "exponential": exponential,
    "inverse_square_root": inverse_square_root,
    "linear": linear,
    "one_cycle": one_cycle,
    "piecewise": piecewise,
    "plateau": plateau,
    "polynomial": polynomial,
    "step": step,
    "warmup": warmup,
}


def get(schedule: Mapping[str, Any] | Schedule) -> Schedule:
    """Return the schedule of the options that one gave (``Schedule.options``), or the object itself.

    Raises:
        ConfigurationError: there is no schedule of that name, or no such option, or one that it needs is missing.
    """
    if is_schedule(schedule):
        return schedule
    known = ", ".join(SCHEDULES)
    if not isinstance(schedule, Mapping):
        raise ConfigurationError(
            f"a schedule must be one of burnish.optim.schedules, not {schedule!r}{call_hint(schedule)}; there is {known}"
        )
    name = schedule.get("name")
    if name not in SCHEDULES:
        raise ConfigurationError(f"there is no learning-rate schedule '{name}'; there is {known}")
    settings = {key: get(value) if key == "schedule" else value for key, value in schedule.items() if key != "name"}
    return with_settings(f"schedule '{name}'", SCHEDULES[name], settings)


__all__ = [
    "SCHEDULES",
    "Constant",
    "Cosine",
    "CosineRestarts",
    "Cyclic",
    "Exponential",
    "InverseSquareRoot",
    "Linear",
    "OneCycle",
    "Piecewise",
    "Plateau",
    "Polynomial",
    "Schedule",
    "Step",
    "Warmup",
    "constant",
    "cosine",
    "cosine_restarts",
    "cyclic",
    "exponential",
    "get",
    "inverse_square_root",
    "linear",
    "one_cycle",
    "piecewise",
    "plateau",
    "polynomial",
    "step",
    "warmup",
]
