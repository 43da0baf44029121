"""A client of a federated run: a session that trains on its own data from a round's state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from burnish.distributed.local_steps import offset_of
from burnish.distributed.samples import sample_axes
from burnish.engines import Engine
from burnish.errors import ConfigurationError, InputError
from burnish.federated.messages import Evaluation, Round, Update
from burnish.federated.sharing import Rules, rules_of
from burnish.files.identity import graph_hashes, program_hash
from burnish.program import Program, Role
from burnish.program.initialization import run_init
from burnish.program.state import Arrays, check_state
from burnish.training import Session
from burnish.training.metric_totals import Means, Sums, Totals
from burnish.validation import is_whole

Batch = Mapping[str, Any]
Batches = Iterable[Batch] | Callable[[int], Iterable[Batch]]
"""Batches that can be iterated repeatedly, such as a list, or a function from the epoch number to its batches."""


class Client:
    """Trains a program on local data.

    ``local_state`` stays here between rounds, such as normalization under ``Sharing(norm="local")``; a client that shares
    everything has none and can be created again for each round.

    Args:
        program: program to train; the same as the server's.
        data: batches of an epoch in the model's layout: a ``burnish.data.Loader``, a list, or a function from the epoch number to
            its batches. Epochs count from 0 over all rounds, so a round does not depend on where it runs.
        evaluation: batches for evaluation, or None.
        number: number of this client; each has its own random numbers.
        engine, device, threads: see ``Session``.
        seed: seed of the local state.

    Attributes:
        local_state: state that stays with the client, by name; empty before the first round.

    Raises:
        ConfigurationError: a number below 0, or data that can be iterated only once.
        EngineError: see ``Session``.
    """

    def __init__(
        self,
        program: Program,
        data: Batches,
        evaluation: Batches | None = None,
        *,
        number: int = 0,
        engine: str | Engine = "auto",
        device: str | None = None,
        threads: int | None = None,
        seed: int = 0,
    ):
        if not is_whole(number) or number < 0:
            raise ConfigurationError(f"number={number!r}: clients are counted from 0")
        for name, batches in (("data", data), ("evaluation", evaluation)):
            _check_batches(name, batches)
        self.program = program
        self.number = number
        self.local_state: Arrays = {}
        self._data, self._evaluation, self._seed = data, evaluation, seed
        self._session = Session(program, engine=engine, device=device, threads=threads, seed=seed)
        self._counted, self._axis = next(iter(sample_axes(program.signature["step"].inputs_of(Role.DATA)).items()))

    @cached_property
    def program_hash(self) -> str:
        """The program's hash."""
        return program_hash(graph_hashes(self.program), self.program.signature)

    def fit(self, round: Round) -> Update:
        """Train from a round's state, and return the result.

        Raises:
            ConfigurationError: the round is for another program.
            InputError, NonFiniteLossError: see ``Session.step``; ``local_state`` is unchanged.
        """
        rules = self._rules(round)
        before = self._began(round, rules)
        self._session.load_state(before)
        means, sums, samples, steps = Means(), Sums.of(self.program), 0, 0
        for batch in islice(self._batches_of(round), round.steps):
            taken = self._with_features(batch)
            size = self._samples(taken) if self._counted in taken else 0
            means.add(self._session.step(taken, **round.hyperparameters), size, sums)
            samples, steps = samples + size, steps + 1
        state = self._session.state()
        if rules.key is not None:
            state[rules.key] = state[rules.key] - offset_of(self.number)
        travelling = {name: state[name] for name in rules.travelling}
        self.local_state = {name: state[name] for name in self._staying(rules)}
        return Update(round.number, self.number, samples, steps, travelling, sums.averages(means))

    def evaluate(self, round: Round) -> Evaluation:
        """Evaluate a round's state with the local state on the client's own data, without training.

        Raises:
            ConfigurationError: the round is for another program, or the client has no evaluation data.
            InputError: see ``Session.evaluate``.
        """
        if self._evaluation is None:
            raise ConfigurationError(f"Client {self.number} has nothing to evaluate on: give it evaluation=")
        self._session.load_state(self._began(round, self._rules(round)))
        totals, samples = Totals(), 0
        for batch in _epoch(self._evaluation, 0):
            taken = self._with_features(batch)
            totals.add(self._session.evaluate_totals(taken))
            samples += self._samples(taken)
        return Evaluation(round.number, self.number, samples, totals.added())

    def predict(self, round: Round, batch: Batch) -> dict[str, np.ndarray]:
        """Return the model's predictions for a batch, with a round's state and the local state."""
        self._session.load_state(self._began(round, self._rules(round)))
        return self._session.predict(batch)

    @property
    def evaluates(self) -> bool:
        """True if there are evaluation data."""
        return self._evaluation is not None

    def close(self) -> None:
        """Free the engine's resources; ``local_state`` remains."""
        self._session.close()

    def _samples(self, batch: Batch) -> int:
        shape = np.shape(batch[self._counted])
        return shape[self._axis] if self._axis < len(shape) else 0

    def _with_features(self, batch: Batch) -> Batch:
        features = self._session.features
        return features.batch(batch) if features.names and not batch.keys() >= {*features.names} else batch

    def _batches_of(self, round: Round) -> Iterator[Batch]:
        first = (round.number - 1) * round.epochs
        for epoch in range(first, first + round.epochs):
            yield from _epoch(self._data, epoch)

    def _rules(self, round: Round) -> Rules:
        if round.program != self.program_hash:
            raise ConfigurationError(
                f"The round is of the program {round.program[:12]}, and client {self.number} has {self.program_hash[:12]}: give "
                "the server and all clients the same saved program"
            )
        return rules_of(self.program, round.sharing)

    def _staying(self, rules: Rules) -> list[str]:
        elsewhere = {*rules.travelling, *rules.anchors, *rules.reset}
        return [name for name in self.program.signature["step"].updates if name not in elsewhere]

    def _began(self, round: Round, rules: Rules) -> Arrays:
        return begun(self.program, rules, round, self._initial, self.local_state, self.number)

    @cached_property
    def _initial(self) -> Arrays:
        state = self.program.initial_state(self._seed)
        for entry in self.program.signature.state:
            if entry.role is Role.KEY:
                state[entry.name] = state[entry.name] + offset_of(self.number)
        return state


