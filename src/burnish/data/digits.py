"""scikit-learn's 1797 handwritten digits of 8x8 pixels, part of the UCI set of Alpaydin and Kaynak (1998)."""

from __future__ import annotations

from typing import Literal

import numpy as np

from burnish.data.data_spec import DataSpec
from burnish.data.dataset import ArrayDataset
from burnish.errors import DataError
from burnish.installing import install_command

TEST_SAMPLES = 360
SPLIT_SEED = 0
LARGEST_PIXEL = 16


def digits_arrays(split: Literal["train", "test"] = "train") -> tuple[np.ndarray, np.ndarray]:
    """Return images (float32 in [0, 1], [samples, 8, 8]) and labels (int64, [samples]) of a split.

    The test split is the first 360 of a fixed permutation, the training split the other 1437.

    Raises:
        DataError: scikit-learn is missing, or there is no such split.
    """
    if split not in ("train", "test"):
        raise DataError(f"digits: there is no split '{split}'; the splits are train and test")
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            f"digits: the images come with scikit-learn, which is not installed; {install_command('sklearn')}"
        ) from error
    loaded = load_digits()
    order = np.random.default_rng(SPLIT_SEED).permutation(len(loaded.target))
    chosen = order[:TEST_SAMPLES] if split == "test" else order[TEST_SAMPLES:]
    images = (loaded.images[chosen] / LARGEST_PIXEL).astype(np.float32)
    return images, loaded.target[chosen].astype(np.int64)


def open_digits(spec: DataSpec, split: Literal["train", "test"] = "train") -> ArrayDataset:
    """Open a split as a dataset for a program."""
    images, labels = digits_arrays(split)
    return spec.dataset(images, labels, "digits")
