"""Every version of every operator with a gradient: the import keeps what it computes, and its gradient is that of this.

The models are the samples of ``tests/specs``, each written in the opset that brought a version. What they compute is what ONNX
Runtime makes of them in that opset; gradients are compared with differences of the same function in float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import onnx
import pytest
import torch

import burnish
from burnish.importer import load
from oracles.combinations import spread
from oracles.float64_values import (
    Arrays,
    Function,
    as_float64,
    directional_difference,
    float32_difference,
    float64_function,
)
from oracles.gradient_harness import NEWEST_OPSET, as_stored, cast_inputs
from oracles.onnxruntime_outputs import onnxruntime_outputs
from oracles.operator_cases import CASES as SAMPLES
from oracles.operator_cases import Case as SampleCase
from specs.older_forms import built_model, sample_model
from specs.opset_models import CASES as MODELS
from specs.opset_models import Case as ModelCase
from specs.opset_models import opsets_of_versions

OLDEST_OPSET = 7
MOST_SAMPLES = 8
"""Of one operator in one version."""

ELSEWHERE = {
    ("GlobalLpPool", 22): "ONNX Runtime has no kernel of it",
    ("GroupNormalization", 18): "test_group_normalization.py",
    ("MaxRoiPool", 22): "ONNX Runtime has no kernel of it",
    ("Resize", 10): "the models below",
    ("RoiAlign", 22): "ONNX Runtime has no kernel of it",
    ("Scan", 8): "refused for the batch axis of its own: test_opset_changes.py",
}
"""Versions without a sample that ONNX Runtime runs, and where else they are tested."""


def versions() -> list[tuple[str, int]]:
    """Each operator of the tables with each opset that brought a version of it; 7 for the version in force there."""
    operators = {case.spec.op_type for case in SAMPLES.values()}
    brought: dict[str, set[int]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain == "" and schema.name in operators and schema.since_version <= NEWEST_OPSET:
            brought.setdefault(schema.name, set()).add(schema.since_version)
    return [
        (op_type, max(version, OLDEST_OPSET))
        for op_type, found in sorted(brought.items())
        for version in sorted(found)
        if version >= OLDEST_OPSET or min((newer for newer in found if newer > version), default=99) > OLDEST_OPSET
    ]


def samples_of(op_type: str) -> list[SampleCase]:
    """Those of a node alone; of an operator that no sample has alone, as it has bodies, the small graphs around it."""
    every = [case for case in SAMPLES.values() if case.spec.op_type == op_type]
    return [case for case in every if case.sample.build is None] or every


def samples_in(opset: int, cases: list[SampleCase], most: int) -> Iterator[tuple[SampleCase, onnx.ModelProto, Arrays]]:
    """The first samples that an opset can say and ONNX Runtime runs there, with what they are fed."""
    count = 0
    for case in cases:
        if count == most:
            return
        model = sample_model(case.spec, case.sample, opset) if case.sample.build is None else built_model(case.sample, opset)
        if model is None:
            continue
        arrays, constants = cast_inputs(case.sample, "float32"), {tensor.name for tensor in model.graph.initializer}
        names = [info.name for info in model.graph.input if info.name not in constants]
        feeds = {name: array for name in names if (array := arrays[int(name.removeprefix("input"))]) is not None}
        try:
            onnxruntime_outputs(model, feeds)
        except Exception:  # ONNX Runtime lacks some versions, and some attributes of others
            continue
        count += 1
        yield case, model, feeds


def in_torch(case: SampleCase) -> list[Function]:
    """The sample in PyTorch, as a function of the model's inputs."""
    function, own = case.sample.torch or case.spec.torch, case.sample.torch_attributes
    if function is None:
        return []
    attributes = as_stored(case.sample.attributes if own is None else own)

    def run(feeds: Mapping[str, np.ndarray]) -> Arrays:
        operands = [
            None if array is None else torch.from_numpy(np.array(feeds.get(f"input{index}", array)))
            for index, array in enumerate(cast_inputs(case.sample, "float64"))
        ]
        result = function(*operands, **attributes)
        outputs = result if isinstance(result, (tuple, list)) else [result]
        return {f"output{index}": output.numpy() for index, output in enumerate(outputs)}

    return [run]


