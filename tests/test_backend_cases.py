"""ONNX's own test cases for training operators, run through burnish on stock ONNX Runtime."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.backend.test.loader import load_model_tests
from onnx.backend.test.runner import Runner

from burnish.backend import BurnishBackend
from oracles.combinations import spread
from oracles.standard_cases import standard_cases

MODULES = """adagrad adam momentum dropout batch_normalization maxunpool meanvariancenormalization negativeloglikelihoodloss
softmax_cross_entropy_loss""".split()
NODE_CASES = {
    "adagrad": (r"test_adagrad", 2),
    "adam": (r"test_adam", 2),
    "momentum": (r"test_(nesterov_)?momentum", 3),
    "dropout": (r"test_dropout_", 6),
    "batch normalization": (r"test_batchnorm_", 4),
    "max unpooling": (r"test_maxunpool_", 2),
    "mean and variance normalization": (r"test_mvn", 1),
    "negative log-likelihood": (r"test_nllloss_", 36),
    "softmax cross-entropy": (r"test_sce_", 68),
}
"""Patterns of case names whose outputs are compared, and how many cases of each onnx 1.23 has; later versions may have more."""

TRAINING_DROPOUT = r"test_training_dropout"


CASES = standard_cases(MODULES)


def matching(pattern):
    return [case for case in CASES if re.match(pattern, case.name)]


COMPARED = [case for pattern, _ in NODE_CASES.values() for case in matching(pattern)]


def gradient_cases():
    return [case for case in load_model_tests(kind="simple") if case.name.startswith("test_gradient_")]


def read_arrays(folder, kind):
    paths = sorted(folder.glob(f"{kind}_*.pb"), key=lambda path: int(re.sub(r"\D", "", path.stem)))
    return [onnx.numpy_helper.to_array(onnx.load_tensor(path)) for path in paths]


@pytest.mark.parametrize("kind", NODE_CASES)
def test_the_cases_are_there(kind):
    pattern, count = NODE_CASES[kind]
    assert len(matching(pattern)) >= count


@spread("case", COMPARED, test=32, ids=lambda case: case.name)
def test_node_case(case):
    prepared = BurnishBackend.prepare(case.model, "CPU")
    assert case.data_sets
    for inputs, expected in case.data_sets:
        Runner.assert_similar_outputs(expected, prepared.run(inputs), rtol=case.rtol, atol=case.atol)


def test_the_gradient_cases_are_there():
    assert {case.name for case in gradient_cases()} >= {"test_gradient_of_add", "test_gradient_of_add_and_mul"}


@pytest.mark.parametrize("case", gradient_cases(), ids=lambda case: case.name)
def test_gradient_case(case):
    folder = Path(case.model_dir)
    prepared = BurnishBackend.prepare(onnx.load(folder / "model.onnx"), "CPU")
    data = sorted(folder.glob("test_data_set_*"))
    assert data
    for part in data:
        outputs = prepared.run(read_arrays(part, "input"))
        Runner.assert_similar_outputs(read_arrays(part, "output"), outputs, rtol=case.rtol, atol=case.atol)


def test_the_training_dropout_cases_are_there():
    assert len(matching(TRAINING_DROPOUT)) >= 6


@pytest.mark.parametrize("case", matching(TRAINING_DROPOUT), ids=lambda case: case.name)
def test_training_dropout_case(case):
    """Shapes, dtypes and what a mask does to the data; the elements that numpy's generator dropped are others."""
    prepared = BurnishBackend.prepare(case.model, "CPU")
    for inputs, expected in case.data_sets:
        outputs = prepared.run(inputs)
        assert [(o.dtype, o.shape) for o in outputs] == [(e.dtype, e.shape) for e in expected]
        x, ratio = inputs[0], float(inputs[1]) if len(inputs) > 1 else 0.5
        kept = outputs[1] if len(outputs) > 1 else outputs[0] != 0
        np.testing.assert_allclose(outputs[0], np.where(kept, x / (1 - ratio), 0), rtol=1e-6)
        # Within four standard deviations of a binomial distribution.
        assert abs(kept.mean() - (1 - ratio)) <= 4 * np.sqrt(ratio * (1 - ratio) / x.size)
        if ratio == 0.0:
            assert kept.all()
        else:
            assert not kept.all()
