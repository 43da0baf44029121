"""What several workers come to, beside what one with the whole batch comes to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import onnx_ir as ir
import torch

import burnish
from burnish.compiler.lowered_graphs import LoweredGraphs
from burnish.distributed import ArrayCommunicator
from burnish.distributed import options as options_of_workers
from burnish.engines.communicator import Communicator
from burnish.engines.torch import fusion as preparation
from oracles.thread_communicator import ThreadCommunicator

Batch = Mapping[str, np.ndarray]
Outcome = tuple[list[dict[str, float]], list[dict[str, np.ndarray]]]
"""What each step reported, and the state behind it."""


def train(session: burnish.Session, batches: Sequence[Batch]) -> Outcome:
    """The reports and states of some steps."""
    reports, states = [], []
    for batch in batches:
        reports.append(session.step(batch))
        states.append(session.state())
    return reports, states


def train_alone(program: burnish.Program, batches: Sequence[Batch], **options: Any) -> Outcome:
    with burnish.Session(program, engine="torch", threads=1, **options) as session:
        return train(session, batches)


def part_of(batch: Batch, rank: int, sizes: Sequence[int]) -> dict[str, np.ndarray]:
    """The samples of one worker, where each has as many as ``sizes`` says, in the order of the ranks."""
    start = sum(sizes[:rank])
    return {name: array[start : start + sizes[rank]] for name, array in batch.items()}


def train_part(
    communicator: Communicator,
    program: burnish.Program | str,
    batches: Sequence[Batch],
    sizes: Sequence[Sequence[int]],
    options: Mapping[str, Any],
) -> Outcome:
    """What one worker comes to; ``sizes`` says for every step how many samples each worker has."""
    loaded = burnish.Program.load(program) if isinstance(program, str) else program
    parallel = burnish.DataParallel(communicator=communicator, **options)
    parts = [part_of(batch, communicator.rank, split) for batch, split in zip(batches, sizes, strict=True)]
    with burnish.Session(loaded, engine="torch", threads=1, parallel=parallel) as session:
        return train(session, parts)


@contextmanager
def graphs_made_once() -> Iterator[None]:
    """Let the first of several threads derive, lower and fuse a program's graphs for all: each worker's are the same."""
    lock, made, fused = threading.RLock(), [], []
    derive, lowered, fuse = options_of_workers.derive, LoweredGraphs._lowered, preparation.fuse

    def once(make: Callable[[], Any], graphs: LoweredGraphs, *key: object) -> Any:
        grad = graphs.semantic.get("grad")
        key = (graphs.target, graphs.optimizer, graphs.recompute, graphs.marks, *key)
        with lock:
            for other, others_key, result in made:
                if other is grad and others_key == key:
                    return result
            result = make()
            made.append((grad, key, result))
            return result

    def derive_once(graphs: LoweredGraphs, *arguments: Any, **options: Any) -> LoweredGraphs:
        return once(lambda: derive(graphs, *arguments, **options), graphs, *arguments, *options.items())

    def lowered_once(graphs: LoweredGraphs, name: str) -> ir.Model:
        model = once(lambda: lowered(graphs, name), graphs, name)
        copy = model.clone()
        copy.graph.meta["copied from"] = (model, graphs.rewrites.get(name))
        return copy

    def fuse_once(model: ir.Model, *settings: object, **options: Any) -> ir.Model:
        key = (model.graph.meta.get("copied from"), settings, options)
        if key[0] is None:
            return fuse(model, *settings, **options)
        with lock:
            result = next((result for others_key, result in fused if others_key == key), None)
            if result is None:
                result = fuse(model, *settings, **options)
                fused.append((key, result))
            return result.clone()

    with (
        mock.patch.object(options_of_workers, "derive", derive_once),
        mock.patch.object(LoweredGraphs, "_lowered", lowered_once),
        mock.patch.object(preparation, "fuse", fuse_once),
    ):
        yield


def in_threads(workers: int, work: Callable[[ThreadCommunicator], Any]) -> list[Any]:
    """Call a function once for each worker, all in threads of their own; raises what the first that failed raised."""
    communicators = ThreadCommunicator.group(workers)
    results: list[Any] = [None] * workers
    errors: list[BaseException] = []

    def call(communicator: ThreadCommunicator) -> None:
        try:
            results[communicator.rank] = work(communicator)
        except BaseException as error:
            errors.append(error)
            communicator.abort()

    threads = [threading.Thread(target=call, args=(communicator,)) for communicator in communicators]
    with graphs_made_once():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise next((error for error in errors if "BrokenBarrierError" not in repr(error)), errors[0])
    return results


def in_array_threads(workers: int, work: Callable[[ArrayCommunicator], Any]) -> list[Any]:
    """The same, of workers that two functions of arrays connect."""

    def adapted(inside: ThreadCommunicator) -> Any:
        def gathered(array: np.ndarray) -> np.ndarray:
            return inside.all_gather(torch.from_numpy(array.copy())).numpy()

        return work(ArrayCommunicator(inside.rank, inside.size, lambda array: gathered(array).sum(0), gathered))

    return in_threads(workers, adapted)


def train_in_threads(
    program: burnish.Program, batches: Sequence[Batch], sizes: Sequence[Sequence[int]], **options: Any
) -> list[Outcome]:
    """What workers come to that are threads of this process."""
    return in_threads(len(sizes[0]), lambda communicator: train_part(communicator, program, batches, sizes, options))


def largest_difference(one: Outcome, other: Outcome) -> float:
    """The largest difference of anything reported and of any state entry, relative to the largest value of each."""
    worst = 0.0
    for ours, theirs in zip(one[0], other[0], strict=True):
        assert ours.keys() == theirs.keys()
        worst = max([worst, *(abs(ours[name] - theirs[name]) / max(1.0, abs(theirs[name])) for name in ours)])
    for state, expected in zip(one[1], other[1], strict=True):
        assert state.keys() == expected.keys()
        for name, array in expected.items():
            difference = np.abs(state[name].astype(np.float64) - array.astype(np.float64)).max(initial=0)
            worst = max(worst, difference / max(1.0, np.abs(array.astype(np.float64)).max(initial=0)))
    return worst if np.isfinite(worst) else np.inf
