"""A model to predict and to be evaluated with, and not to train: two graphs, and what an exported model says of its loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from burnish.program.signature import GraphSignature


@dataclass(frozen=True)
class Inference:
    """A model in inference mode, its weights in it.

    Attributes:
        predict: (data) -> the outputs of the model, under their own names.
        evaluate: (data, label) -> loss, metrics and their totals, as the graph of a program; None where no loss was given.
        signature: of both graphs, by name.
        options: ``loss`` and ``metrics``, and ``loss_terms`` where the loss is a weighted sum, as a program has them.
        metadata: the ``metadata_props`` of the model.
    """

    predict: ir.Model
    evaluate: ir.Model | None
    signature: Mapping[str, GraphSignature]
    options: Mapping[str, Any]
    metadata: Mapping[str, str]
