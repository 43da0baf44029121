"""Average precision of boxes beside pycocotools and definitions written out; the rows of a data set, and mean IoU."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import burnish
from burnish import losses, metrics
from burnish.errors import ConfigurationError, InputError
from burnish.metrics.average_precision import (
    AREAS,
    IOU_THRESHOLDS,
    Picture,
    coco_average_precision,
    overlaps,
    suppressed,
    voc_average_precision,
)
from oracles.found_boxes import RECORDED, SEEDS, pictures
from oracles.scaled_model import scaled_outputs


def as_pictures(made: list[dict[str, Any]]) -> list[Picture]:
    """In fractions of each picture, as a program has them."""
    result = []
    for one in made:
        height, width = one["size"]
        unit = np.array([width, height, width, height])
        found, objects = one["found"] / unit, one["boxes"] / unit
        result.append(
            Picture(one["scores"], one["classes"], found, one["labels"], objects, one["crowd"], one["areas"], one["size"])
        )
    return result


@pytest.mark.parametrize("seed", SEEDS)
def test_figures_are_those_of_pycocotools(seed: int) -> None:
    made = as_pictures(pictures(seed))
    expected = RECORDED[seed]
    for area in AREAS:
        assert coco_average_precision(made, area=area) == pytest.approx(expected[area], abs=1e-12)
    for threshold in (0.5, 0.75):
        assert coco_average_precision(made, [threshold]) == pytest.approx(expected[str(threshold)], abs=1e-12)
    assert metrics.get("coco_map").of_pictures(made) == coco_average_precision(made, IOU_THRESHOLDS)  # type: ignore[attr-defined]


def picture(scores: list[float], boxes: list[list[float]], objects: list[list[float]], difficult: list[bool]) -> Picture:
    zeros = np.zeros(len(scores), np.int64), np.zeros(len(objects), np.int64)
    arrays = (
        np.array(scores),
        zeros[0],
        np.array(boxes, float).reshape(-1, 4),
        zeros[1],
        np.array(objects, float).reshape(-1, 4),
    )
    return Picture(*arrays, np.array(difficult, bool), np.ones(len(objects)), (1.0, 1.0))


def test_voc_is_the_area_under_a_curve_that_does_not_rise() -> None:
    """By hand. The boxes, the likeliest first: a hit, the same object again, a difficult one, nothing, and the second object."""
    first, second, third = [0, 0, 4, 4], [10, 10, 14, 14], [20, 20, 24, 24]
    made = picture(
        [0.9, 0.8, 0.7, 0.6, 0.5], [first, first, third, [30, 30, 31, 31], second], [first, second, third], [False, False, True]
    )
    # Precision after each that counts: 1/1, 1/2, 1/3, 2/4, at recalls 1/2, 1/2, 1/2, 1.
    assert voc_average_precision([made]) == pytest.approx(0.5 * 1 + 0.5 * 0.5)
    assert voc_average_precision([made], points=11) == pytest.approx((6 * 1 + 5 * 0.5) / 11)
    other = picture([], [], [first, second], [False, False])
    # Four objects: recalls 1/4, ..., 2/4.
    assert voc_average_precision([made, other]) == pytest.approx(0.25 * 1 + 0.25 * 0.5)
    assert math.isnan(voc_average_precision([picture([0.5], [first], [], [])]))


def test_the_less_likely_of_two_boxes_goes() -> None:
    boxes = np.array([[0, 0, 10, 10], [1, 0, 11, 10], [2, 0, 12, 10], [0, 0, 10, 10.0]])
    classes = np.array([0, 0, 0, 1])
    scores = np.array([0.5, 0.9, 0.4, 0.3])
    assert overlaps(boxes[:1], boxes[1:2])[0, 0] == pytest.approx(9 / 11)
    assert suppressed(scores, classes, boxes, 0.5).tolist() == [1, 3]
    assert suppressed(scores, classes, boxes, 0.82).tolist() == [1, 0, 2, 3]


N, Q, CLASSES = 6, 5, 3


def detector(crowd: bool = False) -> tuple[ir.Model, losses.Loss, dict[str, np.ndarray]]:
    """A model whose outputs are its inputs times weights near 1, under the loss of DETR, and a batch."""
    rng = np.random.default_rng(3)
    boxes = np.concatenate([rng.uniform(0.3, 0.7, (N, Q, 2)), rng.uniform(0.2, 0.5, (N, Q, 2))], 2)
    scores = 2 * rng.standard_normal((N, Q, CLASSES + 1))
    own = boxes[:, :3] * rng.uniform(0.95, 1.05, (N, 3, 4))
    objects = np.concatenate([own[..., :2] - own[..., 2:] / 2, own[..., :2] + own[..., 2:] / 2], 2)
    labels = rng.integers(-1, CLASSES, (N, 3))
    batch = {"in:boxes": boxes, "in:scores": scores, "labels": labels, "boxes": objects}
    if crowd:
        sizes = rng.integers(50, 200, (N, 2)).astype(float)
        areas = (objects[..., 2:] - objects[..., :2]).prod(2) * sizes.prod(1)[:, None]
        batch |= {"crowd": (rng.random((N, 3)) < 0.3).astype(np.int64), "areas": areas, "sizes": sizes}
    model = scaled_outputs({"boxes": boxes, "scores": scores})
    for value, name in zip(model.graph.outputs, ("places", "classes"), strict=True):
        value.name = name
    return model, losses.detr(crowd=crowd), batch


NAMES = ["coco_map", "coco_map:0.5", "coco_map:suppression=0.4", "voc_map", "voc_map:points=11"]


def test_a_program_reports_what_its_rows_say() -> None:
    model, loss, batch = detector(crowd=True)
    names = [*NAMES, "coco_map:area=small", "coco_map:area=medium"]
    session = burnish.Session(burnish.compile(model, loss=loss, metrics=names), threads=1)
    figures = session.evaluate(batch)
    outputs = session.predict(batch)
    scores = np.exp(outputs["classes"]) / np.exp(outputs["classes"]).sum(2, keepdims=True)
    places = outputs["places"]
    made = []
    for sample in range(N):
        box = np.concatenate(
            [places[sample, :, :2] - places[sample, :, 2:] / 2, places[sample, :, :2] + places[sample, :, 2:] / 2], 1
        )
        there = batch["labels"][sample] >= 0
        made.append(
            Picture(
                scores[sample, :, :CLASSES].T.reshape(-1),
                np.repeat(np.arange(CLASSES), Q),
                np.tile(box, (CLASSES, 1)),
                batch["labels"][sample][there],
                batch["boxes"][sample][there],
                batch["crowd"][sample][there] > 0,
                batch["areas"][sample][there],
                tuple(batch["sizes"][sample]),
            )
        )
    assert figures["coco_map"] == pytest.approx(coco_average_precision(made), abs=1e-12)
    assert figures["coco_map:area=medium"] == pytest.approx(coco_average_precision(made, area="medium"), abs=1e-12)
    assert figures["voc_map"] == pytest.approx(voc_average_precision(made), abs=1e-12)
    assert 0 < figures["coco_map"] < figures["coco_map:0.5"] < 1
    assert figures["coco_map:suppression=0.4"] != figures["coco_map"]
    assert not set(names) & session.step(batch).keys()


def test_batches_of_any_size_and_any_padding_come_to_the_figures_of_the_whole(tmp_path: Any) -> None:
    model, loss, batch = detector()
    program = burnish.compile(model, loss=loss, metrics=NAMES)
    session = burnish.Session(burnish.Program.load(program.save(tmp_path / "program")), threads=1)
    once = session.evaluate(batch)
    parts = [{name: array[part] for name, array in batch.items()} for part in (slice(0, 1), slice(1, 4), slice(4, None))]
    parts[1] |= {
        "labels": np.pad(parts[1]["labels"], ((0, 0), (0, 2)), constant_values=-1),
        "boxes": np.pad(parts[1]["boxes"], ((0, 0), (0, 2), (0, 0))),
    }
    over = session.evaluate_data(parts)
    for name in NAMES:
        assert over[name] == pytest.approx(once[name], abs=1e-12)
    nothing = {**batch, "labels": np.full_like(batch["labels"], -1)}
    assert math.isnan(session.evaluate(nothing)["coco_map"])
    with pytest.raises(InputError, match="Nothing counts towards"):
        session.evaluate_data([nothing])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: metrics.get("coco_map:1.5"), "coco_map: iou must be '0.5:0.95' or a number above 0 up to 1, not 1.5"),
        (lambda: metrics.get("coco_map:area=huge"), "coco_map: area must be 'all', 'small', 'medium', 'large', not 'huge'"),
        (lambda: metrics.get("coco_map:candidates=0"), "candidates must be a whole number above 0, not 0"),
        (lambda: metrics.get("voc_map:suppression=2"), "suppression must be a number between 0 and 1, not 2"),
        (lambda: metrics.get("voc_map:points=5"), r"points must be 0 \(the area under the curve\) or 11, not 5"),
        (
            lambda: burnish.compile(scaled_outputs({"x": np.ones((2, 3))}), metrics=["coco_map"]),
            "the loss cross_entropy is none of detectors",
        ),
        (lambda: burnish.compile(*detector()[:1], loss=detector()[1], metrics=["coco_map:area=small"]), "give it crowd=true"),
        (lambda: burnish.compile(*detector()[:1], loss=detector()[1], metrics=["accuracy"]), "the loss detr compares values"),
        (lambda: burnish.compile(*detector()[:1], loss=detector()[1], metrics=["mae"]), "mean_absolute_error compares values"),
    ],
)
def test_what_cannot_be_measured_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_mean_iou_is_of_the_counts_of_all_pictures() -> None:
    rng = np.random.default_rng(1)
    x, labels = rng.standard_normal((4, 3, 5, 5)), rng.integers(0, 3, (4, 5, 5))
    labels[0, 0] = -100
    names = ["mean_iou", "mean_iou:1", "pixel_accuracy"]
    session = burnish.Session(burnish.compile(scaled_outputs({"x": x}), metrics=names), threads=1)
    said = session.predict({"in:x": x})["x"].argmax(1)
    counted = labels >= 0
    shares = []
    for index in range(3):
        hit = ((said == index) & (labels == index) & counted).sum()
        shares.append(hit / (((said == index) | (labels == index)) & counted).sum())
    over = session.evaluate_data([{"in:x": x[part], "labels": labels[part]} for part in (slice(0, 1), slice(1, None))])
    assert over["mean_iou"] == pytest.approx(np.mean(shares), abs=1e-12)
    assert over["mean_iou:1"] == pytest.approx(shares[1], abs=1e-12)
    assert over["accuracy"] == pytest.approx((said == labels)[counted].mean())
