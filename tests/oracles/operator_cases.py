"""Every sample of the operator tables in ``tests/specs``, as a case for a parametrized test."""

from __future__ import annotations

import importlib
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

import numpy as np
import onnx
import pytest

from burnish.errors import ModelError
from oracles.combinations import spread
from oracles.gradient_harness import differentiated, forward_graph, random_cotangents
from specs.operator_spec import OperatorSpec, Sample

Form = TypeVar("Form")
SPECS_FOLDER = Path(__file__).parent.parent / "specs"


@dataclass(frozen=True, eq=False)
class Case:
    """A sample with its record; hashed by identity, so that what is computed from it can be cached."""

    spec: OperatorSpec
    sample: Sample

    @property
    def wrt(self) -> list[int]:
        return differentiated(self.sample)

    @property
    def widest(self) -> str:
        """The most precise dtype it runs in."""
        return "float64" if "float64" in self.spec.dtypes else "float32"

    @property
    def takes_float64(self) -> bool:
        """Not where the operator's schema has no float64 for a floating-point input, unless a graph can hold it all the same."""
        if self.sample.build is not None:
            return True
        schema = onnx.defs.get_schema(self.spec.op_type, self.sample.opset)
        formal = [schema.inputs[min(index, len(schema.inputs) - 1)] for index in range(len(self.sample.inputs))]
        if all(
            "tensor(double)" in parameter.types
            for parameter, array in zip(formal, self.sample.inputs, strict=True)
            if array is not None and np.asarray(array).dtype.kind == "f"
        ):
            return True
        try:
            forward_graph(self.spec, self.sample, "float64")
        except ModelError:
            return False
        return True

    @property
    def widest_tolerance(self) -> float:
        """What the widest dtype is held to against PyTorch."""
        return self.spec.float64_tolerance if self.widest == "float64" else self.spec.tolerance


def specs() -> list[OperatorSpec]:
    names = sorted(path.stem for path in SPECS_FOLDER.glob("*.py") if path.stem != "operator_spec")
    return [spec for name in names for spec in getattr(importlib.import_module(f"specs.{name}"), "SPECS", ())]


def cases() -> dict[str, Case]:
    found: dict[str, Case] = {}
    counts: Counter[str] = Counter()
    for spec in specs():
        for sample in spec.samples(np.random.default_rng(zlib.crc32(spec.op_type.encode()))):
            label = f"{spec.op_type}-{sample.name or 'sample'}"
            counts[label] += 1
            found[label if counts[label] == 1 else f"{label}-{counts[label]}"] = Case(spec, sample)
    return found


CASES = cases()
FIRST_OF_EACH = {id(case.spec): case for case in reversed(CASES.values())}
NUMBERS = {case: number for number, case in enumerate(CASES.values())}


def in_turn(case: Case, forms: Sequence[Form]) -> list[Form]:
    """All of the forms for the first sample of an operator; one for each of its others, which take turns."""
    if FIRST_OF_EACH[id(case.spec)] is case or not forms:
        return list(forms)
    return [forms[NUMBERS[case] % len(forms)]]


def cases_where(
    condition: Callable[[Case], bool], *, test: int | None = None, test_all: int | None = None
) -> pytest.MarkDecorator:
    """Return a parameter ``case``; those whose sample is repeated are marked as slow, and others as ``spread`` does."""
    chosen = {label: case for label, case in CASES.items() if condition(case)}
    rows = [pytest.param(case, marks=pytest.mark.slow if case.sample.repeated else ()) for case in chosen.values()]
    return spread("case", rows, test=test, test_all=test_all, ids=list(chosen))


@cache
def cotangents_of(case: Case) -> dict[int, np.ndarray]:
    return random_cotangents(case.spec, case.sample, np.random.default_rng(7), case.widest)
