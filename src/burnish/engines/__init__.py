"""Engines: what runs a program. One module or package per engine, behind the protocol in ``base``.

An engine knows no operator's mathematics; it is given graphs of operators it can run. What a step means for the user, batch
checks and checkpoints live in ``burnish.training``.
"""

from burnish.engines.base import Arrays, Engine, LoadedModel, ProgramRunner
from burnish.engines.registry import available, get

__all__ = ["Arrays", "Engine", "LoadedModel", "ProgramRunner", "available", "get"]
