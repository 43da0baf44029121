"""Every loss and its gradients against PyTorch's, in every dtype and on every engine."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from burnish import losses
from oracles.combinations import spread
from oracles.loss_graphs import label_specs, loss_graph
from specs.losses import CASES, LossCase, one_per_loss

SCALE = -1.7
SHAPES = ("static", "batch", "all")
"""What a graph may know of its inputs' shapes."""
BOXES = ("iou", "giou", "diou", "ciou")


def expected(case: LossCase, dtype: str = "float64") -> tuple[float, list[np.ndarray]]:
    """The loss and the gradients of SCALE times it, in float64, from predictions rounded to ``dtype``."""
    rounded = [torch.from_numpy(np.array(array.astype(dtype), np.float64)) for array in case.predictions.values()]
    predictions = [tensor.requires_grad_() for tensor in rounded]
    labels = [torch.from_numpy(np.array(array)) for array in case.labels.values()]
    loss = case.torch(*predictions, *labels)
    loss.backward(torch.tensor(SCALE, dtype=torch.float64))
    gradients = [tensor.grad for tensor in predictions]
    return loss.item(), [gradient.numpy() for gradient in gradients if gradient is not None]


def feeds(case: LossCase, dtype: str) -> dict[str, np.ndarray]:
    def of_dtype(array: np.ndarray) -> np.ndarray:
        return array.astype(dtype) if array.dtype.kind == "f" else array

    arrays = {name: of_dtype(np.asarray(array)) for name, array in (case.predictions | dict(case.labels)).items()}
    return arrays | {"dy": np.asarray(SCALE, dtype)}


def graph_of(case: LossCase, dtype: str, symbolic: str) -> Any:
    """The loss with shapes as they are, with a symbolic batch, or with nothing fixed but what a loss needs."""
    fixed = {**dict.fromkeys(("dice", "tversky", "lovasz"), (1,)), **dict.fromkeys(BOXES, (-1,))}.get(case.loss.name, ())
    fixed = [axis % len(next(iter(case.predictions.values())).shape) for axis in fixed]

    def declared(shape: tuple[int, ...]) -> tuple[int | str, ...]:
        if symbolic == "static":
            return shape
        free = range(len(shape)) if symbolic == "all" else (0,)
        return tuple(f"d{axis}" if axis in free and axis not in fixed else extent for axis, extent in enumerate(shape))

    return loss_graph(case.loss, {name: declared(array.shape) for name, array in case.predictions.items()}, dtype)


# Every loss has many cases, which take turns in what is known of their shapes.
IN_TURN = [(case, SHAPES[index % len(SHAPES)]) for index, case in enumerate(CASES)]


@spread(("case", "symbolic"), IN_TURN, test=158, ids=str, test_all=315)
def test_value_and_gradients_in_float64(case: LossCase, symbolic: str) -> None:
    check_in_float64(case, symbolic)


@pytest.mark.campaign
@pytest.mark.parametrize(("case", "done"), IN_TURN, ids=str)
def test_value_and_gradients_whatever_is_known_of_shapes(case: LossCase, done: str) -> None:
    for symbolic in SHAPES:
        if symbolic != done:
            check_in_float64(case, symbolic)


def check_in_float64(case: LossCase, symbolic: str) -> None:
    value, gradients = expected(case)
    results = graph_of(case, "float64", symbolic).run(**feeds(case, "float64"))
    np.testing.assert_allclose(results["loss"], value, rtol=1e-10, atol=1e-13)
    for name, gradient in zip(case.predictions, gradients, strict=True):
        np.testing.assert_allclose(results[f"d{name}"], gradient, rtol=1e-10, atol=1e-12)


# Options do the same in both dtypes: what goes wrong in float32 alone shows in a few cases of each loss.
FEW = {id(case) for case in (*one_per_loss(), *CASES[::3])}
IN_FLOAT32 = [pytest.param(case, marks=() if id(case) in FEW else pytest.mark.slow) for case in CASES]


@spread("case", IN_FLOAT32, test=31, test_all=155, ids=str)
def test_value_and_gradients_in_float32(case: LossCase) -> None:
    value, gradients = expected(case, "float32")
    results = graph_of(case, "float32", "static").run(**feeds(case, "float32"))
    assert {array.dtype for array in results.values()} == {np.dtype("float32")}
    np.testing.assert_allclose(results["loss"], value, rtol=5e-6, atol=1e-6)
    for name, gradient in zip(case.predictions, gradients, strict=True):
        np.testing.assert_allclose(results[f"d{name}"], gradient, rtol=1e-5, atol=4e-6 * max(np.abs(gradient).max(), 1e-3))


