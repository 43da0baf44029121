"""Folders of objects and of masks: what they hold, what boxes and masks follow, and what is left out by name."""

from __future__ import annotations

import json
import os
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from PIL import Image

from burnish.data.annotated.masks import MaskImages, mask_values
from burnish.data.annotated.objects import ObjectImages
from burnish.data.data_spec import DataSpec
from burnish.data.formats import format_of
from burnish.data.image.augmentation import ImageAugmentation
from burnish.data.image.decoding import ORIENTATION
from burnish.data.sources import open_dataset
from burnish.errors import ConfigurationError, DataError
from burnish.program import Entry, Role
from oracles.shapes import NAMES, Shapes, drawn, write_coco, write_masks, write_voc

FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64
SHAPES = drawn(6, 3)


def spec_of(crowd: bool = False, side: int = 32, classes: int = 2) -> DataSpec:
    labels = [
        Entry("labels", Role.LABEL, INT64, ("batch", "objects"), minimum=0, maximum=classes - 1, ignored=-1),
        Entry("boxes", Role.LABEL, FLOAT, ("batch", "objects", 4)),
    ]
    if crowd:
        labels += [
            Entry("crowd", Role.LABEL, INT64, ("batch", "objects"), minimum=0, maximum=1),
            Entry("areas", Role.LABEL, FLOAT, ("batch", "objects")),
            Entry("sizes", Role.LABEL, FLOAT, ("batch", 2)),
        ]
    data = Entry("x", Role.DATA, FLOAT, ("batch", 3, side, side))
    return DataSpec((data,), labels[0], tuple(labels[1:]))


def mask_spec(shape: tuple[Any, ...] = ("batch", 32, 32), dtype: ir.DataType = INT64, ignored: int | None = -100) -> DataSpec:
    maximum = 2 if dtype is INT64 else 1
    label = Entry("labels", Role.LABEL, dtype, shape, minimum=0, maximum=maximum, ignored=ignored)
    return DataSpec((Entry("x", Role.DATA, FLOAT, ("batch", 3, 32, 32)),), label)


def check_objects(batch: dict[str, np.ndarray], shapes: list[Shapes]) -> None:
    places = max(len(one.labels) for one in shapes)
    assert batch["labels"].shape == (len(shapes), places)
    for row, one in enumerate(shapes):
        there = batch["labels"][row] >= 0
        np.testing.assert_array_equal(batch["labels"][row][there], one.labels)
        np.testing.assert_allclose(batch["boxes"][row][there], one.boxes / 32, rtol=1e-6)
        np.testing.assert_allclose(batch["x"][row], one.pixels.transpose(2, 0, 1) / np.float32(255), rtol=1e-6)


def test_a_coco_folder_and_its_file(tmp_path: Path) -> None:
    folder = write_coco(tmp_path / "coco", SHAPES)
    assert format_of(folder).name == format_of(folder / "annotations" / "instances_train.json").name == "coco"
    for source in (folder, folder / "annotations" / "instances_train.json"):
        dataset = open_dataset(source, spec_of())
        assert isinstance(dataset, ObjectImages)
        assert (len(dataset), dataset.classes, dataset.note) == (6, ("rectangle", "circle"), None)
        check_objects(dataset.batch(np.arange(6)), SHAPES)


def test_a_voc_folder_and_a_list_of_it(tmp_path: Path) -> None:
    """Coordinates count from 1. Objects of every second picture are difficult."""
    folder = write_voc(tmp_path / "voc", SHAPES)
    assert format_of(folder).name == format_of(folder / "ImageSets" / "Main" / "train.txt").name == "voc"
    dataset = open_dataset(folder, spec_of(crowd=True), classes=NAMES)
    batch = dataset.batch(np.arange(6))
    check_objects(batch, SHAPES)
    there = batch["labels"] >= 0
    np.testing.assert_array_equal(batch["crowd"], (np.arange(6) % 2)[:, None] * there)
    np.testing.assert_array_equal(batch["sizes"], np.full((6, 2), 32))
    expected = [(box[2] - box[0]) * (box[3] - box[1]) for one in SHAPES for box in one.boxes]
    np.testing.assert_allclose(batch["areas"][there], expected)
    listed = open_dataset(folder / "ImageSets" / "Main" / "train.txt", spec_of(), classes=NAMES)
    assert len(listed) == 3
    difficult = len(SHAPES[1].labels)
    assert f"{difficult} objects are regions of many, or do not count" in str(listed.note)  # type: ignore[attr-defined]


