"""What a loss can be set to, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from burnish import losses
from burnish.errors import ConfigurationError
from oracles.loss_graphs import label_specs
from oracles.small_graphs import SmallGraph


def test_what_the_label_must_be() -> None:
    (spec,) = label_specs(losses.cross_entropy(ignore_index=255), {"x": ("batch", 10, 4, None)}, "float32")
    assert (spec.name, spec.dtype.name, spec.shape) == ("labels", "INT64", ("batch", 4, None))
    assert (spec.minimum, spec.maximum, spec.ignored) == (0, 9, 255)
    (spec,) = label_specs(losses.mean_squared_error(), {"y": ("batch", 3)})
    assert (spec.name, spec.dtype.name, spec.shape) == ("targets", "DOUBLE", ("batch", 3))
    assert spec.minimum is spec.maximum is spec.ignored is None
    assert label_specs(losses.cross_entropy(), {"x": ("batch", "classes")})[0].maximum is None


def _terms(loss: losses.Loss, dtype: str, shape: Any, label: tuple[str, Any]) -> None:
    graph = SmallGraph({"logits": (dtype, shape), "targets": label})
    loss.terms([graph["logits"]], [graph["targets"]])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: losses.get("crossentropy"),
            r"there is no loss 'crossentropy' \(did you mean 'cross_entropy'\?\); choose among bce, ",
        ),
        (lambda: losses.get(losses.focal), r"not the class 'Focal': call it, as in burnish\.losses\.focal\(\.\.\.\)"),
        (lambda: losses.get(3), "a loss is a name or an object of burnish.losses, not 3; choose among bce, "),
        (lambda: losses.get({"name": "mse", "delta": 1}), "loss 'mse' has no option 'delta'; it takes reduction"),
        (lambda: losses.get({}), "the options of a loss have a 'name', and these have only nothing"),
        (
            lambda: losses.get({"boxes": "huber", "classes": "cross_entropy"}),
            r"have only 'boxes', 'classes'; losses by output are burnish.losses.weighted_sum\(\{output: loss, ...\}\)",
        ),
        (lambda: losses.cross_entropy(reduction="none"), "cross_entropy: reduction must be 'mean' or 'sum', not 'none'"),
        (lambda: losses.mean_squared_error(reduction="max"), "mean_squared_error: reduction must be 'mean' or 'sum', not 'max'"),
        (lambda: losses.cross_entropy(label_smoothing=1.5), "label_smoothing must be between 0 and 1, not 1.5"),
        (lambda: losses.cross_entropy(label_smoothing="a"), "label_smoothing must be between 0 and 1, not 'a'"),
        (
            lambda: losses.cross_entropy(ignore_index=2**63),
            "ignore_index must be an integer that int64 holds, not 92233",
        ),
        (lambda: losses.huber(delta=1e39), r"huber: delta must be a finite number above 0, not 1e\+39"),
        (lambda: losses.cross_entropy(ignore_index=None), "ignore_index must be an integer that int64 holds, not None"),
        (lambda: losses.cross_entropy(weight=[1, -1]), "weight must hold finite numbers that are not negative"),
        (lambda: losses.cross_entropy(weight=[float("nan")]), "weight must hold finite numbers"),
        (lambda: losses.cross_entropy(weight="heavy"), "weight must hold finite numbers"),
        (
            lambda: _terms(losses.cross_entropy(weight=[1, 2]), "float32", (3, 4), ("int64", (3,))),
            "weight has 2 numbers, and the prediction 'logits' has 4 classes",
        ),
        (
            lambda: _terms(losses.cross_entropy(), "float32", (3,), ("int64", (3,))),
            r"'logits' has shape \[3\], and classes are read along axis 1.*outputs=",
        ),
        (
            lambda: _terms(losses.cross_entropy(), "int64", (3, 4), ("int64", (3,))),
            "the prediction 'logits' is INT64, not floating-point",
        ),
        (lambda: _terms(losses.cross_entropy(), "float32", None, ("int64", (3,))), "the shape of .* 'logits' is not known"),
        (lambda: _terms(losses.mean_squared_error(), "float32", (3, 1), ("float32", (3,))), "'logits' has shape .* 'targets'"),
        (lambda: _terms(losses.mean_squared_error(), "float32", (3, 1), ("float32", (3, 4))), "are not broadcast"),
        (lambda: losses.cross_entropy(probabilities=1), "cross_entropy: probabilities must be True or False, not 1"),
        (lambda: losses.nll(reduction="max"), "nll: reduction must be 'mean' or 'sum', not 'max'"),
        (
            lambda: losses.kl_divergence(reduction="max"),
            "reduction must be 'batchmean', 'mean' or 'sum', not 'max'",
        ),
        (lambda: losses.kl_divergence(log_target=0), "kl_divergence: log_target must be True or False, not 0"),
        (lambda: losses.huber(delta=0), "huber: delta must be a finite number above 0, not 0"),
        (lambda: losses.smooth_l1(beta=-1), "smooth_l1: beta must be a finite number of at least 0, not -1"),
        (lambda: losses.bce_with_logits(pos_weight=[1, 0]), r"bce_with_logits: pos_weight must hold .* above 0, not \(1, 0\)"),
        (lambda: losses.hinge(margin=float("inf")), "hinge: margin must be a finite number, not inf"),
        (lambda: losses.hinge(squared="yes"), "hinge: squared must be True or False, not 'yes'"),
        (lambda: losses.hinge_embedding(margin="wide"), "hinge_embedding: margin must be a finite number, not 'wide'"),
        (lambda: losses.multi_margin(p=3), "multi_margin: p must be 1 or 2, not 3"),
        (lambda: losses.multi_margin(margin=-1), "multi_margin: margin must be a finite number of at least 0, not -1"),
        (lambda: losses.cosine_embedding(margin=2), "cosine_embedding: margin must be between -1 and 1, not 2"),
        (lambda: losses.cosine_embedding(outputs="a"), r"outputs must be 2 names of outputs \(first, second\), not 'a'"),
        (lambda: losses.triplet(outputs=["a", "b"]), r"3 names of outputs \(anchor, positive, negative\), not \['a', 'b'\]"),
        (lambda: losses.triplet(p=0.5), "triplet: p must be a finite number of at least 1, not 0.5"),
        (lambda: losses.triplet(margin=0), "triplet: margin must be a finite number above 0, not 0"),
        (lambda: losses.triplet(eps=-1), "triplet: eps must be a finite number of at least 0, not -1"),
        (lambda: losses.focal(gamma=-1), "focal: gamma must be a finite number of at least 0, not -1"),
        (lambda: losses.binary_focal(alpha=2), "binary_focal: alpha must be between 0 and 1, or None, not 2"),
        (lambda: losses.dice(smooth=0), "dice: smooth must be a finite number above 0, not 0"),
        (lambda: losses.dice(ignore_index=0.5), "dice: ignore_index must be an integer that int64 holds, not 0.5"),
        (
            lambda: label_specs(losses.bce_with_logits(pos_weight=[1, 2]), {"x": (3, 4)}),
            "bce_with_logits: pos_weight has 2 numbers, and the prediction 'x' has 4 classes",
        ),
        (
            lambda: label_specs(losses.kl_divergence(), {"x": ()}),
            "kl_divergence: the prediction 'x' has no axis, and batchmean divides .* choose reduction='sum'",
        ),
        (
            lambda: label_specs(losses.dice(), {"x": (3, 4)}),
            r"dice: the prediction 'x' has shape \[3, 4\], and the overlap is measured over positions",
        ),
        (
            lambda: label_specs(losses.dice(), {"x": ("n", "classes", 8)}),
            r"dice: the number of classes of the prediction 'x' \(axis 1 of .*\) is not known",
        ),
        (lambda: label_specs(losses.binary_dice(), {"x": (3, 4)}), "binary_dice: .* measured over positions"),
        (
            lambda: label_specs(losses.cosine_embedding(), {"a": (3,), "b": (3,)}),
            r"cosine_embedding: the prediction 'a' has shape .*: the model must give \[batch, features\]",
        ),
        (
            lambda: label_specs(losses.triplet(), {"a": (3, 4), "b": (3, 4), "c": (3, 5)}),
            "triplet: the prediction 'a' has shape .* and 'c' .*: they must be the same",
        ),
    ],
)
def test_bad_settings_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_names_of_one_loss() -> None:
    for name, make in {"mse": losses.mse, "bce": losses.bce, "mean_absolute_error": losses.l1, "mae": losses.l1}.items():
        assert losses.get(name) == make()
    assert losses.get("binary_cross_entropy_with_logits") == losses.bce_with_logits()
    assert losses.get("negative_log_likelihood") == losses.nll()


def test_every_loss_is_found_by_its_own_name() -> None:
    for name in losses.LOSSES:
        loss = losses.get(name)
        assert losses.get(loss.name) == loss
