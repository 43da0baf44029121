"""The protocol between a program and the engine that runs it."""

from __future__ import annotations

import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import onnx_ir as ir

from burnish.engines.communicator import Communicator
from burnish.engines.row_writes import RowWriter
from burnish.errors import EngineError
from burnish.kernels.building import cores
from burnish.kernels.compiling import cpu_level
from burnish.targets import Target
from burnish.validation import is_whole

if TYPE_CHECKING:
    from burnish.compiler.lowered_graphs import LoweredGraphs


Arrays = dict[str, np.ndarray]
LoadedModel = Callable[[Mapping[str, np.ndarray]], Arrays]
"""A loaded model that can be run repeatedly: inputs by name -> outputs by name."""

NOTHING: Mapping[str, str] = MappingProxyType({})
MOST_THREADS = 1024
"""Limit because each graph may have its own threads, and runtimes create as many as requested."""


def check_threads(threads: int | None) -> None:
    """Check a number of threads.

    Raises:
        EngineError: it is neither None nor an integer from 1 to ``MOST_THREADS``.
    """
    if threads is not None and not (is_whole(threads) and 1 <= threads <= MOST_THREADS):
        raise EngineError(f"threads={threads!r}: give a whole number from 1 to {MOST_THREADS}, or leave it out for all cores")


class HandedOver(dict[str, np.ndarray]):
    """A state without other references: an engine may remove each entry as it copies it, so that it never exists twice."""


