"""The session: a program opened on an engine, with its state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from burnish import engines
from burnish.engines import Engine, ProgramRunner
from burnish.engines.array_runner import InheritedRunner
from burnish.engines.base import NOTHING, HandedOver, described
from burnish.engines.row_writes import RowWriter
from burnish.errors import CarryOverWarning, CheckpointError, ConfigurationError, EngineError, ObjectiveWarning
from burnish.graph import garbage_kept
from burnish.graph.annotations import COLUMNS
from burnish.program import Program, Role
from burnish.program.state import EntriesOnRequest, averages
from burnish.stopping import RunStopped, TimeLimit, watch_interrupts
from burnish.training.cells import cell
from burnish.training.checkpoint import (
    AdapterBase,
    ProgramIdentity,
    carried_from,
    check_checkpoint,
    finite_check,
    open_checkpoint,
    read_checkpoint,
    with_base,
    write_checkpoint,
)
from burnish.training.features import Features
from burnish.training.inputs import BatchCheck, HyperparameterCheck, by_only_input, check_given_state
from burnish.training.objective import FirstStep, check_inputs
from burnish.training.session_calls import TakesPart, one_at_a_time, take_part_in_turns
from burnish.training.tables import ClosedTables, Journal, SessionTables, check_journal, save_journal
from burnish.warn import warn

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from burnish.distributed import DataParallel

STEP_REPORT = (Role.LOSS, Role.METRIC, Role.DIAGNOSTIC)


class Session(TakesPart):
    """A program on an engine with its state: runs steps, evaluates, predicts, saves and restores.

    A session takes one call at a time: threads that share it wait for each other, call by call. Separate sessions run at the same
    time.

    Args:
        program: program to train.
        engine: name (``auto``, ``onnxruntime``, ``reference``, or one that a package registers) or an Engine.
        state: initial state, as from ``state()``; None is ``program.initial_state(seed)``.
        seed: seed of the random key if ``state`` is None.
        device: device of the engine, such as ``cpu``; None is the engine's choice.
        threads: threads used inside one operator; None is the engine's choice. Same seed and threads: same results, bitwise.
        parallel: None trains without other workers. With ``burnish.DataParallel()`` every worker opens a session of the same
            program, and gives each step its part of the batch, of any size, or an empty one; a step reports figures of the whole
            batch.
        tables: folder for memory-mapped files with the embedding tables that are updated by rows, and their optimizer state. They
            may exceed memory, and are a working copy: a run resumes from checkpoints.

    Attributes:
        metadata: entries for the ``metadata_props`` of exported models, besides those of the source: with a ``Trainer``, pixel
            preprocessing and class names (``burnish.data.DataDescription``). Checkpoints store them.
        features: function from a batch of a program with cached features to the features by name (``Features``).

    Raises:
        ConfigurationError: ``state`` does not fit the program, ``seed`` is not an integer, or the workers' programs differ.
        EngineError: the engine or the device is not available, or the engine cannot exchange values with other workers.
    """

    @garbage_kept()
    def __init__(
        self,
        program: Program,
        engine: str | Engine = "auto",
        state: Mapping[str, np.ndarray] | None = None,
        seed: int = 0,
        device: str | None = None,
        threads: int | None = None,
        parallel: DataParallel | None = None,
        tables: str | Path | None = None,
    ):
        if not isinstance(program, Program):
            raise ConfigurationError(
                f"A session opens a program, not a {type(program).__name__}: give what burnish.compile or Program.load returns"
            )
        if parallel is not None:
            from burnish.distributed import DataParallel

            DataParallel.check(parallel)
        take_part_in_turns(self)
        self._limit: TimeLimit | None = None
        self._open(program, engine, state, seed, device, threads, parallel, tables)

    @one_at_a_time
    def _open(
        self,
        program: Program,
        engine: str | Engine,
        state: Mapping[str, np.ndarray] | None,
        seed: int,
        device: str | None,
        threads: int | None,
        parallel: DataParallel | None,
        tables: str | Path | None,
    ) -> None:
        watch_interrupts()
        self.program = program
        self._departures = () if state is not None else tuple(program.options.get("departures", ()))
        self.engine = engines.get(engine)
        self._tables: SessionTables | None = None
        if tables is not None:
            is_own, state = state is None, program.initial_entries(seed) if state is None else state
            check_given_state(self.program, state)
            self._tables = SessionTables(tables, program, state, is_own, parallel is not None)
            state = self._tables.instead(state)
        elif state is None:
            state = program.initial_state(seed)
            is_taken = parallel is None or parallel.shard_tables is not None
            state = HandedOver(state) if is_taken else state
        program.release_weights()
        check_given_state(self.program, state)
        self._step_name = next((entry.name for entry in program.signature.state if entry.role is Role.STEP), None)
        step = program.signature["step"]
        labels = tuple(entry.name for entry in step.inputs_of(Role.LABEL))
        self._step_batch = BatchCheck(step, part=parallel is not None)
        self._step_hyperparameters = HyperparameterCheck(step)
        self._reported = tuple(entry.name for entry in step.outputs_of(*STEP_REPORT, Role.RATE))
        self.features = Features(program, self.engine, device, threads, self._look_at_inputs, parallel is not None)
        self._evaluated_batch = BatchCheck(program.signature["evaluate"])
        self._predicted_batch = BatchCheck(program.signature["predict"], ignored=labels)
        self._runner: ProgramRunner | None
        if parallel is None:
            self._runner = self.engine.open(program.graphs.lowered_to(self.engine.target), state, device=device, threads=threads)
        else:
            self._runner = parallel.open(program, self.engine, state, device=device, threads=threads)
        if self._tables is not None:
            self._tables.check(self.engine.name, self._runner.row_writer)
        self._closed_state: dict[str, np.ndarray] = {}
        self._closed_tables: RowWriter | None = None
        self._journal: Journal | None = None
        self._base = AdapterBase(program)
        self._has_part = False
        self.metadata: dict[str, str] = {}
        self._first_step: FirstStep | None = FirstStep(program, threads)
        self._device, self._threads = device, threads

    def __repr__(self) -> str:
        found = self.describe()
        kernels = "none" if found["kernels"] is None else found["level"]
        return f"Session({found['engine']}, kernels={kernels}, threads={found['threads']}, step={self.step_count})"

    def _repr_html_(self) -> str:
        found = self.describe()
        kernels = "none" if found["kernels"] is None else found["level"]
        rows = [("engine", found["engine"]), ("kernels", kernels), ("threads", found["threads"]), ("steps", self.step_count)]
        return cell("Session", [*rows, *self.program.overview()])

    def compare_with(self, file: Path) -> None:
        """Make the first step compare the program's predictions with the file it was compiled from, on its batch.

        A difference is a warning (``ObjectiveWarning``). Workers that evaluate together do not compare.
        """
        if self._first_step is not None:
            self._first_step.file = file

    def describe(self) -> dict[str, Any]:
        """Return the engine, kernels and precision of the session, JSON-compatible.

        Returns:
            - ``engine``: its name.
            - ``kernels``: path of the library of burnish's own kernels, or None.
            - ``kernels_reason``: reason why there are none, or None.
            - ``level``: instructions of the processor that the kernels use, such as ``avx512``; without kernels, those available.
            - ``threads``: threads used inside one operator.
            - ``precision``: precision of the program, such as ``float32``.
            - ``route``: execution of a step on the engine, in words; None if the engine does not report it, or the session is
              closed.
        """
        found = described(self.engine, self._device, self._threads)
        return {
            "engine": self.engine.name,
            **{key: found[key] for key in ("kernels", "kernels_reason", "level", "threads")},
            "precision": self.program.options.get("precision", "float32"),
            "route": None if self._runner is None else self._runner.route,
        }

    @one_at_a_time
    def step(self, batch: Mapping[str, Any], **hyperparameters: float) -> dict[str, float]:
        """Run one training step.

        Args:
            batch: the model's inputs and the labels, by name.
            hyperparameters: values for this step, such as ``lr=0.01``, that override the program's.

        Returns:
            The loss and the metrics of this batch, from before the update. If the loss is scaled, also ``loss_scale``, the scale
                of this step, and ``skipped``: 1 if its gradients overflowed, so that only the random key and the scale changed;
                else 0. If the program computes its learning rate, also that of this step, ``lr``.

        Raises:
            InputError: the batch does not fit the program; nothing has run.
            ConfigurationError: a hyperparameter is unknown, not a finite number or negative, ``lr`` is given to a program that
                computes it, or the step is past the end of its schedule; nothing has run.
            NonFiniteLossError: the loss is NaN or infinite; the state is the one from before the step.
            EngineError: the engine failed, or the session is closed.
        """
        signature = self.program.signature["step"]
        inputs = {**self._step_batch(batch), **self._step_hyperparameters(hyperparameters)}
        runner = self._require_runner()
        if signature.end is not None and self.step_count >= signature.end:
            raise ConfigurationError(
                f"The learning-rate schedule of this program ends after {signature.end:,} steps, and the state has taken "
                f"{self.step_count:,}: compile with a schedule of more steps, or with past_end='hold' to go on at its last rate"
            )
        first = self._first_step
        with self._limited():
            if first is None or runner.evaluates_together:  # a worker without samples would predict nothing
                outputs = runner.step(inputs)
            else:
                self._first_step = None
                outputs = first.run(runner, inputs)
        return {name: outputs[name].item() for name in self._reported}

    @one_at_a_time
    def _look_at_inputs(self, batch: Mapping[str, Any]) -> None:
        """Check the values of a batch before features are computed from it, as steps do not see its inputs."""
        signature = self.program.signature["predict"]
        names = {entry.name for entry in signature.inputs_of(Role.DATA)}
        if self._runner is not None and not self.evaluates_together and names <= batch.keys():
            check_inputs(self.program, self._runner, self._predicted_batch({name: batch[name] for name in names}))

    def evaluate(self, batch: Mapping[str, Any], parameters: str | None = None) -> dict[str, float]:
        """Return the loss and the metrics of one batch, in inference mode; the state does not change.

        Args:
            batch: the model's inputs and the labels, by name.
            parameters: ``average`` evaluates the averaged weights of the optimizer (``burnish.optim.ema``, ``swa``).

        Raises:
            InputError: the batch does not fit the program.
            ConfigurationError: the optimizer keeps no average.
        """
        from burnish.training.metric_totals import figures_of_batch

        outputs = self._evaluated(batch, parameters)
        return figures_of_batch(outputs)

    def evaluate_totals(self, batch: Mapping[str, Any], parameters: str | None = None) -> dict[str, np.ndarray]:
        """Return the totals of one batch, which can be added over batches, replicas or clients.

        Args:
            batch, parameters: as in ``evaluate``.

        Returns:
            ``sum:<name>`` and ``count:<name>`` of the loss and of each metric that is their quotient, and ``total:<name>:<part>``
            of the others; a loss that is a weighted sum has a pair ``loss:<summand>`` for each summand instead of its own. Counts
            are int64 arrays, sums float64; both can be added directly. ``combine_totals`` computes figures from them.
        """
        from burnish.training.metric_totals import only_totals

        return only_totals(self._evaluated(batch, parameters))

    def combine_totals(self, totals: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Return the loss and the metrics from totals added over any number of batches.

        Raises:
            InputError: nothing counts towards one of them.
        """
        from burnish.training.metric_totals import figures

        return figures(totals, self.program.options.get("loss_terms", {}))

    def evaluate_data(
        self,
        batches: Iterable[Mapping[str, Any]],
        progress: Callable[[int], None] | None = None,
        parameters: str | None = None,
    ) -> dict[str, float]:
        """Return the loss and the metrics over many batches, from totals over all their samples.

        Batches may differ in size; each weighs as much as its samples.

        Args:
            batches: batches for ``evaluate``.
            progress: function called after each batch with the number of batches done.
            parameters: as in ``evaluate``.

        Raises:
            InputError: a batch does not fit, there are none, or nothing in them counts.
        """
        from burnish.training.metric_totals import totals_over

        return self.combine_totals(totals_over(batches, lambda batch: self.evaluate_totals(batch, parameters), progress))

    @one_at_a_time
    def predict(self, batch: Mapping[str, Any] | ArrayLike, parameters: str | None = None) -> dict[str, np.ndarray]:
        """Return the model's outputs by name, in inference mode.

        Args:
            batch: the model's inputs by name (labels are ignored); or an array, if the model has one input.
            parameters: ``average`` predicts with the averaged weights of the optimizer.

        Raises:
            InputError: the batch does not fit the program; or it is one array, and the program has several inputs.
            ConfigurationError: the optimizer keeps no average.
        """
        if self._departures:
            self._tell_departures("predict")
        given = batch if isinstance(batch, Mapping) else by_only_input(self.program.signature["predict"], batch)
        predict, inputs = self._require_runner().predict, self._predicted_batch(given)
        with self._limited():
            return dict(predict(inputs, *self._instead(parameters)))

    @property
    @one_at_a_time
    def step_count(self) -> int:
        """The number of steps that the state has taken."""
        if self._step_name is None:
            return 0
        if self._runner is None:
            return int(self._closed_state[self._step_name])
        return int(self._runner.state_entry(self._step_name))

    @one_at_a_time
    def state(self) -> dict[str, np.ndarray]:
        """Return copies of the state, by state name; also from a closed session.

        All workers call it at the same time with ``DataParallel(shard_optimizer=True)`` or ``shard_tables``, between the updates
        of an optimizer that accumulates, and with ``synchronize_every``, as the call ends a round. While one worker calls
        ``save_checkpoint`` or ``export``, which read the state, the others call ``take_part``.

        Raises:
            EngineError: the session is closed, and other workers had a part of its state.
        """
        if self._runner is None:
            if self._has_part:
                raise EngineError(
                    "The session is closed, and other workers hold a part of its state (shard_optimizer=True, gradients "
                    "accumulated since the last update, a round of synchronize_every, or shard_tables): take the state, or write "
                    "the checkpoint, before it is closed"
                )
            self._settle()
            return {name: array.copy() for name, array in self._closed_state.items()}
        return self._require_runner().state()

    @one_at_a_time
    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Replace the whole state.

        Raises:
            ConfigurationError: a name is missing or unknown, or a shape or dtype differs; the state is unchanged.
        """
        check_given_state(self.program, state)
        self._load(state)

    @one_at_a_time
    def save_checkpoint(self, path: str | Path, extra: Mapping[str, Any] | None = None, journal: bool = False) -> None:
        """Write the whole state into one safetensors file, atomically.

        Args:
            path: file name, by convention ending in ``.safetensors``; its folder is created.
            extra: JSON-compatible values to store, which ``restore`` returns: the position in the data.
            journal: True to write, for embedding tables that are updated by rows, only the rows that changed since the last
                checkpoint with a journal in this folder. They go into the folder ``journal`` next to the file, which has the
                remaining state and needs it. The first such checkpoint writes all rows.

        Raises:
            CheckpointError: the file cannot be written, or the state has NaN or infinite values; an earlier file is untouched.
            ConfigurationError: ``journal`` for a program without such tables, or an engine that does not track written rows.
        """
        check = finite_check(path, self.program.signature["step"].updates)
        described: dict[str, Any] = {"step": self.step_count, "identity": self._identity, "engine": self.engine.name}
        described |= {"extra": extra, "metadata": self.metadata}
        with self._state_on_request() as state:
            if journal:
                self._journal = save_journal(self._journal, path, self.program, state, self._row_writer(), check, **described)
                if self._tables is not None and self._runner is not None:
                    self._tables.follow(self._journal.place)
            else:
                described["base"] = self._base.hash(state)
                write_checkpoint(path, self._base.left_out_of(state), check=check, **described)

    @one_at_a_time
    def restore(self, path: str | Path, strict: bool = True) -> dict[str, Any]:
        """Restore the state of a checkpoint from any engine.

        Args:
            path: the file.
            strict: True rejects a checkpoint of another program; its ``metadata`` is restored too. False carries over entries
                that this program shares in shape and dtype: after a change of the optimizer, of the loss, or of a batch size that
                the model fixes. Other entries keep their present values, and a warning (``CarryOverWarning``) names them.

        Returns:
            The ``extra`` stored with it.

        Raises:
            CheckpointError: the file is missing, truncated, not a checkpoint or of a newer format; or, when strict, of another
                program; or it shares no parameter with this program. The state is unchanged.
        """
        if strict:
            known = None if self._tables is None else self._tables.agrees_with
            with open_checkpoint(path, known) as opened, self._beside(opened.base) as present:
                state = with_base(path, opened, self._base, present)
                check_checkpoint(path, replace(opened, state=state), self.program, self._identity)
                self._load(state, Journal.at(Path(path), opened.journal))
            self.metadata = {**self.metadata, **opened.metadata}
            return opened.extra
        carried = carried_from(path, checkpoint := read_checkpoint(path), self.program, self.state())
        self._load(carried.state)
        if notes := carried.notes():
            said = f"'{path}' was taken over in part: {'; '.join(notes)}"
            warn(CarryOverWarning(said, carried.fresh, carried.dropped))
        return checkpoint.extra

    @garbage_kept()
    @one_at_a_time
    def export(
        self,
        path: str | Path,
        fold_norm: bool = True,
        parameters: str | None = None,
        adapters: str = "merged",
        columns: bool = True,
    ) -> Path:
        """Write an inference model with this state that any ONNX runtime loads, under the source's own names.

        If it was trained on a table with standardized, filled or coded columns, the model includes this preprocessing: it takes
        raw columns, with an input for each column if some are text.

        Args:
            path: ``.onnx`` file, written atomically.
            fold_norm: compute weights under weight normalization once, and fold batch normalization into the layer before or
                after it, if that is exact up to rounding.
            parameters: ``average`` writes the averaged weights of the optimizer instead of the parameters.
            adapters: for a program with adapters, ``merged`` into the weights; ``kept`` next to them; ``apart``, in an
                ``.onnx_adapter`` next to the model, for ONNX Runtime; as required ``inputs`` of the model, with their values in a
                ``.safetensors`` next to it; or ``peft``, without the model: a folder that PEFT reads (``docs/adapters.md``).
            columns: False writes a model that takes columns in the session's form.

        Returns:
            The path.

        Raises:
            CheckpointError: the file cannot be written.
            ConfigurationError: the optimizer keeps no average; or ``adapters`` is unknown, or the program has none.
        """
        from burnish.adapters.exports import check_form, save_with_adapters
        from burnish.files.export import export_inference

        check_form(adapters, self.program.metadata)
        if self._departures:
            self._tell_departures("the exported model")
        with self._state_on_request(*self._instead(parameters)) as state:
            model = export_inference(self.program, state, fold_norm, self.metadata, merge=adapters == "merged")
            if columns and COLUMNS.is_on(model) and adapters != "peft":
                from burnish.data.table_graph import put_columns

                reason = put_columns(model)
                if reason is not None:
                    warn(ObjectiveWarning(reason))
            return save_with_adapters(model, path, adapters)

    @one_at_a_time
    def close(self) -> None:
        """Free the engine's resources. The state stays readable: ``state``, ``save_checkpoint`` and ``export`` still work."""
        runner = self._runner
        if runner is not None:
            self._has_part = runner.is_spread
            if self._has_part:
                self._closed_state = runner.own_state()
            else:
                # A truncated table leaves nothing to keep; reading the state later reports the error.
                with suppress(CheckpointError), self._state_on_request() as state:
                    self._closed_state = dict(state)
            if runner.row_writer is not None:
                self._closed_tables = ClosedTables(runner.row_writer.row_changes, self._closed_state)
        self._runner = None
        self.features.close()
        if self._tables is not None:
            self._tables.close()

    @one_at_a_time
    def check_journal(self) -> None:
        """Raise ConfigurationError if ``save_checkpoint`` cannot take ``journal``."""
        self._row_writer()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    @cached_property
    def _identity(self) -> ProgramIdentity:
        return ProgramIdentity.of(self.program)

    def _beside(self, base: str | None) -> AbstractContextManager[Mapping[str, np.ndarray]]:
        return nullcontext({}) if base is None else self._state_on_request()

    def _require_runner(self, settled: bool = True) -> ProgramRunner:
        """Return the runner, with its tables filled if ``settled``; raise EngineError if the session is closed."""
        if self._runner is None:
            raise EngineError("The session is closed: open another with Session(program, state=session.state())")
        if settled:
            self._settle()
        return self._runner

    def _settle(self) -> None:
        """Fill the table files with the state's tables."""
        if self._tables is not None:
            self._tables.settle()

    def _row_writer(self) -> RowWriter:
        return check_journal(self.program, self._closed_tables if self._runner is None else self._runner.row_writer)

    def _load(self, state: Mapping[str, np.ndarray], journal: Journal | None = None) -> None:
        """Replace the state by a checked one; ``journal`` is the place for its next checkpoint with a journal."""
        runner = self._require_runner(settled=False)
        self._departures = ()
        self._journal = None
        self._base.forget()
        if self._tables is None:
            runner.load_state(state)
        else:
            runner.load_state(self._tables.instead(state))
            self._tables.load(state, None if journal is None else journal.place)
        if runner.row_writer is not None:
            runner.row_writer.row_changes.stop()
            if journal is not None:
                runner.row_writer.row_changes.begin()
                self._journal = journal

    @contextmanager
    def _state_on_request(self, instead: Mapping[str, str] = NOTHING) -> Iterator[Mapping[str, np.ndarray]]:
        """Yield the state with entries copied on request; ``instead`` maps entries to their substitutes.

        It is the present state, and must be read before the next change. Parts on other workers are fetched at once and
        completely; rows of tables one entry at a time.
        """
        self._settle()
        read: Callable[[str], np.ndarray]
        runner = self._runner
        with self.asking():
            if runner is None and not self._has_part:
                read = self._closed_state.__getitem__
            elif runner is None or (runner.is_spread and not runner.gives_entries):
                read = self.state().__getitem__
            else:
                read = runner.state_entry if self._tables is None else self._tables.reading(runner.state_entry)
            yield EntriesOnRequest(self.program.signature.state, read, instead)

    @one_at_a_time
    def _evaluated(self, batch: Mapping[str, Any], parameters: str | None = None) -> dict[str, np.ndarray]:
        if self._departures:
            self._tell_departures("evaluate")
        evaluate, inputs = self._require_runner().evaluate, self._evaluated_batch(batch)
        with self._limited():
            return dict(evaluate(inputs, *self._instead(parameters)))

    def limit(self, step_timeout: TimeLimit | None) -> None:
        """Stop later engine calls that take longer than this, with an EngineError; None removes the limit."""
        self._limit = step_timeout

    @contextmanager
    def _limited(self) -> Iterator[None]:
        """Stop engine calls in this context that exceed the session's time limit.

        Raises:
            EngineError: a call took longer.
        """
        limit = self._limit
        if limit is None:
            yield
            return
        try:
            with limit:
                yield
        except RunStopped as stopped:
            if not limit.is_passed:
                raise
            steps = self.step_count
            place = f"after step {steps}" if stopped.graph in ("evaluate", "predict") else f"in step {steps + 1}"
            raise EngineError(
                f"The {stopped.graph} graph did not end within step_timeout={limit.seconds:g} s {place}, and was stopped. No "
                "state has changed. Look for a loop in the model that does not end, or give it more seconds (step_timeout, "
                "--step-timeout)"
            ) from stopped

    def _inherit(self) -> None:
        runner = vars(self).get("_runner")
        if runner is not None:  # it may not be open yet
            self._runner = InheritedRunner(runner)
            self.features.inherit()

    def _tell_departures(self, call: str) -> None:
        reasons, self._departures = self._departures, ()
        if self.step_count == 0:
            said = f"{call} does not compute what the file of this model computes: {'; '.join(reasons)}"
            warn(ObjectiveWarning(said))

    def _instead(self, parameters: str | None) -> tuple[Mapping[str, str], ...]:
        """Return the substitutes for parameters, as a further argument of a runner's method; empty by default."""
        return () if parameters is None else (averages(self.program.signature, parameters),)
