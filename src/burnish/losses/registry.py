"""The losses by name, and whatever a user gives for a loss turned into one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import onnx
import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.losses.base import Loss
from burnish.losses.binary import bce_with_logits, binary_cross_entropy
from burnish.losses.composite import weighted_sum
from burnish.losses.cross_entropy import cross_entropy
from burnish.losses.ctc import ctc
from burnish.losses.dice import binary_dice, dice
from burnish.losses.embedding import cosine_embedding, triplet
from burnish.losses.focal import binary_focal, focal
from burnish.losses.hinge import hinge, hinge_embedding, multi_margin
from burnish.losses.likelihood import kl_divergence, nll
from burnish.losses.onnx_losses import OnnxLoss, from_onnx, from_options, output
from burnish.losses.regression import huber, l1, mean_squared_error, smooth_l1
from burnish.registry import Registry

LossLike = str | os.PathLike[str] | onnx.ModelProto | ir.Model | Mapping[str, Any] | Loss

LOSSES: Registry[Loss] = Registry(
    "loss",
    {
        "bce_with_logits": bce_with_logits,
        "binary_cross_entropy": binary_cross_entropy,
        "cross_entropy": cross_entropy,
        "binary_dice": binary_dice,
        "ctc": ctc,
        "dice": dice,
        "cosine_embedding": cosine_embedding,
        "triplet": triplet,
        "binary_focal": binary_focal,
        "focal": focal,
        "hinge": hinge,
        "hinge_embedding": hinge_embedding,
        "multi_margin": multi_margin,
        "kl_divergence": kl_divergence,
        "nll": nll,
        "huber": huber,
        "l1": l1,
        "mean_squared_error": mean_squared_error,
        "smooth_l1": smooth_l1,
        "mse": mean_squared_error,
        "bce": binary_cross_entropy,
        "binary_cross_entropy_with_logits": bce_with_logits,
        "negative_log_likelihood": nll,
        "mean_absolute_error": l1,
        "mae": l1,
    },
    home="burnish.losses",
    is_made=lambda given: isinstance(given, Loss),
    unlisted={"output": output, "weighted_sum": weighted_sum, OnnxLoss.name: from_options},
)


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