def test_boxes_follow_a_stretch_a_cut_and_a_flip(tmp_path: Path) -> None:
    pixels = np.zeros((40, 80, 3), np.uint8)
    pixels[10:20, 30:50] = 255
    one = Shapes(pixels, np.array([[30.0, 10, 50, 20], [0, 0, 10, 10]]), np.array([1, 0]), pixels[..., 0])
    folder = write_coco(tmp_path / "coco", [one])
    stretched = open_dataset(folder, spec_of(side=20)).batch(np.arange(1))
    np.testing.assert_allclose(stretched["boxes"][0], [[0.375, 0.25, 0.625, 0.5], [0, 0, 0.125, 0.25]])
    cut = open_dataset(folder, spec_of(side=20), pixels={"resize": "crop", "shorter_side": 20})
    batch = cut.batch(np.arange(1))
    # 40 x 20, of which the columns 10 to 30 stay: of the box at the left rim nothing.
    np.testing.assert_allclose(batch["boxes"][0], [[0.25, 0.25, 0.75, 0.5], [0, 0, 0, 0]], atol=1e-6)
    assert batch["labels"][0].tolist() == [1, -1]
    flipped = cut.augmented_by(ImageAugmentation(flip=1.0)).augmented(np.arange(1), 0, 0)  # type: ignore[attr-defined]
    np.testing.assert_array_equal(flipped["x"], batch["x"][..., ::-1])
    np.testing.assert_allclose(flipped["boxes"][0, 0], [0.25, 0.25, 0.75, 0.5], atol=1e-6)
    other = open_dataset(folder, spec_of(side=20)).augmented_by(ImageAugmentation(flip=1.0))  # type: ignore[attr-defined]
    np.testing.assert_allclose(other.augmented(np.arange(1), 0, 0)["boxes"][0, 1], [0.875, 0, 1, 0.25])
    drawn_twice = [cut.augmented_by(ImageAugmentation(flip=0.5)).augmented(np.zeros(8, int), 0, 3)["x"] for _ in range(2)]  # type: ignore[attr-defined]
    np.testing.assert_array_equal(*drawn_twice)


def test_what_cannot_be_used_is_counted_and_named(tmp_path: Path) -> None:
    folder = write_coco(tmp_path / "coco", SHAPES)
    file = folder / "annotations" / "instances_train.json"
    content = json.loads(file.read_text())
    (folder / "train" / "0000.png").unlink()
    (folder / "train" / "0001.png").write_bytes(b"no picture")
    Image.new("RGB", (8, 8)).save(folder / "train" / "0002.png")
    template = {"image_id": 15, "category_id": 1, "area": 1, "iscrowd": 0}
    content["annotations"] += [
        {**template, "id": 901, "bbox": [1, 1, 0, 5]},
        {**template, "id": 902, "bbox": [1, 1, 5]},
        {**template, "id": 903, "bbox": [1, 1, 5, 5], "category_id": 77},
        {**template, "id": 904, "bbox": [1, 1, 5, 5], "iscrowd": 1},
        {**template, "id": 905, "bbox": [1, 1, True, 5]},
        {**template, "id": 906, "bbox": [1, 1, 10**400, 5]},
        {**template, "id": 907, "bbox": [1, 1, 5, 5], "iscrowd": "yes"},
        {**template, "id": 908, "bbox": [1, 1, 5, 5], "area": 1e39},
        {**template, "id": 909, "bbox": [1, 1, 5, 5], "area": -1},
        {**template, "id": 910, "bbox": [1, 1, 5, 5], "area": 10**400},
    ]
    file.write_text(json.dumps(content))
    dataset = open_dataset(folder, spec_of())
    assert len(dataset) == 3
    note = str(dataset.note)  # type: ignore[attr-defined]
    for part in (
        "left out, their boxes have no area in the picture: 901",
        "left out, their boxes are not four numbers: 902, 905, 906",
        "left out, their 'iscrowd' is neither 0 nor 1: 907",
        "left out, their areas are not numbers that float32 holds, from 0: 908, 909, 910",
        "left out, their pictures or categories are not in the file: 903",
        "1 of 6 pictures left out, their files are missing",
        "1 of 6 pictures left out, they cannot be read",
        "their sizes are not those of the annotations",
        "1 objects are regions of many",
    ):
        assert part in note


