"""The report of a detector: which objects are found and what for, above one score, and the pictures that it gets most wrong."""

from __future__ import annotations

import numpy as np
import pytest

import burnish
from burnish.data.data_spec import DataSpec
from burnish.data.sources import open_dataset
from burnish.metrics.average_precision import Picture
from burnish.training.html_report.contents import Contents
from burnish.training.html_report.page import report_page
from burnish.training.html_report.pictures import drawn_on
from burnish.training.html_report.samples import UNSAID, best_threshold, judge, judge_boxes, matched
from burnish.training.trained_model import model_of_session
from oracles.shapes import NAMES, drawn, write_coco
from oracles.tiny_pictures_models import SSD_TEXT, small_ssd

SQUARE = np.array([0.0, 0.0, 0.4, 0.4])


def picture(scores, classes, boxes, labels, objects, crowd=None) -> Picture:
    return Picture(
        np.array(scores, float),
        np.array(classes, np.int64),
        np.array(boxes, float).reshape(-1, 4),
        np.array(labels, np.int64),
        np.array(objects, float).reshape(-1, 4),
        np.zeros(len(labels), bool) if crowd is None else np.array(crowd),
        np.zeros(len(labels)),
        (1.0, 1.0),
    )


def test_boxes_stand_for_objects_of_their_class_first():
    near = np.array([0.0, 0.0, 0.5, 0.4])
    made = picture(
        [0.9, 0.8, 0.7, 0.6], [1, 0, 0, 1], [SQUARE, near, SQUARE + 0.5, SQUARE + 0.45], [0, 1], [SQUARE, SQUARE + 0.1]
    )
    own = matched(made)
    # The second box is of the first object's class, though the first box lies on it; that is left with the object beside it.
    assert dict(zip(own.objects.tolist(), own.boxes.tolist(), strict=True)) == {0: 1}
    assert (own.spare.tolist(), own.missed.tolist()) == ([0, 2, 3], [1])
    crowded = matched(picture([0.9, 0.8], [0, 0], [SQUARE, SQUARE + 0.5], [0], [SQUARE], [True]))
    assert (crowded.spare.tolist(), crowded.missed.tolist(), len(crowded.boxes)) == ([1], [], 0)


def test_the_score_is_that_of_the_largest_f1():
    # By falling score: right, right and three wrong ones, of three objects. F1 is 2/4, 4/5, 4/6, 4/7, 4/8.
    made = [
        picture([0.9, 0.5, 0.2], [0, 0, 0], [SQUARE, SQUARE + 0.5, SQUARE + 0.5], [0, 0], [SQUARE, SQUARE + 0.2]),
        picture([0.7, 0.3], [0, 0], [SQUARE + 0.5, SQUARE], [0], [SQUARE + 0.5]),
    ]
    assert best_threshold(made) == 0.7
    assert best_threshold([picture([0.9], [1], [SQUARE], [0], [SQUARE])]) == UNSAID
    assert best_threshold([picture([], [], [], [], [])]) == UNSAID


def test_outlines_of_what_is_wrong_are_twice_as_wide():
    gray = np.zeros((8, 10), np.uint8)
    colours = np.array([[255, 0, 0], [0, 255, 0]], np.uint8)
    shown = drawn_on(gray, np.array([[0.0, 0.0, 0.5, 0.5], [0.4, 0.25, 1.0, 1.0]]), colours, np.array([True, False]))
    red = np.zeros((8, 10), bool)
    red[:4, :5] = True
    red[1:3, 1:4] = False
    green = np.zeros((8, 10), bool)
    green[2:, 4:] = True
    green[4:6, 6:8] = False
    np.testing.assert_array_equal((shown == [255, 0, 0]).all(axis=2), red & ~green)
    np.testing.assert_array_equal((shown == [0, 255, 0]).all(axis=2), green)
    tiny = drawn_on(gray, np.array([[0.0, 0.0, 0.01, 0.01]]), colours[1:], np.array([False]))
    assert (tiny == [0, 255, 0]).all(axis=2).sum() == 1


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """A detector that was not trained, and what is said of it on six pictures."""
    folder = write_coco(tmp_path_factory.mktemp("boxes") / "shapes", drawn(6, 0))
    program = burnish.compile(small_ssd(), loss=SSD_TEXT, outputs=["boxes", "scores"], optimizer="sgd", metrics=["coco_map:0.5"])
    session = burnish.Session(program)
    dataset = open_dataset(folder, DataSpec.by(program))
    session.metadata["burnish.classes"] = '["rectangle", "circle"]'
    model = model_of_session("the model", session)
    yield program, model, dataset, judge(model, dataset, batch_size=4, worst=3)
    session.close()


@pytest.mark.slow
def test_a_detector_is_judged_by_its_objects(judged):
    _, model, dataset, judgement = judged
    objects = np.bincount(np.concatenate([one.labels for one in drawn(6, 0)]), minlength=2)
    assert judgement.classes == (*NAMES, "nothing")
    np.testing.assert_array_equal(judgement.confusion[:2].sum(axis=1), objects)
    assert judgement.confusion[2, 2] == 0
    assert 0 < judgement.of_boxes < 1
    assert [one.error for one in judgement.worst] == sorted((one.error for one in judgement.worst), reverse=True)
    whole = judge_boxes(model, dataset, 6, 6)
    np.testing.assert_array_equal(whole.confusion, judgement.confusion)
    assert sum(one.error for one in whole.worst) == judgement.confusion.sum() - judgement.confusion.trace()
    worst = judgement.worst[0]
    assert worst.name.endswith(f"{worst.index:04}.png")
    assert worst.pixels.shape == (32, 2 * 32 + 2, 3)
    counts = np.bincount(drawn(6, 0)[worst.index].labels, minlength=2)
    assert worst.truth == ", ".join(f"{count} {name}" for count, name in zip(counts, NAMES, strict=True) if count)


def test_the_page_says_how_boxes_are_judged(judged):
    program, _, _, judgement = judged
    page = report_page(Contents("boxes", [], program, 2, judgement=judgement, data="shapes"))
    found = judgement.confusion.trace()
    assert f"{found} of {judgement.confusion[:2].sum()} objects are found as what they are, and " in page
    assert f"Boxes count from a score of {judgement.of_boxes:.2g} on" in page
    assert ": the objects, and the boxes of the model. What is missed or wrong is thick" in page
    assert page.count("<img ") == len(judgement.worst)
