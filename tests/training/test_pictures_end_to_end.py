"""A small SSD and a small U-Net, as files, on folders of drawn shapes: by the command, to a mark, and exported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from typer.testing import CliRunner

import burnish
from burnish import losses
from burnish.cli.application import app
from oracles.shapes import NAMES, drawn, write_coco, write_masks
from oracles.tiny_pictures_models import SSD, SSD_TEXT, small_detr, small_ssd, small_unet, small_yolo


def run(*arguments: Any) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.output


def figure(output: str, name: str) -> float:
    """The last value of a figure in what the command printed."""
    words = output.split()
    return float(words[len(words) - 1 - words[::-1].index(name) + 1])


@pytest.mark.slow
def test_a_detector_learns_to_find_shapes(tmp_path: Path) -> None:
    """From 0 to an average precision of 0.5 at least, 0.85 at an overlap of one half, on pictures that it has not seen."""
    ir.save(small_ssd(), tmp_path / "model.onnx")
    write_coco(tmp_path / "shapes", drawn(192, 0))
    folder = write_coco(tmp_path / "shapes", drawn(32, 1), "val") / "annotations"
    options = ["--loss", SSD_TEXT, "--outputs", "boxes,scores", "--metrics", "coco_map,coco_map:0.5"]
    begun = run("evaluate", tmp_path / "model.onnx", folder / "instances_val.json", *options)
    assert figure(begun, "coco_map") < 0.05
    run(
        *("train", tmp_path / "model.onnx", "--data", folder / "instances_train.json", *options),
        *("--epochs", 10, "--batch-size", 16, "--optimizer", "adam", "--lr", 0.003, "--output", tmp_path / "run"),
    )
    tuned = tmp_path / "run" / "tuned.onnx"
    said = run("evaluate", tuned, folder / "instances_val.json")
    assert figure(said, "coco_map") > 0.5
    assert figure(said, "coco_map:0.5") > 0.85
    session = onnxruntime.InferenceSession(tuned)
    x = np.stack([one.pixels.transpose(2, 0, 1) / np.float32(255) for one in drawn(2, 5)])
    scores, boxes = session.run(["scores", "boxes"], {"x": x})
    assert scores.shape == (2, 160, 3)
    assert boxes.shape == (2, 160, 4)
    assert list(NAMES) == ["rectangle", "circle"]
    assert '["rectangle", "circle"]' in ir.load(tuned).metadata_props["burnish.classes"]


@pytest.mark.slow
def test_a_network_learns_to_segment_shapes(tmp_path: Path) -> None:
    """To a mean intersection over union of 0.75 at least (the background alone: 0.28), from a prediction of half size."""
    train, test = write_masks(tmp_path / "train", drawn(192, 0)), write_masks(tmp_path / "test", drawn(32, 1))
    loss = losses.weighted_sum([(1.0, losses.resized("cross_entropy")), (0.5, losses.resized("dice"))])
    program = burnish.compile(
        small_unet(reduction=2), loss=loss, optimizer=burnish.optim.adam(lr=4e-3), metrics=["mean_iou", "pixel_accuracy"]
    )
    trainer = burnish.Trainer(
        program, train, test, epochs=12, batch_size=8, run_directory=tmp_path / "run", augment="flip", engine="onnxruntime"
    )
    result = trainer.run()
    assert result.metrics["mean_iou"] > 0.75
    exported = trainer.session.export(tmp_path / "tuned.onnx")
    assert onnxruntime.InferenceSession(exported).get_outputs()[0].shape == ["batch", 3, 16, 16]


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("model", "loss", "samples", "epochs", "mark"),
    [
        (
            small_yolo,
            losses.task_aligned(grids=[8, 4], bins=8, channels_first=True, outputs=["distances", "scores"]),
            *(192, 16, 0.4),
        ),
        (small_detr, losses.detr(outputs=["boxes", "scores"]), 384, 30, 0.2),
    ],
    ids=["task_aligned", "detr"],
)
def test_other_detectors_learn_to_find_shapes(
    model: Callable[[], ir.Model], loss: losses.Loss, samples: int, epochs: int, mark: float, tmp_path: Path
) -> None:
    """The dense layer in place of DETR's attention knows places alone; its mark is lower."""
    write_coco(tmp_path / "shapes", drawn(samples, 0))
    folder = write_coco(tmp_path / "shapes", drawn(32, 1), "val") / "annotations"
    program = burnish.compile(model(), loss=loss, optimizer=burnish.optim.adam(lr=3e-3))
    trainer = burnish.Trainer(
        program,
        folder / "instances_train.json",
        folder / "instances_val.json",
        epochs=epochs,
        batch_size=16,
        run_directory=tmp_path / "run",
        engine="onnxruntime",
        augment="flip",
    )
    assert trainer.run().metrics["coco_map"] > mark


def test_a_few_steps_on_a_folder_make_the_loss_smaller(tmp_path: Path) -> None:
    loss = losses.ssd(**SSD, crowd=True, outputs=["boxes", "scores"])
    folder = write_coco(tmp_path / "shapes", drawn(12, 0))
    program = burnish.compile(small_ssd(), loss=loss, optimizer=burnish.optim.adam(lr=3e-3))
    trainer = burnish.Trainer(
        program, folder, folder, epochs=3, batch_size=6, run_directory=tmp_path / "run", engine="onnxruntime"
    )
    result = trainer.run()
    assert result.best is not None
    assert result.best["metric"] == "coco_map"
    evaluated = [row["eval_loss"] for row in result.history if row.get("eval_loss") is not None]
    assert evaluated[-1] < evaluated[0]
    # What evaluation alone reports stands in the table too.
    assert result.history[-1]["eval_coco_map"] == result.metrics["coco_map"]