def begun(
    program: Program,
    rules: Rules,
    round: Round,
    initial: Mapping[str, np.ndarray],
    local_state: Mapping[str, np.ndarray],
    number: int,
) -> Arrays:
    """Return the whole state that a client begins a round with.

    Args:
        program: program of the run.
        rules: rules of its state.
        round: the round, with the shared state.
        initial: the client's state before its first round, with its own random key.
        local_state: the client's local state; empty before its first round.
        number: number of the client.

    Raises:
        ConfigurationError: the round's state does not fit the program.
    """
    entries = [entry for entry in program.signature.state if entry.name in rules.travelling]
    remedy = "Give the server and all clients the same saved program"
    check_state(entries, round.state, ConfigurationError, f"The state of round {round.number}", remedy)
    state = {**initial, **local_state, **round.state}
    if rules.key is not None:
        state[rules.key] = state[rules.key] + offset_of(number)
    if rules.reset:
        fresh = run_init(program.init, program.signature["init"], state, seed=0)
        state |= {name: fresh[name] for name in rules.reset}
    return state | {anchor: state[parameter] for anchor, parameter in rules.anchors.items()}


def client(program: Program, data: Batches, evaluation: Batches | None = None, **options: Any) -> Client:
    """Return a client of a federated run; see ``Client``. ``burnish.federated.flower.client_app`` makes it a ClientApp."""
    return Client(program, data, evaluation, **options)


def _check_batches(name: str, batches: Batches | None) -> None:
    if batches is None or callable(batches) or hasattr(batches, "epoch"):
        return
    if isinstance(batches, Mapping):
        raise ConfigurationError(f"{name} is one batch: give a list of batches, [{{...}}]")
    if not isinstance(batches, Iterable) or iter(batches) is batches:
        raise ConfigurationError(
            f"{name} can be gone through once only, and rounds go through it again: give a list, a burnish.data.Loader, or a "
            "function from the number of an epoch to its batches"
        )


def _epoch(batches: Any, number: int) -> Iterable[Batch]:
    visit = getattr(batches, "epoch", batches)  # a Loader's method
    given = visit(number) if callable(visit) else batches
    if not isinstance(given, Iterable):
        raise InputError(f"The data of epoch {number} is {given!r}: give batches, which are mappings of the inputs by name")
    return given
