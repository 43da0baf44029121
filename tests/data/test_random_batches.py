"""Random batches that fit a program."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import onnx_ir as ir
import pytest

from burnish.data.random_data import random_batches
from burnish.errors import ConfigurationError
from burnish.norms import ExtentRule
from burnish.program import Entry, GraphSignature, Role
from oracles.tiny_program import tiny_program
from specs.program_inputs import class_entry, data_entry, value_entry


def program_with(*inputs: Entry, extents: tuple[ExtentRule, ...] = ()):
    program = tiny_program()
    signature = program.signature
    step = GraphSignature(inputs, signature["step"].outputs, extents)
    changed = replace(program.graphs, signature=replace(signature, graphs={**signature.graphs, "step": step}))
    return replace(program, graphs=changed)


def test_they_fit_the_signature_and_follow_the_seed():
    program = program_with(data_entry(3, "time"), class_entry(5, "time"))
    first, second = islice(random_batches(program, 6, seed=3, extents={"time": 7}), 2)
    assert first["x"].shape == (6, 3, 7)
    assert first["x"].dtype == np.float32
    assert first["labels"].shape == (6, 7)
    assert first["labels"].dtype == np.int64
    assert set(first["labels"].ravel()) == set(range(5))
    assert not np.array_equal(first["x"], second["x"])
    again = next(iter(random_batches(program, 6, seed=3, extents={"time": 7})))
    np.testing.assert_array_equal(again["x"], first["x"])
    assert not np.array_equal(next(iter(random_batches(program, 6, seed=4, extents={"time": 7})))["x"], first["x"])


def test_indices_and_masks_are_zero_or_one_and_bounded_labels_stay_in_bounds():
    words = Entry("ids", Role.DATA, ir.DataType.INT64, ("batch", None))
    share = replace(value_entry(2), minimum=0, maximum=1)
    positive = replace(value_entry(2), name="count", minimum=1)
    sign = replace(value_entry(2), name="sign", minimum=-1, maximum=1, two_values=True)
    batch = next(iter(random_batches(program_with(words, share, positive, sign), 50)))
    assert set(batch["sign"].ravel()) == {-1, 1}
    assert batch["ids"].shape == (50, 8)
    assert set(batch["ids"].ravel()) == {0, 1}
    assert 0 <= batch["targets"].min() < 0.1 < 0.9 < batch["targets"].max() <= 1
    assert batch["count"].min() >= 1


def test_the_batch_is_one_that_the_layers_take():
    program = program_with(data_entry(2), extents=(ExtentRule("batch", "layer", multiple=4),))
    assert next(iter(random_batches(program, 5)))["x"].shape == (8, 2)


def test_what_makes_no_batch_is_refused():
    program = program_with(data_entry(2))
    with pytest.raises(ConfigurationError, match=r"batch_size=0: give a size of 1 or more"):
        random_batches(program, 0)
    with pytest.raises(ConfigurationError, match=r"batch_size=999999999999: give a size of 1 or more, up to 16,777,216"):
        random_batches(program, 10**12 - 1)
    with pytest.raises(ConfigurationError, match=r"seed=-1: give a seed of 0 or more"):
        random_batches(program, seed=-1)
    with pytest.raises(ConfigurationError, match=r"extent: no input has a dimension 'width'; symbolic are batch"):
        random_batches(program, extents={"width": 3})