def test_a_picture_that_breaks_off_gives_its_place_to_the_next(tmp_path: Path) -> None:
    folder = write_coco(tmp_path / "coco", SHAPES)
    broken = folder / "train" / "0004.png"
    broken.write_bytes(broken.read_bytes()[:200])
    dataset = open_dataset(folder, spec_of())
    batch = dataset.batch(np.array([4, 5]))
    np.testing.assert_array_equal(batch["x"][0], batch["x"][1])
    np.testing.assert_array_equal(batch["boxes"][0], batch["boxes"][1])
    assert "1 of 6 images cannot be read, and others take their places" in str(dataset.remark)  # type: ignore[attr-defined]


def changed_coco(tmp_path: Path, change: Any) -> None:
    folder = write_coco(tmp_path / "coco", SHAPES[:2])
    file = folder / "annotations" / "instances_train.json"
    content = json.loads(file.read_text())
    text = change(content)
    file.write_text(text if isinstance(text, str) else json.dumps(content))
    open_dataset(folder, spec_of())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: "{", "damaged, or no JSON"),
        (lambda content: "[" * 100_000, "damaged, or no JSON"),
        (lambda content: "[]", "it holds a list, and COCO's instances are an object"),
        (lambda content: content.pop("categories") and None, "no list 'categories'"),
        (lambda content: content["images"][1].pop("width") and None, "number 1 of 'images' has no 'width'"),
        (lambda content: content["images"][1].update(width="x"), "has the size"),
        (lambda content: content["images"][1].update(id=[1]), "'id' of number 1 of 'images' is a list, and a whole number or"),
        (lambda content: content["images"][1].update(id=True), "'id' of number 1 of 'images' is true"),
        (lambda content: content["images"][1].update(width=True), "has the size"),
        (lambda content: content["images"][1].update(file_name=None), "'file_name' of number 1 of 'images' is null"),
        (lambda content: content["images"][1].update(id=10), "2 of 'images' have the id 10; give each an id of its own"),
        (lambda content: content["images"][1].update(file_name="a\0b"), "no file can have the name .*embedded null"),
        (lambda content: content["images"][1].update(file_name="a" * 5000), "no file can have the name .*too long"),
        (lambda content: content["annotations"][0].update(image_id=10.0), "'image_id' of number 0 of 'annotations' is 10.0"),
        (lambda content: content["categories"][1].update(name=None), "'name' of number 1 of 'categories' is null"),
        (lambda content: content["categories"][1].update(id=1), "2 of 'categories' have the id 1"),
        (lambda content: content["images"][0].update(file_name="../../secret.png"), "leads out of the folder"),
        (lambda content: content["images"][0].update(file_name="/etc/passwd"), "leads out of the folder"),
        (lambda content: content["categories"][1].update(name="rectangle"), "two of its categories have one name"),
        (lambda content: content["categories"].append({"id": 9, "name": "star"}), "3 classes .* and the model has 2"),
        (
            lambda content: content["categories"].extend({"id": one, "name": f"n{one}"} for one in range(10, 50_000)),
            "49992 classes .* and the model has 2",
        ),
    ],
)
def test_damaged_instances_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        changed_coco(tmp_path, change)


