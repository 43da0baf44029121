"""Records of operators as tests ask about them, and change them for one test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from burnish.operators.registry import Precision, records


def differentiable_operators() -> frozenset[str]:
    """The operators of the standard that have a gradient rule in some version."""
    return frozenset(
        name for (domain, name), versions in records().items() if domain == "" and any(record.gradient for record in versions)
    )


def operators_of(precision: Precision) -> frozenset[str]:
    """The operators that mixed precision does this with."""
    return frozenset(name for (_, name), versions in records().items() if versions[0].precision is precision)


def change_record(monkeypatch: pytest.MonkeyPatch, name: str, domain: str = "", **rules: Callable[..., Any] | None) -> None:
    """Put other rules in the place of an operator's."""
    changed = [replace(record, **rules) for record in records()[domain, name]]
    monkeypatch.setitem(records(), (domain, name), changed)
