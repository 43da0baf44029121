"""Fine-tuning of detectors and of segmentation: what a file is, what of it is re-initialized, and what must be said."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from PIL import Image
from typer.testing import CliRunner

import burnish
from burnish.cli.application import app
from burnish.errors import ConfigurationError
from burnish.finetuning.detectors import file_line, file_precision, find_detector, in_fractions
from burnish.finetuning.options import FinetuneOptions
from burnish.finetuning.preparation import transfer
from burnish.importer import load
from burnish.surgery.class_layers import class_layers, replace_class_layers
from burnish.surgery.linear_sources import linear_sources
from burnish.training.trained_model import model_of_session
from oracles.shapes import drawn, write_coco, write_masks, write_voc
from oracles.tiny_pictures_models import SSD_TEXT, exported_yolo, queried_detr, small_detr, small_ssd, small_unet, small_yolo


@pytest.fixture(scope="module")
def shapes(tmp_path_factory) -> Path:
    """24 pictures of rectangles and circles in COCO's form."""
    return write_coco(tmp_path_factory.mktemp("coco") / "shapes", drawn(24, 0)) / "annotations" / "instances_train.json"


@pytest.fixture(scope="module")
def masks(tmp_path_factory) -> Path:
    return write_masks(tmp_path_factory.mktemp("masks") / "shapes", drawn(8, 0))


@pytest.mark.parametrize(
    ("model", "read", "expected"),
    [
        (
            small_yolo,
            ("distances", "scores"),
            {"name": "task_aligned", "grids": [[8, 8], [4, 4]], "bins": 8, "channels_first": True},
        ),
        (exported_yolo, None, {"name": "task_aligned", "grids": [[8, 8], [4, 4]], "bins": 8, "channels_first": True}),
        (
            partial(exported_yolo, mean_by_layer=True),
            None,
            {"name": "task_aligned", "grids": [[8, 8], [4, 4]], "bins": 8, "channels_first": True},
        ),
        (small_detr, ("boxes", "scores"), {"name": "detr", "class_loss": "cross_entropy"}),
        (queried_detr, ("sides", "given"), {"name": "detr", "class_loss": "cross_entropy"}),
    ],
)
def test_a_detector_is_told_by_its_graph(model, read, expected):
    found = find_detector(load(model(classes=5)))
    assert read is None or found.outputs == read
    options = found.loss.options()
    grids = [list(grid) for grid in options.get("grids", [])]
    assert {name: grids if name == "grids" else options[name] for name in expected} == expected
    assert found.score_count - found.background == 5


def test_what_the_file_of_an_ssd_does_not_say_is_named():
    model = load(small_ssd())
    with pytest.raises(
        ConfigurationError, match=r"are 2 boxes in each cell of the grids \[\[8,8\],\[4,4\]\]; what they are relative"
    ):
        find_detector(model)
    found = find_detector(model, loss=SSD_TEXT)
    assert (found.outputs, found.background) == (("boxes", "scores"), 1)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (small_unet, {}, r"which values of the model are boxes and scores cannot be told .*: none\): name both, boxes first"),
        (small_yolo, {"outputs": ["scores"]}, "a detector has two, boxes and scores, that are values of the model"),
        (small_yolo, {"loss": "mse"}, "the data hold objects with boxes, and the loss mean_squared_error is none of detectors"),
    ],
)
def test_what_cannot_be_told_is_asked_for(model, options, message):
    with pytest.raises(ConfigurationError, match=message):
        find_detector(load(model()), **options)


def test_only_the_layers_of_the_scores_are_re_initialized():
    model = load(exported_yolo(classes=5))
    found = find_detector(model)
    before = {name: value.const_value.numpy() for name, value in model.graph.initializers.items()}
    layers = class_layers(found.scores, 5)
    assert [node.inputs[1].name for node in linear_sources(found.boxes)] != list(layers.names["weight"])
    replace_class_layers(model, layers, 2, rare=True)
    after = {name: value.const_value.numpy() for name, value in model.graph.initializers.items()}
    changed = {name for name, array in after.items() if name in before and array.tobytes() != before[name].tobytes()}
    assert changed == set(layers.initializers)
    assert [after[name].shape[0] for name in layers.initializers] == [2, 2, 2, 2]
    np.testing.assert_allclose(1 / (1 + np.exp(-after[layers.names["bias"][0]])), 0.01, rtol=1e-5)
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    output, _ = session.run(None, {"x": np.zeros((3, 3, 32, 32), np.float32)})
    assert output.shape == (3, 6, 80)


