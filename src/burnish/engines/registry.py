"""Find engines by name.

A third party adds an engine with an entry point of the group ``burnish.engines`` that names an Engine class or object.
"""

from __future__ import annotations

import importlib
import importlib.metadata

from burnish.engines.base import Engine
from burnish.errors import EngineError
from burnish.installing import install_command
from burnish.settings import suggestion

ENTRY_POINT_GROUP = "burnish.engines"
DEFAULT_ENGINE = "onnxruntime"
BUILT_IN = {
    "onnxruntime": "burnish.engines.onnxruntime:OnnxRuntimeEngine",
    "reference": "burnish.engines.reference:ReferenceEngine",
    "torch": "burnish.engines.torch:TorchEngine",
}


def available() -> tuple[str, ...]:
    """Return the names that ``get`` takes, built-in engines first."""
    third_party = sorted(entry.name for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP))
    return tuple(dict.fromkeys([*BUILT_IN, *third_party]))


def get(engine: str | Engine = "auto") -> Engine:
    """Return an engine.

    Args:
        engine: a name, ``auto`` for the default (``onnxruntime``), or an Engine, which is returned unchanged.

    Raises:
        EngineError: no engine has this name, a required package is not installed, or an object is not an engine.
    """
    if not isinstance(engine, str):
        if isinstance(engine, type) or not isinstance(engine, Engine):
            raise EngineError(
                f"engine={engine!r} is not an engine: give one of {', '.join(available())}, "
                "or an object with name, target, open and load (burnish.engines.Engine)"
            )
        return engine
    name = DEFAULT_ENGINE if engine == "auto" else engine
    found = _load(name)
    made = found() if isinstance(found, type) else found
    if not isinstance(made, Engine):
        raise EngineError(
            f"The engine '{name}' is registered as {found!r}, which lacks name, target, open or load (burnish.engines.Engine): "
            f"update the package that provides it, or choose another of {', '.join(available())}"
        )
    return made


def _load(name: str) -> object:
    try:
        if name in BUILT_IN:
            module, _, attribute = BUILT_IN[name].partition(":")
            return getattr(importlib.import_module(module), attribute)
        for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=name):
            return entry.load()
    except ImportError as error:
        raise EngineError(
            f"The engine '{name}' cannot be loaded: {error}. Install what it needs ({install_command(error.name or name)}), "
            f"or choose another: {', '.join(other for other in available() if other != name)}"
        ) from error
    known = available()
    raise EngineError(
        f"There is no engine '{name}'{suggestion(name, known)}. Choose among {', '.join(known)} (auto is {DEFAULT_ENGINE})"
    )
