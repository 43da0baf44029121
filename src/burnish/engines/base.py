"""The small protocol between a program and what runs it."""

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
"""A model loaded once, to be run any number of times: inputs by name in, outputs by name out."""

NOTHING: Mapping[str, str] = MappingProxyType({})
MOST_THREADS = 1024
"""Each graph may have threads of its own, and runtimes make as many as they are told."""


def check_threads(threads: int | None) -> None:
    """Refuse a number of threads that is none.

    Raises:
        EngineError: it is no whole number from 1 to ``MOST_THREADS``, and not None.
    """
    if threads is not None and not (is_whole(threads) and 1 <= threads <= MOST_THREADS):
        raise EngineError(f"threads={threads!r}: give a whole number from 1 to {MOST_THREADS}, or leave it out for all cores")


class HandedOver(dict[str, np.ndarray]):
    """A state that no one else keeps: an engine may take each entry out as it copies it, so that it is never there twice."""


class ProgramRunner(ABC):
    """A program opened on an engine, holding its state there. Inputs are arrays by name, already checked.

    Whatever fails inside a method, the state stays as it was before the call. What one worker of several needs beside that has
    the answer of one alone here: it holds all of the state, and every step ends a round.
    """

    @property
    def route(self) -> str | None:
        """How a step runs, in words, for ``Session.describe``; None where the engine does not say."""
        return None

    @property
    def row_writer(self) -> RowWriter | None:
        """What says which rows of tables its steps wrote in place; None where nothing does, or more changes in a table."""
        return None

    @property
    def reopened(self) -> int:
        """How many times the graph of the steps was opened again with fewer of the runtime's optimizations, as these broke it."""
        return 0

    @property
    def is_spread(self) -> bool:
        """Whether other workers hold what this one does not."""
        return False

    @property
    def gives_entries(self) -> bool:
        """Whether an entry of a state that is spread can be asked for without the others, while they take part (``asking``)."""
        return False

    @property
    def evaluates_together(self) -> bool:
        """Whether ``evaluate`` and ``predict`` are exchanges, which all workers make at the same time."""
        return False

    @property
    def ends_round(self) -> bool:
        """Whether workers exchange something in the next step; they do not within a round that each steps alone."""
        return True

    @abstractmethod
    def step(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Run one training step: data, labels and hyperparameters in; loss, metrics and rates out; the state moves on.

        Raises:
            NonFiniteLossError: the loss is NaN or infinite; the state is the one from before the step.
            EngineError: the engine cannot load or run the step graph.
        """

    @abstractmethod
    def evaluate(self, inputs: Mapping[str, np.ndarray], instead: Mapping[str, str] = NOTHING) -> Arrays:
        """Run the evaluate graph on the current state; the state stays.

        Args:
            inputs: data and labels.
            instead: state entry -> the state entry, of its dtype and shape, that is read in its place.
        """

    @abstractmethod
    def predict(self, inputs: Mapping[str, np.ndarray], instead: Mapping[str, str] = NOTHING) -> Arrays:
        """Run the predict graph on the current state, as ``evaluate`` does; the state stays."""

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
        """Return what this worker holds; asks nobody."""
        return self.state()

    def reopen(self, reopened: int) -> None:
        """Open the graph of the steps with as few optimizations as a runner of the same program came to; never with more."""
        return

    def asking(self) -> AbstractContextManager[None]:
        """While this lasts, the others that take part wait for what is asked of them."""
        return nullcontext()

    def take_part(self) -> None:
        """Give this worker's part of the state to another one, which asks for the state at the same time."""
        return

    def synchronize(self) -> None:
        """End the round; does nothing if the workers have the same weights after each step."""
        return

    def take_over(self, given: Callable[[str, np.ndarray], np.ndarray]) -> None:
        """Take over the state that the first worker loaded, if it alone was given the whole.

        Args:
            given: returns on all workers what the first one gives, by the name of a state entry.
        """
        return


def described(engine: Engine, device: str | None = None, threads: int | None = None) -> dict[str, Any]:
    """Return what sessions of an engine run on, as its ``describe`` says; ``device`` and ``threads`` as ``open`` takes them.

    Returns:
        ``kernels``: the path of burnish's own kernels, or None; ``kernels_reason``: why there are none, or None;
        ``kernels_remedy``: how to come by them, or None; ``level``: the instructions of the processor that run, such as
        ``avx512``; ``threads``: threads used inside one operator.
    """
    found: dict[str, Any] = {"kernels": None, "kernels_reason": "this engine has none", "kernels_remedy": None}
    found |= {"level": cpu_level(), "threads": threads or cores()}
    return found | (engine.describe(device, threads) if isinstance(engine, DescribedEngine) else {})


@runtime_checkable
class DescribedEngine(Protocol):
    """An engine that says what its sessions run on (``described``)."""

    def describe(self, device: str | None = None, threads: int | None = None) -> dict[str, Any]: ...


@runtime_checkable
class Engine(Protocol):
    """Something that runs graphs of the operators that its target has.

    Attributes:
        name: how errors and comparisons call it.
        target: what it can run.
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
            graphs: those of the program, lowered to the target; their signature says which inputs are state.
            state: every state entry by name, already checked; what is ``HandedOver`` may be emptied.
            device: where to run, such as ``cpu``; None is the engine's choice.
            threads: threads used inside one operator; None is the engine's choice.
            communicator: to the workers that the program is trained with. It is given to an engine whose target has collectives.

        Raises:
            EngineError: the device is not one of this engine's.
        """
        ...

    def load(self, model: ir.Model, threads: int | None = None) -> LoadedModel:
        """Load a model, to be run any number of times; it has no state, and is not to be changed while it is in use.

        Args:
            model: the model.
            threads: as ``open`` takes it.

        Raises:
            EngineError: the model cannot be loaded; and from what is returned: it cannot be run on these inputs.
        """
        ...


class RunsModels:
    """Lets an engine run a model once, by its ``load``."""

    def run(self: Loads, model: ir.Model, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Load a model and run it once; returns its outputs by name.

        Raises:
            EngineError: the model cannot be loaded or run.
        """
        return self.load(model)(inputs)


class Loads(Protocol):
    def load(self, model: ir.Model) -> LoadedModel: ...


def refuse_workers(engine: str, communicator: Communicator | None) -> None:
    """Raise EngineError where an engine that cannot exchange values with other workers is given a communicator to them."""
    if communicator is not None:
        raise cannot_exchange(engine)


def cannot_exchange(engine: str) -> EngineError:
    """The error of an engine, by its name, that cannot exchange values with other workers."""
    return EngineError(
        f"The engine '{engine}' cannot exchange values with other workers: train with engine='torch' "
        "(--engine torch), or with one worker (without parallel=..., --workers)"
    )


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let an interrupt from the keyboard wait until the end of the block; outside the main thread none arrives anyway."""
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
