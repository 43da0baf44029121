"""Arithmetic with broadcasting and elementwise functions."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from specs.operator_spec import OperatorSpec, Sample, normal


def binary_samples(rng: np.random.Generator) -> Iterator[Sample]:
    yield Sample([normal(rng, 2, 3), normal(rng, 2, 3)], name="same_shape", batched=(0, 1), most_nodes=2)
    yield Sample([normal(rng, 2, 3), normal(rng, 3)], name="missing_axis")


SPECS = [
    OperatorSpec("Add", binary_samples, torch=torch.add, shapes=("static", "batch", "symbolic", "unranked")),
    OperatorSpec("Mul", binary_samples, torch=torch.mul, shapes=("static", "batch", "symbolic", "unranked")),
    OperatorSpec("Tanh", lambda rng: [Sample([normal(rng, 2, 3)])], torch=torch.tanh),
]