VOC = """<annotation><size><width>32</width>{}</size><object><name>circle</name><difficult>{}</difficult><bndbox>
    <xmin>1</xmin><ymin>1</ymin><xmax>9</xmax><ymax>9</ymax></bndbox></object></annotation>"""
BOMB = '<!DOCTYPE a [<!ENTITY b "cc"><!ENTITY c "&b;&b;">]><annotation><filename>&c;</filename></annotation>'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (BOMB, "it declares a document type"),
        (BOMB.encode("utf-16"), "it declares a document type"),
        ("<annotation>", "no XML"),
        ("<annotation/>", "it holds no elements"),
        ("<annotation><size><width>3</width></size></annotation>", "an element is missing"),
        ("<annotation>" + "<a>" * 50 + "</a>" * 50 + "</annotation>", "nested deeper than 8"),
        ("<a>" + " " * (1 << 20) + "</a>", "larger than 1,048,576 bytes"),
        *((f'<?xml version="1.0" encoding="{name}"?><a/>', "no XML") for name in ("nope", "hex", "utf-7", "idna", "cp037")),
        (VOC.format("<height>32</height><height>33</height>", "0"), "it has 'height' 2 times, and one is expected"),
        (VOC.format("<height>32</height>", "maybe"), "'difficult' is 'maybe', and 0 or 1 is expected"),
        (None, "it is a pipe or a device"),
    ],
)
def test_damaged_annotations_are_counted_and_named(tmp_path: Path, text: str | bytes | None, reason: str) -> None:
    folder = write_voc(tmp_path / "voc", SHAPES)
    file = folder / "Annotations" / "0003.xml"
    file.unlink()
    if text is None:
        os.mkfifo(file)
    else:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    dataset = open_dataset(folder, spec_of(crowd=True), classes=NAMES)
    assert len(dataset) == 5
    assert "1 of 6 annotations left out, they cannot be read: 0003.xml" in str(dataset.note)  # type: ignore[attr-defined]
    assert reason in str(dataset.note)  # type: ignore[attr-defined]


def test_a_list_of_pictures_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = write_voc(tmp_path / "voc", SHAPES) / "ImageSets" / "Main" / "train.txt"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"train\.txt: no list of pictures in UTF-8 .*can't decode.*; write it again"):
        open_dataset(file, spec_of())


def test_masks_are_the_classes_of_pixels(tmp_path: Path) -> None:
    folder = write_masks(tmp_path / "masks", SHAPES)
    assert format_of(folder).name == "masks"
    dataset = open_dataset(folder, mask_spec())
    batch = dataset.batch(np.arange(6))
    np.testing.assert_array_equal(batch["labels"], np.stack([one.mask for one in SHAPES]))
    flipped = dataset.augmented_by(ImageAugmentation(flip=1.0)).augmented(np.arange(2), 0, 0)  # type: ignore[attr-defined]
    np.testing.assert_array_equal(flipped["labels"], batch["labels"][:2, :, ::-1])
    np.testing.assert_array_equal(flipped["x"], batch["x"][:2, ..., ::-1])
    small = open_dataset(folder, mask_spec(("batch", 8, 8))).batch(np.arange(6))
    np.testing.assert_array_equal(small["labels"], batch["labels"][:, 2::4, 2::4])
    yes = open_dataset(folder, mask_spec(("batch", 1, 32, 32), FLOAT, None)).batch(np.arange(2))
    np.testing.assert_array_equal(yes["labels"][:, 0], batch["labels"][:2] > 0)


def test_masks_that_unpack_to_more_than_images_may_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_masks(tmp_path / "masks", SHAPES)
    mask = folder / "masks" / "0001.png"
    assert len(list(mask_values([mask]))) == 1
    dataset = open_dataset(folder, mask_spec())
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert not list(mask_values([mask]))
    with pytest.raises(DataError, match=r"0001.png.*decompression bomb"):
        dataset.batch(np.array([1]))


