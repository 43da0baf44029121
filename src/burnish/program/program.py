"""The program itself: six graphs, their signature and the initial state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from burnish.program.signature import Signature

GRAPH_NAMES = ("init", "step", "grad", "apply", "evaluate", "predict")


@dataclass
class Program:
    """A training program: pure graphs over explicit state, in standard ONNX operators.

    Attributes:
        init: (seed, param/*) -> opt/*, rng/key, step: the state that training starts from, beside the model's own.
        step: one training step: grad followed by apply, in one graph.
        grad: (data, label, param/*, stat/*, rng/key, step) -> loss, metrics, grad:*, next statistics, next key.
        apply: (param/*, grad:*, opt/*, step, hyperparameters) -> next parameters, next optimizer state, next step.
        evaluate: (data, label, param/*, stat/*) -> loss and metrics, and for each ``sum:<name>`` and ``count:<name>``,
            from which a data set's figures are added up exactly.
        predict: (data, param/*, stat/*) -> the outputs of the model, under their own names.
        signature: every input and output of every graph.
        weights: the source's parameters and statistics, by state name (``param/...``, ``stat/...``).
        options: what the program was compiled with, as JSON-compatible values: loss, optimizer, norm, metrics.
    """

    init: ir.Model
    step: ir.Model
    grad: ir.Model
    apply: ir.Model
    evaluate: ir.Model
    predict: ir.Model
    signature: Signature
    weights: Mapping[str, np.ndarray]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def graphs(self) -> dict[str, ir.Model]:
        """The six graphs by name."""
        return {name: getattr(self, name) for name in GRAPH_NAMES}
