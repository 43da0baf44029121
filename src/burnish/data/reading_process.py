"""A reading process (``python -m burnish.data.reading_process``): gets a dataset, then reads batches until its input ends.

Standard input and output carry JSON headers and arrays as bytes. Only the dataset is pickled, once, on its way here; answers and
file contents are never unpickled. The process ends with its parent and ignores Ctrl-C.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from burnish.data.dataset import Dataset
from burnish.errors import BurnishError

LENGTH_BYTES = 8
LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class Request:
    """A batch to read.

    Attributes:
        indices: sample numbers, int64 [samples].
        seed, epoch: seeds of random changes.
    """

    indices: np.ndarray
    seed: int
    epoch: int

    def read(self, dataset: Dataset) -> dict[str, np.ndarray]:
        """Return the batch of a training epoch."""
        # Checking the protocol with isinstance costs as much as reading a small batch.
        of_epoch = getattr(dataset, "batch_of_epoch", None) or getattr(dataset, "augmented", None)
        return dataset.batch(self.indices) if of_epoch is None else of_epoch(self.indices, self.seed, self.epoch)

    def header(self) -> dict[str, Any]:
        """Return the request as JSON-compatible values."""
        return {"indices": self.indices.tolist(), "seed": self.seed, "epoch": self.epoch}

    @classmethod
    def of(cls, header: Mapping[str, Any]) -> Request:
        """Return the request that ``header`` wrote."""
        return cls(np.asarray(header["indices"], np.int64), header["seed"], header["epoch"])


def send(file: IO[bytes], header: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> None:
    """Write a header and arrays."""
    held = {name: np.ascontiguousarray(array) for name, array in (arrays or {}).items()}
    described = [(name, _dtype_text(array.dtype), list(array.shape)) for name, array in held.items()]
    text = json.dumps({**header, "arrays": described}).encode()
    file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
    for array in held.values():
        if array.size:
            file.write(array.reshape(-1).view(np.uint8).data)
    file.flush()


def receive(file: IO[bytes]) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    """Read the header and arrays of ``send``; None if the other side is gone."""
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


def _filled(file: IO[bytes], memory: memoryview) -> bool:
    done = 0
    while done < len(memory):
        read = file.readinto(memory[done:])  # type: ignore[attr-defined]  # a pipe, buffered or not, has it
        if not read:
            return False
        done += read
    return True


def _dtype_text(dtype: np.dtype) -> str:
    # NumPy knows extension types such as bfloat16 only by name.
    return dtype.name if dtype.kind == "V" else dtype.str


def main() -> None:
    """Answer requests for batches until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    # Send the output of libraries to standard error, to keep it out of the protocol.
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        dataset = pickle.load(source)
    except EOFError:  # no batch was requested
        return
    while (received := receive(source)) is not None:
        header, _ = received
        try:
            send(sink, *_answer(dataset, Request.of(header)))
        except BrokenPipeError:
            return


def _end_with(parent: int) -> None:
    """End this process after its parent; a busy process would not notice the end of its input."""
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    os._exit(1)


def _answer(dataset: Dataset, request: Request) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        batch = request.read(dataset)
    except BurnishError as error:
        return {"error": str(error), "kind": type(error).__name__}, {}
    except Exception as error:  # a dataset may raise anything; the caller raises it again
        return {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}, {}
    findings = getattr(dataset, "take_findings", None)
    return {"findings": {} if findings is None else findings()}, batch


if __name__ == "__main__":
    main()
