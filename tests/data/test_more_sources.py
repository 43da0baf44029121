"""Archives of images, arrays in files, images of Hugging Face's data sets, and batches that come as they are."""

from __future__ import annotations

import io
import json
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import burnish
from burnish.data import Batches, Loader, as_dataset, open_dataset
from burnish.data.file_rows import FileRows
from burnish.data.tar_shards import shards_of
from burnish.data.unlabelled import open_samples
from burnish.errors import ConfigurationError, DataError
from burnish.models import residual_network
from burnish.training.callbacks import Callback
from specs.program_inputs import classification


def picture(shade: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((4, 4, 3), shade, np.uint8)).save(file, "PNG")
    return file.getvalue()


def shard(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def test_images_of_archives(tmp_path):
    shard(
        tmp_path / "a-00.tar", {"0.png": picture(10), "0.cls": b"2", "1.cls": b"0\n", "1.png": picture(20), "2.png": picture(30)}
    )
    shard(tmp_path / "a-01.tar", {"../x/3.png": picture(40), "../x/3.json": json.dumps({"label": 1}).encode()})
    dataset = open_dataset(tmp_path, classification(4, 4, 3), pixels="raw")
    batch = dataset.batch(np.arange(3))
    assert (batch["x"][:, 0, 0, 0].tolist(), batch["labels"].tolist()) == ([10, 20, 40], [2, 0, 1])
    assert dataset.classes == ("0", "1", "2")
    assert "1 of 4 images have no class and are left out" in dataset.note
    assert shards_of(tmp_path / "a-{00..01}.tar") == [tmp_path / "a-00.tar", tmp_path / "a-01.tar"]
    same = open_dataset(tmp_path / "a-{00..01}.tar", classification(4, 4, 3), pixels="raw")
    np.testing.assert_array_equal(same.batch(np.arange(3))["x"], batch["x"])
    assert not (tmp_path.parent / "x").exists()
    samples = open_samples(tmp_path / "a-00.tar", classification(4, 4, 3))
    assert samples.names == [f"{tmp_path / 'a-00.tar'}: {index}.png" for index in range(3)]
    first = [batch["labels"].tolist() for batch in Loader(dataset, 2, seed=3).epoch(0)]
    assert first == [batch["labels"].tolist() for batch in Loader(pickle.loads(pickle.dumps(dataset)), 2, seed=3).epoch(0)]


def test_names_of_classes_in_archives(tmp_path):
    path = shard(tmp_path / "a.tar", {"0.png": picture(1), "0.cls": b"owl", "1.png": picture(2), "1.cls": b"cat"})
    dataset = open_dataset(path, classification(3, 4, 4))
    assert (dataset.classes, dataset.batch(np.arange(2))["labels"].tolist()) == (("cat", "owl"), [1, 0])
    with pytest.raises(DataError, match="class 'owl' is not among the classes that are trained: cat, dog"):
        open_dataset(path, classification(3, 4, 4), classes=("cat", "dog"))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"0.png": picture(1)}, r"1 images and no class; beside <name>\.jpg"),
        ({"0.png": picture(1), "0.cls": b"x" * 70_000}, "70,000 bytes, and a class has 65,536 at most"),
        ({"0.png": picture(1), "0.json": b"{"}, "no class in UTF-8, or no JSON"),
        ({"0.png": picture(1), "0.json": b'{"label": [1]}'}, r"the class is \[1\], and an index below 1,000,000 or a name"),
        ({"0.png": picture(1), "0.json": b'{"label": 1e20}'}, r"the class is 1e\+20, and an index below"),
        ({"0.png": picture(1), "0.json": b'{"label": 99999999999999999999}'}, "the class is 99999999999999999999, and an index"),
        *(({"0.png": picture(1), "0.cls": text}, f"the class is '{text.decode()}'") for text in (b"-1", b"1.5", b"1e2", b"")),
        ({"0.png": picture(1), "0.cls": b"1", "1.png": picture(1), "1.cls": b"owl"}, "some classes are numbers and some names"),
        ({"0.png": picture(1), "0.cls": b"7"}, "8 classes .*, and the model has 3"),
    ],
)
def test_archives_that_do_not_fit(tmp_path, files, message):
    with pytest.raises(DataError, match=message):
        open_dataset(shard(tmp_path / "a.tar", files), classification(3, 4, 4))


