"""A worker's part of a batch, also of no samples: its graph is then run on a stand-in for them, which counts nowhere.

Many operators have no result for nothing: a reshape that infers an extent, the largest element, the mean. A graph that runs on
some samples runs on the stand-in too, and every exchange takes zeros of a worker that says it has no samples
(``graphs.samples``).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

import numpy as np

from burnish.distributed.graphs.samples import counted_inputs
from burnish.distributed.runners.distributed_state import SpreadRunner
from burnish.engines import ProgramRunner
from burnish.engines.base import Arrays
from burnish.engines.communicator import Communicator, array_of, buffer_of
from burnish.engines.row_writes import RowWriter
from burnish.program import Role
from burnish.program.layout import stand_in
from burnish.program.signature import GraphSignature


class PartRunner(SpreadRunner):
    """A runner that tells the step how many samples its worker has, and gives it others if it has none.

    The stand-in is the last part that had samples. A worker that has had none yet gets the part of one that has: all workers say
    what they have in the first step, and in those that follow it until one of them has had samples.
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
    def row_writer(self) -> RowWriter | None:
        return self._runner.row_writer  # every worker writes the rows of all

    def step(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        counts = np.array([inputs[name].shape[axis] for name, axis in self._counted.items()], np.int64)
        part = {entry.name: inputs[entry.name] for entry in self._batch_inputs}
        if counts[0]:
            self._last = part
        if not self._all_have_stand_in:
            self._share_stand_in(part)
        if not counts[0]:
            counts[:] = 0
            empty = [entry for entry in self._batch_inputs if not part[entry.name].size]
            part = self._last or part | {entry.name: stand_in(entry, part[entry.name].shape, self._signature) for entry in empty}
        return self._runner.step({**inputs, **part, self._numbers: counts})

    def _share_stand_in(self, part: Arrays) -> None:
        """Give the workers that have had no samples yet the part of the first one that has had some; all do this together."""
        arrays = list((self._last or part).values())
        form = [self._last is not None, *(extent for array in arrays for extent in array.shape)]
        forms = array_of(self._communicator.all_gather(buffer_of(self._communicator, np.array(form, np.int64))))
        has_samples = forms[:, 0]
        if not has_samples.any():
            return
        self._all_have_stand_in = True
        if has_samples.all():
            return
        first = int(np.argmax(has_samples))
        extents = iter(forms[first, 1:].tolist())
        if first != self._communicator.rank:
            arrays = [np.zeros(tuple(islice(extents, array.ndim)), array.dtype) for array in arrays]
        content = np.frombuffer(b"".join(array.tobytes() for array in arrays), np.uint8).copy()
        given = array_of(self._communicator.all_gather(buffer_of(self._communicator, content)))[first]
        contents = np.split(given, np.cumsum([array.nbytes for array in arrays])[:-1])
        self._last = self._last or {
            name: content.copy().view(array.dtype).reshape(array.shape)
            for name, array, content in zip(part, arrays, contents, strict=True)
        }
