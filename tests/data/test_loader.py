"""Data sets of arrays, the order of a loader, augmentation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.data import ArrayDataset, Dataset, Loader, shift_images
from burnish.errors import ConfigurationError, DataError


def numbered(samples: int) -> ArrayDataset:
    return ArrayDataset({"x": np.arange(samples, dtype=np.float32)[:, None], "labels": np.arange(samples)})


def labels(loader: Loader, epoch: int, start: int = 0) -> list[list[int]]:
    return [batch["labels"].tolist() for batch in loader.epoch(epoch, start)]


def test_arrays_are_a_data_set():
    dataset = numbered(5)
    assert isinstance(dataset, Dataset)
    assert len(dataset) == 5
    batch = dataset.batch(np.array([3, 0]))
    assert batch["labels"].tolist() == [3, 0]
    assert batch["x"].tolist() == [[3.0], [0.0]]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "the data set has no array"),
        ({"x": np.zeros(2), "y": np.zeros(3)}, "differ in their number of samples: 'x' 2, 'y' 3"),
        ({"x": np.zeros((0, 4))}, "the data set is empty"),
        ({"x": np.float32(1)}, "'x' is a single number"),
        ({"x": np.array([{}])}, "'x' holds Python objects"),
    ],
)
def test_arrays_that_are_no_data_set(arrays, message):
    with pytest.raises(DataError, match=message):
        ArrayDataset(arrays)


@pytest.mark.slow
@given(
    samples=st.integers(1, 40),
    batch_size=st.integers(1, 50),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 5),
    shuffle=st.booleans(),
    data=st.data(),
)
def test_every_sample_once_an_epoch_and_any_start_continues_it(samples, batch_size, seed, epoch, shuffle, data):
    loader = Loader(numbered(samples), batch_size, seed, shuffle)
    batches = labels(loader, epoch)
    assert len(batches) == len(loader)
    assert sorted(itertools.chain(*batches)) == list(range(samples))
    assert all(len(batch) == batch_size for batch in batches[:-1])
    start = data.draw(st.integers(0, len(loader)))
    assert labels(Loader(numbered(samples), batch_size, seed, shuffle), epoch, start) == batches[start:]


def test_the_order_changes_with_the_epoch_and_the_seed():
    loader = Loader(numbered(50), 50, seed=1)
    assert labels(loader, 0) != labels(loader, 1)
    assert labels(loader, 0) != labels(Loader(numbered(50), 50, seed=2), 0)
    assert labels(Loader(numbered(4), 4, shuffle=False), 3) == [[0, 1, 2, 3]]


def test_a_short_last_batch_is_kept_or_dropped():
    assert [len(batch) for batch in labels(Loader(numbered(7), 3), 0)] == [3, 3, 1]
    assert [len(batch) for batch in labels(Loader(numbered(7), 3, drop_last=True), 0)] == [3, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size=0: a batch holds 1 sample or more"),
        ({"batch_size": 2, "seed": -1}, "seed=-1: give a seed of 0 or more"),
        ({"batch_size": 9, "drop_last": True}, "batch_size=9 leaves no batch: the data set has 7 samples"),
    ],
)
def test_a_loader_that_cannot_be(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        Loader(numbered(7), **arguments)


def test_augmentation_depends_on_seed_epoch_and_batch_alone():
    def drawn(start: int) -> list[float]:
        loader = Loader(numbered(6), 2, 5, augment=lambda batch, generator: {"drawn": generator.random(1)})
        return [batch["drawn"][0] for batch in loader.epoch(2, start)]

    whole = drawn(0)
    assert len(set(whole)) == 3
    assert drawn(1) == whole[1:]


def test_shifted_images_are_moved_by_at_most_so_many_pixels():
    images = np.random.default_rng(0).random((200, 2, 5, 6)).astype(np.float32) + 1
    batch = {"x": images, "labels": np.arange(200)}
    moved = shift_images("x", 1)(batch, np.random.default_rng(1))
    assert moved["labels"] is batch["labels"]
    assert moved["x"].shape == images.shape
    seen = set()
    for before, after in zip(images, moved["x"], strict=True):
        possible = {}
        for down in (-1, 0, 1):
            for right in (-1, 0, 1):
                expected = np.zeros_like(before)
                rows, columns = slice(max(down, 0), 5 + min(down, 0)), slice(max(right, 0), 6 + min(right, 0))
                from_rows, from_columns = slice(max(-down, 0), 5 - max(down, 0)), slice(max(-right, 0), 6 - max(right, 0))
                expected[:, rows, columns] = before[:, from_rows, from_columns]
                possible[(down, right)] = expected
        matches = [shift for shift, expected in possible.items() if np.array_equal(expected, after)]
        assert len(matches) == 1
        seen.update(matches)
    assert len(seen) == 9


@pytest.mark.slow
@given(
    samples=st.integers(1, 40),
    batch_size=st.integers(1, 50),
    seed=st.integers(0, 2**40),
    workers=st.integers(1, 7),
    changed=st.booleans(),
    data=st.data(),
)
def test_the_parts_of_all_workers_are_the_batch_of_one(samples, batch_size, seed, workers, changed, data):
    def add_noise(batch, generator):
        return {**batch, "x": batch["x"] + generator.normal(size=batch["x"].shape)}

    options = {"seed": seed, "augment": add_noise if changed else None}
    alone = Loader(numbered(samples), batch_size, **options)
    start = data.draw(st.integers(0, len(alone)))
    parts = [Loader(numbered(samples), batch_size, **options, rank=rank, workers=workers) for rank in range(workers)]
    assert {len(part) for part in parts} == {len(alone)}
    for batch, *shares in zip(alone.epoch(1, start), *(part.epoch(1, start) for part in parts), strict=True):
        sizes = [len(share["labels"]) for share in shares]
        assert max(sizes) - min(sizes) <= 1
        assert sizes == sorted(sizes, reverse=True)
        for name, array in batch.items():
            joined = np.concatenate([share[name] for share in shares])
            assert joined.dtype == array.dtype
            np.testing.assert_array_equal(joined, array)


def test_a_rank_is_one_of_the_workers():
    with pytest.raises(ConfigurationError, match=r"rank=2, workers=2: ranks count from 0"):
        Loader(numbered(4), 2, rank=2, workers=2)
