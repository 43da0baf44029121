"""A worker's part of a batch, also of no samples: its graph is then run on a stand-in for them, which counts nowhere.

Many operators have no result for nothing: a reshape that infers an extent, the largest element, the mean. A graph that runs on
some samples runs on the stand-in too, and every exchange takes zeros of a worker that says it has no samples
(``graphs.samples``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np

from burnish.distributed.graphs.samples import counted_inputs
from burnish.distributed.runners.distributed_state import SpreadRunner
from burnish.engines import ProgramRunner
from burnish.engines.base import Arrays
from burnish.engines.communicator import Communicator, array_of, buffer_of
from burnish.program import Role
from burnish.program.layout import stand_in
from burnish.program.signature import Entry, GraphSignature


class PartRunner(SpreadRunner):
    """A runner that tells the step how many samples its worker has, and gives it others where it has none.

    The stand-in is the last part that had samples. A worker that has had none yet gets the part of one that has: all workers say
    what they have in the first step, and in those that follow it until one of them has had samples.

    Args:
        runner: of this worker; its step reads numbers of samples.
        communicator: to the others.
        signature: of the step.
    """

    def __init__(self, runner: ProgramRunner, communicator: Communicator, signature: GraphSignature):
        super().__init__(runner, communicator)
        (numbers,) = signature.inputs_of(Role.SAMPLES)
        self._numbers = numbers.name
        self._counted = counted_inputs(signature.inputs_of(Role.DATA))
        self._batch_inputs = signature.inputs_of(Role.DATA, Role.LABEL)
        self._signature = signature
        self._last: Arrays | None = None
        self._all_have_stand_in = communicator.size == 1

    @property
    def writer(self) -> ProgramRunner | None:
        return self._runner  # every worker writes the rows of all

    def step(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        counts = np.array([inputs[name].shape[axis] for name, axis in self._counted.items()], np.int64)
        part = {entry.name: inputs[entry.name] for entry in self._batch_inputs}
        if counts[0]:
            self._last = part
        if not self._all_have_stand_in:
            self._share_stand_in()
        if not counts[0]:
            counts[:] = 0
            part = self._last or {entry.name: self._instead_of(inputs[entry.name], entry) for entry in self._batch_inputs}
        return self._runner.step({**inputs, **part, self._numbers: counts})

    def _instead_of(self, array: np.ndarray, entry: Entry) -> np.ndarray:
        """What has samples, where no worker has had any."""
        return array if array.size else stand_in(entry, array.shape, self._signature)

    def _share_stand_in(self) -> None:
        """Give the workers that have had no samples yet what the first one has that had some; all do this together."""
        content = b"" if self._last is None else packed(self._last)
        size = buffer_of(self._communicator, np.array([len(content)], np.int64))
        sizes = array_of(self._communicator.all_gather(size)).reshape(-1)
        if not sizes.any():
            return
        self._all_have_stand_in = True
        if sizes.all():
            return
        first = int(np.argmax(sizes > 0))
        buffer = np.zeros(int(sizes[first]), np.uint8)
        if first == self._communicator.rank:
            buffer[:] = np.frombuffer(content, np.uint8)
        rows = array_of(self._communicator.all_gather(buffer_of(self._communicator, buffer)))
        if self._last is None:
            self._last = unpacked(rows[first].tobytes(), self._batch_inputs)


def packed(part: Mapping[str, np.ndarray]) -> bytes:
    """A part of a batch as bytes: the shapes, and the arrays."""
    header = json.dumps({name: array.shape for name, array in part.items()}).encode()
    return b"".join([len(header).to_bytes(8, "little"), header, *(array.tobytes() for array in part.values())])


def unpacked(content: bytes, entries: tuple[Entry, ...]) -> Arrays:
    """What ``packed`` made bytes of."""
    start = 8 + int.from_bytes(content[:8], "little")
    shapes = json.loads(content[8:start])
    part = {}
    for entry in entries:
        dtype, shape = entry.numpy_dtype, shapes[entry.name]
        count = int(np.prod(shape))
        part[entry.name] = np.frombuffer(content, dtype, count, start).reshape(shape).copy()
        start += count * dtype.itemsize
    return part
