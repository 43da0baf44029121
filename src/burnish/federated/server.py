"""The server of a federated run, which holds the shared state and combines the clients' updates."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from burnish import optim
from burnish.engines.non_finite_loss import first_non_finite
from burnish.errors import CheckpointError, ConfigurationError
from burnish.federated.messages import Evaluation, Round, Update
from burnish.federated.server_optimizer import ServerOptimizer, method
from burnish.federated.sharing import Sharing, joined, rules_of
from burnish.files.export import export_inference, save_inference
from burnish.files.state_file import read_state_file, write_state_file
from burnish.program import Program
from burnish.program.state import Arrays, check_state, state_differences
from burnish.training.checkpoint import ProgramIdentity, check_checkpoint, finite_check, read_checkpoint, write_checkpoint
from burnish.training.inputs import check_given_state
from burnish.training.metric_totals import Means, Sums, Totals, figures
from burnish.validation import is_whole

STATE = "state.safetensors"


@dataclass(frozen=True)
class RoundReport:
    """The report of a round.

    Attributes:
        number: number of the round.
        joined: sorted numbers of the clients whose updates were used.
        samples: samples they trained on.
        metrics: averages over their steps, weighted by samples.
        refused: client -> reason why its update was rejected: late, damaged, or for another program.
        is_lost: True if too few updates were left, so the state is unchanged.
    """

    number: int
    joined: tuple[int, ...]
    samples: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    refused: Mapping[int, str] = field(default_factory=dict)
    is_lost: bool = False


class Server:
    """Holds the state of a federated run, and updates it from the clients.

    Args:
        program: program that the clients train.
        optimizer: use of the clients' average: ``fedavg`` takes it as it is; ``fedavgm`` and ``fedadam``, with settings after a
            colon (``fedadam:lr=0.01``), or an optimizer of ``burnish.optim`` take the difference to it as the gradient.
        sharing: state that clients share.
        state: initial state, by name; ``program.initial_state(seed)`` by default.
        seed: seed of the initial state.
        minimum: fewest updates; with fewer the round is lost and the state unchanged.

    Attributes:
        number: number of finished rounds.

    Raises:
        ConfigurationError: an invalid argument or state.
    """

    def __init__(
        self,
        program: Program,
        optimizer: str | optim.Optimizer | None = "fedavg",
        *,
        sharing: Sharing | None = None,
        state: Mapping[str, np.ndarray] | None = None,
        seed: int = 0,
        minimum: int = 1,
    ):
        if not is_whole(minimum) or minimum < 1:
            raise ConfigurationError(f"minimum={minimum!r}: a round needs the updates of one client or more")
        self.program, self.sharing, self.number = program, sharing or Sharing(), 0
        self._minimum = minimum
        self._rules = rules_of(program, self.sharing)
        self._state: Arrays = dict(program.initial_state(seed) if state is None else state)
        check_given_state(program, self._state)
        made, parameters = method(optimizer), [name for name in self._rules.mean if name.startswith("param/")]
        self._optimizer = None if made is None else ServerOptimizer(made, program, parameters, self._state)

    @cached_property
    def _identity(self) -> ProgramIdentity:
        return ProgramIdentity.of(self.program)

    @property
    def program_hash(self) -> str:
        """The program's hash."""
        return self._identity.program

    def begin(self, *, epochs: int = 1, steps: int | None = None, **hyperparameters: float) -> Round:
        """Return the next round for the clients; may be called repeatedly.

        Args:
            epochs: epochs of each client.
            steps: most steps.
            hyperparameters: values for each step, such as ``lr=0.01``.

        Raises:
            ConfigurationError: a number below 1, or a hyperparameter that the program does not have.
        """
        known = {entry.name for entry in self.program.signature["step"].inputs if entry.default is not None}
        if unknown := [name for name in hyperparameters if name not in known]:
            raise ConfigurationError(
                f"'{unknown[0]}' is no hyperparameter of this program, which has {', '.join(sorted(known)) or 'none'}"
            )
        state = {name: self._state[name].copy() for name in self._rules.travelling}
        return Round(self.number + 1, self.program_hash, state, self.sharing, epochs, steps, hyperparameters)

    def join(self, updates: Iterable[Update]) -> RoundReport:
        """End the round with the clients' updates, in any order; missing updates are allowed.

        Updates that are late, do not fit, or hold NaN or infinity are left out and reported. The resulting state is bitwise
        independent of their order.

        Raises:
            ConfigurationError: a client has two updates.
        """
        refused: dict[int, str] = {}
        taken: dict[int, Update] = {}
        for update in updates:
            if update.client in taken or update.client in refused:
                raise ConfigurationError(
                    f"Client {update.client} has two updates in one round: give each client a number of its own"
                )
            if reason := self._refusal(update):
                refused[update.client] = reason
            elif update.samples:
                taken[update.client] = update
        ordered = [taken[client] for client in sorted(taken)]
        samples, metrics, sums = sum(update.samples for update in ordered), Means(), Sums.of(self.program)
        for update in ordered:
            metrics.add(update.metrics, update.samples, sums)
        self.number += 1
        is_lost = len(ordered) < self._minimum
        if not is_lost:
            self._state |= self._joined(ordered)
        return RoundReport(self.number, tuple(sorted(taken)), samples, sums.averages(metrics), refused, is_lost)

    def evaluated(self, evaluations: Iterable[Evaluation]) -> dict[str, float]:
        """Return loss and metrics over all samples of the clients, as for one dataset.

        Raises:
            InputError: no samples count for one of them.
        """
        totals = Totals()
        for evaluation in sorted(evaluations, key=lambda evaluation: evaluation.client):
            totals.add(evaluation.totals)
        return figures(totals.added(), self.program.options.get("loss_terms", {}))

    def state(self) -> Arrays:
        """Return copies of the whole state for ``Session``; state that stays with clients has its initial values."""
        return {name: array.copy() for name, array in self._state.items()}

    def take(self, shared: Mapping[str, np.ndarray]) -> None:
        """Replace the shared state, by name.

        Raises:
            ConfigurationError: a name is missing or unknown, or a shape or dtype differs; the state is unchanged.
        """
        entries = [entry for entry in self.program.signature.state if entry.name in self._rules.travelling]
        check_state(entries, shared, ConfigurationError, "The state", "Give what begin() returned as state")
        self._state |= {name: np.array(shared[name]) for name in self._rules.travelling}

    def export(self, path: str | Path, fold_norm: bool = True) -> Path:
        """Write an inference model of this state; see ``Session.export``."""
        return save_inference(export_inference(self.program, self._state, fold_norm), path)

    def save(self, folder: str | Path) -> None:
        """Write the run to a folder: ``state.safetensors``, a checkpoint also for sessions, and the optimizer's state.

        An interrupted save leaves the previous one intact.

        Raises:
            CheckpointError: it cannot be written, or holds NaN or infinity.
        """
        folder = Path(folder)
        slots = f"optimizer-{self.number}.safetensors"
        folder.mkdir(parents=True, exist_ok=True)
        if self._optimizer is not None:
            # Written before the checkpoint that names it, so an interrupted save leaves the old pair intact.
            write_state_file(folder / slots, self._optimizer.state, {"format": "burnish federated optimizer"})
        extra: dict[str, Any] = {"round": self.number, "sharing": self.sharing.options()}
        extra |= {} if self._optimizer is None else {"optimizer": slots}
        step = int(self._state.get("step", np.zeros((), np.int64)))
        check = finite_check(folder / STATE, self.program.signature["step"].updates)
        write_checkpoint(
            folder / STATE, self._state, step=step, identity=self._identity, engine="federated", extra=extra, check=check
        )
        for old in folder.glob("optimizer-*.safetensors"):
            if old.name != slots:
                old.unlink(missing_ok=True)

    def restore(self, folder: str | Path) -> None:
        """Resume a run that ``save`` wrote.

        Raises:
            CheckpointError: it is missing, damaged, or of another program.
            ConfigurationError: it was saved with another sharing or optimizer.
        """
        folder = Path(folder)
        checkpoint = read_checkpoint(folder / STATE)
        check_checkpoint(folder / STATE, checkpoint, self.program, self._identity)
        extra = checkpoint.extra
        if not is_whole(extra.get("round")) or not isinstance(extra.get("sharing"), dict):
            raise CheckpointError(f"'{folder / STATE}' is a checkpoint of a session, not of a federated run: give it as state=")
        if extra["sharing"] != self.sharing.options():
            raise ConfigurationError(
                f"The run in '{folder}' was saved with the sharing {json.dumps(extra['sharing'])}: give the server the same"
            )
        slots = extra.get("optimizer")
        if (slots is None) is not (self._optimizer is None):
            raise ConfigurationError(f"The run in '{folder}' was saved with another optimizer of the server: give the same")
        if self._optimizer is not None:
            self._optimizer.load_state(read_state_file(folder / Path(str(slots)).name, "optimizer's state")[0])
        self._state, self.number = dict(checkpoint.state), extra["round"]

    def _refusal(self, update: Update) -> str:
        if update.round != self.number + 1:
            return f"it is of round {update.round}, and this is round {self.number + 1}"
        entries = [entry for entry in self.program.signature.state if entry.name in self._rules.travelling]
        if differences := state_differences(entries, update.state):
            return f"its state does not fit: {'; '.join(differences)}"
        if (damaged := first_non_finite(update.state)) is not None:
            return f"'{damaged}' holds NaN or infinite values"
        negative = [variance for _, variance in self._rules.moments if (update.state[variance] < 0).any()]
        return f"the running variance '{negative[0]}' is negative" if negative else ""

    def _joined(self, updates: list[Update]) -> Arrays:
        before = {name: self._state[name] for name in self._rules.travelling}
        following = joined(self._rules, before, [update.state for update in updates], [update.samples for update in updates])
        furthest = max(updates, key=lambda update: update.steps).state  # the first one, if several
        counted = (*self._rules.counted, *(() if self._rules.key is None else (self._rules.key,)))
        following |= {name: np.array(furthest[name]) for name in counted}
        if self._optimizer is not None:
            moved = self._optimizer.update(before, following)
            for name, rows in self._rules.held_rows.items():
                if name in moved:
                    moved[name][list(rows)] = before[name][list(rows)]
            following |= moved
        return following
