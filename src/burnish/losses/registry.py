"""The registry of losses, and ``get``, which accepts a name, options, an object or a graph."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import onnx
import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.losses.base import Loss
from burnish.losses.onnx_losses import from_onnx
from burnish.registry import Registry

LossLike = str | os.PathLike[str] | onnx.ModelProto | ir.Model | Mapping[str, Any] | Loss

LOSSES: Registry[Loss] = Registry("loss", {}, home="burnish.losses", is_made=lambda given: isinstance(given, Loss))
"""Factories of losses by name. ``burnish.losses`` fills it in, because some losses look others up here."""


def get(loss: LossLike) -> Loss:
    """Return the loss of a name, of options (``Loss.options``), or the loss object itself.

    Args:
        loss: a name, optionally followed by a colon and comma-separated settings (``huber:delta=0.5``); options; a loss object;
            or an ONNX graph (``from_onnx``): a path that ends in ``.onnx``, a ``ModelProto`` or an ``onnx_ir.Model``.

    Raises:
        ConfigurationError: there is no loss of that name, or no such option.
        ModelError: the path does not lead to a valid ONNX model.
    """
    if isinstance(loss, os.PathLike | onnx.ModelProto | ir.Model) or (isinstance(loss, str) and loss.endswith(".onnx")):
        return from_onnx(loss)
    if isinstance(loss, Mapping) and "name" not in loss:
        raise ConfigurationError(
            f"the options of a loss have a 'name', and these have only {', '.join(map(repr, loss)) or 'nothing'}; losses by "
            "output are burnish.losses.weighted_sum({output: loss, ...})"
        )
    return LOSSES.resolve(loss)
