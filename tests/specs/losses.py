"""Losses with one term, each beside the same function in PyTorch: the table that feeds the generic tests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from burnish import losses
from oracles.combinations import covering
from specs import region_and_box_losses as of_regions

N, C, D = 6, 5, 4
REDUCTIONS = ("mean", "sum")
WEIGHT = [0.5, 1.0, 2.0, 0.25, 3.0]


@dataclass
class LossCase:
    """A loss with samples.

    Attributes:
        loss: the loss.
        torch: the same function of (*predictions, *labels).
        predictions: float64 samples by name, away from kinks.
        labels: by the name of the input.
        extreme: whether the predictions may be any finite numbers.
    """

    loss: losses.Loss
    torch: Callable[..., torch.Tensor]
    predictions: Mapping[str, np.ndarray]
    labels: Mapping[str, np.ndarray] = field(default_factory=dict)
    extreme: bool = True

    def __str__(self) -> str:
        defaults = _default_options(self.loss.name)
        shown = {key: value for key, value in self.loss.options().items() if value != defaults[key]}
        shapes = "x".join(map(str, next(iter(self.predictions.values())).shape))
        return "-".join([self.loss.name, shapes, *(f"{key}={value}" for key, value in shown.items())]).replace(" ", "")


@cache
def _default_options(name: str) -> Mapping[str, Any]:
    return losses.get(name).options()


def _rng() -> np.random.Generator:
    return np.random.default_rng(7)


def _values(make: Callable[..., losses.Loss], function: Callable[..., Any], **options: Any) -> list[LossCase]:
    rng = _rng()
    cases = []
    for shape, reduction in itertools.product(((N, D), (N,), (2, 3, 2), ()), REDUCTIONS):
        x, y = 2 * np.asarray(rng.standard_normal(shape)), np.asarray(rng.standard_normal(shape))
        reference = _with(function, reduction=reduction, **options)
        cases.append(LossCase(make(reduction=reduction, **options), reference, {"x": x}, {"targets": y}))
    return cases


def _with(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return lambda *tensors: function(*tensors, **options)


def _regression() -> list[LossCase]:
    return [
        *_values(losses.mse, F.mse_loss),
        *_values(losses.l1, F.l1_loss),
        *(case for delta in (0.3, 1.0, 4.0) for case in _values(losses.huber, F.huber_loss, delta=delta)),
        *(case for beta in (0.0, 0.3, 1.0) for case in _values(losses.smooth_l1, F.smooth_l1_loss, beta=beta)),
    ]


def _classified(shape: tuple[int, ...], ignored: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    rng = _rng()
    labels = rng.integers(0, shape[1], (shape[0], *shape[2:]))
    labels.flat[0] = 0
    if ignored is not None:
        labels.flat[1] = ignored
    return 3 * rng.standard_normal(shape), labels


CLASSIFIED = ((N, C), (3, C, D), (2, C, 3, 2), (4, 1))


def _weights(weight: list[float] | None, classes: int) -> tuple[list[float] | None, torch.Tensor | None]:
    chosen = None if weight is None else weight[:classes]
    return chosen, None if chosen is None else torch.tensor(chosen, dtype=torch.float64)


def _cross_entropy() -> list[LossCase]:
    cases = []
    for shape, smoothing, weight, reduction, ignored in covering(
        CLASSIFIED, (0.0, 0.1, 1.0), (None, WEIGHT), REDUCTIONS, (-100, 1)
    ):
        x, labels = _classified(shape, ignored)
        own, tensor = _weights(weight, shape[1])
        loss = losses.cross_entropy(weight=own, reduction=reduction, ignore_index=ignored, label_smoothing=smoothing)
        function = _with(F.cross_entropy, weight=tensor, reduction=reduction, ignore_index=ignored, label_smoothing=smoothing)
        cases.append(LossCase(loss, function, {"x": x}, {"labels": labels}))
    for shape, smoothing, weight, reduction in covering(CLASSIFIED, (0.0, 0.1, 1.0), (None, WEIGHT), REDUCTIONS):
        x, _ = _classified(shape)
        q = _rng().dirichlet(np.ones(shape[1]), (shape[0], *shape[2:]))
        own, tensor = _weights(weight, shape[1])
        loss = losses.cross_entropy(weight=own, reduction=reduction, label_smoothing=smoothing, probabilities=True)
        function = _with(F.cross_entropy, weight=tensor, reduction=reduction, label_smoothing=smoothing)
        cases.append(LossCase(loss, function, {"x": x}, {"targets": np.moveaxis(q, -1, 1).copy()}))
    return cases


def _cross_entropy_along_the_last_axis() -> list[LossCase]:
    cases = []
    for shape, weight, ignored, probabilities in itertools.product(CLASSIFIED, (None, WEIGHT), (-100, 1), (False, True)):
        x, labels = _classified(shape, ignored)
        own, tensor = _weights(weight, shape[1])
        settings = {"label_smoothing": 0.1} if probabilities else {"label_smoothing": 0.1, "ignore_index": ignored}
        loss = losses.cross_entropy(weight=own, probabilities=probabilities, class_axis=-1, **settings)
        function = _with(F.cross_entropy, weight=tensor, **settings)
        compared = {"labels": labels}
        if probabilities:
            compared = {"targets": _rng().dirichlet(np.ones(shape[1]), (shape[0], *shape[2:]))}
        cases.append(LossCase(loss, _classes_last(function), {"x": np.moveaxis(x, 1, -1).copy()}, compared))
    return cases


def _classes_last(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A function of [N, C, d1, ...] for [N, d1, ..., C]."""
    return lambda x, y: function(torch.movedim(x, -1, 1), torch.movedim(y, -1, 1) if y.ndim == x.ndim else y)


