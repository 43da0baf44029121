"""What a PyTorch module says of its own training, as options of ``burnish.compile``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from burnish.compiler.options import CompileOptions
from burnish.compiler.selection import HoldRows, ModelState, Trainable
from burnish.importer import Source, exported_module
from burnish.norms import CUMULATIVE, Auto, BatchStatistics, NormPolicy
from burnish.norms import get as get_policy

if TYPE_CHECKING:
    from burnish.importer.pytorch import ExportedModule

Norm = str | NormPolicy | Mapping[str, str | NormPolicy]


def take_module(source: Source, options: CompileOptions) -> tuple[ExportedModule | None, Source, Trainable, Norm]:
    """Export a module; return that, what is compiled of it, what of it trains and how it normalizes.

    The user's selection comes before ``requires_grad``, and the user's policies before the modes of the layers. Without a module
    all is as it was given.

    Raises:
        ConfigurationError, UnsupportedOperatorError: see ``exported_module``.
    """
    module = exported_module(source, options.example_inputs, options.dynamic_shapes, options.verify, options.sample_axis)
    if module is None:
        return None, source, options.trainable, options.norm
    return module, module.model, _trainable_of(module, options.trainable), _norm_of(module, options.norm)


def _trainable_of(module: ExportedModule, trainable: Trainable) -> Trainable:
    if trainable is not None:
        return trainable

    def requires_gradient(name: str, array: np.ndarray) -> bool:
        return module.parameters.get(name, False)

    return requires_gradient


def _norm_of(module: ExportedModule, norm: Norm) -> Norm:
    policies = {layer: _continued(module, layer, policy) for layer, policy in module.norm_policies.items()}
    if isinstance(norm, Mapping):
        return {**policies, **norm}
    is_default = norm == Auto.name or isinstance(norm, Auto)
    return policies if is_default and policies else norm


def _continued(module: ExportedModule, layer: str, policy: str) -> str:
    """A policy that goes on with the average over all batches that the module has seen, where it keeps one."""
    found, seen = get_policy(policy), module.counted_batches.get(f"{layer}.num_batches_tracked", 0)
    if not isinstance(found, BatchStatistics) or found.momentum != CUMULATIVE:
        return policy
    return str(replace(found, seen=seen))


def held_rows_of(module: ExportedModule | None, state: ModelState, hold_rows: HoldRows) -> HoldRows:
    """Return the rows that are held: ``padding_idx`` of embeddings that train, and those of the user."""
    if module is None:
        return hold_rows
    held = {name: rows for name, rows in module.held_rows.items() if name in state.trainable}
    return {**held, **hold_rows} if isinstance(hold_rows, Mapping) else held if hold_rows is None else hold_rows
