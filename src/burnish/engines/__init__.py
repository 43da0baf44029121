"""Engines, which run programs: one module or package for each, behind the protocol in ``base``.

An engine knows no operator's mathematics; it gets graphs of operators that it can run. Checks of batches and checkpoints are in
``burnish.training``.
"""

from burnish.engines.base import Arrays, Engine, LoadedModel, ProgramRunner
from burnish.engines.registry import available, get

__all__ = ["Arrays", "Engine", "LoadedModel", "ProgramRunner", "available", "get"]
