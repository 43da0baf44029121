"""Generic gradient tests over every operator table in ``tests/specs``."""

from __future__ import annotations

import importlib
import zlib
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from oracles.central_differences import TOLERANCE
from oracles.gradient_harness import (
    NEWEST_OPSET,
    assert_close,
    check_standard,
    differentiated,
    gradient_graph,
    numerical_gradients,
    random_cotangents,
    run_gradients,
)
from oracles.torch_gradients import torch_gradients
from specs.operator_spec import ErrorInput, OperatorSpec, Sample

SPECS_FOLDER = Path(__file__).parent.parent / "specs"
FLOAT64_TOLERANCE = 1e-10
FLOAT16_TOLERANCE = 2e-2


@dataclass(frozen=True, eq=False)
class Case:
    """A sample with its record; hashed by identity, so that what is computed from it can be cached."""

    spec: OperatorSpec
    sample: Sample

    @property
    def wrt(self) -> list[int]:
        return differentiated(self.sample)


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
every_case = pytest.mark.parametrize("case", list(CASES.values()), ids=list(CASES))


@cache
def cotangents_of(case: Case) -> dict[int, np.ndarray]:
    return random_cotangents(case.spec, case.sample, np.random.default_rng(7))


@cache
def gradients_in_float64(case: Case) -> tuple[list[np.ndarray], list[np.ndarray]]:
    return run_gradients(gradient_graph(case.spec, case.sample, "float64"), case.sample, "float64", cotangents_of(case))


def torch_function(case: Case):
    return case.sample.torch or case.spec.torch


def against_torch(case: Case, dtype: str, tolerance: float, results: tuple[list[np.ndarray], list[np.ndarray]]) -> None:
    """Compare with PyTorch in float64 at the very point that ``dtype`` rounded the inputs to."""
    inputs = [
        None if array is None else (array.astype(dtype).astype(np.float64) if array.dtype.kind == "f" else array)
        for array in case.sample.inputs
    ]
    attributes = case.sample.attributes if case.sample.torch_attributes is None else case.sample.torch_attributes
    outputs, gradients = torch_gradients(torch_function(case), inputs, attributes, cotangents_of(case), case.wrt)
    for index in cotangents_of(case):
        assert_close(results[0][index], outputs[index], tolerance, f"output {index}")
    for index, actual, expected in zip(case.wrt, results[1], gradients, strict=True):
        assert_close(actual, expected, tolerance, f"gradient of input {index}")


@every_case
def test_matches_central_differences(case: Case) -> None:
    if not case.sample.smooth:
        assert torch_function(case) is not None, "a point with a kink is compared with PyTorch: give it a torch function"
        return
    expected = numerical_gradients(case.spec, case.sample, cotangents_of(case), case.wrt)
    for index, actual, reference in zip(case.wrt, gradients_in_float64(case)[1], expected, strict=True):
        assert_close(actual, reference, TOLERANCE, f"gradient of input {index}")


@pytest.mark.parametrize(
    "case", [c for c in CASES.values() if torch_function(c)], ids=[n for n, c in CASES.items() if torch_function(c)]
)
def test_matches_torch(case: Case) -> None:
    against_torch(case, "float64", FLOAT64_TOLERANCE, gradients_in_float64(case))
    if "float32" in case.spec.dtypes:
        results = run_gradients(gradient_graph(case.spec, case.sample, "float32"), case.sample, "float32", cotangents_of(case))
        against_torch(case, "float32", case.spec.tolerance, results)


@every_case
def test_float32_matches_float64(case: Case) -> None:
    rounded = replace(
        case.sample,
        inputs=[array if array is None or array.dtype.kind != "f" else array.astype(np.float32) for array in case.sample.inputs],
    )
    _, expected = run_gradients(gradient_graph(case.spec, rounded, "float64"), rounded, "float64", cotangents_of(case))
    _, actual = run_gradients(gradient_graph(case.spec, rounded, "float32"), rounded, "float32", cotangents_of(case))
    for index, single, double in zip(case.wrt, actual, expected, strict=True):
        assert_close(single, double, case.spec.tolerance, f"gradient of input {index}")


