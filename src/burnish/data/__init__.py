"""Data sets and the loader: one file per format, ``open_dataset`` in front of them.

A data set gives batches as arrays by the names of the program's inputs. Nothing here knows a loss or an engine.
"""

from burnish.data.augment import shift_images
from burnish.data.dataset import ArrayDataset, Dataset
from burnish.data.loader import Loader
from burnish.data.sources import FORMATS, open_dataset
from burnish.data.wanted import Wanted

__all__ = ["FORMATS", "ArrayDataset", "Dataset", "Loader", "Wanted", "open_dataset", "shift_images"]
