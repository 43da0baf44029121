"""What Python, JavaScript and C do alike: the table of vectors.json, its programs, and the fields of its rows.

An array is ``{"dtype", "shape", "cycle"}``: the values of ``cycle`` in turn, until the shape is full; ``"nan"`` and ``"inf"`` are
numbers. ``batches`` has the batch of each program.

A refusal is a call that fails, in the languages that ``in`` names, or in all. Where it has ``state``, these entries are written
first.

- ``step``, ``evaluate`` and ``predict`` take the program's batch, with the arrays of ``batch`` in place of its own (null: without
  this input), ``hyperparameters`` by name, and the averaged weights for ``average``.
- ``write`` puts arrays into the state.
- ``restore`` reads the checkpoint that the client writes after one step, with a ``change``: the checkpoint ``of`` another
  program; a text to ``replace`` by one as long, once; the number of bytes to ``drop`` at the end or to ``keep``; a text to
  ``append``; the byte whose lowest bit is ``flip``-ped. With ``stamp`` the digest is that of the changed file.
- ``save`` writes a checkpoint to where a ``pipe`` or a ``folder`` is.
- ``export`` writes the model, of which nothing stays.

It raises ``error``, whose message has every text of ``says``, and leaves the state as it was.

A run takes ``steps``, each with its hyperparameters. ``losses`` are those of the steps, ``loss`` is that of the evaluation
afterwards, and ``state`` has the sum of each trained array, all to the digits that are the same on every processor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import programs

import burnish
from burnish.optim import adamw, ema, schedules, sgd
from oracles.small_networks import batch_of as random_batch
from oracles.small_networks import perceptron

TABLE: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
PROGRAMS: Mapping[str, Callable[[], burnish.Program]] = {
    "classes": lambda: burnish.compile(perceptron(dropout=True), loss="cross_entropy", optimizer="adamw"),
    "scheduled": lambda: burnish.compile(
        perceptron(dropout=True), loss="cross_entropy", optimizer=ema(adamw(lr=schedules.cosine(0.05, steps=120)), decay=0.9)
    ),
    "signs": lambda: burnish.compile(perceptron(outputs=1), loss="hinge", optimizer=sgd(lr=0.05, momentum=0.9)),
    "adapters": lambda: burnish.compile(burnish.surgery.lora(perceptron(), rank=2), loss="cross_entropy", optimizer="adamw"),
    "words": lambda: programs.program("recurrent")[0],
    "ia3": lambda: burnish.compile(burnish.surgery.lora(perceptron(), variant="ia3"), optimizer="sgd"),
    "pruned": lambda: burnish.compile(burnish.surgery.prune(perceptron(), 0.5), optimizer="sgd"),
    "quantized": lambda: _quantized("int8 per channel"),
    "int4": lambda: _quantized("int4 per channel"),
}


def _quantized(weights: str) -> burnish.Program:
    samples = [{"x": random_batch(perceptron())["x"]}]
    model = burnish.surgery.quantize(perceptron(), weights=weights, activations="uint8", calibration=samples)
    return burnish.compile(model, optimizer="sgd")


def write_programs(folder: Path) -> None:
    """Save every program of the table in a folder of its name."""
    for name, program in PROGRAMS.items():
        program().save(folder / name)


def array_of(described: Mapping[str, Any]) -> np.ndarray:
    """Return an array of the table."""
    count = int(np.prod(described["shape"]))
    cycle = [float(value) if isinstance(value, str) else value for value in described["cycle"]]
    values = [cycle[place % len(cycle)] for place in range(count)]
    return np.array(values, dtype=described["dtype"]).reshape(described["shape"])


def batch_of(row: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the batch of a row."""
    described = {**TABLE["batches"][row["program"]], **row.get("batch", {})}
    return {name: array_of(array) for name, array in described.items() if array is not None}


def changed(checkpoint: bytes, change: Mapping[str, Any], restamped: Callable[[bytes], bytes]) -> bytes:
    """Return a checkpoint with a row's change."""
    if "replace" in change:
        old, new = (text.encode() for text in change["replace"])
        assert len(old) == len(new)
        assert old in checkpoint
        checkpoint = checkpoint.replace(old, new, 1)
    checkpoint = checkpoint[: change.get("keep", len(checkpoint) - change.get("drop", 0))] + change.get("append", "").encode()
    if "flip" in change:
        flipped = bytearray(checkpoint)
        flipped[change["flip"]] ^= 1
        checkpoint = bytes(flipped)
    return restamped(checkpoint) if change.get("stamp") else checkpoint