def check_values(model: onnx.ModelProto, feeds: Arrays) -> None:
    expected, found = onnxruntime_outputs(model, feeds), onnxruntime_outputs(load(model), feeds)
    assert list(found) == list(expected)
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-6, err_msg=name)


def check_gradients(model: onnx.ModelProto, feeds: Arrays, wrt: list[str], function: Function | None) -> None:
    """Compare the gradients along a random direction with differences, in float32 where there is no ``function``."""
    rng = np.random.default_rng(5)
    outputs = onnxruntime_outputs(model, feeds)
    known = outputs if function is None else function(as_float64(feeds))
    for of in [name for name, array in outputs.items() if name in known and array.dtype == np.float32]:
        cotangent = rng.standard_normal(outputs[of].shape).astype(np.float32) if outputs[of].ndim else np.float32(1)
        flowing = {f"cotangent:{of}": cotangent} if outputs[of].ndim else {}
        gradients = onnxruntime_outputs(burnish.grad(model, wrt=wrt, of=of), {**feeds, **flowing})
        for name in wrt:
            gradient, direction = gradients[f"grad:{name}"], rng.standard_normal(feeds[name].shape)
            if function is None:
                reference, tolerance = float32_difference(model, feeds, name, direction, {of: cotangent}), 2e-3
            else:
                reference, tolerance = directional_difference(function, feeds, name, direction, {of: cotangent}), 2e-4
            actual = float((gradient * direction).sum())
            error = abs(actual - reference) / (float(np.linalg.norm(gradient)) + 1e-2)
            assert error <= tolerance, f"d {of} / d {name}: {actual}, and differences give {reference}"


@spread(("op_type", "opset"), versions(), test=48, test_all=144, ids=lambda item: str(item))
def test_version(op_type: str, opset: int) -> None:
    """Versions of an operator take turns in its samples."""
    every = samples_of(op_type)
    turn = every[opset % 4 :: 4] + [case for number, case in enumerate(every) if number % 4 != opset % 4]
    check_version(op_type, opset, list(samples_in(opset, turn, MOST_SAMPLES // 4)))


@pytest.mark.campaign
@pytest.mark.parametrize(("op_type", "opset"), versions(), ids=lambda item: str(item))
def test_version_in_more_samples(op_type: str, opset: int) -> None:
    check_version(op_type, opset, list(samples_in(opset, samples_of(op_type), MOST_SAMPLES)))


def check_version(op_type: str, opset: int, found: list[tuple[SampleCase, onnx.ModelProto, Arrays]]) -> None:
    assert bool(found) == ((op_type, opset) not in ELSEWHERE)
    for case, model, feeds in found:
        check_values(model, feeds)
        if not case.sample.smooth:
            continue
        function = float64_function(model, feeds, in_torch(case))
        assert function is not None
        check_gradients(model, feeds, [f"input{index}" for index in case.wrt if f"input{index}" in feeds], function)


def models() -> dict[str, tuple[ModelCase, int]]:
    """Each model of ``opset_models`` in the first opset of each combination of versions of its operators."""
    return {f"{case.name}-{opset}": (case, opset) for case in MODELS if case.differentiable for opset in opsets_of_versions(case)}


@spread(("case", "opset"), list(models().values()), test=36, ids=list(models()), test_all=108)
def test_gradient_of_a_model(case: ModelCase, opset: int) -> None:
    """What ``test_opset_changes`` compares the values of: operators whose form or meaning changed."""
    model = case.make(opset)
    feeds = {"x": np.random.default_rng(7).normal(size=case.shape).astype(np.float32)}
    check_gradients(model, feeds, ["x"], float64_function(model, feeds))