def test_masks_are_turned_as_their_pictures_are(tmp_path: Path) -> None:
    folder = write_masks(tmp_path / "masks", SHAPES[:2])
    exif = Image.Exif()
    exif[ORIENTATION] = 3
    upright = open_dataset(folder, mask_spec()).batch(np.array([1]))
    for name in ("images", "masks"):
        with Image.open(folder / name / "0001.png") as image:
            image.load()
            image.save(folder / name / "0001.png", exif=exif)
    turned = open_dataset(folder, mask_spec()).batch(np.array([1]))
    np.testing.assert_array_equal(turned["labels"], upright["labels"][:, ::-1, ::-1])
    np.testing.assert_array_equal(turned["x"], upright["x"][..., ::-1, ::-1])


def test_pairs_that_cannot_be_used_are_counted_and_named(tmp_path: Path) -> None:
    folder = write_masks(tmp_path / "masks", SHAPES)
    (folder / "masks" / "0001.png").unlink()
    Image.new("L", (9, 9)).save(folder / "masks" / "0002.png")
    Image.new("RGB", (32, 32)).save(folder / "masks" / "0003.png")
    dataset = open_dataset(folder, mask_spec())
    note = str(dataset.note)  # type: ignore[attr-defined]
    assert len(dataset) == 3
    for part in ("1 of 6 pictures left out, they have no masks", "9 x 9, and the picture 32 x 32", "its pixels are RGB"):
        assert part in note
    void = SHAPES[4].mask.copy()
    void[0] = 255
    Image.fromarray(void).save(folder / "masks" / "0004.png")
    assert (dataset.batch(np.array([1]))["labels"][0, 0] == -100).all()
    void[0] = 7
    Image.fromarray(void).save(folder / "masks" / "0004.png")
    with pytest.raises(DataError, match=r"0004.png: it holds the class 7, and the model has 3; number the classes from 0"):
        dataset.batch(np.array([1]))


def test_masks_in_files_that_change_pixels_are_left_out(tmp_path: Path) -> None:
    folder = write_masks(tmp_path / "masks", SHAPES[:2])
    (folder / "masks" / "0001.png").unlink()
    for name, how in (("0001.jpg", {}), ("0001.tif", {"compression": "jpeg"})):
        Image.fromarray((SHAPES[1].mask > 0).astype(np.uint8) * 255).save(folder / "masks" / name, **how)
        dataset = open_dataset(folder, mask_spec())
        assert len(dataset) == 1
        reason = "a JPEG file, which changes the values of pixels, and these are classes: save masks as PNG"
        assert f"{name} ({reason})" in str(dataset.note)  # type: ignore[attr-defined]
        (folder / "masks" / name).unlink()


@pytest.mark.parametrize("bits", [2, 4])
def test_masks_whose_values_are_stretched_are_left_out(tmp_path: Path, bits: int) -> None:
    """Gray of less than 8 bits: Pillow reads the class 1 as 85 or 17."""
    folder = write_masks(tmp_path / "masks", SHAPES[:2])
    chunks = (b"IHDR" + struct.pack(">IIBBBBB", 32, 32, bits, 0, 0, 0, 0), b"IDAT" + zlib.compress(bytes(33 * 32)), b"IEND")
    content = b"".join(struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk in chunks)
    (folder / "masks" / "0001.png").write_bytes(b"\x89PNG\r\n\x1a\n" + content)
    dataset = open_dataset(folder, mask_spec())
    assert len(dataset) == 1
    assert "0001.png (gray of less than 8 bits, whose values readers stretch to 255" in str(dataset.note)  # type: ignore[attr-defined]


