"""Optimizers: pure graph builders ``(parameters, gradients, state, step) -> (parameters', state')``, one per file.

``burnish.compiler`` inlines them in ``step`` or makes them the graph ``apply``. Nothing here runs a graph.
"""

from __future__ import annotations

from burnish.optim import schedules
from burnish.optim.accumulate import Accumulate, accumulate
from burnish.optim.adadelta import Adadelta, adadelta
from burnish.optim.adafactor import Adafactor, adafactor
from burnish.optim.adagrad import Adagrad, RowwiseAdagrad, adagrad, rowwise_adagrad
from burnish.optim.adam import Adam, AdamW, adam, adamw
from burnish.optim.adamax import Adamax, adamax
from burnish.optim.asgd import ASGD, asgd
from burnish.optim.average import ExponentialAverage, StochasticWeightAverage, ema, share_of_first, swa
from burnish.optim.base import Optimizer, RatedOptimizer, Schedule, Transform, UpdateInputs
from burnish.optim.chain import Chain, chain
from burnish.optim.diloco import DiLoCo, diloco
from burnish.optim.gradient_transforms import (
    GradientTransform,
    add_decayed_weights,
    centralize,
    clip_by_global_norm,
    clip_by_norm,
    clip_by_value,
)
from burnish.optim.groups import Groups, groups, layerwise_decay
from burnish.optim.lamb import LAMB, lamb
from burnish.optim.lars import LARS, lars
from burnish.optim.lion import Lion, lion
from burnish.optim.muon import Muon, muon
from burnish.optim.nadam import NAdam, nadam
from burnish.optim.parameters import ParameterInfo, ParameterKind, bind, frozen_parameters
from burnish.optim.proximal import Proximal, proximal
from burnish.optim.radam import RAdam, radam
from burnish.optim.registry import OPTIMIZERS, get, slots_by_options
from burnish.optim.rmsprop import RMSprop, rmsprop
from burnish.optim.rprop import Rprop, rprop
from burnish.optim.sgd import SGD, sgd
from burnish.optim.slots import Slot
from burnish.optim.sparse_adam import SparseAdam, sparse_adam

OPTIMIZERS |= {
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
    "sparse_adam": sparse_adam,
}

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
    "Proximal",
    "RAdam",
    "RMSprop",
    "RatedOptimizer",
    "RowwiseAdagrad",
    "Rprop",
    "Schedule",
    "Slot",
    "SparseAdam",
    "StochasticWeightAverage",
    "Transform",
    "UpdateInputs",
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
    "proximal",
    "radam",
    "rmsprop",
    "rowwise_adagrad",
    "rprop",
    "schedules",
    "sgd",
    "share_of_first",
    "slots_by_options",
    "sparse_adam",
    "swa",
]
