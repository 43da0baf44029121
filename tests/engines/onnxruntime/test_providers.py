"""Execution providers of ONNX Runtime. Every build for CPUs has Azure's too, which takes no operator of a program."""

from __future__ import annotations

import numpy as np
import pytest

import burnish
from burnish.engines.onnxruntime import OnnxRuntimeEngine
from burnish.errors import EngineError
from oracles.standard_operators import STANDARD
from oracles.tiny_program import LR, tiny_batch, tiny_program

AZURE = "AzureExecutionProvider"


@pytest.mark.parametrize("provider", [AZURE, (AZURE, {})])
def test_what_a_provider_does_not_take_runs_on_the_cpu(provider):
    program = tiny_program()
    sessions = [burnish.Session(program, engine=engine) for engine in (STANDARD, OnnxRuntimeEngine(providers=[provider]))]
    losses = [[session.step(tiny_batch(seed=number), lr=LR)["loss"] for number in range(3)] for session in sessions]
    assert losses[0] == losses[1]
    for name, array in sessions[0].state().items():
        np.testing.assert_array_equal(sessions[1].state()[name], array)


def test_providers_are_given_to_onnxruntime_the_cpu_behind_them():
    engine = OnnxRuntimeEngine(providers=[(AZURE, {})])
    assert engine.providers == [(AZURE, {}), "CPUExecutionProvider"]
    assert OnnxRuntimeEngine(providers=AZURE).providers == [AZURE, "CPUExecutionProvider"]
    graph = burnish.compile(burnish.models.residual_network(), loss="cross_entropy").predict
    assert engine.inference_session(graph).get_providers() == [AZURE, "CPUExecutionProvider"]


def test_a_provider_that_is_not_there_is_named():
    with pytest.raises(EngineError, match=r"has no execution provider 'CUDAExecutionProvider'; it has .*CPUExecutionProvider"):
        OnnxRuntimeEngine(providers=["CUDAExecutionProvider"])
