"""Targets in files: TOML that says what a runtime can do.

name = "accelerator"
opset = 21                      # the newest version of the standard domain
ir_version = 10                 # the newest ONNX file format
shapes = "static"               # or "symbolic", as it is where nothing is said
float64 = false                 # whether it has float64; true where nothing is said
dtypes = ["float32", "int64"]   # of operators that do not say otherwise; all where nothing is said
operators = ["Add", {name = "Conv", newest = 11, dtypes = ["float32"]}, {name = "MaxPool", outputs = 1}]    # "*": all
kernels = ["ConvWeightGrad"]    # semantic operators that it has kernels of its own for

[domains]                       # operators of other domains; "*": all of one
"com.microsoft" = ["FusedConv"]
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.lowering.targets import STANDARD_DOMAINS, STANDARD_OPERATORS, TARGETS, Support, Target
from burnish.operators.semantic import declared_operators
from burnish.settings import is_whole, suggestion
from burnish.untrusted import read_toml_file

ALL = "*"
SHAPES = {"symbolic": True, "static": False}
_KEYS = ("name", "opset", "ir_version", "shapes", "dtypes", "operators", "kernels", "collectives", "domains", "float64")
_NUMPY_NAMES = {"float32": ir.DataType.FLOAT, "float64": ir.DataType.DOUBLE}

TargetLike = str | Path | Target
"""The name of a target, the TOML file of one, or one."""


def target_of(target: TargetLike) -> Target:
    """Return a target.

    Args:
        target: a name of ``TARGETS``, a path that ends in ``.toml``, or a Target, which is returned as it is.

    Raises:
        ConfigurationError: there is no such target, or its file does not describe one.
    """
    if isinstance(target, Target):
        return target
    if isinstance(target, str) and target in TARGETS:
        return TARGETS[target]
    if isinstance(target, str | Path) and Path(target).suffix == ".toml":
        return read_target(target)
    raise ConfigurationError(
        f"target: unknown '{target}'; choose among {', '.join(map(repr, TARGETS))}, or give a file that describes one, such as "
        "accelerator.toml"
    )


def read_target(path: str | Path) -> Target:
    """Read a target from a TOML file.

    Raises:
        ConfigurationError: the file cannot be read, is no TOML, or does not describe a target.
    """
    try:
        values = read_toml_file(Path(path))
    except OSError as error:
        raise ConfigurationError(f"the target '{path}' cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigurationError(f"the target '{path}' is no TOML: {error}") from error
    return target_from_dict(values, f"the target '{path}'")


def target_from_dict(values: Mapping[str, Any], what: str = "the target") -> Target:
    """Return the target that such values, as a file has them, describe; ``target_to_dict`` returns them.

    Args:
        values: the keys of a file.
        what: what errors call it.

    Raises:
        ConfigurationError: they do not describe a target.
    """
    return _Reader(what, values).target()


def target_to_dict(target: Target) -> dict[str, Any]:
    """Return a target as JSON-compatible values, which ``target_from_dict`` reads."""
    operators = ALL if target.operators == STANDARD_OPERATORS else [_support_to_dict(*item) for item in target.operators.items()]
    return {
        "name": target.name,
        "opset": target.newest_opset,
        "ir_version": target.newest_ir_version,
        "shapes": "symbolic" if target.symbolic_shapes else "static",
        "float64": target.float64,
        "operators": operators,
        "kernels": sorted(target.kernels),
        "collectives": sorted(target.collectives),
        "domains": {domain: ALL if names is None else sorted(names) for domain, names in target.domains.items()},
    }


def _support_to_dict(name: str, support: Support) -> dict[str, Any]:
    values: dict[str, Any] = {"name": name}
    if support.newest is not None:
        values["newest"] = support.newest
    if support.dtypes is not None:
        values["dtypes"] = sorted(dtype.name.lower() for dtype in support.dtypes)
    if support.outputs is not None:
        values["outputs"] = support.outputs
    return values


class _Reader:
    """The values of a file, read with errors that name the file and the key."""

    def __init__(self, what: str, values: Mapping[str, Any]):
        self._what = what
        self._values = values

    def target(self) -> Target:
        for key in self._values:
            if key not in _KEYS:
                raise self._error(f"there is no key '{key}'{suggestion(key, _KEYS)}", f"keys are {', '.join(_KEYS)}")
        shapes = self._values.get("shapes", "symbolic")
        if shapes not in SHAPES:
            raise self._error(f"shapes is {shapes!r}", 'give "static" or "symbolic"')
        return Target(
            self._text("name"),
            self._whole("opset", self._values),
            self._whole("ir_version", self._values),
            operators=self._operators(),
            domains=self._domains(),
            kernels=self._semantic("kernels"),
            collectives=self._semantic("collectives"),
            symbolic_shapes=SHAPES[shapes],
            float64=self._flag("float64"),
        )

    def _error(self, problem: str, remedy: str) -> ConfigurationError:
        return ConfigurationError(f"{self._what} does not describe a target: {problem}; {remedy}")

    def _text(self, key: str) -> str:
        value = self._values.get(key)
        if not isinstance(value, str) or not value:
            raise self._error(f"{key} is {value!r}", f"give it a {key}, as text")
        return value

    def _flag(self, key: str) -> bool:
        value = self._values.get(key, True)
        if not isinstance(value, bool):
            raise self._error(f"{key} is {value!r}", "give true or false")
        return value

    def _whole(self, key: str, values: Mapping[str, Any]) -> int:
        value = values.get(key)
        if not is_whole(value) or value < 1:
            raise self._error(f"{key} is {value!r}", "give a whole number of at least one")
        return int(value)

    def _names(self, key: str, value: Any) -> list[str]:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self._error(f"{key} is {value!r}", "give a list of names")
        return value

    def _operators(self) -> Mapping[str, Support]:
        default = self._dtypes("dtypes", self._values)
        listed = self._values.get("operators")
        if listed == ALL:
            return STANDARD_OPERATORS if default is None else dict.fromkeys(STANDARD_OPERATORS, Support(dtypes=default))
        if not isinstance(listed, list):
            raise self._error(f"operators is {listed!r}", 'give a list of standard operators, or "*" for all of them')
        operators = {}
        for entry in listed:
            values = {"name": entry} if isinstance(entry, str) else entry
            if not isinstance(values, dict) or not isinstance(values.get("name"), str):
                raise self._error(
                    f"{entry!r} is among the operators", 'give a name, or {name = "Conv", newest = 11, dtypes = [...]}'
                )
            name = values["name"]
            if name not in STANDARD_OPERATORS:
                remedy = "operators of other domains stand under [domains], semantic ones under kernels"
                raise self._error(f"the standard has no operator '{name}'{suggestion(name, STANDARD_OPERATORS)}", remedy)
            if unknown := values.keys() - {"name", "newest", "dtypes", "outputs"}:
                raise self._error(f"the operator {name} has '{min(unknown)}'", "it may have newest, dtypes and outputs")
            newest = self._whole("newest", values) if "newest" in values else None
            outputs = self._whole("outputs", values) if "outputs" in values else None
            operators[name] = Support(newest, self._dtypes("dtypes", values) if "dtypes" in values else default, outputs)
        return operators

    def _dtypes(self, key: str, values: Mapping[str, Any]) -> frozenset[ir.DataType] | None:
        if key not in values:
            return None
        known = {dtype.name.lower(): dtype for dtype in ir.DataType} | _NUMPY_NAMES
        names = self._names(key, values[key])
        for name in names:
            if name not in known:
                raise self._error(
                    f"there is no dtype '{name}'{suggestion(name, known)}", "give names such as float32, int64 and bool"
                )
        return frozenset(known[name] for name in names)

    def _semantic(self, key: str) -> frozenset[str]:
        names = self._names(key, self._values.get(key, []))
        known = declared_operators()
        for name in names:
            if name not in known:
                raise self._error(
                    f"there is no semantic operator '{name}' for {key}{suggestion(name, known)}",
                    "burnish.operators.semantic.declared_operators() has them",
                )
        return frozenset(names)

    def _domains(self) -> dict[str, frozenset[str] | None]:
        domains = self._values.get("domains", {})
        if not isinstance(domains, Mapping):
            raise self._error(f"domains is {domains!r}", 'give a table of domains, as in "com.microsoft" = ["FusedConv"]')
        for domain in domains:
            if domain in STANDARD_DOMAINS:
                raise self._error(
                    f"'{domain}' is among the domains", "it is the standard's, whose operators stand under operators"
                )
        return {
            domain: None if names == ALL else frozenset(self._names(f"the domain '{domain}'", names))
            for domain, names in domains.items()
        }
