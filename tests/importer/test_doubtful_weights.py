"""Weights that were perhaps several, or one of two that were one, when their model was exported: `compile` warns of them."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import pytest

import burnish
from burnish.errors import ObjectiveWarning
from burnish.importer import perhaps_copied

pytestmark = pytest.mark.filterwarnings("ignore::burnish.errors.UntrainedWeightsWarning")

TABLE = np.random.default_rng(0).standard_normal((6, 3)).astype(np.float32)


def language_model(head: np.ndarray, body: str = "", transposed: int = 0) -> onnx.ModelProto:
    """A table of rows, and a head."""
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 18]> g (int64[N] tokens) => (float[N, 6] logits) {{
        rows = Gather (table, tokens)
        {body or "shown = Identity (rows)"}
        logits = Gemm <transB = {transposed}> (shown, head)
    }}""")
    for name, array in {"table": TABLE, "head": head, "ones": np.ones(3, np.float32), "zeros": np.zeros(3, np.float32)}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


@pytest.mark.parametrize(("head", "transposed"), [(TABLE.T, 0), (TABLE, 1)], ids=["transposed", "the same"])
def test_a_copy_of_a_table_is_warned_of(head, transposed):
    source = language_model(np.ascontiguousarray(head), transposed=transposed)
    assert perhaps_copied(burnish.load(source)) == {"head": "table"}
    message = "a weight holds the same numbers as a table .* trains apart from it: 'head' of 'table'.*do_constant_folding=False"
    with pytest.warns(ObjectiveWarning, match=message):
        burnish.compile(source)


@pytest.mark.parametrize("head", [TABLE.T + 1, TABLE.T[::-1], np.ones((3, 6))], ids=["shifted", "turned", "of one value"])
def test_another_matrix_is_not(head):
    assert perhaps_copied(burnish.load(language_model(np.ascontiguousarray(head, dtype=np.float32)))) == {}


def test_two_equal_tables_are_one_pair():
    source = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 18]> g (int64[N] a, int64[N] b) => (float[N, 3] y) {
        one = Gather (first, a)
        two = Gather (second, b)
        y = Add (one, two)
    }""")
    source.graph.initializer.extend([onnx.numpy_helper.from_array(TABLE, name) for name in ("first", "second")])
    assert perhaps_copied(burnish.load(source)) == {"second": "first"}


def test_a_vector_that_several_layers_read_is_warned_of():
    layers = "once = LayerNormalization (rows, ones, zeros)\n shown = LayerNormalization (once, ones, zeros)"
    source = language_model(np.ascontiguousarray(TABLE.T) + 1, layers)
    with pytest.warns(ObjectiveWarning, match=r"several layers read train as one: 'ones' \(2 layers\), 'zeros' \(2 layers\)\. "):
        burnish.compile(source)


def test_what_does_not_train_is_not_warned_of():
    layers = "once = LayerNormalization (rows, ones, zeros)\n shown = LayerNormalization (once, ones, zeros)"
    with warnings.catch_warnings():
        warnings.simplefilter("error", ObjectiveWarning)
        head = burnish.compile(language_model(np.ascontiguousarray(TABLE.T) + 1, layers), trainable=["head"])
        whole = burnish.compile(language_model(np.ascontiguousarray(TABLE.T) + 1))
    for program, trained in ((head, {"grad:head"}), (whole, {"grad:head", "grad:table"})):
        assert {entry.name for entry in program.signature["grad"].outputs if entry.name.startswith("grad:")} == trained
