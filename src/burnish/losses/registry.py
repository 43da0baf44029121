"""Losses by name, and the loss that a user asks for by name, options, object or graph."""

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
"""What makes each loss, by name; ``burnish.losses`` enters them: some hold other losses, and ask for these here."""


def get(loss: LossLike) -> Loss:
    """Return the loss of a name, of the options that a loss gave (``Loss.options``), or the loss object itself.

    Args:
        loss: a name, with settings behind a colon (``huber:delta=0.5``, with commas between several); options; a loss object;
            or an ONNX graph (``from_onnx``): a path that ends in ``.onnx``, a ``ModelProto`` or an ``onnx_ir.Model``.

    Raises:
        ConfigurationError: there is no loss of that name, or no such option.
        ModelError: a path that leads to no valid ONNX model.
    """
    if isinstance(loss, os.PathLike | onnx.ModelProto | ir.Model) or (isinstance(loss, str) and loss.endswith(".onnx")):
        return from_onnx(loss)
    if isinstance(loss, Mapping) and "name" not in loss:
        raise ConfigurationError(
            f"the options of a loss have a 'name', and these have only {', '.join(map(repr, loss)) or 'nothing'}; losses by "
            "output are burnish.losses.weighted_sum({output: loss, ...})"
        )
    return LOSSES.resolve(loss)
