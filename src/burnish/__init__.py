"""burnish: a training compiler for ONNX models."""

from burnish import engines, errors, losses, metrics, norms, optim
from burnish.importer import load
from burnish.program import Program
from burnish.program.compile import compile
from burnish.program.gradient import grad
from burnish.training import Session, Trainer

__version__ = "0.1.0"

__all__ = ["Program", "Session", "Trainer", "compile", "engines", "errors", "grad", "load", "losses", "metrics", "norms", "optim"]
