"""The test cases that the ONNX standard brings for its operators."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterable

import onnx.backend.test.case.node as standard
from onnx.backend.test.case.test_case import TestCase


def standard_cases(modules: Iterable[str]) -> list[TestCase]:
    """The cases that some modules of ``onnx.backend.test.case.node`` define.

    To import one computes the values that its cases expect; to import all of them takes seven seconds.
    """
    names = [f"{standard.__name__}.{module}" for module in modules]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # cases of other operators overflow on purpose
        for name in names:
            importlib.import_module(name)
    return list(standard._NodeTestCases)