@pytest.mark.parametrize(
    "case",
    [c for c in CASES.values() if "float16" in c.spec.dtypes],
    ids=[n for n, c in CASES.items() if "float16" in c.spec.dtypes],
)
def test_half_precision_stays_half(case: Case) -> None:
    rounded = replace(
        case.sample,
        inputs=[array if array is None or array.dtype.kind != "f" else array.astype(np.float16) for array in case.sample.inputs],
    )
    graph = gradient_graph(case.spec, rounded, "float16")
    check_standard(graph)
    assert "Cast" not in graph.emitted or case.spec.op_type.startswith("Cast")
    _, expected = run_gradients(gradient_graph(case.spec, rounded, "float64"), rounded, "float64", cotangents_of(case))
    _, actual = run_gradients(graph, rounded, "float16", cotangents_of(case))
    for index, half, double in zip(case.wrt, actual, expected, strict=True):
        assert_close(half, double, FLOAT16_TOLERANCE, f"gradient of input {index}")


@every_case
def test_standard_operators_under_every_shape_knowledge(case: Case) -> None:
    expected = gradients_in_float64(case)[1]
    for shapes in case.spec.shapes:
        graph = gradient_graph(case.spec, case.sample, "float64", shapes)
        check_standard(graph, declared_shapes=shapes != "unranked")
        assert not graph.dead, f"{shapes} shapes: nothing reads {graph.dead}"
        if shapes == "static":
            continue
        _, actual = run_gradients(graph, case.sample, "float64", cotangents_of(case))
        for index, one, other in zip(case.wrt, actual, expected, strict=True):
            assert_close(one, other, 1e-12, f"{shapes} shapes: gradient of input {index}")


@every_case
def test_newest_opset(case: Case) -> None:
    if not case.sample.newest_opset:
        return
    newest = replace(case.sample, opset=max(NEWEST_OPSET, case.sample.opset))
    graph = gradient_graph(case.spec, newest, "float32")
    check_standard(graph)
    _, expected = run_gradients(gradient_graph(case.spec, case.sample, "float32"), case.sample, "float32", cotangents_of(case))
    _, actual = run_gradients(graph, newest, "float32", cotangents_of(case))
    for index, new, old in zip(case.wrt, actual, expected, strict=True):
        assert_close(new, old, case.spec.tolerance, f"gradient of input {index}")


@pytest.mark.parametrize(
    "case", [c for c in CASES.values() if len(c.wrt) > 1], ids=[n for n, c in CASES.items() if len(c.wrt) > 1]
)
def test_each_gradient_alone(case: Case) -> None:
    full = gradient_graph(case.spec, case.sample, "float64")
    for position, index in enumerate(case.wrt):
        graph = gradient_graph(case.spec, case.sample, "float64", wrt=[index])
        assert not graph.dead, f"gradient of input {index} alone: nothing reads {graph.dead}"
        assert len(graph.emitted) <= len(full.emitted)
        _, (actual,) = run_gradients(graph, case.sample, "float64", cotangents_of(case), wrt=[index])
        assert_close(actual, gradients_in_float64(case)[1][position], 1e-12, f"gradient of input {index} alone")


@pytest.mark.parametrize(
    "case", [c for c in CASES.values() if c.sample.outputs > 1], ids=[n for n, c in CASES.items() if c.sample.outputs > 1]
)
def test_absent_cotangents(case: Case) -> None:
    """Gradients are linear in the cotangents: those of each output alone add up to those of all."""
    total = [np.zeros_like(gradient) for gradient in gradients_in_float64(case)[1]]
    for output, cotangent in cotangents_of(case).items():
        graph = gradient_graph(case.spec, case.sample, "float64", cotangents=[output])
        assert not graph.dead, f"cotangent of output {output} alone: nothing reads {graph.dead}"
        _, parts = run_gradients(graph, case.sample, "float64", {output: cotangent})
        total = [whole + part for whole, part in zip(total, parts, strict=True)]
    for index, actual, expected in zip(case.wrt, total, gradients_in_float64(case)[1], strict=True):
        assert_close(actual, expected, 1e-12, f"gradient of input {index}")


@pytest.mark.parametrize(
    "case",
    [c for c in CASES.values() if c.sample.most_nodes is not None],
    ids=[n for n, c in CASES.items() if c.sample.most_nodes is not None],
)
def test_emits_few_nodes(case: Case) -> None:
    emitted = gradient_graph(case.spec, case.sample, "float32").emitted
    assert len(emitted) <= (case.sample.most_nodes or 0), emitted


ERRORS = [(spec, error) for spec in specs() for error in spec.error_inputs]


@pytest.mark.parametrize(("spec", "error"), ERRORS, ids=[f"{spec.op_type}-{error.sample.name}" for spec, error in ERRORS])
def test_refused_with_a_named_error(spec: OperatorSpec, error: ErrorInput) -> None:
    with pytest.raises(error.error, match=error.match):
        gradient_graph(spec, error.sample, "float32", error.shapes)
