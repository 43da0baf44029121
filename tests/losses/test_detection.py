"""Losses of detectors beside PyTorch, in value and gradient: assignments, terms, padding, regions of many objects."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

import burnish
from burnish import losses
from burnish.autodiff import differentiate
from burnish.errors import ConfigurationError
from burnish.losses.detection import default_boxes
from oracles import detectors
from oracles.combinations import diagonal
from oracles.scaled_model import scaled_outputs
from oracles.small_graphs import SmallGraph

CLASSES = 3
ENGINES = ("onnxruntime", "torch")
GRIDS = [(4, 6), (2, 3)]
CELLS = 30
SSD = {"grids": [[3, 4], [2, 2]], "scales": [0.2, 0.5, 0.9], "ratios": [[2.0], [2.0, 3.0]]}


def graph_of(loss: losses.Loss, predictions: Mapping[str, np.ndarray], *, open_batch: bool = True) -> SmallGraph:
    """(predictions, labels) -> each term with its coefficient, total and weight, the loss, and its gradients."""

    def shape(array: np.ndarray) -> tuple[Any, ...]:
        return ("batch", *array.shape[1:]) if open_batch else array.shape

    dtype = str(next(iter(predictions.values())).dtype)
    declared = {name: (dtype, shape(array)) for name, array in predictions.items()}
    specs = loss.label_specs([SmallGraph(declared)[name] for name in predictions])
    declared |= {spec.name: (spec.dtype.numpy().name, spec.shape) for spec in specs}
    graph = SmallGraph(declared)
    read = [graph[name] for name in predictions]
    terms = loss.terms(read, [graph[spec.name] for spec in specs])
    total = losses.combined(terms)
    gradients = differentiate(graph.builder, {total.value: graph.builder.scalar(1.0, total)}, [tensor.value for tensor in read])
    graph.output("loss", total)
    for term in terms:
        graph.output(f"loss:{term.name}", losses.average(term.total, term.weight) * term.coefficient)
        graph.output(f"total:{term.name}", term.total)
        graph.output(f"weight:{term.name}", term.weight)
    for name, tensor in zip(predictions, read, strict=True):
        gradient = gradients[tensor.value]
        assert gradient is not None
        graph.output(f"d{name}", gradient)
    return graph


def objects(samples: int, seed: int, places: int = 4) -> dict[str, np.ndarray]:
    """The first picture has no object, and the second has all places taken."""
    rng = np.random.default_rng(seed)
    corner, size = rng.uniform(0, 0.5, (samples, places, 2)), rng.uniform(0.15, 0.5, (samples, places, 2))
    labels = np.where(rng.random((samples, places)) < 0.3, -1, rng.integers(0, CLASSES, (samples, places)))
    labels[0], labels[1] = -1, np.arange(places) % CLASSES
    boxes = np.where(labels[..., None] < 0, 0.0, np.concatenate([corner, corner + size], -1))
    return {"labels": labels, "boxes": boxes}


def with_crowd(given: dict[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    crowd = (np.random.default_rng(seed).random(given["labels"].shape) < 0.4).astype(np.int64)
    return {**given, "crowd": crowd, "areas": np.ones(crowd.shape), "sizes": np.ones((len(crowd), 2))}


def check(
    loss: losses.Loss,
    predictions: Mapping[str, np.ndarray],
    given: Mapping[str, np.ndarray],
    by_torch: Callable[..., dict[str, torch.Tensor]],
) -> None:
    tensors = [torch.from_numpy(array.copy()).requires_grad_() for array in predictions.values()]
    expected = by_torch(*tensors, torch.from_numpy(given["labels"]), torch.from_numpy(given["boxes"]))
    sum(expected.values()).backward()
    results = graph_of(loss, predictions).run(**predictions, **given)
    for name, value in expected.items():
        np.testing.assert_allclose(results[f"loss:{name}"], value.item(), rtol=1e-10, atol=1e-12, err_msg=name)
    np.testing.assert_allclose(results["loss"], sum(value.item() for value in expected.values()), rtol=1e-10)
    for name, tensor in zip(predictions, tensors, strict=True):
        np.testing.assert_allclose(results[f"d{name}"], tensor.grad, rtol=1e-9, atol=1e-11, err_msg=name)
    narrow = {name: array.astype(np.float32) for name, array in predictions.items()}
    labels = {name: array.astype(np.float32) if array.dtype.kind == "f" else array for name, array in given.items()}
    single = graph_of(loss, narrow, open_batch=False).run(**narrow, **labels)
    np.testing.assert_allclose(single["loss"], results["loss"], rtol=2e-4)


def offsets(seed: int, anchors: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"offsets": rng.standard_normal((3, anchors, 4)), "scores": 2 * rng.standard_normal((3, anchors, 1 + CLASSES))}


@pytest.mark.slow
@pytest.mark.parametrize("has_crowd", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_ssd(seed: int, has_crowd: bool) -> None:
    boxes = losses.ssd(**SSD).default_boxes  # moved, as those in one object overlap it alike
    loss = losses.ssd(anchors=boxes + np.random.default_rng(9).uniform(0, 0.01, boxes.shape), crowd=has_crowd)
    given = with_crowd(objects(3, seed), seed) if has_crowd else objects(3, seed)
    crowd = torch.from_numpy(given["crowd"]) if has_crowd else None
    anchors = loss.default_boxes
    check(loss, offsets(seed, len(anchors)), given, lambda *read: detectors.ssd(*read, anchors, crowd))


@pytest.mark.slow
def test_ssd_takes_the_default_boxes_themselves() -> None:
    anchors = default_boxes(((3, 4), (2, 2)), SSD["scales"], SSD["ratios"])
    predictions, given = offsets(0, len(anchors)), objects(3, 0)
    results = [
        graph_of(loss, predictions).run(**predictions, **given) for loss in (losses.ssd(anchors=anchors), losses.ssd(**SSD))
    ]
    assert results[0]["loss"] == results[1]["loss"]


def test_default_boxes_are_in_the_order_of_torchvision() -> None:
    """Two maps by hand: rows, then columns, then a square, a larger one, a wide and an upright box."""
    boxes = default_boxes(((1, 2), (1, 1)), (0.2, 0.8, 1.0), ((4.0,), ()))
    root = 0.4
    first = [[0.2, 0.2], [root, root], [0.4, 0.1], [0.1, 0.4]]
    expected = [[x, 0.5, *size] for x in (0.25, 0.75) for size in first]
    expected += [[0.5, 0.5, 0.8, 0.8], [0.5, 0.5, *[np.sqrt(0.8)] * 2]]
    np.testing.assert_allclose(boxes, expected)


def distances(seed: int, bins: int, given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    read = rng.uniform(0.5, 2.0, (3, CELLS, 4)) if bins == 1 else 2 * rng.standard_normal((3, CELLS, 4 * bins))
    return {"distances": read, "scores": 2 * rng.standard_normal((3, CELLS, CLASSES))}


@pytest.mark.slow
@diagonal(("seed", range(2)), (("bins", "has_crowd"), [(4, False), (4, True), (1, False)]))
def test_task_aligned(seed: int, bins: int, has_crowd: bool) -> None:
    loss = losses.task_aligned(grids=GRIDS, bins=bins, candidates=3, crowd=has_crowd)
    given = with_crowd(objects(3, seed), seed) if has_crowd else objects(3, seed)
    crowd = torch.from_numpy(given["crowd"]) if has_crowd else None
    check(
        loss,
        distances(seed, bins, given),
        given,
        lambda *read: detectors.task_aligned(*read, GRIDS, bins, 3, crowd),
    )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_boxes_without_an_extent_leave_a_finite_loss(dtype: str) -> None:
    """Distances behind a ReLU are 0 all round in many cells at once."""
    given = {name: array.astype(dtype) if array.dtype.kind == "f" else array for name, array in objects(3, 0).items()}
    scores = np.random.default_rng(0).standard_normal((3, CELLS, CLASSES)).astype(dtype)
    predictions = {"distances": np.zeros((3, CELLS, 4), dtype), "scores": scores}
    results = graph_of(losses.task_aligned(grids=GRIDS, bins=1), predictions).run(**predictions, **given)
    assert all(np.isfinite(array).all() for array in results.values())


@pytest.mark.slow
def test_task_aligned_reads_channels_first() -> None:
    given = objects(3, 1)
    predictions = distances(1, 4, given)
    turned = {name: np.ascontiguousarray(array.transpose(0, 2, 1)) for name, array in predictions.items()}
    loss = losses.task_aligned(grids=GRIDS, bins=4)
    other = losses.task_aligned(grids=GRIDS, bins=4, channels_first=True)
    results = graph_of(loss, predictions).run(**predictions, **given)
    np.testing.assert_allclose(graph_of(other, turned).run(**turned, **given)["loss"], results["loss"], rtol=1e-12)


def queries(seed: int, focal: bool, count: int = 7) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    boxes = np.concatenate([rng.uniform(0.2, 0.8, (3, count, 2)), rng.uniform(0.1, 0.4, (3, count, 2))], -1)
    return {"queries": boxes, "scores": 2 * rng.standard_normal((3, count, CLASSES + (not focal)))}


@pytest.mark.slow
@diagonal((("seed", "count"), [(0, 7), (1, 7), (2, 2)]), ("focal", [False, True]))
def test_detr(seed: int, count: int, focal: bool) -> None:
    """With two predictions for four objects, those that are found are the cheapest two."""
    loss = losses.detr(class_loss="focal" if focal else "cross_entropy")
    check(loss, queries(seed, focal, count), objects(3, seed), lambda *read: detectors.detr(*read, focal))


MADE = [
    (losses.ssd(**SSD), lambda: offsets(1, len(losses.ssd(**SSD).default_boxes))),
    (losses.task_aligned(grids=GRIDS, bins=4, candidates=3), lambda: distances(1, 4, {})),
    (losses.detr(), lambda: queries(1, False)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "make"), MADE, ids=[loss.name for loss, _ in MADE])
def test_batches_add_up_and_places_without_objects_change_nothing(loss: losses.Loss, make: Any) -> None:
    predictions, given = make(), objects(3, 1)
    session = graph_of(loss, predictions).session()
    whole = session(**predictions, **given)
    parts = [
        session(**{name: array[part] for name, array in {**predictions, **given}.items()}) for part in (slice(0, 2), slice(2, 3))
    ]
    for name in whole:
        if name.startswith(("total:", "weight:")) and loss.name != "task_aligned":
            np.testing.assert_allclose(sum(part[name] for part in parts), whole[name], rtol=1e-12, atol=1e-12, err_msg=name)
    wider = {
        "labels": np.pad(given["labels"], ((0, 0), (0, 3)), constant_values=-1),
        "boxes": np.pad(given["boxes"], ((0, 0), (0, 3), (0, 0))),
    }
    padded = session(**predictions, **wider)
    for name, array in whole.items():
        np.testing.assert_allclose(padded[name], array, rtol=1e-12, atol=1e-14, err_msg=name)
    nothing = session(**predictions, labels=np.full((3, 1), -1), boxes=np.zeros((3, 1, 4)))
    assert all(np.isfinite(array).all() for array in nothing.values())


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "make"), MADE, ids=[loss.name for loss, _ in MADE])
def test_gradients_are_those_of_central_differences(loss: losses.Loss, make: Any) -> None:
    """The assignment stays as it is within such a step: the gradient is that of the loss with it held."""
    predictions, given = make(), objects(3, 1)
    session = graph_of(loss, predictions).session()
    gradients = session(**predictions, **given)
    rng = np.random.default_rng(0)
    for name, array in predictions.items():
        if loss.name == "task_aligned":  # the scores that classes are to have move with the boxes, and no gradient goes there
            break
        direction, step = rng.standard_normal(array.shape), 1e-6
        ends = [session(**{**predictions, name: array + sign * step * direction}, **given)["loss"] for sign in (1, -1)]
        np.testing.assert_allclose((gradients[f"d{name}"] * direction).sum(), (ends[0] - ends[1]) / (2 * step), rtol=1e-5)


@pytest.mark.parametrize("loss", [loss for loss, _ in MADE], ids=[loss.name for loss, _ in MADE])
def test_options_make_the_loss_again(loss: losses.Loss) -> None:
    options = json.loads(json.dumps(loss.options(), allow_nan=False))
    assert losses.get(options) == loss


def test_a_detector_is_asked_for_by_text() -> None:
    assert losses.get("ssd:grids=[[3,4],[2,2]],scales=[0.2,0.5,0.9],ratios=[[2.0],[2.0,3.0]]") == losses.ssd(**SSD)
    assert losses.get("task_aligned:grids=[[4,6],[2,3]],bins=4,candidates=3") == MADE[1][0]


def specs_of(loss: losses.Loss, boxes: Any, scores: Any, dtype: str = "float32") -> Any:
    graph = SmallGraph({"boxes": (dtype, boxes), "scores": (dtype, scores)})
    return loss.label_specs([graph["boxes"], graph["scores"]])


def test_what_the_objects_are() -> None:
    specs = specs_of(losses.detr(crowd=True), ("n", 7, 4), ("n", 7, CLASSES + 1))
    assert [(spec.name, spec.dtype.name, spec.shape) for spec in specs] == [
        ("labels", "INT64", ("n", "objects")),
        ("boxes", "FLOAT", ("n", "objects", 4)),
        ("crowd", "INT64", ("n", "objects")),
        ("areas", "FLOAT", ("n", "objects")),
        ("sizes", "FLOAT", ("n", 2)),
    ]
    assert (specs[0].minimum, specs[0].maximum, specs[0].ignored) == (0, CLASSES - 1, -1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: specs_of(losses.ssd(**SSD), ("n", 7, 4), ("n", 7, 4)),
            r"'boxes' has shape \['n', 7, 4\].*must be \[batch, 72, 4\] and the second \[batch, 72, 1 \+ classes\].*grids",
        ),
        (lambda: specs_of(losses.ssd(**SSD), ("n", 72, 4), ("n", 72, 1)), "the first is the background: nothing would be found"),
        (lambda: specs_of(losses.detr(), ("n", 7, 4), ("n", 7, 1)), "the last is of no object: nothing would be found"),
        (lambda: specs_of(losses.detr(), ("n", 7, 5), ("n", 7, 3)), "name them in that order"),
        (lambda: specs_of(MADE[1][0], ("n", 30, 4), ("n", 30, 3)), r"must be \[batch, 30, 16\].*channels_first=True"),
        (lambda: losses.ssd(), "grids are the height and the width of each feature map"),
        (lambda: losses.ssd(grids=[3], scales=[0.1]), "scales must be 2 numbers above 0"),
        (lambda: losses.ssd(grids=[3], scales=[0.1, 0.2], ratios=[[2], [2]]), "ratios must be a list for each of the 1 grids"),
        (lambda: losses.ssd(grids=[3], anchors=[[0, 0, 1, 1]]), "leave grids, scales and ratios out"),
        (lambda: losses.ssd(**SSD, outputs=["a"]), "outputs must be two names of outputs"),
        (lambda: losses.task_aligned(grids=GRIDS, bins=0), "bins must be a whole number above 0, not 0"),
        (lambda: losses.detr(class_loss="mse"), "class_loss must be 'cross_entropy' or 'focal'"),
        (lambda: losses.detr(box_format="yxyx"), "box_format must be 'xyxy'"),
        (lambda: losses.detr(no_object_weight=0), "no_object_weight must be a finite number above 0, not 0"),
    ],
)
def test_what_does_not_fit_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "make"), MADE, ids=[loss.name for loss, _ in MADE])
def test_engines_take_the_same_steps(loss: losses.Loss, make: Any) -> None:
    predictions = make()
    batch = {**{f"in:{name}": array for name, array in predictions.items()}, **objects(3, 1)}
    program = burnish.compile(
        scaled_outputs(predictions), loss=loss, outputs=list(predictions), optimizer=burnish.optim.sgd(lr=0.01)
    )
    runs = [
        [session.step(batch)["loss"] for _ in range(2)]
        for session in (burnish.Session(program, engine=name, threads=1) for name in ENGINES)
    ]
    np.testing.assert_allclose(runs[1], runs[0], rtol=1e-10)
    assert runs[0][1] < runs[0][0]
