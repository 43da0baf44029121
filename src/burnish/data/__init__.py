"""Datasets and loaders. ``formats`` has one table of all file formats and ``open_dataset`` opens any of them.

A dataset yields batches: arrays by the names of the program's inputs. This package does not depend on losses or engines.
"""

from typing import TYPE_CHECKING

from burnish.lazy_imports import exports

if TYPE_CHECKING:
    from burnish.data.batches import Batches
    from burnish.data.data_spec import DataSpec
    from burnish.data.dataset import ArrayDataset, Dataset, EpochDataset
    from burnish.data.idx import read_idx
    from burnish.data.image.augmentation import ImageAugmentation
    from burnish.data.loader import Loader, shift_images
    from burnish.data.model_metadata import DataDescription
    from burnish.data.preprocessing import Preprocessing
    from burnish.data.random_data import synthetic_clicks
    from burnish.data.sources import DataSource, as_dataset, open_dataset
    from burnish.data.text.dataset import TextDataset
    from burnish.data.text.settings import Text

__all__ = [
    "ArrayDataset",
    "Batches",
    "DataDescription",
    "DataSource",
    "DataSpec",
    "Dataset",
    "EpochDataset",
    "ImageAugmentation",
    "Loader",
    "Preprocessing",
    "Text",
    "TextDataset",
    "as_dataset",
    "open_dataset",
    "read_idx",
    "shift_images",
    "synthetic_clicks",
]

if not TYPE_CHECKING:  # type checkers would accept every name from a module's __getattr__
    __getattr__, __dir__ = exports(
        __name__,
        {
            "batches": "Batches",
            "data_spec": "DataSpec",
            "dataset": "ArrayDataset Dataset EpochDataset",
            "idx": "read_idx",
            "image.augmentation": "ImageAugmentation",
            "loader": "Loader shift_images",
            "model_metadata": "DataDescription",
            "preprocessing": "Preprocessing",
            "random_data": "synthetic_clicks",
            "sources": "DataSource as_dataset open_dataset",
            "text.dataset": "TextDataset",
            "text.settings": "Text",
        },
    )
