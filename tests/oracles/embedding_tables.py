"""A classifier over embedding tables, and batches that look up some rows of them often and others never."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

import burnish

ROWS, WIDTH, CLASSES, LENGTH = 9, 4, 3, 3
FEW = 2
"""Rows of the table ``kind_table``: fewer than three workers."""

TEXT = """<ir_version: 10, opset_import: ["": 18]>
classifier (int64[N, 3] words, int64[N] last, int64[N] kind) => (TYPE[N, 3] logits) {
  several = Gather <axis = 0> (word_table, words)
  one = Gather <axis = 0> (word_table, last)
  of_kind = Gather <axis = 0> (kind_table, kind)
  sum = ReduceSum <keepdims = 0> (several, axis)
  product = Mul (sum, one)
  features = Add (product, of_kind)
  hidden = Tanh (features)
  logits = MatMul (hidden, head)
}"""


def tables_model(dtype: str = "float64") -> onnx.ModelProto:
    """Two lookups in ``word_table`` [9, 4], one in ``kind_table`` [2, 4], and a dense ``head``."""
    rng = np.random.default_rng(0)
    values = {
        "word_table": rng.standard_normal((ROWS, WIDTH)).astype(dtype),
        "kind_table": rng.standard_normal((FEW, WIDTH)).astype(dtype),
        "head": rng.standard_normal((WIDTH, CLASSES)).astype(dtype),
        "axis": np.array([1]),
    }
    model = onnx.parser.parse_model(TEXT.replace("TYPE", {"float64": "double", "float32": "float"}[dtype]))
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in values.items())
    return model


def tables_program(optimizer: Any, dtype: str = "float64", **options: Any) -> burnish.Program:
    """A program that updates both tables by rows."""
    return burnish.compile(tables_model(dtype), optimizer=optimizer, sparse=["word_table", "kind_table"], **options)


def table_batches(count: int = 4, samples: int = 6) -> list[dict[str, np.ndarray]]:
    """Word 1 is in every sample, and the last but one, counted from the end, in the first; no word is the last of all."""
    rng = np.random.default_rng(1)
    batches = []
    for _ in range(count):
        words = rng.integers(0, ROWS - 2, (samples, LENGTH))
        words[:, 0] = 1
        words[0, 1] = -2
        batches.append(
            {
                "words": words,
                "last": rng.integers(0, ROWS - 1, samples),
                "kind": rng.integers(0, FEW, samples),
                "labels": rng.integers(0, CLASSES, samples),
            }
        )
    return batches
