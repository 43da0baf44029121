"""``burnish predict`` of a detector and of a model of pixels: boxes in pixels of the picture, and shares of classes."""

from __future__ import annotations

import csv

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from PIL import Image

import burnish
from burnish.data.preprocessing import Preprocessing
from burnish.losses import ssd
from burnish.training.predictions import in_pixels
from oracles.shapes import drawn, write_coco, write_masks
from oracles.tiny_pictures_models import SSD, SSD_TEXT, small_ssd, small_unet

HEADER = ["file", "class", "score", "left", "top", "right", "bottom"]


def exported(model, path, classes, **objective):
    """A file as a run exports it, that was not trained."""
    with burnish.Session(burnish.compile(model, optimizer="sgd", **objective)) as session:
        session.metadata["burnish.classes"] = classes
        session.export(path)


@pytest.fixture
def picture(folder):
    """A picture that is twice as wide as high, and what a model of 32 x 32 reads of it."""
    pixels = np.random.default_rng(0).integers(0, 256, (40, 80, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "wide.png")
    read = np.asarray(Image.fromarray(pixels).resize((32, 32), Image.Resampling.BILINEAR))
    return read.transpose(2, 0, 1)[None] / np.float32(255)


def written(path) -> list[list[str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


@pytest.mark.slow
def test_a_detector_lists_its_boxes(run, folder, picture):
    exported(small_ssd(), "ssd.onnx", '["rectangle", "circle"]', loss=SSD_TEXT, outputs=["boxes", "scores"], metrics=["coco_map"])
    said = run("predict", "ssd.onnx", "wide.png", "--score", "0.01", "-o", "boxes.csv").output
    assert "boxes of a score of 0.01 or more (--score), in pixels of the picture" in said
    header, *rows = written(folder / "boxes.csv")
    offsets, logits = onnxruntime.InferenceSession("ssd.onnx").run(["boxes", "scores"], {"x": picture})
    p = np.exp(logits[0].astype(float))
    p = (p / p.sum(axis=1, keepdims=True))[:, 1:]
    anchor, label = np.unravel_index(p.argmax(), p.shape)
    x, y, width, height = ssd(**SSD).default_boxes[anchor]
    shift = offsets[0, anchor].astype(float) * [0.1, 0.1, 0.2, 0.2]
    x, y, width, height = x + shift[0] * width, y + shift[1] * height, width * np.exp(shift[2]), height * np.exp(shift[3])
    sides = np.clip([x - width / 2, y - height / 2, x + width / 2, y + height / 2], 0, 1) * [80, 40, 80, 40]
    assert header == HEADER
    assert rows[0][:2] == ["wide.png", ("rectangle", "circle")[label]]
    np.testing.assert_allclose([float(cell) for cell in rows[0][2:]], [p.max(), *sides], rtol=1e-4)
    assert [float(row[2]) for row in rows] == sorted((float(row[2]) for row in rows), reverse=True)
    assert "; none in 1 picture of 1" in run("predict", "ssd.onnx", "wide.png", "--score", "1").output


def test_boxes_of_a_cut_are_those_of_the_picture():
    cut = Preprocessing(size=(20, 20), resize="crop", shorter_side=25)
    # 100 x 50 becomes 50 x 25, of which 15 ... 35 and 2 ... 22 are read: rounded as torchvision does.
    whole = in_pixels(np.array([[0.0, 0.0, 1.0, 1.0], [-9.0, 0.5, 0.5, 9.0]]), (100, 50), cut)
    np.testing.assert_allclose(whole, [[30, 4, 70, 44], [0, 24, 50, 50]])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("channels", "loss", "names"), [(3, "cross_entropy", ("sky", "tree", "road")), (1, "bce_with_logits", ("no", "yes"))]
)
def test_a_model_of_pixels_says_the_shares_of_its_classes(run, folder, picture, channels, loss, names):
    exported(small_unet(classes=channels), "unet.onnx", '["sky", "tree", "road"]', loss=loss)
    assert (
        "the shares of pixels whose class is most probable" in run("predict", "unet.onnx", "wide.png", "-o", "shares.csv").output
    )
    header, *rows = written(folder / "shares.csv")
    (logits,) = onnxruntime.InferenceSession("unet.onnx").run(None, {"x": picture})
    said = logits[0].argmax(axis=0) if channels > 1 else (logits[0, 0] > 0).astype(int)
    shares = {names[index]: count / 1024 for index, count in enumerate(np.bincount(said.reshape(-1))) if count}
    assert header == ["file", "class", "share of pixels"]
    assert {row[1]: float(row[2]) for row in rows} == pytest.approx(shares, abs=0.01)


@pytest.mark.slow
def test_pictures_with_annotations_are_asked_for_by_their_folder(run, folder):
    ir.save(small_unet(), "unet.onnx")
    write_masks(folder / "scans", drawn(1, 0))
    said = " ".join(run("predict", "unet.onnx", "scans", code=1).output.split())
    assert "scans: it holds masks beside 'images', and predictions are of pictures alone: name the folder that holds them" in said
    annotations = str(write_coco(folder / "coco", drawn(1, 0)) / "annotations" / "instances_train.json")
    assert "it holds objects in the form of COCO, and predictions" in " ".join(
        run("predict", "unet.onnx", annotations, code=1).output.split()
    )
