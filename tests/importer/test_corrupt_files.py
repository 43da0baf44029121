"""Whatever happens to a file on its way, ``load`` gives a model or a ModelError, and never another exception."""

from __future__ import annotations

import contextlib
from functools import cache

import numpy as np
import onnx
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from burnish.errors import ModelError, UnsupportedOperatorError
from burnish.importer import load
from specs.opset_models import CASES
from torch_models import ResNet, export_onnx

QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


@cache
def contents() -> list[bytes]:
    """Serialized models: small ones of several opsets, and a network as PyTorch exports it."""
    names = ("convolutional_classifier", "branches", "slice_axes", "resize_sizes", "long_short_term_memory", "top_k")
    cases = [case for case in CASES if case.name in names]
    models = [case.make(opset) for case in cases for opset in {case.since, 13, case.until}]
    models.append(export_onnx(ResNet((1,), 4, 3), torch.zeros(1, 3, 16, 16)))
    return [model.SerializeToString() for model in models]


def load_or_refuse(content: bytes) -> None:
    with contextlib.suppress(ModelError, UnsupportedOperatorError):
        load(content)


@pytest.mark.slow
def test_the_models_load_when_whole() -> None:
    for content in contents():
        outputs = [value.name for value in onnx.ModelProto.FromString(content).graph.output]
        assert [value.name for value in load(content).graph.outputs] == outputs


@pytest.mark.slow
@QUICK
@given(st.data())
def test_truncated(data: st.DataObject) -> None:
    content = data.draw(st.sampled_from(contents()))
    load_or_refuse(content[: data.draw(st.integers(0, len(content) - 1))])


@pytest.mark.slow
@QUICK
@given(st.data())
def test_flipped_bits(data: st.DataObject) -> None:
    content = bytearray(data.draw(st.sampled_from(contents())))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    load_or_refuse(bytes(content))


@pytest.mark.slow
@QUICK
@given(st.data())
def test_overwritten_block(data: st.DataObject) -> None:
    content = bytearray(data.draw(st.sampled_from(contents())))
    start = data.draw(st.integers(0, len(content) - 1))
    block = data.draw(st.binary(min_size=1, max_size=32))
    content[start : start + len(block)] = block
    load_or_refuse(bytes(content))


@QUICK
@given(st.binary(max_size=200))
def test_noise(content: bytes) -> None:
    load_or_refuse(content)


def test_a_file_cut_anywhere_near_its_end() -> None:
    content = contents()[0]
    for length in np.linspace(len(content) - 60, len(content) - 1, 60).astype(int):
        load_or_refuse(content[:length])
