"""What burnish says in the ``metadata_props`` of a model that it writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from burnish.errors import ModelError
from burnish.graph.annotations import OBJECTIVE
from burnish.losses import Distillation, Mixed
from burnish.untrusted_files import UNREADABLE

TRAINING = "burnish.training"
"""The entry of a model that holds a program: its signature, options and how its graphs are laid out, as JSON."""
LARGEST_OBJECTIVE = 1 << 16
"""Characters above which it is left out: a loss that is an ONNX graph with weights of its own."""


def objective_entry(options: Mapping[str, Any]) -> dict[str, str]:
    """Return what an exported model says of its loss, from the options of its program: one entry, or none."""
    if "loss" not in options:
        return {}
    outputs = [prediction["output"] for prediction in options.get("predictions", ())]
    loss = options["loss"]
    if isinstance(loss, Mapping) and loss.get("name") == Distillation.name:
        # The teacher may be gone where the model goes, and hints read what is no output of it.
        loss, outputs = loss["loss"], outputs[:1]
    if isinstance(loss, Mapping) and loss.get("name") == Mixed.name:
        loss = loss["loss"]  # which evaluation reads: nothing is mixed there
    text = OBJECTIVE.write({"loss": loss, "metrics": options.get("metrics", []), "outputs": outputs})
    return {OBJECTIVE.key: text} if len(text) <= LARGEST_OBJECTIVE else {}


def read_objective(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return what ``objective_entry`` wrote; nothing where a model does not say.

    Raises:
        ModelError: the entry is not what was written.
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
