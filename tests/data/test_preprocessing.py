"""What is done to pixels: against torchvision's formulas, written out with Pillow and NumPy; and what is refused."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from PIL import Image

from burnish.data import Preprocessing, open_dataset
from burnish.data.preprocessing import PRESETS, read_pixels
from burnish.errors import ConfigurationError, DataError
from specs.program_inputs import classification, data_entry

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture
def folder(tmp_path):
    """Upright, wide and square images, small and large, of noise."""
    generator = np.random.default_rng(0)
    for name, (height, width) in {"a": (37, 61), "b": (300, 211), "c": (20, 20), "d": (259, 258)}.items():
        (tmp_path / name).mkdir()
        pixels = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / name / "image.png")
    return tmp_path


def images(folder):
    return [Image.open(folder / name / "image.png").convert("RGB") for name in "abcd"]


def read(folder, shape, **settings):
    dataset = open_dataset(folder, classification(*shape, classes=4), **settings)
    return dataset.batch(np.arange(4))["x"]


def resized_as_torchvision(image: Image.Image, size: int, crop: int, how: Image.Resampling) -> Image.Image:
    """``Resize(size)`` and ``CenterCrop(crop)`` of torchvision, whose sides are cut off and corners rounded as Python rounds."""
    width, height = image.size
    if width < height:
        image = image.resize((size, int(size * height / width)), how)
    else:
        image = image.resize((int(size * width / height), size), how)
    width, height = image.size
    top, left = round((height - crop) / 2.0), round((width - crop) / 2.0)
    return image.crop((left, top, left + crop, top + crop))


@pytest.mark.parametrize(("crop", "size"), [(224, 256), (32, 37), (21, 24)])
def test_imagenet_is_what_torchvision_does(folder, crop, size):
    """``ToTensor`` and ``Normalize`` divide, subtract and divide in float32; a pixel rounded once is within two of its steps."""
    expected = []
    for image in images(folder):
        pixels = np.asarray(resized_as_torchvision(image, size, crop, Image.Resampling.BILINEAR), np.float32).transpose(2, 0, 1)
        expected.append((pixels / np.float32(255) - np.float32(MEAN)[:, None, None]) / np.float32(STD)[:, None, None])
    found = read(folder, (3, crop, crop), pixels="imagenet")
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, np.stack(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"])
def test_images_are_stretched_by_the_interpolation_asked_for(folder, interpolation):
    how = Image.Resampling[interpolation.upper()]
    expected = [np.asarray(image.resize((9, 7), how)) for image in images(folder)]
    found = read(folder, (7, 9, 3), pixels={"preset": "raw", "interpolation": interpolation})
    np.testing.assert_array_equal(found, np.stack(expected))


@pytest.mark.parametrize(
    ("shape", "pixels", "expected"),
    [
        ((3, 8, 8), "unit", lambda rgb: rgb / 255),
        ((3, 8, 8), "raw", lambda rgb: rgb),
        ((3, 8, 8), "-1..1", lambda rgb: rgb / 127.5 - 1),
        (
            (3, 8, 8),
            {"preset": "caffe", "resize": "stretch"},
            lambda rgb: rgb[::-1] - np.reshape([103.939, 116.779, 123.68], (3, 1, 1)),
        ),
        ((3, 8, 8), {"scale": 2, "mean": (1, 2, 3), "std": 4}, lambda rgb: (rgb * 2 - np.reshape([1, 2, 3], (3, 1, 1))) / 4),
        ((8, 8, 3), {"mean": MEAN, "std": STD}, lambda rgb: ((rgb.transpose(1, 2, 0) / 255) - MEAN) / STD),
        ((8, 8, 3), {"preset": "raw", "channels": "bgr"}, lambda rgb: rgb[::-1].transpose(1, 2, 0)),
    ],
)
def test_the_formula_in_float64(folder, shape, pixels, expected):
    small = [
        np.asarray(image.resize((8, 8), Image.Resampling.BILINEAR), np.float64).transpose(2, 0, 1) for image in images(folder)
    ]
    found = read(folder, shape, pixels=pixels)
    np.testing.assert_array_equal(found, np.stack([np.asarray(expected(rgb), np.float32) for rgb in small]))


def test_gray_is_the_luma_of_pillow(folder):
    expected = [
        np.asarray(image.resize((8, 8), Image.Resampling.BILINEAR)) for image in (one.convert("L") for one in images(folder))
    ]
    found = read(folder, (1, 8, 8), pixels={"mean": 0.5, "std": 0.25})
    np.testing.assert_array_equal(found[:, 0], ((np.stack(expected) / 255 - 0.5) / 0.25).astype(np.float32))


def test_channels_and_size_that_the_input_leaves_open(folder):
    opened = classification(None, None, None, classes=4)
    with pytest.raises(DataError, match=r"shape \[batch, \?, \?, \?\], which is not that of images: .*--layout NCHW or NHWC"):
        open_dataset(folder, opened, image_size=(8, 8))
    dataset = open_dataset(folder, opened, image_size=(8, 6), pixels={"layout": "NHWC"})
    assert dataset.batch(np.arange(2))["x"].shape == (2, 8, 6, 3)
    dataset = open_dataset(folder, opened, image_size=(8, 6), pixels={"layout": "NCHW", "channels": "gray"})
    assert dataset.batch(np.arange(2))["x"].shape == (2, 1, 8, 6)
    described = dataset.preprocessing
    assert (described.size, described.channels, described.layout) == ((8, 6), "gray", "NCHW")


def test_an_input_of_bytes_takes_the_pixels(folder):
    wanted = classification(8, 8, 3, classes=4)
    wanted = type(wanted)((data_entry(8, 8, 3, dtype=ir.DataType.UINT8),), wanted.label)
    dataset = open_dataset(folder, wanted)
    found = dataset.batch(np.arange(4))["x"]
    assert (found.dtype, dataset.preprocessing.scale) == (np.uint8, 1.0)
    np.testing.assert_array_equal(found[0], np.asarray(images(folder)[0].resize((8, 8), Image.Resampling.BILINEAR)))
    with pytest.raises(DataError, match=r"takes whole numbers \(uint8\), and .*pixel / 255.* gives others: .*pixels='raw'"):
        open_dataset(folder, wanted, pixels="unit")


@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE])
def test_values_are_rounded_once_to_the_dtype_of_the_input(folder, dtype):
    wanted = classification(3, 8, 8, classes=4)
    wanted = type(wanted)((data_entry(3, 8, 8, dtype=dtype),), wanted.label)
    found = open_dataset(folder, wanted, pixels={"mean": MEAN, "std": STD}).batch(np.arange(4))["x"]
    small = [np.asarray(image.resize((8, 8), Image.Resampling.BILINEAR), np.float64) for image in images(folder)]
    exact = ((np.stack(small) * (1 / 255) - MEAN) / STD).transpose(0, 3, 1, 2)
    assert found.dtype == dtype.numpy()
    np.testing.assert_array_equal(found.astype(np.float64), exact.astype(dtype.numpy()).astype(np.float64))


@pytest.mark.parametrize("channels_first", [True, False])
def test_arrays_of_bytes_are_pixels_too(tmp_path, channels_first):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 4, 6, 3), dtype=np.uint8)
    np.savez(tmp_path / "data.npz", x=pixels.transpose(0, 3, 1, 2) if channels_first else pixels, y=np.arange(5) % 4)
    dataset = open_dataset(tmp_path / "data.npz", classification(3, 4, 6, classes=4), pixels="imagenet")
    expected = ((pixels / 255 - MEAN) / STD).transpose(0, 3, 1, 2)
    np.testing.assert_allclose(dataset.batch(np.arange(5))["x"], expected, rtol=0, atol=1e-6)
    assert dataset.preprocessing == PRESETS["imagenet"]
    turned = f"{tmp_path / 'data.npz'}: 'x' is turned to the model's NCHW, and lies as NHWC"
    assert dataset.note == (None if channels_first else turned)


def test_every_byte_becomes_the_same_255th_as_by_division_in_float32(tmp_path):
    pixels = np.arange(256, dtype=np.uint8)[None]
    np.savez(tmp_path / "data.npz", x=pixels, y=np.zeros(1))
    found = open_dataset(tmp_path / "data.npz", classification(256)).batch(np.arange(1))["x"]
    np.testing.assert_array_equal(found, pixels.astype(np.float32) / np.float32(255))


@pytest.mark.parametrize(
    ("arrays", "pixels", "message"),
    [
        ({"x": np.zeros((2, 3), np.float32)}, "unit", r"its numbers are taken as they are \('x' float32\); pixels says what is"),
        (
            {"x": np.zeros((2, 3), np.uint8)},
            "imagenet",
            r"mean has 3 numbers, and input 'x' of shape \[batch, 3\] takes 1 channel",
        ),
    ],
)
def test_arrays_that_are_no_pixels(tmp_path, arrays, pixels, message):
    np.savez(tmp_path / "data.npz", **arrays, y=np.zeros(2))
    with pytest.raises(DataError, match=message):
        open_dataset(tmp_path / "data.npz", classification(3), pixels=pixels)


def test_data_that_hold_no_pixels(tmp_path):
    (tmp_path / "data.csv").write_text("a,b,y\n1,2,0\n")
    with pytest.raises(DataError, match=r"data\.csv: a table holds numbers, which are taken as they are; pixels says"):
        open_dataset(tmp_path / "data.csv", classification(2), pixels="unit")
    with pytest.raises(DataError, match="digits: digits are divided by 16 already; pixels says"):
        open_dataset("digits", classification(1, 8, 8, classes=10), pixels="unit")


@pytest.mark.parametrize(
    ("shape", "pixels", "size", "message"),
    [
        ((1, 8, 8), "imagenet", None, r"mean has 3 numbers, and input 'x' of shape \[batch, 1, 8, 8\] takes 1 channel: give one"),
        ((1, 8, 8), {"channels": "rgb"}, None, "takes 1 channel, and the pixels are to be rgb: leave channels out"),
        ((3, 8, 8), {"channels": "gray"}, None, "takes 3 channels, and the pixels are to be gray: leave channels out"),
        ((3, 8, 8), {"layout": "NHWC"}, None, r"shape \[batch, 3, 8, 8\], which is NCHW and not NHWC: leave the layout out"),
        ((3, 8, 8), {"size": (4, 4)}, None, "takes images of 8 x 8, and --image-size says 4 x 4: leave it out"),
        ((3, 8, "width"), None, (4, 4), "takes images of 8 x any, and --image-size says 4 x 4"),
        ((3, "height", "width"), "imagenet", None, r"leaves the size of an image open; .*--image-size"),
    ],
)
def test_descriptions_that_do_not_fit_the_input(folder, shape, pixels, size, message):
    with pytest.raises(DataError, match=message):
        open_dataset(folder, classification(*shape, classes=4), pixels=pixels, image_size=size)


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        ("imagent", r"there is no 'imagent' \(did you mean 'imagenet'\?\); give unit, raw, -1\.\.1, imagenet, caffe"),
        (3, "pixels=3: give unit, raw"),
        ({"sigma": 1}, "pixels has no option 'sigma'"),
        ({"scale": 0}, "scale=0: give a number above 0, such as 1/255"),
        ({"mean": (1, 2)}, r"mean=\(1, 2\): give finite numbers, one or three"),
        ({"mean": "1"}, "mean='1': give finite numbers"),
        ({"std": 0}, "std=0: give numbers above 0, one or three"),
        ({"std": (1, float("nan"), 1)}, "std=.*: give numbers above 0"),
        ({"interpolation": "cubic"}, r"interpolation='cubic' \(did you mean 'bicubic'\?\): choose among nearest, bilinear"),
        ({"resize": "cut"}, "resize='cut'.*: choose among stretch, crop"),
        ({"channels": "cmyk"}, "channels='cmyk': choose among rgb, bgr, gray"),
        ({"layout": "CHW"}, r"layout='CHW' .*: choose among NCHW, NHWC, NHW"),
        ({"size": 224}, "size=224: give height and width in pixels"),
        ({"size": (0, 4)}, r"size=\(0, 4\): give height and width"),
        ({"shorter_side": 8}, "shorter_side is for resize='crop'"),
        ({"resize": "crop", "shorter_side": 0}, "shorter_side=0: give a number of pixels"),
        ({"resize": "crop", "shorter_side": 7, "size": (6, 8)}, "6 x 8 cannot be cut out of an image whose shorter side is 7"),
    ],
)
def test_descriptions_that_mean_nothing(pixels, message):
    with pytest.raises(ConfigurationError, match=message):
        read_pixels(pixels)


@pytest.mark.parametrize("mode", ["I;16", "F"])
def test_images_of_more_than_8_bits_are_named(tmp_path, mode):
    """Pillow cuts them off at 255."""
    (tmp_path / "a").mkdir()
    file = tmp_path / "a" / ("image.png" if mode == "I;16" else "image.tif")
    Image.fromarray(np.full((8, 8), 1000, np.uint16 if mode == "I;16" else np.float32)).save(file)
    dataset = open_dataset(tmp_path, classification(1, 8, 8))
    with pytest.raises(DataError, match=rf"image\.\w+: its pixels have more than 8 bits \(mode {mode}\); convert it to 8 bits"):
        dataset.batch(np.arange(1))


def test_the_text_says_all_of_it():
    described = read_pixels({"preset": "imagenet", "interpolation": "bicubic"}).for_images(data_entry(3, 224, 224), "folder")
    assert described.text() == (
        "shorter side resized to 256 (bicubic), 224 x 224 cut out of the centre, RGB, NCHW, values "
        "(pixel / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]"
    )
    assert (
        read_pixels("unit").for_images(data_entry(8, 8), "folder").text()
        == "resized to 8 x 8 (bilinear), gray, NHW, values pixel / 255"
    )
    assert Preprocessing(scale=0.3, std=2.0).formula() == "(pixel * 0.3) / 2"
    assert (read_pixels("raw").formula(), read_pixels("caffe").formula()) == ("pixel", "pixel - [103.939, 116.779, 123.68]")


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_written_is_read(name):
    described = PRESETS[name]
    assert read_pixels(described.options()) == described


def test_what_is_asked_for_changes_what_is_known():
    known = read_pixels({"preset": "imagenet", "interpolation": "lanczos"})
    assert read_pixels({"mean": 0.5}, known).interpolation == "lanczos"
    assert read_pixels({"preset": "unit"}, known) == PRESETS["unit"]
