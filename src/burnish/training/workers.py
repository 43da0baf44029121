"""The work of a run's workers besides steps: agreement, common start, evaluation, and a common stop."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from burnish.data import Dataset, Loader
from burnish.distributed.connection.process_group import ProcessGroup
from burnish.distributed.connection.store import ranks
from burnish.engines.communicator import Pending
from burnish.errors import BurnishError, InputError, WorkerError, comes_again
from burnish.training.metric_totals import Totals
from burnish.training.session import Session

if TYPE_CHECKING:
    import torch

SAMPLES_COMPARED = 5
Result = TypeVar("Result")


GO_ON, STOP, INTERRUPT, TERMINATE = range(4)
"""Votes of a worker: to go on, or to stop for a callback, Ctrl-C or SIGTERM."""


class StopVote:
    """The vote of the workers at each step, without waiting: the result arrives with the gradients.

    All workers learn it at the same step, so all stop after the same one.
    """

    def __init__(self, group: ProcessGroup):
        self._group = group
        self._vote: tuple[torch.Tensor, Pending] | None = None

    def begin(self, wish: int) -> None:
        """Cast this worker's vote (``GO_ON``, ``STOP``, ``INTERRUPT``, ``TERMINATE``); all workers do, at each step."""
        if self._group.world_size == 1:
            return
        import torch

        vote = torch.tensor([wish], dtype=torch.int32)
        self._vote = vote, self._group.begin_all_reduce(vote, "max", name="whether to stop")

    def passed(self) -> int:
        """Return the strongest vote; ``GO_ON`` if none was begun."""
        if self._vote is None:
            return GO_ON
        (vote, pending), self._vote = self._vote, None
        pending.wait()
        return int(vote.item())


def on_first(group: ProcessGroup, function: Callable[[], Any], name: str) -> Any:
    """Return on all workers the JSON-compatible result of a function on rank 0.

    Raises:
        BurnishError: the error of ``function``, on rank 0.
        WorkerError: the same, on the others.
    """
    told: dict[str, Any] = {}
    failure: BurnishError | None = None
    if group.rank == 0:
        try:
            told = {"value": function()}
        except BurnishError as error:
            failure, told = error, {"error": str(error), "comes again": comes_again(error)}
    first = group.all_gather_json(told, name=name)[0]
    if failure is not None:
        raise failure
    if "error" in first:
        raise WorkerError(f"Rank 0 stopped: {first['error']}", first["comes again"])
    return first["value"]


def on_all(group: ProcessGroup, function: Callable[[], Result], name: str) -> Result:
    """Return the result of a function on this worker, if it succeeds on all of them.

    Args:
        group: the workers.
        function: work of each worker, of any duration, without exchanges.
        name: the work that others wait for, in messages.

    Raises:
        BurnishError: the error of ``function`` here, unless rank 0 raised the same.
        WorkerError: it failed on another rank, or on rank 0 with the same error; names the first such rank.
    """
    failure: BurnishError | None = None
    try:
        value = function()
    except BurnishError as error:
        failure = error
    except BaseException as error:
        group.fail(error)
        raise
    group.barrier(name=f"the others to {name}")
    outcome = ["", False] if failure is None else [str(failure), comes_again(failure)]
    told = group.all_gather_json(outcome, name=f"whether all could {name}")
    if failure is not None and (group.rank == 0 or str(failure) != told[0][0]):
        raise failure
    failed = next((rank for rank, (message, _) in enumerate(told) if message), None)
    if failed is not None:
        message, again = told[failed]
        raise WorkerError(f"Rank {failed} stopped: {message}", again)
    return value


def agree(group: ProcessGroup, facts: Mapping[str, Any]) -> None:
    """Check that all workers have the same facts.

    Args:
        group: the workers.
        facts: facts to compare: descriptions with JSON-compatible values.

    Raises:
        WorkerError: a fact differs; names it with both values, by rank.
    """
    said = group.all_gather_json(dict(facts), name="what each worker trains")
    for what in facts:
        first = said[0].get(what)
        others = [rank for rank in range(group.world_size) if said[rank].get(what) != first]
        if others:
            raise WorkerError(
                f"The workers do not train the same: {what} is {first} on rank 0, and {said[others[0]].get(what)} on "
                f"{ranks(others)}. Start all of them with the same command, versions, model and data",
                comes_again=True,
            )


