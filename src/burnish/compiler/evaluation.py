"""A source that computes something else in evaluation than in training: a module that asks for its own mode."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from burnish import losses
from burnish.compiler.predictions import Prediction, find_predictions
from burnish.compiler.selection import ModelState
from burnish.errors import ConfigurationError
from burnish.rewriting.fold_constants import fold_constants


@dataclass(frozen=True)
class Evaluation:
    """What predicts and is evaluated, with state of the model that trains.

    Attributes:
        in_file: in the dtypes of its file.
        model: computes the same in float32 at least.
        predictions: what the loss reads in it.
    """

    in_file: ir.Model
    model: ir.Model
    predictions: tuple[Prediction, ...]

    @functools.cached_property
    def folded(self) -> ir.Model:
        """The model with what hangs on constants alone computed."""
        folded = self.model.clone()
        fold_constants(folded)
        return folded


def evaluated_predictions(model: ir.Model, outputs: str | Sequence[str] | None, objective: losses.Loss) -> tuple[Prediction, ...]:
    """Return what the loss reads of a model in evaluation: the outputs of the same names, or the only one there.

    Raises:
        ConfigurationError: there are neither.
    """
    try:
        return find_predictions(model, outputs, objective.readings, objective.name)
    except ConfigurationError as error:
        try:
            return find_predictions(model, None, objective.readings, objective.name)
        except ConfigurationError:
            raise ConfigurationError(
                f"{error}. That is so in evaluation, eval(): let forward return in both modes what the loss reads"
            ) from error


def state_within(state: ModelState, model: ir.Model) -> ModelState:
    """Return those parameters and statistics that a model has."""

    def present(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(name for name in names if name in model.graph.initializers)

    return replace(
        state,
        parameters=present(state.parameters),
        statistics=present(state.statistics),
        trainable=present(state.trainable),
        asked_for={pattern: held for pattern, names in state.asked_for.items() if (held := present(names))},
    )
