"""Random changes to images: what they are, that they are functions of seed, epoch and index, and what is refused."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from PIL import Image, ImageOps

from burnish.data import ArrayDataset, DataSpec, ImageAugmentation, Loader, open_dataset
from burnish.data.image.augmentation import OPERATIONS, cut, mixing, rand_augment, read_augmentation
from burnish.errors import ConfigurationError
from burnish.program import Entry, Role
from burnish.training.run_data import RunData
from specs.program_inputs import classification, data_entry

CLASSES = 3


def probabilities(*shape: int) -> DataSpec:
    return DataSpec(
        (data_entry(*shape),), Entry("targets", Role.LABEL, ir.DataType.FLOAT, ("batch", CLASSES), minimum=0, maximum=1)
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("images")
    for name in "abc":
        (path / name).mkdir()
        for number in range(3):
            pixels = np.random.default_rng(ord(name) + number).integers(0, 256, (20, 24, 3), np.uint8)
            Image.fromarray(pixels).save(path / name / f"{number}.png")
    return path


def test_texts_and_what_they_come_to():
    assert read_augmentation("crop,flip,rand_augment,mixup,cutmix") == ImageAugmentation(
        crop=(0.08, 1), flip=0.5, rand_augment=2, mixup=0.2, cutmix=1.0
    )
    read = read_augmentation("crop:0.5, rand_augment:3:12,mixup:0.4")
    assert read == ImageAugmentation(crop=(0.5, 1), rand_augment=3, magnitude=12, mixup=0.4)
    assert read.text() == (
        "random crops of 50 to 100 % of the area, RandAugment of 3 operations at magnitude 12, MixUp with alpha 0.4"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("flop", r"there is no 'flop' \(did you mean 'flip'\?\); give crop, flip, rand_augment, mixup, cutmix"),
        ("flip:2", "flip=2.0: give how often, 0 to 1"),
        ("crop:0", "crop=.*: give least and largest share of the area"),
        ("rand_augment:2:31", "magnitude=31: give a whole number, 0 to 30"),
        ("rand_augment:1.5", "rand_augment=1.5: give a number of operations"),
        ("mixup:x", "'mixup:x': mixup takes a number after a colon, such as mixup:0.2"),
        ("mixup:1:2", "mixup takes a number after a colon"),
        ("cutmix:-1", "cutmix=-1.0: give alpha, 0 or more"),
    ],
)
def test_texts_that_mean_nothing(text, message):
    with pytest.raises(ConfigurationError, match=message):
        read_augmentation(text)


def test_boxes_lie_in_the_image_and_have_the_area_and_ratio_asked_for():
    asked, generator = ImageAugmentation(crop=(0.2, 0.6)), np.random.default_rng(0)
    areas, ratios = [], []
    for _ in range(300):
        left, top, right, bottom = asked.box(60, 40, generator)
        assert 0 <= left < right <= 60
        assert 0 <= top < bottom <= 40
        areas.append((right - left) * (bottom - top) / 2400)
        ratios.append((right - left) / (bottom - top))
    assert 0.18 < min(areas) < 0.25 < 0.55 < max(areas) < 0.63
    assert 0.7 < min(ratios) < 0.8 < 1.25 < max(ratios) < 1.4
    assert asked.box(1000, 10, generator) == (493, 0, 506, 10)  # no box fits: the centre, of the widest ratio


def test_each_sample_is_a_function_of_seed_epoch_and_index(folder):
    dataset = open_dataset(folder, classification(3, 8, 8)).augmented_by(read_augmentation("crop,flip,rand_augment"))
    whole = dataset.augmented(np.arange(9), 1, 2)["x"]
    np.testing.assert_array_equal(dataset.augmented(np.array([7, 2]), 1, 2)["x"], whole[[7, 2]])
    for other in (
        dataset.augmented(np.arange(9), 2, 2)["x"],
        dataset.augmented(np.arange(9), 1, 3)["x"],
        dataset.batch(np.arange(9))["x"],
    ):
        assert (other != whole).reshape(9, -1).any(axis=1).sum() >= 8
    parts = [
        np.concatenate([batch["x"] for batch in batches])
        for batches in zip(*(Loader(dataset, 4, seed=1, rank=rank, workers=2).epoch(2) for rank in (0, 1)), strict=True)
    ]
    np.testing.assert_array_equal(
        np.concatenate(parts), np.concatenate([batch["x"] for batch in Loader(dataset, 4, seed=1).epoch(2)])
    )


def test_a_flip_alone(folder):
    dataset = open_dataset(folder, classification(3, 8, 8)).augmented_by(ImageAugmentation(flip=1.0))
    np.testing.assert_array_equal(dataset.augmented(np.arange(9), 0, 0)["x"], dataset.batch(np.arange(9))["x"][..., ::-1])


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_every_operation_changes_an_image_and_keeps_its_form(mode):
    image = Image.fromarray(np.random.default_rng(0).integers(30, 200, (16, 16, 3), np.uint8)).convert(mode)
    changed = [operation(image, 0.5, 1.0) for operation in OPERATIONS]
    assert {(each.mode, each.size) for each in changed} == {(mode, (16, 16))}
    same = sum(np.array_equal(np.asarray(each), np.asarray(image)) for each in changed)
    assert same == (1 if mode == "RGB" else 2)  # identity; and gray has no colour to strengthen
    np.testing.assert_array_equal(np.asarray(OPERATIONS[11](image, 0.0, 1.0)), np.asarray(image))
    np.testing.assert_array_equal(np.asarray(OPERATIONS[11](image, 1.0, 1.0)), 255 - np.asarray(image))
    np.testing.assert_array_equal(np.asarray(OPERATIONS[10](image, 1.0, 1.0)), np.asarray(ImageOps.posterize(image, 4)))
    moved = np.asarray(OPERATIONS[3](image, 1.0, 1.0))
    np.testing.assert_array_equal(moved[:, 7:], np.asarray(image)[:, :9])
    assert np.array_equal(np.asarray(rand_augment(image, 0, 9, np.random.default_rng(0))), np.asarray(image))


def test_mixup_mixes_images_and_targets_alike():
    spec = probabilities(3, 4, 4)
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(4, 3, 4, 4)).astype(np.float32), "targets": np.eye(3, dtype=np.float32)[[0, 1, 2, 0]]}
    mixed = mixing(ImageAugmentation(mixup=0.8), spec)(batch, np.random.default_rng(5))
    share = np.random.default_rng(5).beta(0.8, 0.8)
    for name in ("x", "targets"):
        expected = share * batch[name] + (1 - share) * batch[name][[3, 0, 1, 2]]
        np.testing.assert_allclose(mixed[name], expected, rtol=1e-6, atol=1e-7)
        assert mixed[name].dtype == np.float32
    np.testing.assert_allclose(mixed["targets"].sum(axis=1), 1, rtol=1e-6)


@pytest.mark.parametrize("shape", [(3, 12, 10), (12, 10, 3), (12, 10)])
def test_cutmix_takes_a_box_and_the_share_of_its_area(shape):
    batch = {"x": np.stack([np.full(shape, value, np.float32) for value in range(3)]), "targets": np.eye(3, dtype=np.float32)}
    augment = mixing(ImageAugmentation(cutmix=1.0), probabilities(*shape))
    for seed in range(5):
        mixed = augment(batch, np.random.default_rng(seed))
        taken = (mixed["x"][1] == 0).mean()
        assert set(np.unique(mixed["x"][1])) <= {0.0, 1.0}
        np.testing.assert_allclose(mixed["targets"][1], [taken, 1 - taken, 0], atol=1e-6)
    rows, columns = cut(12, 10, 0.75, np.random.default_rng(0))
    assert (rows.stop - rows.start, columns.stop - columns.start) <= (6, 5)


def test_a_folder_gives_probabilities_to_a_loss_that_compares_with_them(folder):
    batch = open_dataset(folder, probabilities(3, 8, 8)).batch(np.array([0, 4, 8]))
    np.testing.assert_array_equal(batch["targets"], np.eye(3, dtype=np.float32))


def test_what_cannot_be_changed_is_named(folder):
    spec = classification(3, 8, 8)
    with pytest.raises(
        ConfigurationError, match=r"compares 'labels' with classes or values: take cross_entropy:probabilities=true"
    ):
        mixing(ImageAugmentation(mixup=1.0), spec)
    with pytest.raises(
        ConfigurationError, match="are changes to image files as they are read, and the data are of type ArrayDataset"
    ):
        RunData.augmented(ArrayDataset({"x": np.zeros((2, 3, 8, 8)), "labels": np.zeros(2)}), "flip", spec)