class ProgramRunner(ABC):
    """A program opened on an engine, which holds its state. Inputs are arrays by name, already checked.

    If a method fails, the state stays as it was before the call. The methods for several workers have the answers of a single one
    here: it holds all of the state, and every step ends a round.
    """

    @property
    def route(self) -> str | None:
        """A description of how a step runs, for ``Session.describe``; None if the engine gives none."""
        return None

    @property
    def row_writer(self) -> RowWriter | None:
        """The record of the table rows that steps wrote in place; None if there is none, or tables change in other ways."""
        return None

    @property
    def reopened(self) -> int:
        """The number of times that the step graph was reopened with fewer of the runtime's optimizations, which broke it."""
        return 0

    @property
    def is_spread(self) -> bool:
        """True if other workers hold parts of the state that this one does not."""
        return False

    @property
    def gives_entries(self) -> bool:
        """True if an entry of a distributed state can be read without the others, while they take part (``asking``)."""
        return False

    @property
    def evaluates_together(self) -> bool:
        """True if ``evaluate`` and ``predict`` exchange data, so that all workers must run them at the same time."""
        return False

    @property
    def ends_round(self) -> bool:
        """True if workers exchange data in the next step; within a round, each steps on its own."""
        return True

    @abstractmethod
    def step(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Run one training step and update the state: data, labels and hyperparameters -> loss, metrics and rates.

        Raises:
            NonFiniteLossError: the loss is NaN or infinite; the state is the one from before the step.
            EngineError: the engine cannot load or run the step graph.
        """

    @abstractmethod
    def evaluate(self, inputs: Mapping[str, np.ndarray], instead: Mapping[str, str] = NOTHING) -> Arrays:
        """Run the evaluate graph on the current state, which does not change.

        Args:
            inputs: data and labels.
            instead: state entry -> the state entry, of the same dtype and shape, that is read in its place.
        """

    @abstractmethod
    def predict(self, inputs: Mapping[str, np.ndarray], instead: Mapping[str, str] = NOTHING) -> Arrays:
        """Run the predict graph on the current state, which does not change; ``instead`` is as for ``evaluate``."""

    @abstractmethod
    def state(self) -> Arrays:
        """Return copies of the state, by state name."""

    @abstractmethod
    def state_entry(self, name: str) -> np.ndarray:
        """Return a copy of one state entry, such as ``step``, without copying the others."""

    @abstractmethod
    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Replace the state by copies of these arrays; names, dtypes and shapes are already checked."""

    def own_state(self) -> Arrays:
        """Return this worker's part of the state, without involving the others."""
        return self.state()

    def reopen(self, reopened: int) -> None:
        """Reopen the step graph with as few optimizations as another runner of the same program needed; never with more."""
        return

    def asking(self) -> AbstractContextManager[None]:
        """Make the other workers wait for requests during the block."""
        return nullcontext()

    def take_part(self) -> None:
        """Give this worker's part of the state to another one, which asks for the state at the same time."""
        return

    def synchronize(self) -> None:
        """End the round; does nothing if the workers have the same weights after each step."""
        return

    def take_over(self, given: Callable[[str, np.ndarray], np.ndarray]) -> None:
        """Take over the state that was loaded on the first worker, if only that one was given all of it.

        Args:
            given: a function that returns the first worker's array on all workers, by the name of a state entry.
        """
        return


def described(engine: Engine, device: str | None = None, threads: int | None = None) -> dict[str, Any]:
    """Return a description of the engine's sessions; ``device`` and ``threads`` are as for ``open``.

    Returns:
        ``kernels``: the path of burnish's own kernels, or None; ``kernels_reason``: the reason if there are none, or None;
        ``kernels_remedy``: the way to get them, or None; ``level``: the instruction set in use, such as ``avx512``; ``threads``:
        threads used inside one operator.
    """
    found: dict[str, Any] = {"kernels": None, "kernels_reason": "this engine has none", "kernels_remedy": None}
    found |= {"level": cpu_level(), "threads": threads or cores()}
    return found | (engine.describe(device, threads) if isinstance(engine, DescribedEngine) else {})


@runtime_checkable
class DescribedEngine(Protocol):
    """An engine that describes its sessions (``described``)."""

    def describe(self, device: str | None = None, threads: int | None = None) -> dict[str, Any]: ...


@runtime_checkable
class Engine(Protocol):
    """An engine that runs graphs of its target's operators.

    Attributes:
        name: name in errors and comparisons.
        target: operators and features that it can run.
    """

    name: str

    @property
    def target(self) -> Target: ...

    def open(
        self,
        graphs: LoweredGraphs,
        state: Mapping[str, np.ndarray],
        *,
        device: str | None,
        threads: int | None,
        communicator: Communicator | None = None,
    ) -> ProgramRunner:
        """Open a program with copies of its state on the device.

        Args:
            graphs: graphs of the program, lowered to the target; their signature marks the inputs that are state.
            state: every state entry by name, already checked; a ``HandedOver`` may be emptied.
            device: device to run on, such as ``cpu``; None is the engine's choice.
            threads: threads used inside one operator; None is the engine's choice.
            communicator: connection to the other workers. Only an engine whose target has collectives gets one.

        Raises:
            EngineError: the engine does not have the device.
        """
        ...

    def load(self, model: ir.Model, threads: int | None = None) -> LoadedModel:
        """Load a model without state, to be run repeatedly. Do not modify the model while it is in use.

        Args:
            model: the model.
            threads: as for ``open``.

        Raises:
            EngineError: the model cannot be loaded; or, from the returned callable, cannot be run on these inputs.
        """
        ...


class RunsModels:
    """A base class that runs a model once through ``load``."""

    def run(self: Loads, model: ir.Model, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Load a model and run it once; return its outputs by name.

        Raises:
            EngineError: the model cannot be loaded or run.
        """
        return self.load(model)(inputs)


class Loads(Protocol):
    def load(self, model: ir.Model) -> LoadedModel: ...


def refuse_workers(engine: str, communicator: Communicator | None) -> None:
    """Raise EngineError if an engine without support for several workers is given a communicator."""
    if communicator is not None:
        raise cannot_exchange(engine)


def cannot_exchange(engine: str) -> EngineError:
    """Return the error of an engine without support for several workers, by its name."""
    return EngineError(
        f"The engine '{engine}' cannot exchange values with other workers: train with engine='torch' "
        "(--engine torch), or with one worker (without parallel=..., --workers)"
    )


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay a keyboard interrupt until the end of the block; threads other than the main one receive none anyway."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    heard: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: heard.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if heard:
        handler(*heard[0])
