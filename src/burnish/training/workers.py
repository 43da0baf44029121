"""The workers of a run beside their steps: they agree, start in one state, evaluate, stop after the same step."""

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
"""What a worker wants: to go on, or the end that a callback, Ctrl-C or SIGTERM asked for."""


class StopVote:
    """The vote of the workers, asked at each step without waiting: a step's answer is there when its gradients are.

    All workers learn it at the same step, so that all stop after the same one.
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
        """Return the strongest wish in the vote that was begun; ``GO_ON`` where none was."""
        if self._vote is None:
            return GO_ON
        (vote, pending), self._vote = self._vote, None
        pending.wait()
        return int(vote.item())


def on_first(group: ProcessGroup, function: Callable[[], Any], name: str) -> Any:
    """Return on all workers what a function returns on rank 0: a JSON-compatible value.

    Raises:
        BurnishError: what ``function`` raised, on rank 0.
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
    """Return what a function returns on this worker, where it succeeds on all of them.

    Args:
        group: the workers.
        function: what each does by itself, however long it takes: it exchanges nothing.
        name: what the others wait for, for messages.

    Raises:
        BurnishError: what ``function`` raised here, where rank 0 did not raise the same.
        WorkerError: it failed elsewhere, or on rank 0 as here: the first rank on which it did, and its error.
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
    """Check that all workers say the same.

    Args:
        group: the workers.
        facts: what they are to agree on, in words, with JSON-compatible values.

    Raises:
        WorkerError: they do not: what differs, by rank, with both values.
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
    """Return what must be alike on all workers: the size of a data set, its arrays, its classes, and a few of its samples."""
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
    """Return the arrays that rank 0 has; all workers give arrays of the same names, shapes and dtypes."""
    if group.world_size == 1:
        return dict(state)
    import torch

    received = {}
    for name in sorted(state):
        array = np.array(state[name], order="C")  # a copy, which is written to
        if array.size:
            # As bytes: PyTorch need not know the dtype.
            content = torch.from_numpy(array.reshape(-1).view(np.uint8))
            group.broadcast(content, name=f"the state '{name}'")
        received[name] = array
    return received


def restore(group: ProcessGroup, session: Session, path: Path, strict: bool = True) -> None:
    """Restore a checkpoint that rank 0 reads, on all workers.

    Raises:
        CheckpointError: as ``Session.restore``.
        WorkerError: the same, on the others.
    """

    def read() -> None:
        with session.asking():
            session.restore(path, strict)

    if session.evaluates_together and group.rank:
        session.take_part()  # what the checkpoint lacks is taken from the present state
    on_first(group, read, f"the checkpoint '{path}'")
    take_over_state(group, session)


def take_over_state(group: ProcessGroup, session: Session) -> None:
    """Give the sessions of all workers the state that rank 0's has."""
    if group.world_size > 1 and not session.take_over(lambda name, array: spread(group, {name: array})[name]):
        state = spread(group, session.state())
        if group.rank:
            session.load_state(state)


def evaluate(
    group: ProcessGroup, session: Session, loader: Loader, *, parameters: str | None = None, looked_up: Callable[[], None]
) -> dict[str, float]:
    """Return the loss and the metrics over a data set, whose batches the workers share.

    The totals of all batches are added as one process would: counts exactly, sums rounded once. So the figures do not depend on
    the number of workers.

    Args:
        group: the workers.
        session: this worker's.
        loader: all batches, the same on all workers.
        parameters: as ``Session.evaluate`` takes it.
        looked_up: called after each batch.

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
        session.take_part()  # the others have a batch more
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