def _log_softmax(x: np.ndarray) -> np.ndarray:
    return torch.log_softmax(torch.from_numpy(x), 1).numpy()


def _kl_divergence(x: torch.Tensor, y: torch.Tensor, log_target: bool, reduction: str) -> torch.Tensor:
    """PyTorch's, whose own mean warns that it is no divergence."""
    if reduction == "mean":
        return F.kl_div(x, y, log_target=log_target, reduction="sum") / x.numel()
    return F.kl_div(x, y, log_target=log_target, reduction=reduction)


def _likelihood() -> list[LossCase]:
    cases = []
    for shape, weight, reduction, ignored in covering(CLASSIFIED, (None, WEIGHT), REDUCTIONS, (-100, 1)):
        x, labels = _classified(shape, ignored)
        own, tensor = _weights(weight, shape[1])
        loss = losses.nll(weight=own, reduction=reduction, ignore_index=ignored)
        function = _with(F.nll_loss, weight=tensor, reduction=reduction, ignore_index=ignored)
        cases.append(LossCase(loss, function, {"x": _log_softmax(x)}, {"labels": labels}))
    for shape, reduction in itertools.product(((N, C), (3, C, D), (N,)), ("batchmean", *REDUCTIONS)):
        rng = _rng()
        x, y = -rng.exponential(size=shape), rng.uniform(0.01, 0.99, shape)
        y.flat[0] = 0
        for log_target in (False, True):
            targets = np.log(y + 1e-3) if log_target else y
            loss = losses.kl_divergence(log_target=log_target, reduction=reduction)
            function = _with(_kl_divergence, log_target=log_target, reduction=reduction)
            cases.append(LossCase(loss, function, {"x": x}, {"targets": targets}))
    return cases


def _sigmoid_focal(x: torch.Tensor, y: torch.Tensor, gamma: float, alpha: float | None, reduction: str) -> torch.Tensor:
    p = torch.sigmoid(x)
    element = -(y * F.logsigmoid(x) + (1 - y) * F.logsigmoid(-x)) * (1 - (p * y + (1 - p) * (1 - y))) ** gamma
    if alpha is not None:
        element = element * (alpha * y + (1 - alpha) * (1 - y))
    return getattr(element, reduction)()


def _binary() -> list[LossCase]:
    cases = []
    for shape, reduction, hard in itertools.product(((N, C), (2, C, 3), (2, C, 2, 3)), REDUCTIONS, (False, True)):
        rng = _rng()
        x, y = 4 * rng.standard_normal(shape), rng.uniform(size=shape)
        y = np.round(y) if hard else y
        p = 1 / (1 + np.exp(-x))
        function = _with(F.binary_cross_entropy, reduction=reduction)
        cases.append(LossCase(losses.bce(reduction=reduction), function, {"x": p}, {"targets": y}, extreme=False))
        for pos_weight in (None, 2.5, WEIGHT):
            tensor = None if pos_weight is None else torch.tensor(pos_weight, dtype=torch.float64)
            if pos_weight is WEIGHT:
                tensor = tensor.reshape(-1, *[1] * (len(shape) - 2))
            loss = losses.bce_with_logits(pos_weight=pos_weight, reduction=reduction)
            function = _with(F.binary_cross_entropy_with_logits, pos_weight=tensor, reduction=reduction)
            cases.append(LossCase(loss, function, {"x": x}, {"targets": y}))
        for gamma, alpha in ((0.0, 0.25), (0.5, 0.25), (1.0, 0.25), (2.0, 0.25), (2.0, None), (3.5, 0.9)):
            loss = losses.binary_focal(gamma=gamma, alpha=alpha, reduction=reduction)
            function = _with(_sigmoid_focal, gamma=gamma, alpha=alpha, reduction=reduction)
            cases.append(LossCase(loss, function, {"x": x}, {"targets": y}))
    return cases


