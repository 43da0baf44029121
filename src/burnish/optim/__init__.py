"""Optimizers: pure graph builders ``(parameters, gradients, state, step) -> (parameters', state')``, one file each.

What calls them, inlined in ``step`` or as the graph ``apply``, is ``burnish.program``. Nothing here runs a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from burnish.errors import ConfigurationError
from burnish.optim import schedules
from burnish.optim.accumulate import Accumulate, accumulate
from burnish.optim.adadelta import Adadelta, adadelta
from burnish.optim.adafactor import Adafactor, adafactor
from burnish.optim.adagrad import Adagrad, adagrad
from burnish.optim.adam import Adam, adam
from burnish.optim.adamax import Adamax, adamax
from burnish.optim.adamw import AdamW, adamw
from burnish.optim.asgd import ASGD, asgd
from burnish.optim.average import ExponentialAverage, StochasticWeightAverage, ema, share_of_first, swa
from burnish.optim.base import Optimizer, Schedule
from burnish.optim.diloco import DiLoCo, diloco
from burnish.optim.groups import Groups, groups, layerwise_decay
from burnish.optim.lamb import LAMB, lamb
from burnish.optim.lars import LARS, lars
from burnish.optim.lion import Lion, lion
from burnish.optim.muon import Muon, muon
from burnish.optim.nadam import NAdam, nadam
from burnish.optim.parameters import ParameterInfo, ParameterKind, bind, frozen_parameters
from burnish.optim.radam import RAdam, radam
from burnish.optim.rmsprop import RMSprop, rmsprop
from burnish.optim.rowwise_adagrad import RowwiseAdagrad, rowwise_adagrad
from burnish.optim.rprop import Rprop, rprop
from burnish.optim.sgd import SGD, sgd
from burnish.optim.transforms import (
    Chain,
    GradientTransform,
    add_decayed_weights,
    centralize,
    chain,
    clip_by_global_norm,
    clip_by_norm,
    clip_by_value,
)
from burnish.optim.wrappers import WRAPPERS, wrapper_of
from burnish.settings import read_settings, suggestion, with_settings

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adadelta": adadelta,
    "adafactor": adafactor,
    "adagrad": adagrad,
    "adam": adam,
    "adamax": adamax,
    "adamw": adamw,
    "asgd": asgd,
    "lamb": lamb,
    "lars": lars,
    "lion": lion,
    "muon": muon,
    "nadam": nadam,
    "radam": radam,
    "rmsprop": rmsprop,
    "rowwise_adagrad": rowwise_adagrad,
    "rprop": rprop,
    "sgd": sgd,
}


def get(optimizer: str | Mapping[str, Any] | Optimizer) -> Optimizer:
    """Return the optimizer of a name, of the options that an optimizer gave (``Optimizer.options``), or the object itself.

    Args:
        optimizer: a name, with settings behind a colon (``rmsprop:momentum=0.9,centered=true``); options; or an optimizer.

    Raises:
        ConfigurationError: there is no optimizer of that name, or no such option.
    """
    if isinstance(optimizer, str):
        name, settings = read_settings("optimizer", optimizer)
        return _built(name, settings)
    if isinstance(optimizer, Mapping):
        settings = {key: value for key, value in optimizer.items() if key != "name"}
        name = str(optimizer.get("name"))
        return wrapper_of(name, settings, get) if name in WRAPPERS else _built(name, settings)
    if isinstance(optimizer, type | FunctionType):
        raise ConfigurationError(
            f"optimizer must be a name or an optimizer of burnish.optim, not the {type(optimizer).__name__} "
            f"'{optimizer.__name__}': call it, as in burnish.optim.{optimizer.__name__.lower()}()"
        )
    if isinstance(optimizer, Optimizer):
        return optimizer
    raise ConfigurationError(
        f"optimizer must be a name or an optimizer of burnish.optim, not {type(optimizer).__name__}; "
        f"there is {', '.join(sorted(OPTIMIZERS))}"
    )


def _built(name: str, settings: Mapping[str, Any]) -> Optimizer:
    if name in WRAPPERS:
        raise ConfigurationError(f"optimizer '{name}' goes around another one: give the object, burnish.optim.{name}(...)")
    if name not in OPTIMIZERS:
        raise ConfigurationError(
            f"there is no optimizer '{name}'{suggestion(name, OPTIMIZERS)}; there is {', '.join(sorted(OPTIMIZERS))}"
        )
    lr = settings.get("lr")
    built = {**settings, "lr": schedules.get(lr)} if isinstance(lr, Mapping) else settings
    return with_settings(f"optimizer '{name}'", OPTIMIZERS[name], built)


__all__ = [
    "ASGD",
    "LAMB",
    "LARS",
    "OPTIMIZERS",
    "SGD",
    "Accumulate",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Chain",
    "DiLoCo",
    "ExponentialAverage",
    "GradientTransform",
    "Groups",
    "Lion",
    "Muon",
    "NAdam",
    "Optimizer",
    "ParameterInfo",
    "ParameterKind",
    "RAdam",
    "RMSprop",
    "RowwiseAdagrad",
    "Rprop",
    "Schedule",
    "StochasticWeightAverage",
    "accumulate",
    "adadelta",
    "adafactor",
    "adagrad",
    "adam",
    "adamax",
    "adamw",
    "add_decayed_weights",
    "asgd",
    "bind",
    "centralize",
    "chain",
    "clip_by_global_norm",
    "clip_by_norm",
    "clip_by_value",
    "diloco",
    "ema",
    "frozen_parameters",
    "get",
    "groups",
    "lamb",
    "lars",
    "layerwise_decay",
    "lion",
    "muon",
    "nadam",
    "radam",
    "rmsprop",
    "rowwise_adagrad",
    "rprop",
    "schedules",
    "sgd",
    "share_of_first",
    "swa",
]
