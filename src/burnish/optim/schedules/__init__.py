"""Learning-rate schedules, computed in the graph from ``step``: pure builders of float64 scalars, one file per family.

Pass one as the ``lr`` of an optimizer. The session, not the schedule, refuses steps after a schedule's end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from burnish.optim.base import Schedule, is_schedule
from burnish.optim.schedules.cosine import Cosine, CosineRestarts, cosine, cosine_restarts
from burnish.optim.schedules.cyclic import Cyclic, cyclic
from burnish.optim.schedules.exponential import Exponential, exponential
from burnish.optim.schedules.inverse_square_root import InverseSquareRoot, inverse_square_root
from burnish.optim.schedules.one_cycle import OneCycle, one_cycle
from burnish.optim.schedules.piecewise import Constant, Piecewise, Step, constant, piecewise, step
from burnish.optim.schedules.plateau import Plateau, plateau
from burnish.optim.schedules.polynomial import Linear, Polynomial, linear, polynomial
from burnish.optim.schedules.warmup import Warmup, warmup
from burnish.registry import Registry

SCHEDULES: Registry[Schedule] = Registry(
    "learning-rate schedule",
    {
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
    },
    home="burnish.optim.schedules",
    is_made=is_schedule,
)


def get(schedule: str | Mapping[str, Any] | Schedule) -> Schedule:
    """Return the schedule of a text, of options (``Schedule.options``), or the object itself.

    Raises:
        ConfigurationError: there is no schedule of that name, no such option, or a required one is missing.
    """
    if isinstance(schedule, Mapping) and "schedule" in schedule:
        schedule = {**schedule, "schedule": get(schedule["schedule"])}
    return SCHEDULES.resolve(schedule)


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