def test_what_the_file_of_a_detr_leaves_open_is_said():
    model = load(queried_detr(classes=5))
    found = find_detector(model)
    assert found.doubt.startswith("scores: the last is taken for that of no object, as in DETR; where each is a question")
    assert find_detector(model, loss="detr:class_loss=focal").doubt is None
    assert find_detector(load(exported_yolo())).doubt is None


def test_scores_of_an_ssd_are_taken_apart_by_the_new_number():
    model = load(small_ssd(classes=5))
    found = find_detector(model, loss=SSD_TEXT)
    replace_class_layers(model, class_layers(found.scores, 6), 3)
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    scores, boxes = session.run(["scores", "boxes"], {"x": np.zeros((2, 3, 32, 32), np.float32)})
    assert (scores.shape, boxes.shape) == ((2, 160, 3), (2, 160, 4))


def test_a_file_that_names_its_loss_is_tuned_by_it(shapes):
    created = burnish.models.create("ssd", classes=5, input_shape=(3, 32, 32))
    prepared, _ = transfer(created, shapes)
    assert (prepared.task.outputs, prepared.task.loss.name, prepared.task.others) == (("boxes", "scores"), "ssd", 1)
    assert prepared.task.loss.grids == ((8, 8), (4, 4))
    other = burnish.losses.ssd(grids=[[8, 8], [4, 4]], scales=[0.1, 0.3, 0.6], ratios=[[2], [2]])
    asked, _ = transfer(created, shapes, FinetuneOptions(loss=other))
    assert asked.task.loss.scales == (0.1, 0.3, 0.6)


def test_a_layer_that_gives_boxes_too_is_not_re_initialized():
    model = load(exported_yolo())
    joined = next(node for node in model.graph if node.op_type == "Concat").outputs[0]
    with pytest.raises(ConfigurationError, match="which are no whole number of 7 scores: it gives something else too"):
        class_layers(joined, 7)
    output = next(value for value in model.graph.outputs if value.name == "output0")
    with pytest.raises(ConfigurationError, match="the scores 'output0' are not all that Conv, Gemm or MatMul"):
        class_layers(output, 5)


@pytest.mark.parametrize(("reduction", "loss"), [(1, "cross_entropy"), (2, "resized")])
def test_masks_are_learned_at_their_size(masks, reduction, loss):
    prepared, dataset = transfer(small_unet(classes=6, reduction=reduction), masks)
    assert (prepared.task.kind, prepared.task.loss.name, prepared.task.metrics) == ("masks", loss, ("mean_iou", "pixel_accuracy"))
    assert (prepared.head.classes, prepared.is_new, len(dataset)) == (3, True, 8)
    with pytest.raises(ConfigurationError, match="mixup and cutmix mix samples that have one class each"):
        transfer(small_unet(), masks, FinetuneOptions(augment="mixup"))


@pytest.mark.slow
def test_void_pixels_are_no_class(masks, tmp_path):
    folder = tmp_path / "shapes"
    shutil.copytree(masks, folder)
    file = folder / "masks" / "0000.png"
    void = np.array(Image.open(file))
    void[0] = 255
    Image.fromarray(void).save(file)
    chosen = burnish.losses.resized(burnish.losses.cross_entropy(ignore_index=255))
    prepared, _ = transfer(small_unet(classes=6, reduction=2), folder, FinetuneOptions(loss=chosen))
    assert prepared.head.classes == 3


def yes_or_no_masks(folder: Path, yes: int) -> Path:
    return write_masks(folder, [one._replace(mask=(one.mask > 0).astype(np.uint8) * yes) for one in drawn(8, 0)])


