"""Data sets and the loader: one file per format, ``open_dataset`` in front of them.

A data set gives batches as arrays by the names of the program's inputs. Nothing here knows a loss or an engine.
"""

from burnish.data.augment import shift_images
from burnish.data.batches import Batches
from burnish.data.clicks import CriteoFile, synthetic_clicks
from burnish.data.data_spec import DataSpec
from burnish.data.dataset import ArrayDataset, Dataset, EpochDataset
from burnish.data.idx import read_idx
from burnish.data.image.augmentation import ImageAugmentation
from burnish.data.loader import Loader
from burnish.data.model_metadata import DataDescription
from burnish.data.preprocessing import Preprocessing
from burnish.data.sources import FORMATS, DataSource, as_dataset, open_dataset
from burnish.data.text.dataset import TextDataset
from burnish.data.text.settings import Text

__all__ = [
    "FORMATS",
    "ArrayDataset",
    "Batches",
    "CriteoFile",
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