@pytest.mark.parametrize("case", one_per_loss(), ids=str)
def test_value_and_gradients_on_the_reference_evaluator(case: LossCase) -> None:
    value, gradients = expected(case)
    results = graph_of(case, "float64", "batch").run_reference(**feeds(case, "float64"))
    np.testing.assert_allclose(results["loss"], value, rtol=1e-10, atol=1e-13)
    for name, gradient in zip(case.predictions, gradients, strict=True):
        np.testing.assert_allclose(results[f"d{name}"], gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", [case for case in one_per_loss() if case.extreme], ids=str)
def test_predictions_of_ten_thousand_have_finite_values_and_gradients(case: LossCase, dtype: str) -> None:
    rng = np.random.default_rng(3)
    arrays = feeds(case, dtype)
    for name, array in case.predictions.items():
        arrays[name] = rng.choice([-1e4, 1e4, 0.0, 9999.0], array.shape).astype(dtype)
    results = graph_of(case, dtype, "static").run(**arrays)
    assert all(np.isfinite(array).all() for array in results.values())
    extreme = LossCase(case.loss, case.torch, {name: arrays[name] for name in case.predictions}, case.labels)
    np.testing.assert_allclose(results["loss"], expected(extreme)[0], rtol=1e-5)


@pytest.mark.parametrize("case", [case for case in one_per_loss() if case.loss.name != "triplet"], ids=str)
def test_totals_and_weights_of_batches_add_up_to_the_whole(case: LossCase) -> None:
    session = graph_of(case, "float64", "batch").session()
    arrays = feeds(case, "float64")
    whole = session(**arrays)
    batches = (slice(0, 1), slice(1, None))
    parts = [session(**{name: array[batch] if array.ndim else array for name, array in arrays.items()}) for batch in batches]
    for name in ("total", "weight"):
        np.testing.assert_allclose(sum(part[name] for part in parts), whole[name], rtol=1e-13)


@spread("case", CASES, test=195, ids=str)
def test_options_make_the_loss_again(case: LossCase) -> None:
    options = json.loads(json.dumps(case.loss.options(), allow_nan=False))
    assert losses.get(options) == case.loss
    assert losses.get(case.loss) is case.loss
    assert isinstance(case.loss, losses.Loss)


@pytest.mark.parametrize("case", one_per_loss(), ids=str)
def test_labels_are_named_and_shaped(case: LossCase) -> None:
    specs = label_specs(case.loss, {name: array.shape for name, array in case.predictions.items()}, "float32")
    assert [spec.name for spec in specs] == list(case.labels)
    for spec, array in zip(specs, case.labels.values(), strict=True):
        assert spec.shape == array.shape
        assert spec.dtype.numpy() == (np.float32 if array.dtype.kind == "f" else np.int64)


def test_every_loss_of_one_prediction_set_has_a_case() -> None:
    built_otherwise = {"ctc", "detr", "distill"}
    assert {losses.get(name).name for name in losses.LOSSES} - built_otherwise == {case.loss.name for case in CASES}


@pytest.mark.parametrize(
    ("loss", "shape", "labels"),
    [
        (losses.focal(gamma=0.5), (2, 3), {"labels": np.array([0, 2])}),
        (losses.binary_focal(gamma=0.5), (2, 1), {"targets": np.array([[1.0], [0.0]])}),
    ],
    ids=["focal", "binary"],
)
def test_a_root_of_no_error_has_a_finite_gradient(
    loss: losses.Loss, shape: tuple[int, ...], labels: dict[str, np.ndarray]
) -> None:
    """A sample that is classified beyond the digits of its dtype: the factor is a power below 1 of zero."""
    x = np.array([[1e3, 0, 0], [0, 0, 1e3]]) if shape == (2, 3) else np.array([[1e3], [-1e3]])
    results = loss_graph(loss, shape).run(x=x, **labels, dy=np.float64(1))
    assert results["loss"] == 0
    np.testing.assert_array_equal(results["dx"], np.zeros(shape))


@pytest.mark.parametrize("p", [2.0, 3.0])
def test_a_distance_of_zero_has_a_finite_gradient(p: float) -> None:
    arrays = {"anchor": np.ones((2, 3)), "positive": np.ones((2, 3)), "negative": np.array([[1.0, 1, 1], [1, 1, 1.5]])}
    tensors = [torch.from_numpy(array.copy()).requires_grad_() for array in arrays.values()]
    loss = torch.nn.functional.triplet_margin_loss(*tensors, p=p, eps=0.0)
    loss.backward()
    shapes = {name: array.shape for name, array in arrays.items()}
    results = loss_graph(losses.triplet(p=p, eps=0.0), shapes).run(**arrays, dy=np.float64(1))
    assert results["loss"] == pytest.approx(loss.item())
    for name, tensor in zip(arrays, tensors, strict=True):
        np.testing.assert_allclose(results[f"d{name}"], tensor.grad, rtol=1e-12, err_msg=name)
