"""What goes between the training process and a reading process: a JSON header, and arrays as bytes.

Both ends belong to one run. The data set goes to a reading process pickled, once. Nothing that comes back, and nothing that is
read from a file, is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from burnish.data.dataset import Dataset

LENGTH_BYTES = 8


@dataclass(frozen=True)
class Request:
    """A batch that is to be read.

    Attributes:
        indices: of its samples, int64 [samples].
        seed, epoch: what random changes are drawn from.
    """

    indices: np.ndarray
    seed: int
    epoch: int

    def read(self, dataset: Dataset) -> dict[str, np.ndarray]:
        """Return the batch as an epoch of training has it."""
        # By the method, and not by the protocol: a check of that costs as much as a small batch.
        of_epoch = getattr(dataset, "batch_of_epoch", None) or getattr(dataset, "augmented", None)
        return dataset.batch(self.indices) if of_epoch is None else of_epoch(self.indices, self.seed, self.epoch)

    def header(self) -> dict[str, Any]:
        """Return the request as JSON-compatible values."""
        return {"indices": self.indices.tolist(), "seed": self.seed, "epoch": self.epoch}

    @classmethod
    def of(cls, header: Mapping[str, Any]) -> Request:
        """Return what ``header`` wrote."""
        return cls(np.asarray(header["indices"], np.int64), header["seed"], header["epoch"])


def send(file: BinaryIO, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> None:
    """Write a header, and arrays after it."""
    held = {name: np.ascontiguousarray(array) for name, array in (arrays or {}).items()}
    described = [(name, _dtype_text(array.dtype), list(array.shape)) for name, array in held.items()]
    text = json.dumps({**header, "arrays": described}).encode()
    file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
    for array in held.values():
        if array.size:
            file.write(array.reshape(-1).view(np.uint8).data)
    file.flush()


def receive(file: BinaryIO) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    """Read what ``send`` wrote; None where the other side is gone."""
    length = file.read(LENGTH_BYTES)
    if len(length) < LENGTH_BYTES:
        return None
    count = int.from_bytes(length, "little")
    text = file.read(count)
    if len(text) < count:
        return None
    header = json.loads(text)
    arrays = {}
    for name, dtype, shape in header.pop("arrays"):
        array = np.empty(shape, np.dtype(dtype))
        if array.size and not _filled(file, memoryview(array.reshape(-1).view(np.uint8).data)):
            return None
        arrays[name] = array
    return header, arrays


def _filled(file: BinaryIO, memory: memoryview) -> bool:
    done = 0
    while done < len(memory):
        read = file.readinto(memory[done:])  # type: ignore[attr-defined]  # a pipe, buffered or not, has it
        if not read:
            return False
        done += read
    return True


def _dtype_text(dtype: np.dtype) -> str:
    # Types that NumPy does not have, such as bfloat16, are known by their names alone.
    return dtype.name if dtype.kind == "V" else dtype.str
