"""burnish: a training compiler for ONNX models.

This module only lists the public names. Each is imported on first use, so ``import burnish`` and ``burnish --help`` load no ONNX
library. ``docs/architecture.md`` describes the packages.
"""

from typing import TYPE_CHECKING

from burnish.lazy_imports import exports
from burnish.version import __version__

if TYPE_CHECKING:
    from burnish import (
        comparison,
        data,
        distributed,
        engines,
        errors,
        federated,
        losses,
        metrics,
        models,
        norms,
        optim,
        surgery,
        training,
    )
    from burnish.compiler.compile import compile
    from burnish.compiler.gradient import grad
    from burnish.compiler.lower_training_operators import lower
    from burnish.distributed import DataParallel
    from burnish.finetuning import finetune
    from burnish.importer import load
    from burnish.program import Program
    from burnish.rewriting.precision import MixedPrecision
    from burnish.training import Prediction, Predictor, Session, Trainer

__all__ = [
    "DataParallel",
    "MixedPrecision",
    "Prediction",
    "Predictor",
    "Program",
    "Session",
    "Trainer",
    "__version__",
    "comparison",
    "compile",
    "data",
    "distributed",
    "engines",
    "errors",
    "federated",
    "finetune",
    "grad",
    "load",
    "losses",
    "lower",
    "metrics",
    "models",
    "norms",
    "optim",
    "surgery",
    "training",
]

if not TYPE_CHECKING:  # type checkers believe that a module with __getattr__ has every name
    __getattr__, __dir__ = exports(
        __name__,
        {
            "compiler.compile": "compile",
            "compiler.gradient": "grad",
            "compiler.lower_training_operators": "lower",
            "distributed": "DataParallel",
            "importer": "load",
            "rewriting.precision": "MixedPrecision",
            "program": "Program",
            "training": "Prediction Predictor Session Trainer",
            "finetuning": "finetune",
        },
    )