@pytest.mark.parametrize("yes", [1, 255])
def test_a_model_of_one_channel_learns_yes_or_no(tmp_path, yes):
    folder = yes_or_no_masks(tmp_path / "shapes", yes)
    prepared, dataset = transfer(small_unet(classes=1), folder)
    assert (prepared.task.loss.name, prepared.head.classes, prepared.is_new) == ("bce_with_logits", 1, False)
    assert prepared.notes[0].startswith("task: yes or no for each pixel: bce_with_logits of 'logits', mean_iou")
    assert "stays, as the loss compares each of its scores with a target of its own" in prepared.notes[1]
    labels = dataset.batch(np.arange(8))["targets"]
    np.testing.assert_array_equal(labels[:, 0], np.stack([one.mask > 0 for one in drawn(8, 0)]))


@pytest.mark.slow
def test_the_head_gets_the_channels_that_masks_ask_for(masks, tmp_path):
    prepared, _ = transfer(small_unet(classes=6), yes_or_no_masks(tmp_path / "shapes", 255), FinetuneOptions(loss="binary_dice"))
    assert (prepared.head.classes, prepared.is_new) == (1, True)
    assert prepared.notes[1].endswith("is re-initialized for one score of each pixel; the file had 6")
    prepared, _ = transfer(small_unet(classes=1), masks)
    assert (prepared.task.loss.name, prepared.head.classes, prepared.is_new) == ("cross_entropy", 3, True)
    assert prepared.notes[1].endswith("is re-initialized for 3 classes; the file had 1")


@pytest.mark.slow
def test_a_model_of_pixels_reads_the_masks_of_a_voc_folder(tmp_path):
    folder = write_voc(tmp_path / "voc", drawn(4, 0))
    with pytest.raises(ConfigurationError, match="the data hold objects with boxes"):
        transfer(small_unet(classes=6), folder)
    (folder / "SegmentationClass").mkdir()
    for number, one in enumerate(drawn(4, 0)):
        Image.fromarray(one.mask).save(folder / "SegmentationClass" / f"{number:04}.png")
    prepared, dataset = transfer(small_unet(classes=6), folder)
    assert (prepared.task.kind, prepared.head.classes, len(dataset)) == ("masks", 3, 4)
    prepared, _ = transfer(small_yolo(classes=6), folder)
    assert (prepared.task.kind, prepared.task.classes) == ("objects", 2)


def test_masks_want_a_class_for_each_pixel(masks):
    with pytest.raises(ConfigurationError, match=r"the data are masks, .* and the output 'logits' has shape"):
        transfer(burnish.models.residual_network((3, 32, 32), classes=3, width=2, blocks=(1,)), masks)


@pytest.mark.slow
def test_the_precision_of_a_file_is_that_of_the_boxes_that_it_leaves(tmp_path):
    """Objects are put where the file finds some; the metric suppresses the same boxes on the host."""
    model, pictures = exported_yolo(classes=2), drawn(4, 3)
    ir.save(model, tmp_path / "yolo.onnx")
    x = np.stack([one.pixels.transpose(2, 0, 1) / np.float32(255) for one in pictures])
    output, selected = onnxruntime.InferenceSession(tmp_path / "yolo.onnx").run(None, {"x": x})
    shapes = []
    for sample, one in enumerate(pictures):
        chosen = [(label, box) for index, label, box in selected if index == sample][:3]
        boxes = np.stack([np.clip(output[sample, :4, box], 0, 32) for _, box in chosen])
        shapes.append(one._replace(boxes=boxes.astype(float), labels=np.array([label for label, _ in chosen])))
    folder = write_coco(tmp_path / "found", shapes)
    prepared, dataset = transfer(model, folder, FinetuneOptions(freeze_until="head"))
    program = burnish.compile(
        prepared.model, loss=prepared.task.loss, optimizer="sgd", outputs=list(prepared.task.outputs), metrics=["coco_map"]
    )
    with burnish.Session(program) as session:
        expected = model_of_session("the model", session).evaluate(dataset, 2)["coco_map"]
        session.export(tmp_path / "drawn.onnx")
    assert expected > 0.01  # of none found it would be 0, and any two ways agree
    assert file_precision(tmp_path / "drawn.onnx", dataset, 2) == pytest.approx(expected, abs=1e-6)
    said = file_line(tmp_path / "drawn.onnx", dataset, 2, "evaluation")
    assert said.endswith(f"coco_map {expected:.4f} of the boxes that its own NonMaxSuppression leaves (evaluation data)")
    ir.save(exported_yolo(classes=5), tmp_path / "other.onnx")
    assert "reads 5 scores of each box, and there are 2 classes" in file_line(tmp_path / "other.onnx", dataset, 2, "evaluation")
    ir.save(small_yolo(), tmp_path / "raw.onnx")
    assert file_line(tmp_path / "raw.onnx", dataset, 2, "evaluation") is None


