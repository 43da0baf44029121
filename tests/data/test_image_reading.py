"""Pictures as cameras, scanners and the web have them: turned, in other colours, huge, damaged, empty."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from burnish.data import open_dataset
from burnish.data.image import decoding
from burnish.data.image.decoding import ORIENTATION, UnreadableImage, decode
from burnish.data.preprocessing import read_pixels
from burnish.data.unlabelled import open_samples
from burnish.errors import DataError
from specs.program_inputs import classification, data_entry

RAW = read_pixels("raw").for_images(data_entry(8, 8, 3), "test")


def write(path: Path, pixels: np.ndarray | None = None, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(len(str(path)))
    Image.fromarray(rng.integers(0, 256, (12, 10, 3), np.uint8) if pixels is None else pixels).save(path, **options)
    return path


def decoded(path: Path, preprocessing=RAW) -> np.ndarray:
    return np.asarray(decode(path, preprocessing))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_stands_as_the_camera_was_held(tmp_path, orientation):
    """Each orientation, undone by Pillow's own ``exif_transpose``, which the decoder does not call."""
    from PIL import ImageOps

    pixels = np.random.default_rng(orientation).integers(0, 256, (16, 8, 3), np.uint8)
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    path = write(tmp_path / "a.png", pixels, exif=exif)
    upright = ImageOps.exif_transpose(Image.open(path))
    np.testing.assert_array_equal(decoded(path), np.asarray(upright.resize((8, 8), Image.Resampling.BILINEAR)))
    cropping = read_pixels({"preset": "raw", "resize": "crop", "shorter_side": 8}).for_images(data_entry(8, 8, 3), "test")
    width, height = upright.size
    sides = (8, 16) if width < height else (16, 8)
    left, top = (0, 4) if width < height else (4, 0)
    expected = upright.resize(sides, Image.Resampling.BILINEAR).crop((left, top, left + 8, top + 8))
    np.testing.assert_array_equal(decoded(path, cropping), np.asarray(expected))


@pytest.mark.parametrize(
    ("mode", "suffix"), [("L", "png"), ("1", "png"), ("P", "gif"), ("RGBA", "png"), ("LA", "png"), ("CMYK", "jpg")]
)
def test_other_colours_become_rgb_as_pillow_converts_them(tmp_path, mode, suffix):
    path = tmp_path / f"a.{suffix}"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)).convert(mode).save(path)
    np.testing.assert_array_equal(decoded(path), np.asarray(Image.open(path).convert("RGB")))


@pytest.mark.slow
def test_a_large_jpeg_is_decoded_at_a_fraction_of_its_size(tmp_path, monkeypatch):
    """A smooth picture: a quarter of the size, resized by the rest, is within 3 of 255 of all of it resized at once."""
    rows, columns = np.mgrid[0:1200, 0:1600]
    waves = np.stack([np.sin(rows / 90), np.cos(columns / 110), np.sin((rows + columns) / 130)], axis=-1)
    path = write(tmp_path / "a.jpg", np.uint8(127 + 100 * waves), quality=95)
    wanted = read_pixels("raw").for_images(data_entry(96, 128, 3), "test")
    sizes = []
    resize = Image.Image.resize
    monkeypatch.setattr(Image.Image, "resize", lambda image, *how: (sizes.append(image.size), resize(image, *how))[1])
    drafted = decoded(path, wanted).astype(int)
    monkeypatch.setattr(decoding, "DRAFT_FROM", 1 << 40)
    whole = decoded(path, wanted).astype(int)
    assert sizes == [(400, 300), (1600, 1200)]
    assert np.abs(drafted - whole).max() <= 3


