"""Every rule over the whole domain of its attributes and shapes, against PyTorch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oracles.attribute_domains import DRAWN, uses
from oracles.combinations import spread
from oracles.gradient_harness import (
    GradientGraph,
    as_stored,
    assert_close,
    cast_inputs,
    check_standard,
    differentiated,
    gradient_graph,
    run_gradients,
)
from oracles.operator_records import differentiable_operators
from oracles.torch_gradients import torch_gradients
from specs.operator_spec import OperatorSpec, Sample

CALM = list(HealthCheck)
FLOAT16_TOLERANCE = 2e-2


def tolerance_of(spec: OperatorSpec, dtype: str) -> float:
    return {"float16": FLOAT16_TOLERANCE, "float32": spec.tolerance, "float64": spec.float64_tolerance}[dtype]


def compare(spec: OperatorSpec, sample: Sample, graph: GradientGraph, dtype: str) -> None:
    rounded = [None if x is None else x.astype(x.dtype if x.dtype.kind != "f" else "float64") for x in cast_inputs(sample, dtype)]
    sample = replace(sample, inputs=rounded)
    own = sample.torch_attributes
    attributes = as_stored(sample.attributes if own is None else own)
    function, wrt, rng = sample.torch or spec.torch, differentiated(sample), np.random.default_rng(7)
    outputs, _ = torch_gradients(function, sample.inputs, attributes, {}, [])
    cotangents = {index: np.asarray(np.float16(rng.standard_normal(y.shape)), np.float64) for index, y in enumerate(outputs)}
    _, expected = torch_gradients(function, sample.inputs, attributes, cotangents, wrt)
    _, actual = run_gradients(graph, sample, dtype, cotangents)
    tolerance = tolerance_of(spec, dtype)
    for index, one, other in zip(wrt, actual, expected, strict=True):
        what = f"{dtype}: gradient of input {index} of {sample}"
        try:
            assert_close(one, other, tolerance, what)
        except AssertionError:
            if dtype == "float64" or "float64" not in spec.dtypes:
                raise
            # Terms as large as the cotangents may cancel, and their rounding remains; in float64 next to nothing does.
            size = float(np.sqrt(sum(np.sum(cotangent**2) for cotangent in cotangents.values())))
            assert np.linalg.norm(np.asarray(one, np.float64) - other) <= tolerance * size, what
            compare(spec, sample, gradient_graph(spec, sample, "float64", "static"), "float64")


def of_another_batch(sample: Sample) -> Sample | None:
    """The use with a sample more, where the operands have a batch."""
    batched = [index for index in sample.batched if index < len(sample.inputs) and np.ndim(sample.inputs[index])]
    extents = {np.shape(sample.inputs[index])[0] for index in batched}
    if len(extents) != 1 or not extents.pop() > 1:
        return None
    inputs = [
        array if index not in batched or array is None else np.concatenate([array, array[:1] * 1.01])
        for index, array in enumerate(sample.inputs)
    ]
    return replace(sample, inputs=inputs)


def check(spec: OperatorSpec, sample: Sample, chosen: dict[str, str]) -> None:
    graph = gradient_graph(spec, sample, chosen["dtype"], chosen["shapes"])
    check_standard(graph)
    compare(spec, sample, graph, chosen["dtype"])
    other = of_another_batch(sample) if chosen["shapes"] == "batch" else None
    if other is not None:
        compare(spec, other, graph, chosen["dtype"])


@spread("op_type", DRAWN, test=17)
def test_drawn_uses(op_type: str) -> None:
    drawn_uses(op_type, 4)


@pytest.mark.campaign
@pytest.mark.parametrize("op_type", DRAWN)
def test_many_drawn_uses(op_type: str) -> None:
    drawn_uses(op_type, 30)


def drawn_uses(op_type: str, count: int) -> None:
    @settings(max_examples=count, deadline=None, derandomize=True, suppress_health_check=CALM)
    @given(st.data())
    def test(data: st.DataObject) -> None:
        check(*data.draw(uses(op_type)))

    test()


ELSEWHERE = {
    "drawn with its attributes in test_window_configurations.py": "Conv ConvTranspose MaxPool AveragePool LpPool",
    "drawn in test_normalization_autotest.py": "BatchNormalization",
    "no function in PyTorch, or none with these attributes: differences, in test_operator_gradients.py": (
        "AffineGrid CenterCropPad Col2Im CumSum DFT DeformConv LRN MaxRoiPool MaxUnpool ReverseSequence RoiAlign STFT "
        "TensorScatter"
    ),
    "the whole domain is in the tables": "Cast CastLike GlobalAveragePool GlobalLpPool GlobalMaxPool Mod OneHot Range",
    "a shape and attributes that hang together, each form in the tables": (
        "Compress Det Einsum GRU GatherND GridSample LSTM NegativeLogLikelihoodLoss RNN Resize ScatterElements ScatterND "
        "SoftmaxCrossEntropyLoss TopK Unique"
    ),
    "bodies, drawn in test_random_graphs.py": "If Loop Scan",
    "draws of random numbers": "Bernoulli Dropout RandomNormalLike RandomUniformLike",
    "zero everywhere": "DynamicQuantizeLinear EyeLike Hardmax MelWeightMatrix",
}
"""Rules whose uses are not drawn here, by the reason."""


def test_which_rules_are_drawn() -> None:
    named = " ".join(ELSEWHERE.values()).split()
    assert len(named) == len(set(named))
    assert differentiable_operators() - set(DRAWN) == set(named)
