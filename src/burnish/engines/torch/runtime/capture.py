"""A step that is recorded once per shape of the batch and then replayed: on CUDA, as one CUDA graph.

A recording reads and writes fixed memory: the tensors of the state, random key, hyperparameters, batch and outputs do not move.
The next state is copied into the state only after the loss was read back and found finite. A step that writes in place
(``inductor.InPlaceStep``) handles that itself.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from burnish.engines.torch.translate.dtypes import TORCH_DTYPES, tensor_of
from burnish.program.signature import Entry, GraphSignature


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the bytes of tensors of any dtype and shape, concatenated on their device."""
    return torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])


def unpack(packed: torch.Tensor, entries: Sequence[Entry], shapes: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    """Return the arrays that ``pack`` packed, by name, after waiting for them.

    Args:
        packed: result of ``pack``.
        entries: names and dtypes, in the order of the tensors.
        shapes: their shapes.
    """
    data = packed.cpu().numpy().tobytes()
    arrays, offset = {}, 0
    for entry, shape in zip(entries, shapes, strict=True):
        dtype = np.dtype(entry.numpy_dtype)
        count = math.prod(shape)
        arrays[entry.name] = np.frombuffer(data, dtype, count, offset).reshape(tuple(shape)).copy()
        offset += count * dtype.itemsize
    assert offset == len(data), "the entries do not name what was packed"
    return arrays


Tensors = dict[str, torch.Tensor]
Layout = Callable[[torch.Tensor], torch.Tensor]
KEPT_RECORDINGS = 8
"""The number of recorded batch shapes; the least recently used one is replaced."""
_log = logging.getLogger("burnish")


class CaptureError(RuntimeError):
    """A graph cannot be recorded: it waits for the device, or allocates memory whose size depends on the data."""


class Recording(Protocol):
    """A recorded call; its outputs are always the same tensors."""

    @property
    def outputs(self) -> tuple[torch.Tensor, ...]: ...

    def replay(self) -> None: ...


class Recorder(Protocol):
    """Records calls."""

    def record(self, function: Callable[[], tuple[torch.Tensor, ...]]) -> Recording:
        """Record a function without side effects, which may be called several times.

        Raises:
            CaptureError: the function cannot be recorded.
            RuntimeError: it fails.
        """
        ...


class CudaRecorder:
    """Records CUDA graphs, which share one memory pool.

    Args:
        device: a CUDA device.
        warm_up: number of calls before the recording, in which libraries choose their algorithms and allocate workspaces.
    """

    def __init__(self, device: torch.device, warm_up: int = 3):
        self._device = device
        self._warm_up = warm_up
        self._pool: Any = None

    def record(self, function: Callable[[], tuple[torch.Tensor, ...]]) -> Recording:
        current = torch.cuda.current_stream(self._device)
        aside = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            for _ in range(self._warm_up):
                function()
        current.wait_stream(aside)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                outputs = function()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise CaptureError(str(error).splitlines()[0].rstrip(".")) from error
        self._pool = graph.pool()
        return _CudaRecording(graph, outputs)


@dataclass(frozen=True)
class _CudaRecording:
    graph: torch.cuda.CUDAGraph
    outputs: tuple[torch.Tensor, ...]

    def replay(self) -> None:
        self.graph.replay()


@dataclass(frozen=True)
class _Shape:
    inputs: Tensors
    staged: Tensors
    recording: Recording


class RecordedStep:
    """The step of a program over fixed memory.

    Args:
        call: the step graph: inputs in the signature's order -> outputs.
        signature: signature of the step graph.
        state: state entries; these tensors are read in place, and written by ``commit``.
        device: device of the tensors.
        layout: a function that converts an input to its layout on the device.
        recorder: the recorder.
        in_place: a step that overwrites the present state, like ``InPlaceStep``; it is recorded instead of ``call``, which runs
            if nothing can be recorded.
    """

    def __init__(
        self,
        call: Callable[..., tuple[torch.Tensor, ...]],
        signature: GraphSignature,
        state: Tensors,
        device: torch.device,
        layout: Layout,
        recorder: Recorder,
        in_place: Callable[..., tuple[torch.Tensor, ...]] | None = None,
    ):
        self._call = call
        self._in_place = in_place
        self._moves = torch.ones((), dtype=torch.bool, device=device)
        self._signature = signature
        self._state = state
        self._device = device
        self._layout = layout
        self._recorder = recorder
        self._shapes: OrderedDict[tuple[tuple[int, ...], ...], _Shape] = OrderedDict()
        self._next: Tensors | None = None
        self._refused = False
        self._given = tuple(entry for entry in signature.inputs if not entry.is_state)
        self._reported = tuple(entry for entry in signature.outputs if entry.updates is None)

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run one step on copies of the inputs; return its report, in one transfer. The state does not change until ``commit``.

        Raises:
            RuntimeError: the step fails; the state is unchanged.
        """
        self._next = None
        shape = self._shape(inputs)
        if shape is None:
            *results, packed = self._packed(self._uploaded(inputs))
        else:
            self._upload(inputs, shape)
            shape.recording.replay()
            *results, packed = shape.recording.outputs
            if self._in_place is not None:
                self._next = {}
                return unpack(packed, self._reported, [tensor.shape for tensor in results])
        self._next = {
            entry.updates: tensor
            for entry, tensor in zip(self._signature.outputs, results, strict=True)
            if entry.updates is not None
        }
        return unpack(packed, self._reported, [tensor.shape for tensor in self._of_reported(results)])

    def commit(self) -> None:
        """Make the state of the last ``run`` the current one, in place."""
        assert self._next is not None
        by_dtype: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for name, tensor in self._next.items():
            targets, sources = by_dtype.setdefault(tensor.dtype, ([], []))
            targets.append(self._state[name])
            sources.append(tensor)
        for targets, sources in by_dtype.values():
            torch._foreach_copy_(targets, sources, non_blocking=True)
        self._next = None

    def _of_reported(self, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        pairs = zip(self._signature.outputs, results, strict=True)
        return [tensor for entry, tensor in pairs if entry.updates is None]

    def _packed(self, inputs: Tensors) -> tuple[torch.Tensor, ...]:
        fed = self._fed(inputs)
        # A state entry that is passed through, or becomes another entry, must not be read while the commit writes it.
        held = {tensor.untyped_storage().data_ptr() for tensor in self._state.values()}
        results = tuple(tensor.clone() if tensor.untyped_storage().data_ptr() in held else tensor for tensor in self._call(*fed))
        return (*results, pack(self._of_reported(results)))

    def _fed(self, inputs: Tensors) -> list[torch.Tensor]:
        return [self._state[entry.name] if entry.is_state else inputs[entry.name] for entry in self._signature.inputs]

    def _record(self, inputs: Tensors) -> Recording:
        in_place = self._in_place
        if in_place is None:
            return self._recorder.record(lambda: self._packed(inputs))

        def step() -> tuple[torch.Tensor, ...]:
            reported = in_place(*self._fed(inputs), self._moves)
            return (*reported, pack(reported))

        # The function runs a few times before it is recorded.
        self._moves.fill_(False)
        try:
            return self._recorder.record(step)
        finally:
            self._moves.fill_(True)

    def _shape(self, inputs: Mapping[str, np.ndarray]) -> _Shape | None:
        """Return the recording for the shapes of these inputs; None if the step cannot be recorded."""
        if self._refused:
            return None
        key = tuple(inputs[entry.name].shape for entry in self._given)
        found = self._shapes.get(key)
        if found is not None:
            self._shapes.move_to_end(key)
            return found
        while len(self._shapes) >= KEPT_RECORDINGS:
            self._shapes.popitem(last=False)
        fixed = self._uploaded(inputs)
        try:
            recording = self._record(fixed)
        except CaptureError as error:
            self._refused = True
            _log.warning(
                "burnish: the step cannot be recorded as one CUDA graph (%s); its operators are launched one by one, which "
                "computes the same, and takes longer for small batches",
                error,
            )
            return None
        pinned = self._device.type == "cuda"
        staged = {
            entry.name: torch.empty(fixed[entry.name].shape, dtype=fixed[entry.name].dtype, pin_memory=pinned)
            for entry in self._given
        }
        self._shapes[key] = _Shape(fixed, staged, recording)
        return self._shapes[key]

    def _uploaded(self, inputs: Mapping[str, np.ndarray]) -> Tensors:
        return {entry.name: self._layout(_tensor(inputs[entry.name], entry).to(self._device)) for entry in self._given}

    def _upload(self, inputs: Mapping[str, np.ndarray], shape: _Shape) -> None:
        """Copy the inputs to the recording's memory; the previous copy is complete, because its step was synchronized."""
        for entry in self._given:
            staged = shape.staged[entry.name]
            staged.copy_(_tensor(inputs[entry.name], entry))
            shape.inputs[entry.name].copy_(staged, non_blocking=True)


def _tensor(array: np.ndarray, entry: Entry) -> torch.Tensor:
    tensor = tensor_of(array, entry.dtype)
    assert tensor.dtype == TORCH_DTYPES[entry.dtype]
    return tensor