def write_header(path: Path, width: int, height: int) -> Path:
    """A PNG file that says how large it is, and holds no pixels."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    content = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + content + struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT")))
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "height", "reason"),
    [
        (11_000, 10_000, "11000 x 10000 pixels, and 100 million are read at most"),
        (100_000, 100_000, "10000000000 pixels"),
        (
            1,
            80_000_000,
            r"it takes 7,360,\d{3},\d{3} bytes of memory, and a file of 45 bytes may take 1,073,741,824; if you trust",
        ),
        (80_000_000, 1, r"it takes 4,160,\d{3},\d{3} bytes of memory, and a file of 45 bytes may take 1,073,741,824"),
    ],
)
def test_a_picture_that_would_take_all_memory_is_refused_by_its_header(tmp_path, width, height, reason):
    path = write_header(tmp_path / "a.png", width, height)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        with pytest.raises(UnreadableImage, match=rf"a\.png: damaged, or no image \(.*{reason}"):
            decode(path, RAW)


def test_no_program_runs_for_a_picture(tmp_path):
    """Pillow would give PostScript to Ghostscript, whatever the suffix of the file."""
    path = tmp_path / "a.png"
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n")
    assert Image.open(path).format == "EPS"
    with pytest.raises(UnreadableImage, match=r"a\.png: damaged, or no image \(no format that is read\)"):
        decode(path, RAW)


@pytest.mark.slow
def test_warnings_of_pillow_are_not_printed(tmp_path):
    write_header(tmp_path / "a.png", 11_000, 10_000)
    code = "import pathlib, sys; from burnish.data.image import decoding; decoding.upright_size(pathlib.Path(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "a.png"], capture_output=True, text=True)
    assert "11000 x 10000 pixels" in done.stderr
    assert "Warning" not in done.stderr


def test_damaged_images_are_counted_and_others_take_their_places(tmp_path):
    for name in "abc":
        for number in range(4):
            write(tmp_path / name / f"{number}.png")
    whole = (tmp_path / "a" / "1.png").read_bytes()
    (tmp_path / "a" / "1.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "a" / "2.png").write_bytes(b"no image")
    (tmp_path / "b" / "0.png").write_bytes(b"")
    dataset = open_dataset(tmp_path, classification(3, 8, 8))
    assert dataset.note == f"{tmp_path}: 1 of 12 images are empty files and left out: {tmp_path / 'b' / '0.png'}"
    assert (len(dataset), dataset.remark) == (11, None)
    batch = dataset.batch(np.arange(11))
    assert batch["labels"].tolist() == [0] * 4 + [1] * 3 + [2] * 4
    np.testing.assert_array_equal(batch["x"][1], batch["x"][3])
    np.testing.assert_array_equal(batch["x"][2], batch["x"][3])
    assert re.search(
        r"2 of 11 images cannot be read, and others of their classes take their places: .*a/1\.png \(.*truncated.*\), .*a/2\.png "
        r"\(no format that is read\)",
        str(dataset.remark),
    )


def test_images_to_predict_that_are_damaged_are_left_out(tmp_path):
    for number in range(3):
        write(tmp_path / f"{number}.png")
    (tmp_path / "1.png").write_bytes(b"")
    samples = open_samples(tmp_path, classification(3, 8, 8))
    assert samples.names == [str(tmp_path / "0.png"), str(tmp_path / "2.png")]
    assert (
        samples.note
        == f"{tmp_path}: 1 of 3 images cannot be read and are left out: {tmp_path / '1.png'} (no format that is read)"
    )
    (tmp_path / "0.png").write_bytes(b"x")
    (tmp_path / "2.png").write_bytes(b"x")
    with pytest.raises(DataError, match=r"0\.png: damaged, or no image \(no format that is read\); repair or remove it"):
        open_samples(tmp_path, classification(3, 8, 8))


def test_classes_that_a_person_wants_to_look_at(tmp_path):
    write(tmp_path / "cat" / "0.png")
    write(tmp_path / "Cat" / "0.png")
    write(tmp_path / "Cat" / "1.png")
    (tmp_path / "dog").mkdir()
    note = open_dataset(tmp_path, classification(3, 8, 8)).note
    assert note == (
        f"{tmp_path}: the classes 'Cat' and 'cat' differ in case alone, and are two; no image of the class dog; one image of the "
        "class cat"
    )


@pytest.mark.parametrize(("first", "second"), [("cat", "cat "), ("caf\u00e9", "cafe\u0301")])
def test_classes_of_one_name(tmp_path, first, second):
    write(tmp_path / first / "0.png")
    write(tmp_path / second / "0.png")
    with pytest.raises(DataError, match="are one, but for spaces or how accents are encoded; put their images into one folder"):
        open_dataset(tmp_path, classification(3, 8, 8))


def test_a_folder_of_empty_files(tmp_path):
    write(tmp_path / "a" / "0.png").write_bytes(b"")
    with pytest.raises(DataError, match="all of its 1 images are empty files of 0 bytes"):
        open_dataset(tmp_path, classification(3, 8, 8))