def _hinge(x: torch.Tensor, y: torch.Tensor, margin: float, squared: bool, reduction: str) -> torch.Tensor:
    element = torch.clamp(margin - y * x, min=0) ** (2 if squared else 1)
    return getattr(element, reduction)()


def _positions_last(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A function of ([N, C], [N]) for [N, C, d1, ...] and [N, d1, ...]."""
    return lambda x, y: function(torch.movedim(x, 1, -1).reshape(-1, x.shape[1]), y.reshape(-1))


def _margins() -> list[LossCase]:
    cases = []
    for shape, reduction in itertools.product(((N, D), (2, 3, 2)), REDUCTIONS):
        rng = _rng()
        x, y = 2 * rng.standard_normal(shape), rng.choice([-1.0, 1.0], shape)
        for margin, squared in ((1.0, False), (0.5, True), (-0.5, False)):
            loss = losses.hinge(margin=margin, squared=squared, reduction=reduction)
            function = _with(_hinge, margin=margin, squared=squared, reduction=reduction)
            cases.append(LossCase(loss, function, {"x": x}, {"targets": y}))
        for margin in (1.0, 0.2):
            loss = losses.hinge_embedding(margin=margin, reduction=reduction)
            function = _with(F.hinge_embedding_loss, margin=margin, reduction=reduction)
            cases.append(LossCase(loss, function, {"x": x}, {"targets": y}))
    for shape, reduction, p, margin, weight in covering(CLASSIFIED, REDUCTIONS, (1, 2), (1.0, 0.3), (None, WEIGHT)):
        x, labels = _classified(shape)
        own, tensor = _weights(weight, shape[1])
        loss = losses.multi_margin(p=p, margin=margin, weight=own, reduction=reduction)
        function = _positions_last(_with(F.multi_margin_loss, p=p, margin=margin, weight=tensor, reduction=reduction))
        cases.append(LossCase(loss, function, {"x": x}, {"labels": labels}))
    return cases


def _embedding() -> list[LossCase]:
    cases = []
    rng = _rng()
    a, b, c = rng.standard_normal((3, N, D))
    for reduction, margin in itertools.product(REDUCTIONS, (0.0, 0.4, -0.3)):
        loss = losses.cosine_embedding(margin=margin, reduction=reduction)
        function = _with(F.cosine_embedding_loss, margin=margin, reduction=reduction)
        cases.append(LossCase(loss, function, {"a": a, "b": b}, {"targets": np.array([1.0, -1, 1, -1, -1, -1])}))
    for reduction, swap, p, margin in covering(REDUCTIONS, (False, True), (1, 2, 3, 2.5, np.inf), (1.0, 3.0)):
        loss = losses.triplet(margin=margin, p=p, swap=swap, reduction=reduction)
        function = _with(F.triplet_margin_loss, margin=margin, p=p, swap=swap, reduction=reduction)
        # A distance to the power of 3 needs a range in which it is finite; 10^4 in float32 is.
        cases.append(LossCase(loss, function, {"a": a, "b": b, "c": c}))
    return cases


def _focal(x: torch.Tensor, y: torch.Tensor, gamma: float, weight: torch.Tensor | None, ignored: int, reduction: str) -> Any:
    log_p = -F.nll_loss(torch.log_softmax(x, 1), y, reduction="none", ignore_index=ignored)
    element = -log_p * (1 - log_p.exp()) ** gamma
    counts = y != ignored
    if weight is not None:
        element = element * weight[torch.where(counts, y, 0)]
    return getattr(element[counts], reduction)()


def _dice(
    x: torch.Tensor, y: torch.Tensor, smooth: float, squared: bool, reduction: str, ignored: int | None = None
) -> torch.Tensor:
    if ignored is None:
        p = torch.sigmoid(x)
    else:
        counts = (y != ignored).unsqueeze(1)
        hot = F.one_hot(torch.where(y == ignored, 0, y), x.shape[1])
        p, y = torch.softmax(x, 1) * counts, torch.movedim(hot, -1, 1) * counts
    p, y = p.flatten(2), y.flatten(2)
    power = 2 if squared else 1
    element = 1 - (2 * (p * y).sum(2) + smooth) / ((p**power).sum(2) + (y**power).sum(2) + smooth)
    return getattr(element, reduction)()


def _segmentation() -> list[LossCase]:
    cases = []
    for shape, gamma, weight, reduction, ignored in covering(
        CLASSIFIED[:3], (0.0, 0.5, 1.0, 2.0, 3.5), (None, WEIGHT), REDUCTIONS, (-100, 1)
    ):
        x, labels = _classified(shape, ignored)
        own, tensor = _weights(weight, shape[1])
        loss = losses.focal(gamma=gamma, weight=own, ignore_index=ignored, reduction=reduction)
        function = _with(_focal, gamma=gamma, weight=tensor, ignored=ignored, reduction=reduction)
        cases.append(LossCase(loss, function, {"x": x}, {"labels": labels}))
    for shape, smooth, squared, reduction in covering(CLASSIFIED[1:3], (1.0, 1e-5), (False, True), REDUCTIONS):
        for ignored in (-100, 1):
            x, labels = _classified(shape, ignored)
            loss = losses.dice(smooth=smooth, squared=squared, ignore_index=ignored, reduction=reduction)
            function = _with(_dice, smooth=smooth, squared=squared, reduction=reduction, ignored=ignored)
            cases.append(LossCase(loss, function, {"x": x}, {"labels": labels}))
        x, y = _rng().standard_normal(shape), _rng().uniform(size=shape)
        loss = losses.binary_dice(smooth=smooth, squared=squared, reduction=reduction)
        function = _with(_dice, smooth=smooth, squared=squared, reduction=reduction)
        cases.append(LossCase(loss, function, {"x": x}, {"targets": y}))
    return cases


def _boxes() -> list[LossCase]:
    cases = []
    for make, box_format, shape, reduction in covering(
        (losses.iou, losses.giou, losses.diou, losses.ciou), ("xyxy", "xywh", "cxcywh"), ((N, 4), (2, 3, 4)), REDUCTIONS
    ):
        boxes, targets = (of_regions.as_format(box, box_format) for box in of_regions.boxes_that_overlap(_rng(), shape[:-1]))
        loss = make(box_format=box_format, reduction=reduction)
        function = _with(of_regions.box_loss, kind=loss.name, box_format=box_format, epsilon=loss.epsilon, reduction=reduction)
        cases.append(LossCase(loss, function, {"x": boxes}, {"targets": targets}, extreme=False))
    return cases


def _regions() -> list[LossCase]:
    cases = []
    for shape, (alpha, beta), smooth, gamma, reduction, ignored in covering(
        CLASSIFIED[1:3], ((0.3, 0.7), (1.0, 1.0)), (1.0, 1e-5), (1.0, 0.75, 2.0), REDUCTIONS, (-100, 1)
    ):
        x, labels = _classified(shape, ignored)
        options = {"alpha": alpha, "beta": beta, "smooth": smooth, "gamma": gamma, "reduction": reduction}
        loss = losses.tversky(ignore_index=ignored, **options)
        function = _with(of_regions.tversky, ignored=ignored, **options)
        cases.append(LossCase(loss, function, {"x": x}, {"labels": labels}))
    for shape, reduction, ignored in itertools.product(CLASSIFIED[1:3], REDUCTIONS, (-100, 1)):
        x, labels = _classified(shape, ignored)
        function = _with(of_regions.lovasz, ignored=ignored, reduction=reduction)
        loss = losses.lovasz(ignore_index=ignored, reduction=reduction)
        cases.append(LossCase(loss, function, {"x": x}, {"labels": labels}))
    return cases


CASES = [
    *_boxes(),
    *_regions(),
    *_regression(),
    *_cross_entropy(),
    *_cross_entropy_along_the_last_axis(),
    *_likelihood(),
    *_binary(),
    *_margins(),
    *_embedding(),
    *_segmentation(),
]


def one_per_loss() -> list[LossCase]:
    """The first case of each loss that is not a plain sum."""
    first: dict[str, LossCase] = {}
    for case in CASES:
        if case.loss.options().get("reduction") != "sum":
            first.setdefault(case.loss.name, case)
    return list(first.values())