def described(dataset: Dataset) -> dict[str, Any]:
    """Return the facts of a data set that all workers must share: its size, arrays, classes, and a few samples."""
    count = len(dataset)
    places = np.unique(np.linspace(0, count - 1, SAMPLES_COMPARED).astype(np.int64))
    samples = dataset.batch(places)
    checksum = 0
    for name in sorted(samples):
        checksum = zlib.crc32(np.ascontiguousarray(samples[name]).reshape(-1).view(np.uint8).data, checksum)
    arrays = {name: f"{array.dtype}{list(array.shape[1:])}" for name, array in sorted(samples.items())}
    classes = getattr(dataset, "classes", None)
    return {
        "samples": count,
        "arrays": arrays,
        "classes": None if classes is None else [str(name) for name in classes],
        "checksum of a few samples": f"{checksum:08x}",
    }


def spread(group: ProcessGroup, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays of rank 0; all workers give arrays of the same names, shapes and dtypes."""
    if group.world_size == 1:
        return dict(state)
    import torch

    received = {}
    for name in sorted(state):
        array = np.array(state[name], order="C")  # a copy to write to
        if array.size:
            # As bytes, since PyTorch may not know the dtype.
            content = torch.from_numpy(array.reshape(-1).view(np.uint8))
            group.broadcast(content, name=f"the state '{name}'")
        received[name] = array
    return received


def restore(group: ProcessGroup, session: Session, path: Path, strict: bool = True) -> None:
    """Restore a checkpoint on all workers, read by rank 0.

    Raises:
        CheckpointError: as ``Session.restore``.
        WorkerError: the same, on the others.
    """

    def read() -> None:
        with session.asking():
            session.restore(path, strict)

    if session.evaluates_together and group.rank:
        session.take_part()  # entries missing in the checkpoint come from the present state
    on_first(group, read, f"the checkpoint '{path}'")
    take_over_state(group, session)


def take_over_state(group: ProcessGroup, session: Session) -> None:
    """Give the sessions of all workers the state of rank 0."""
    if group.world_size > 1 and not session.take_over(lambda name, array: spread(group, {name: array})[name]):
        state = spread(group, session.state())
        if group.rank:
            session.load_state(state)


def evaluate(
    group: ProcessGroup, session: Session, loader: Loader, *, parameters: str | None = None, looked_up: Callable[[], None]
) -> dict[str, float]:
    """Return the loss and the metrics over a data set, with its batches shared among the workers.

    The totals of all batches are added as in one process: counts exactly, sums rounded once. So the figures do not depend on the
    number of workers.

    Args:
        group: the workers.
        session: this worker's session.
        loader: all batches, the same on all workers.
        parameters: as in ``Session.evaluate``.
        looked_up: function called after each batch.

    Raises:
        InputError: as ``Session.evaluate_data``.
    """
    if group.world_size == 1:
        return session.evaluate_data(loader.epoch(0), lambda _: looked_up(), parameters)
    batches = []
    for batch in loader.every(group.rank, group.world_size):
        batches.append(session.evaluate_totals(batch, parameters))
        looked_up()
    if session.evaluates_together and len(loader) % group.world_size and group.rank >= len(loader) % group.world_size:
        session.take_part()  # the others have one more batch
    totals = Totals()
    for content in group.all_gather_bytes(_packed(batches), name="the totals of the evaluation"):
        for part in _unpacked(content):
            totals.add(part)
    if not totals.counts and not totals.sums:
        raise InputError("There is no batch to evaluate: the data set is empty")
    return session.combine_totals(totals.added())


def _packed(batches: list[dict[str, np.ndarray]]) -> bytes:
    file = io.BytesIO()
    arrays: dict[str, Any] = {f"{index}/{name}": array for index, batch in enumerate(batches) for name, array in batch.items()}
    np.savez(file, **arrays)
    return file.getvalue()


def _unpacked(content: bytes) -> list[dict[str, np.ndarray]]:
    batches: dict[str, dict[str, np.ndarray]] = {}
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        for key in arrays.files:
            index, _, name = key.partition("/")
            batches.setdefault(index, {})[name] = arrays[key]
    return list(batches.values())