def test_void_pixels_are_refused_where_the_loss_ignores_none(tmp_path: Path) -> None:
    folder = write_masks(tmp_path / "masks", SHAPES[:1])
    void = SHAPES[0].mask.copy()
    void[0] = 255
    Image.fromarray(void).save(folder / "masks" / "0000.png")
    for maximum in (2, None):
        spec = mask_spec(ignored=None)
        assert spec.label is not None
        spec = replace(spec, label=replace(spec.label, maximum=maximum))
        with pytest.raises(DataError, match=r"0000.png: pixels of 255 have no class, and the loss ignores none: use one with"):
            open_dataset(folder, spec).batch(np.array([0]))


def test_masks_of_0_and_255_alone_say_yes_where_they_hold_255(tmp_path: Path) -> None:
    folder, yes_or_no = tmp_path / "masks", mask_spec(("batch", 1, 32, 32), FLOAT, None)
    write_masks(folder, [one._replace(mask=(one.mask > 0).astype(np.uint8) * 255) for one in SHAPES])
    labels = open_dataset(folder, yes_or_no).batch(np.arange(6))["labels"]
    np.testing.assert_array_equal(labels[:, 0], np.stack([one.mask > 0 for one in SHAPES]))
    with pytest.raises(DataError, match=r"the masks hold 0 and 255 alone, .* write 1 in its place; or .* bce_with_logits"):
        open_dataset(folder, mask_spec())
    Image.fromarray(SHAPES[5].mask).save(folder / "masks" / "0005.png")
    with pytest.raises(DataError, match=r"0000.png: pixels of 255 have no class, .* a loss of yes or no ignores none"):
        open_dataset(folder, yes_or_no).batch(np.arange(1))


def test_a_voc_folder_holds_masks_for_a_loss_of_pixels(tmp_path: Path) -> None:
    folder = write_voc(tmp_path / "voc", SHAPES)
    masks = folder / "SegmentationClass"
    masks.mkdir()
    for number in (1, 2, 4):
        Image.fromarray(SHAPES[number].mask).save(masks / f"{number:04}.png")
    whole = open_dataset(folder, mask_spec())
    np.testing.assert_array_equal(whole.batch(np.arange(3))["labels"], np.stack([SHAPES[place].mask for place in (1, 2, 4)]))
    listed = folder / "ImageSets" / "Segmentation" / "train.txt"
    listed.parent.mkdir()
    listed.write_text("0002\n0003\n0009\n", encoding="utf-8")
    some = open_dataset(listed, mask_spec())
    np.testing.assert_array_equal(some.batch(np.arange(1))["labels"][0], SHAPES[2].mask)
    assert isinstance(some, MaskImages)
    note = str(some.note)
    assert "1 of 3 pictures left out, they are not in 'JPEGImages': 0009" in note
    assert "1 of 3 pictures left out, they have no masks" in note
    assert isinstance(open_dataset(folder, spec_of()), ObjectImages)


def test_data_of_another_kind_than_the_loss_are_refused(tmp_path: Path) -> None:
    coco, masks = write_coco(tmp_path / "coco", SHAPES[:1]), write_masks(tmp_path / "masks", SHAPES[:1])
    with pytest.raises(DataError, match=r"objects with boxes, and the loss compares with 'labels': use a loss of detectors"):
        open_dataset(coco, mask_spec())
    with pytest.raises(DataError, match=r"masks give a class to each pixel.*use a loss of positions"):
        open_dataset(masks, mask_spec(("batch",)))
    with pytest.raises(ConfigurationError, match="boxes and masks follow a flip, and not random crops"):
        open_dataset(coco, spec_of()).augmented_by(ImageAugmentation(crop=(0.5, 1.0)))  # type: ignore[attr-defined]
    with pytest.raises(DataError, match=r"class 'rectangle' is not among the classes that are trained: circle, star"):
        open_dataset(coco, spec_of(), classes=("circle", "star"))
    write_coco(tmp_path / "coco", SHAPES[:1], "val")
    with pytest.raises(DataError, match=r"has one file of instances, and this has .*train.*val.*name the file itself"):
        open_dataset(coco, spec_of())
