"""Small programs that clients in other languages train, each with its batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import burnish
from burnish.models import bert, residual_network
from burnish.program import Program, Role
from oracles.small_networks import batch_of, mobile, perceptron

Batch = dict[str, np.ndarray]
STEPS = 120
"""Of the schedule of the program with dropout."""


def _lstm() -> onnx.ModelProto:
    """Words -> embedding -> LSTM -> last hidden state -> classes; batch and number of words are open."""
    rng = np.random.default_rng(3)
    words, embedded, hidden, classes = 12, 6, 5, 3
    weights = {
        "embedding": rng.standard_normal((words, embedded)),
        "W": rng.standard_normal((1, 4 * hidden, embedded)) / 2,
        "R": rng.standard_normal((1, 4 * hidden, hidden)) / 2,
        "B": rng.standard_normal((1, 8 * hidden)) / 4,
        "head": rng.standard_normal((hidden, classes)) / 2,
    }
    nodes = [
        helper.make_node("Gather", ["embedding", "words"], ["embedded"]),
        helper.make_node("Transpose", ["embedded"], ["x"], perm=[1, 0, 2]),
        helper.make_node("LSTM", ["x", "W", "R", "B"], ["", "last"], hidden_size=hidden),
        helper.make_node("Squeeze", ["last", "first"], ["features"]),
        helper.make_node("MatMul", ["features", "head"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "classifier",
        [helper.make_tensor_value_info("words", TensorProto.INT64, ["batch", "words"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", classes])],
        [
            *(numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()),
            numpy_helper.from_array(np.array([0]), "first"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def _dropout() -> tuple[Program, Batch]:
    """Dropout, a schedule, an average of the weights, counters."""
    model = perceptron(dropout=True)
    adam = burnish.optim.ema(burnish.optim.adamw(lr=burnish.optim.schedules.cosine(0.05, steps=STEPS)), decay=0.9)
    return burnish.compile(model, loss="cross_entropy", optimizer=adam), batch_of(model)


def _residual() -> tuple[Program, Batch]:
    rng = np.random.default_rng(1)
    program = burnish.compile(residual_network(), loss="cross_entropy", optimizer=burnish.optim.sgd(lr=0.05, momentum=0.9))
    return program, {"x": rng.standard_normal((6, 1, 8, 8)).astype(np.float32), "labels": rng.integers(0, 10, 6)}


def _mobile() -> tuple[Program, Batch]:
    model = mobile()
    return burnish.compile(model, loss="cross_entropy", optimizer="adamw"), batch_of(model)


def _recurrent() -> tuple[Program, Batch]:
    words = np.random.default_rng(5).integers(0, 12, (8, 7))
    return burnish.compile(_lstm(), loss="cross_entropy", optimizer="adamw"), {"words": words, "labels": words[:, 0] % 3}


def _transformer() -> tuple[Program, Batch]:
    model = bert(40, classes=3, width=16, layers=1, heads=2, positions=8)
    program = burnish.compile(model, loss="cross_entropy", optimizer="adamw")
    rng = np.random.default_rng(6)
    batch = {}
    for entry in program.signature["step"].inputs_of(Role.DATA):
        shape = [4, *(extent if isinstance(extent, int) else 8 for extent in entry.extents[1:])]
        high = 1 + (entry.maximum if entry.maximum is not None else 1)
        batch[entry.name] = rng.integers(0, high, shape).astype(entry.numpy_dtype)
    return program, {**batch, "labels": rng.integers(0, 3, 4)}


PROGRAMS: dict[str, Callable[[], tuple[Program, Batch]]] = {
    "dropout": _dropout,
    "residual": _residual,
    "mobile": _mobile,
    "recurrent": _recurrent,
    "transformer": _transformer,
}


@cache
def program(name: str) -> tuple[Program, Batch]:
    """A program, and a batch of it."""
    return PROGRAMS[name]()
