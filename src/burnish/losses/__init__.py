"""Losses: what training minimizes, as sums of terms over sums of weights, in operators that autodiff differentiates.

One file per family, on what is in ``base``. How a loss is wired into a program is in ``burnish.program``; what is only
reported is in ``burnish.metrics``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from burnish.errors import ConfigurationError
from burnish.losses.base import (
    CLASS_AXIS,
    Activation,
    Compared,
    LabelSpec,
    Loss,
    LossBase,
    Reading,
    Reduction,
    Term,
    average,
    combined,
)
from burnish.losses.binary import BinaryCrossEntropy, BinaryCrossEntropyWithLogits, bce_with_logits, binary_cross_entropy
from burnish.losses.cross_entropy import CrossEntropy, cross_entropy
from burnish.losses.dice import BinaryDice, Dice, binary_dice, dice
from burnish.losses.embedding import CosineEmbedding, TripletMargin, cosine_embedding, triplet
from burnish.losses.focal import BinaryFocal, Focal, binary_focal, focal
from burnish.losses.hinge import Hinge, HingeEmbedding, MultiMargin, hinge, hinge_embedding, multi_margin
from burnish.losses.likelihood import KullbackLeibler, NegativeLogLikelihood, kl_divergence, nll
from burnish.losses.regression import (
    Huber,
    MeanAbsoluteError,
    MeanSquaredError,
    SmoothL1,
    huber,
    l1,
    mean_squared_error,
    smooth_l1,
)

__all__ = [
    "CLASS_AXIS",
    "LOSSES",
    "Activation",
    "BinaryCrossEntropy",
    "BinaryCrossEntropyWithLogits",
    "BinaryDice",
    "BinaryFocal",
    "Compared",
    "CosineEmbedding",
    "CrossEntropy",
    "Dice",
    "Focal",
    "Hinge",
    "HingeEmbedding",
    "Huber",
    "KullbackLeibler",
    "LabelSpec",
    "Loss",
    "LossBase",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "MultiMargin",
    "NegativeLogLikelihood",
    "Reading",
    "Reduction",
    "SmoothL1",
    "Term",
    "TripletMargin",
    "average",
    "bce",
    "bce_with_logits",
    "binary_cross_entropy",
    "binary_dice",
    "binary_focal",
    "combined",
    "cosine_embedding",
    "cross_entropy",
    "dice",
    "focal",
    "get",
    "hinge",
    "hinge_embedding",
    "huber",
    "kl_divergence",
    "l1",
    "mean_squared_error",
    "mse",
    "multi_margin",
    "nll",
    "smooth_l1",
    "triplet",
]

bce = binary_cross_entropy
mse = mean_squared_error

LOSSES: dict[str, Callable[..., Loss]] = {
    "bce_with_logits": bce_with_logits,
    "binary_cross_entropy": binary_cross_entropy,
    "cross_entropy": cross_entropy,
    "binary_dice": binary_dice,
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
}


def get(loss: str | Mapping[str, Any] | Loss) -> Loss:
    """Return the loss of a name, of the options that a loss gave (``Loss.options``), or the loss object itself.

    Raises:
        ConfigurationError: there is no loss of that name, or no such option.
    """
    if isinstance(loss, str):
        return _named(loss)()
    if isinstance(loss, Mapping):
        settings = {key: value for key, value in loss.items() if key != "name"}
        try:
            return _named(str(loss.get("name")))(**settings)
        except TypeError as error:
            raise ConfigurationError(f"loss '{loss.get('name')}': {error}; it was given the options {settings}") from error
    if isinstance(loss, Loss):
        return loss
    raise ConfigurationError(
        f"loss must be a name or a loss object of burnish.losses, not {type(loss).__name__}; there is {', '.join(sorted(LOSSES))}"
    )


def _named(name: str) -> Callable[..., Loss]:
    if name not in LOSSES:
        raise ConfigurationError(f"there is no loss '{name}'; there is {', '.join(sorted(LOSSES))}")
    return LOSSES[name]
