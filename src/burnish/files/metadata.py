"""The entries of burnish in the ``metadata_props`` of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from burnish.errors import ModelError
from burnish.graph.annotations import OBJECTIVE
from burnish.losses import Distillation, Mixed
from burnish.untrusted_files import UNREADABLE

TRAINING = "burnish.training"
"""The entry of a model that holds a program: its signature, options and the layout of its graphs, as JSON."""
LARGEST_OBJECTIVE = 1 << 16
"""The number of characters above which it is left out, such as for an ONNX loss graph with its own weights."""


def objective_entry(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the entry about the loss for an exported model, from the options of its program: one entry, or none."""
    if "loss" not in options:
        return {}
    outputs = [prediction["output"] for prediction in options.get("predictions", ())]
    loss = options["loss"]
    if isinstance(loss, Mapping) and loss.get("name") == Distillation.name:
        # The teacher may not be available to the reader, and hints read values that are not outputs of the model.
        loss, outputs = loss["loss"], outputs[:1]
    if isinstance(loss, Mapping) and loss.get("name") == Mixed.name:
        loss = loss["loss"]  # evaluation reads this one and mixes nothing
    text = OBJECTIVE.write({"loss": loss, "metrics": options.get("metrics", []), "outputs": outputs})
    return {OBJECTIVE.key: text} if len(text) <= LARGEST_OBJECTIVE else {}


def read_objective(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return the values that ``objective_entry`` wrote; empty if a model has none.

    Raises:
        ModelError: the entry is malformed.
    """
    if OBJECTIVE.key not in metadata:
        return {}
    try:
        entry = OBJECTIVE.read(metadata[OBJECTIVE.key])
        loss, metrics, outputs = dict(entry["loss"]), entry["metrics"], entry["outputs"]
        if not all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in (metrics, outputs)):
            raise ValueError("metrics and outputs are lists of names")
    except UNREADABLE as error:
        raise ModelError(
            f"the model's metadata '{OBJECTIVE.key}' cannot be read ({error!r}): export it again, or remove that "
            "entry and say which loss"
        ) from error
    return {"loss": loss, "metrics": metrics, "outputs": outputs}