def test_damaged_archives(tmp_path):
    path = shard(tmp_path / "a.tar", {"0.cls": b"1", "0.png": b"x" * 20_000})
    path.write_bytes(path.read_bytes()[:4000])
    with pytest.raises(DataError, match=r"'0\.png' is said to have 20,000 bytes, and \d,\d{3} follow"):
        open_dataset(path, classification(3, 4, 4))
    with tarfile.open(path, "w:gz"):
        pass
    with pytest.raises(DataError, match=r"no tar archive that can be read in its place .*gunzip"):
        open_dataset(path, classification(3, 4, 4))
    with pytest.raises(DataError, match=r"2 of 2 archives are not there: .*b-0\.tar, .*b-1\.tar"):
        open_dataset(tmp_path / "b-{0..1}.tar", classification(3, 4, 4))
    with pytest.raises(DataError, match=r"the sequence ends before it begins: write \{0\.\.1\}"):
        open_dataset(tmp_path / "b-{1..0}.tar", classification(3, 4, 4))
    os.mkfifo(tmp_path / "a-1.tar")
    with pytest.raises(DataError, match=r"a-1\.tar: .*it is a pipe or a device"):
        open_dataset(tmp_path, classification(3, 4, 4))


def _bit_of_a_header(content: bytes) -> bytes:
    return content[:1024] + bytes([content[1024] ^ 1]) + content[1025:]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[:2048], "it is damaged or breaks off, at byte 2,048 of 2,048"),
        (lambda content: content[:2300], "it is damaged or breaks off, at byte 2,048 of 2,300"),
        (_bit_of_a_header, "it is damaged or breaks off, at byte 1,024 of 10,240"),
        (lambda content: content * 2, "more follows behind the mark of its end, as where archives are joined, at byte"),
    ],
    ids=["cut", "cut in a header", "a bit of a header", "joined"],
)
def test_no_sample_behind_damage_is_lost_without_a_word(tmp_path, change, message):
    path = shard(tmp_path / "a.tar", {"0.png": picture(1), "0.cls": b"1", "1.png": picture(2), "1.cls": b"0"})
    assert len(open_dataset(path, classification(3, 4, 4))) == 2
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=rf"a\.tar: {message}"):
        open_dataset(path, classification(3, 4, 4))


def test_arrays_in_files_are_read_by_rows(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 4, 4, 3), np.uint8)
    np.save(tmp_path / "x.npy", pixels)
    np.save(tmp_path / "y.npy", np.array(["b", "a", "c", "a", "b"]))
    dataset = open_dataset(tmp_path, classification(3, 4, 4), pixels="raw")
    assert isinstance(dataset._arrays["x"], FileRows)
    batch = pickle.loads(pickle.dumps(dataset)).batch(np.array([4, 1]))
    np.testing.assert_array_equal(batch["x"], pixels[[4, 1]].transpose(0, 3, 1, 2))
    assert (batch["labels"].tolist(), dataset.classes) == ([1, 0], ("a", "b", "c"))
    assert len(pickle.dumps(dataset)) < 5000
    samples = open_samples(tmp_path, classification(3, 4, 4), pixels="raw")
    np.testing.assert_array_equal(samples.dataset.batch(np.array([4, 1]))["x"], batch["x"])


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (np.zeros((3, 2), np.float32), None, r"no array labels\.npy or y\.npy; the folder has x\.npy"),
        (np.zeros((3, 2), np.float32), np.zeros(2, int), "its arrays hold 'x' 3, 'labels' 2 samples"),
        (np.array([[0, 0], [0, np.nan]], np.float32), np.zeros(2, int), r"x\.npy: sample 1 holds a NaN or infinite value"),
        (np.array([[{}, {}]]), np.zeros(1, int), r"x\.npy: damaged, no \.npy file, or one of Python objects"),
        (np.zeros((3, 5), np.float32), np.zeros(3, int), r"'x' wants samples of shape \[2\]"),
        (
            np.zeros((3, 2), np.float32),
            np.eye(3),
            r"one class index for each sample.* shape \[3\]: where they are one-hot, write",
        ),
    ],
)
def test_arrays_in_files_that_do_not_fit(tmp_path, x, y, message):
    np.save(tmp_path / "x.npy", x)
    if y is not None:
        np.save(tmp_path / "y.npy", y)
    with pytest.raises(DataError, match=message):
        open_dataset(tmp_path, classification(2)).batch(np.arange(min(len(x), 2)))


class ImageFeature:
    """Stands for ``datasets.Image``."""

    def __init__(self, decode: bool = True):
        self.decode = decode


ImageFeature.__name__ = "Image"


class Names:
    names = ("cat", "owl")