@pytest.mark.parametrize("images", [(2, 3, 20, 40), (2, 20, 40, 3)])
def test_boxes_in_pixels_are_read_in_either_order(images):
    """Of pictures that are wider than high the two sides are divided by different extents, in whichever order they stand."""
    straight = np.array([[4.0, 5.0, 10.0, 20.0]])
    expected = np.array([[0.1, 0.25, 0.25, 1.0]])
    np.testing.assert_allclose(in_fractions(straight, False, images), expected)
    np.testing.assert_allclose(in_fractions(straight[:, [1, 0, 3, 2]], True, images), expected)
    np.testing.assert_array_equal(in_fractions(expected, False, images), expected)


@pytest.mark.slow
def test_a_detector_is_tuned_and_written_by_the_command(shapes, tmp_path):
    ir.save(exported_yolo(classes=5), tmp_path / "yolo.onnx")
    options = ("--epochs", "1", "--batch-size", "8", "--lr", "0.003", "--threads", "1", "--output", str(tmp_path / "run"))
    options += ("--eval-data", str(shapes))
    done = CliRunner().invoke(app, ["finetune", str(tmp_path / "yolo.onnx"), "--data", str(shapes), *options])
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert "task: boxes of objects: task_aligned" in said
    assert "re-initialized for 2 classes; the file had 5" in said
    assert "of the boxes that its own NonMaxSuppression leaves (evaluation data)" in said
    tuned = onnx.load(tmp_path / "run" / "tuned.onnx")
    assert [output.name for output in tuned.graph.output] == ["output0", "selected"]
    assert {entry.key: entry.value for entry in tuned.metadata_props}["burnish.classes"] == '["rectangle", "circle"]'
    refused = CliRunner().invoke(
        app,
        ["finetune", str(tmp_path / "yolo.onnx"), "--data", str(shapes), "--quantize", "int8", "--output", str(tmp_path / "b")],
    )
    assert "quantize: of a detector the loss reads values inside of the model" in " ".join(refused.output.split())


@pytest.mark.campaign
def test_tuned_models_find_what_they_have_not_seen(tmp_path):
    """From a file of other classes to a mark on other pictures, with nothing said but the data."""
    write_coco(tmp_path / "shapes", drawn(192, 0))
    folder = write_coco(tmp_path / "shapes", drawn(32, 1), "val") / "annotations"
    train, test = folder / "instances_train.json", folder / "instances_val.json"
    detector = burnish.finetune(exported_yolo(classes=5), train, eval_data=test, output=tmp_path / "yolo.onnx", epochs=20)
    assert detector.result.best["metric"] == "coco_map"
    assert detector.result.best["value"] > 0.3
    write_masks(tmp_path / "train", drawn(192, 0))
    write_masks(tmp_path / "test", drawn(32, 1))
    network = burnish.finetune(
        small_unet(classes=6), tmp_path / "train", eval_data=tmp_path / "test", output=tmp_path / "unet.onnx", epochs=12
    )
    assert network.result.best["value"] > 0.5  # the background alone comes to 0.28
