"""A client in another process, in any language, which trains from checkpoint to checkpoint."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from burnish.distributed.local_steps import offset_of
from burnish.errors import ConfigurationError, WorkerError
from burnish.federated.client import Client
from burnish.federated.messages import Evaluation, Round, Update
from burnish.federated.sharing import Rules
from burnish.program import Program
from burnish.program.state import Arrays
from burnish.training.checkpoint import ProgramIdentity, check_checkpoint, read_checkpoint, write_checkpoint
from burnish.untrusted_files import UNREADABLE
from burnish.validation import is_whole

TRAIN, EVALUATE = "train", "evaluate"


class ProcessClient(Client):
    """A client that trains by a command: ``node client.mjs``, a C program, another Python.

    Each round runs ``<command> train <round.safetensors> <update.safetensors>``. The first file is a checkpoint, with ``round``,
    ``epochs``, ``steps`` and ``hyperparameters`` in ``extra``; the command writes a checkpoint of the trained state to the
    second, and prints as its last line JSON with ``samples``, the number trained on, and optionally ``metrics``. For ``<command>
    evaluate <round.safetensors>`` it prints JSON with ``samples`` and ``totals``: the sums of ``sum:<name>`` and ``count:<name>``
    from the graph ``evaluate``.

    Args:
        program: the program; the command has its own copy.
        command: program to run and its first arguments.
        number: number of this client.
        evaluates: True if the command supports ``evaluate``.
        timeout: time limit in seconds, or None.
        seed: seed of the local state.

    Raises:
        ConfigurationError: there is no command, or a number below 0.
    """

    def __init__(
        self,
        program: Program,
        command: Sequence[str],
        *,
        number: int = 0,
        evaluates: bool = False,
        timeout: float | None = None,
        seed: int = 0,
    ):
        if isinstance(command, str) or not command:
            raise ConfigurationError(f"command={command!r}: give a list, the program to run and its first arguments")
        if not is_whole(number) or number < 0:
            raise ConfigurationError(f"number={number!r}: clients are counted from 0")
        self.program, self.number, self.local_state = program, number, {}
        self._command, self._evaluates, self._timeout, self._seed = list(command), evaluates, timeout, seed
        self._identity = ProgramIdentity.of(program)

    @property
    def program_hash(self) -> str:
        return self._identity.program

    @property
    def evaluates(self) -> bool:
        return self._evaluates

    def fit(self, round: Round) -> Update:
        """Run the command on a round's state, and return the result.

        Raises:
            ConfigurationError: the round is for another program.
            WorkerError: the command failed, was killed, took too long, or printed no number of samples.
            CheckpointError: it wrote no valid checkpoint of the program.
        """
        rules = self._rules(round)
        with tempfile.TemporaryDirectory(prefix="burnish-round-") as folder:
            given, taken = Path(folder) / "round.safetensors", Path(folder) / "update.safetensors"
            before = self._write(round, rules, given)
            printed = self._run(TRAIN, given, taken)
            checkpoint = read_checkpoint(taken)
            check_checkpoint(taken, checkpoint, self.program, self._identity)
        state = dict(checkpoint.state)
        if rules.key is not None:
            state[rules.key] = state[rules.key] - offset_of(self.number)
        steps = checkpoint.step - int(before.get("step", np.zeros((), np.int64)))
        metrics = {str(name): float(value) for name, value in dict(printed.get("metrics", {})).items()}
        travelling = {name: state[name] for name in rules.travelling}
        update = Update(round.number, self.number, self._samples(printed), max(0, steps), travelling, metrics)
        self.local_state = {name: state[name] for name in self._staying(rules)}
        return update

    def evaluate(self, round: Round) -> Evaluation:
        """Evaluate a round's state with the command.

        Raises:
            ConfigurationError, WorkerError: see ``fit``.
        """
        if not self.evaluates:
            raise ConfigurationError(f"Client {self.number} does not evaluate: give it evaluates=True")
        with tempfile.TemporaryDirectory(prefix="burnish-round-") as folder:
            given = Path(folder) / "round.safetensors"
            self._write(round, self._rules(round), given)
            printed = self._run(EVALUATE, given)
        outputs = {entry.name: entry for entry in self.program.signature["evaluate"].outputs}
        totals: dict[str, np.ndarray] = {}
        for name, value in dict(printed.get("totals", {})).items():
            if name not in outputs:
                raise WorkerError(f"Client {self.number} printed a total '{name}', which the program does not have")
            is_count = outputs[name].numpy_dtype.kind in "iub"
            totals[name] = np.asarray(value, np.int64 if is_count else np.float64)
        return Evaluation(round.number, self.number, self._samples(printed), totals)

    def predict(self, round: Round, batch: Mapping[str, Any]) -> dict[str, np.ndarray]:
        raise ConfigurationError("A client in another process does not predict here: open a Session with the server's state")

    def close(self) -> None:
        """Do nothing: the command ends with each round."""

    def _write(self, round: Round, rules: Rules, path: Path) -> Arrays:
        before = self._began(round, rules)
        options = round.options()
        extra = {"round": options["number"], **{name: options[name] for name in ("epochs", "steps", "hyperparameters")}}
        step = int(before.get("step", np.zeros((), np.int64)))
        write_checkpoint(path, before, step=step, identity=self._identity, engine="federated", extra=extra)
        return before

    def _run(self, what: str, *paths: Path) -> dict[str, Any]:
        subject = f"Client {self.number} ({self._command[0]} {what})"
        try:
            done = subprocess.run(
                [*map(str, self._command), what, *map(str, paths)],
                capture_output=True,
                text=True,
                timeout=self._timeout,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise WorkerError(f"{subject} took longer than {self._timeout:g} s and was stopped") from error
        except OSError as error:
            raise WorkerError(f"{subject} cannot be started: {error}", comes_again=True) from error
        if done.returncode:
            ended = f"was killed by signal {-done.returncode}" if done.returncode < 0 else f"ended with status {done.returncode}"
            raise WorkerError(f"{subject} {ended}: {(done.stderr.strip().splitlines() or ['it printed no error'])[-1]}")
        try:
            printed = json.loads(done.stdout.strip().splitlines()[-1])
            return dict(printed)
        except UNREADABLE as error:
            raise WorkerError(f'{subject} printed no JSON as its last line, such as {{"samples": 100}}') from error

    def _samples(self, printed: Mapping[str, Any]) -> int:
        samples = printed.get("samples")
        if not is_whole(samples) or samples < 0:
            raise WorkerError(f"Client {self.number} printed samples={samples!r}: a whole number of at least zero belongs there")
        return int(samples)