class Rows:
    """Stands for a ``datasets.Dataset`` with a column of images, which decodes them where it is asked to."""

    column_names = ["picture", "label"]  # noqa: RUF012  # as the library has it

    def __init__(self, feature: object):
        self.features = {"picture": feature, "label": Names()}

    def __len__(self) -> int:
        return 3

    def __getitem__(self, key):
        if key == "label":
            return [1, 0, 1]
        content = picture(10 * (key + 1))
        decode = getattr(self.features["picture"], "decode", True)
        return {
            "picture": Image.open(io.BytesIO(content)) if decode else {"bytes": content, "path": None},
            "label": [1, 0, 1][key],
        }

    def cast_column(self, name, feature):
        return Rows(feature)


@pytest.mark.parametrize("feature", [ImageFeature(), None])
def test_images_of_a_data_set_of_hugging_face(feature):
    dataset = as_dataset(Rows(feature), classification(4, 4, 3), pixels="raw")
    batch = dataset.batch(np.array([2, 0, 1]))
    assert (batch["x"][:, 0, 0, 0].tolist(), batch["labels"].tolist()) == ([30, 10, 20], [1, 1, 0])
    assert dataset.classes == ("cat", "owl")


@pytest.fixture(scope="module")
def program():
    return burnish.compile(residual_network((1, 4, 4), classes=3, width=2, blocks=(1,)))


class Losses(Callback):
    """Keeps what each step was given and gave."""

    def __init__(self) -> None:
        self.losses, self.sizes = [], []

    def on_step_end(self, run, report):
        self.losses.append(report.figures["loss"])
        self.sizes.append(len(report.batch["labels"]))


def trained(program, source, folder, **options):
    kept = Losses()
    trainer = burnish.Trainer(
        program, source, run_directory=folder, progress=False, engine="onnxruntime", callbacks=[kept], overwrite=True, **options
    )
    return trainer.run(), kept


@pytest.mark.slow
def test_batches_train_as_they_come(program, tmp_path):
    """The same batches from a DataLoader, a function and a generator, in tensors, tuples and mappings: the same losses."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(10, 1, 4, 4)).astype(np.float32), rng.integers(0, 3, 10)
    torch = pytest.importorskip("torch")
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y)), batch_size=4)

    def batches():
        for start in range(0, 10, 4):
            yield {"x": x[start : start + 4].astype(np.float64), "labels": y[start : start + 4]}

    def endless():
        while True:
            yield from batches()

    result, kept = trained(program, loader, tmp_path / "run", epochs=2, eval_data=loader)
    assert (kept.sizes, result.steps) == ([4, 4, 2] * 2, 6)
    assert result.history[-1]["samples"] == 20
    for source in (Batches(batches, steps=3), Batches(endless(), steps=3)):
        _, again = trained(program, source, tmp_path / "run", epochs=2)
        assert again.losses == kept.losses
    resumed = burnish.Trainer(
        program, loader, loader, epochs=2, run_directory=tmp_path / "run", progress=False, engine="onnxruntime", overwrite=True
    )
    assert resumed.run().metrics == result.metrics


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (
            iter([1]),
            ConfigurationError,
            r"does not say how many batches an epoch has: give burnish\.data\.Batches\(source, steps=100\)",
        ),
        (Batches(lambda: iter([]), 2), DataError, "the batches ended after 0 of 2; give as many, or fewer steps"),
        (
            Batches([{"x": np.zeros((2, 1, 4, 4))}]),
            DataError,
            r"batch 0 of epoch 1: nothing for 'labels' \('x'\); give a mapping",
        ),
        (Batches([np.zeros((2, 1, 4, 4))]), DataError, r"nothing for 'x' \(a ndarray\)"),
        (
            Batches([(np.zeros((2, 1, 5, 4)), np.zeros(2, int))]),
            DataError,
            r"batch 0 of epoch 1: 'x' wants samples of shape \[1, 4, 4\]",
        ),
        (Batches([(np.zeros((2, 1, 4, 4)), np.array([0, 3]))]), DataError, "sample 1 has the label 3"),
        (
            Batches([(np.zeros((2, 1, 4, 4)), np.array(["owl", "cat"]))]),
            DataError,
            "'labels' holds names of classes, and which number each has is not known from one batch: give class indices",
        ),
    ],
)
def test_batches_that_do_not_fit(program, tmp_path, source, error, message):
    with pytest.raises(error, match=message):
        trained(program, source, tmp_path / "run")


def test_batches_are_not_changed(program, tmp_path):
    with pytest.raises(ConfigurationError, match="augment: batches are taken as they come: change them where they are made"):
        trained(program, Batches(lambda: iter([]), 1), tmp_path / "run", augment="flip")
    with pytest.raises(ConfigurationError, match="steps=0: an epoch has 1 batch or more"):
        Batches([])
