"""Losses: sums of terms over sums of weights, built from operators that autodiff differentiates.

There is one file per family; ``base`` holds the shared parts. ``burnish.compiler`` wires a loss into a program, and
``burnish.metrics`` holds the figures that are only reported.
"""

from __future__ import annotations

from burnish.losses.base import (
    Activation,
    Compared,
    Detections,
    LabelSpec,
    Loss,
    LossBase,
    Reading,
    Reduction,
    Scale,
    Term,
    average,
    combined,
)
from burnish.losses.binary_cross_entropy import (
    BinaryCrossEntropy,
    BinaryCrossEntropyWithLogits,
    BinaryFocal,
    Focal,
    bce_with_logits,
    binary_cross_entropy,
    binary_focal,
    focal,
)
from burnish.losses.composite import Resized, Standardized, Summand, WeightedSum, resized, standardized, weighted_sum
from burnish.losses.cross_entropy import CrossEntropy, KullbackLeibler, NegativeLogLikelihood, cross_entropy, kl_divergence, nll
from burnish.losses.ctc import ConnectionistTemporalClassification, ctc
from burnish.losses.detr import Detr, detr
from burnish.losses.distillation import Distillation, distill
from burnish.losses.embedding import CosineEmbedding, TripletMargin, cosine_embedding, triplet
from burnish.losses.hinge import Hinge, HingeEmbedding, MultiMargin, hinge, hinge_embedding, multi_margin
from burnish.losses.iou import CompleteIoU, DistanceIoU, GeneralizedIoU, IntersectionOverUnion, ciou, diou, giou, iou
from burnish.losses.mixed import Mixed, mixed
from burnish.losses.onnx_losses import OnnxLoss, OutputLoss, from_onnx, from_options, output
from burnish.losses.registry import LOSSES, LossLike, get
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
from burnish.losses.segmentation import BinaryDice, Dice, Lovasz, Tversky, binary_dice, dice, lovasz, tversky
from burnish.losses.ssd import Ssd, ssd
from burnish.losses.task_aligned import TaskAligned, task_aligned
from burnish.operators.loss import CLASS_AXIS

LOSSES |= {
    "bce_with_logits": bce_with_logits,
    "binary_cross_entropy": binary_cross_entropy,
    "cross_entropy": cross_entropy,
    "binary_dice": binary_dice,
    "ctc": ctc,
    "dice": dice,
    "tversky": tversky,
    "lovasz": lovasz,
    "iou": iou,
    "giou": giou,
    "diou": diou,
    "ciou": ciou,
    "detr": detr,
    "distill": distill,
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
LOSSES.unlisted = {
    "mixed": mixed,
    "output": output,
    "resized": resized,
    "ssd": ssd,
    "standardized": standardized,
    "task_aligned": task_aligned,
    "weighted_sum": weighted_sum,
    OnnxLoss.name: from_options,
}

__all__ = [
    "CLASS_AXIS",
    "LOSSES",
    "Activation",
    "BinaryCrossEntropy",
    "BinaryCrossEntropyWithLogits",
    "BinaryDice",
    "BinaryFocal",
    "Compared",
    "CompleteIoU",
    "ConnectionistTemporalClassification",
    "CosineEmbedding",
    "CrossEntropy",
    "Detections",
    "Detr",
    "Dice",
    "DistanceIoU",
    "Distillation",
    "Focal",
    "GeneralizedIoU",
    "Hinge",
    "HingeEmbedding",
    "Huber",
    "IntersectionOverUnion",
    "KullbackLeibler",
    "LabelSpec",
    "Loss",
    "LossBase",
    "LossLike",
    "Lovasz",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "Mixed",
    "MultiMargin",
    "NegativeLogLikelihood",
    "OnnxLoss",
    "OutputLoss",
    "Reading",
    "Reduction",
    "Resized",
    "Scale",
    "SmoothL1",
    "Ssd",
    "Standardized",
    "Summand",
    "TaskAligned",
    "Term",
    "TripletMargin",
    "Tversky",
    "WeightedSum",
    "average",
    "bce",
    "bce_with_logits",
    "binary_cross_entropy",
    "binary_dice",
    "binary_focal",
    "ciou",
    "combined",
    "cosine_embedding",
    "cross_entropy",
    "ctc",
    "detr",
    "dice",
    "diou",
    "distill",
    "focal",
    "from_onnx",
    "get",
    "giou",
    "hinge",
    "hinge_embedding",
    "huber",
    "iou",
    "kl_divergence",
    "l1",
    "lovasz",
    "mean_squared_error",
    "mixed",
    "mse",
    "multi_margin",
    "nll",
    "output",
    "resized",
    "smooth_l1",
    "ssd",
    "standardized",
    "task_aligned",
    "triplet",
    "tversky",
    "weighted_sum",
]

bce = binary_cross_entropy
mse = mean_squared_error
