"""A model for prediction and evaluation from any source: a run, a checkpoint, a saved program or an ONNX file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from burnish import engines, losses, metrics
from burnish.compiler.compile import compile_inference
from burnish.data import DataDescription, Dataset, DataSpec, Text
from burnish.data.formats import format_of
from burnish.data.text.settings import TOKENIZER, TextDescription
from burnish.engines import Engine, LoadedModel
from burnish.engines.base import check_threads
from burnish.errors import CheckpointError, ConfigurationError, InputError
from burnish.files.folder import MANIFEST
from burnish.files.metadata import TRAINING, read_objective
from burnish.importer import read_proto
from burnish.program import Entry, GraphSignature, Program, Role
from burnish.program.layout import moved_axes, sample_extent, samples_first, to_data_set
from burnish.program.program import Inference
from burnish.program.state import averages
from burnish.sample_axes import AskedAxes
from burnish.training.inputs import BatchCheck
from burnish.training.metric_totals import Totals, figures, only_totals
from burnish.training.run_files import AVERAGE, BEST, checkpoint_of, exported_parameters, is_run, program_beside
from burnish.training.session import Session

Batch = Mapping[str, np.ndarray]


class TrainedModel:
    """A model in inference mode, opened on an engine.

    Attributes:
        name: description of the model in words.
        described: description of its training data, as far as it is recorded.
        options: ``loss``, ``metrics`` and ``predictions``, as in a program; without ``loss`` if none is known.
        predict_graph: model that ``predict`` runs.
    """

    def __init__(
        self,
        name: str,
        *,
        signature: Mapping[str, GraphSignature],
        samples: tuple[Entry, ...],
        options: Mapping[str, Any],
        metadata: Mapping[str, str],
        predict_graph: ir.Model,
        predict: Callable[[Batch], dict[str, np.ndarray]],
        evaluate_totals: Callable[[Batch], dict[str, np.ndarray]] | None,
        close: Callable[[], None] = lambda: None,
    ):
        self.name = name
        self.described = DataDescription.read(metadata, name)
        self.options = options
        self.predict_graph = predict_graph
        self._signature, self._samples = signature, samples
        self._predict, self._evaluate_totals, self._close = predict, evaluate_totals, close
        self._moved = moved_axes(signature["predict"].outputs)

    @property
    def evaluates(self) -> bool:
        """True if its loss is known, so that it can be evaluated."""
        return self._evaluate_totals is not None

    @property
    def to_predict(self) -> DataSpec:
        """The inputs that a data set must fill to predict, without labels."""
        return DataSpec.of(self._signature["predict"].inputs_of(Role.DATA), described=self.described, predicts=True)

    @property
    def to_evaluate(self) -> DataSpec:
        """The inputs that a data set must fill to evaluate.

        Raises:
            ConfigurationError: the model does not record its loss, and none was given.
        """
        self._evaluation()
        return DataSpec.of(self._samples, self._signature["evaluate"].inputs_of(Role.LABEL), self.described)

    def predict(self, data: Dataset, batch_size: int = 32) -> dict[str, np.ndarray]:
        """Return the model's outputs over all samples of a data set, in order, by name, with the samples along axis 0.

        Raises:
            InputError: the data do not fit the model; or an output has no entry for each sample.
            EngineError: the engine cannot run it.
        """
        parts: dict[str, list[np.ndarray]] = {}
        for outputs in self.predictions(data, batch_size):
            for name, array in outputs.items():
                parts.setdefault(name, []).append(array)
        return {name: np.concatenate(arrays) for name, arrays in parts.items()}

    def predictions(self, data: Dataset, batch_size: int = 32) -> Iterator[dict[str, np.ndarray]]:
        """Yield the outputs of each batch, in the form of ``predict``.

        Raises:
            InputError, EngineError: as ``predict``.
        """
        fixed, spec = self.fixed_batch("predict"), self.to_predict
        for batch, samples in _batches(data, fixed or batch_size):
            missing = 0 if fixed is None else fixed - samples
            # With a fixed batch size, the last sample is repeated, and outputs of the copies are dropped.
            shared = spec.shared(batch) if missing else ()
            filled = {
                name: array if name in shared or not missing else np.concatenate([array, *[array[-1:]] * missing])
                for name, array in batch.items()
            }
            predicted = self._predict(spec.to_model(filled))
            outputs = {}
            for name, whole in to_data_set(predicted, self._moved).items():
                array = whole[:samples] if whole.ndim and len(whole) == samples + missing else whole
                if array.ndim == 0 or len(array) != samples:
                    which = f"axis {self._moved[name]}" if name in self._moved else "its first axis"
                    raise InputError(
                        f"the output '{name}' has shape {list(predicted[name].shape)} for a batch of {samples} samples: {which} "
                        "is not that of the samples, and no prediction can be told from another"
                    )
                outputs[name] = array
            yield outputs

    def evaluate(self, data: Dataset, batch_size: int = 32) -> dict[str, float]:
        """Return loss and metrics over all samples of a data set, from totals over them all.

        Raises:
            ConfigurationError: no loss is known.
            InputError: the data do not fit the model, or nothing in them counts.
            EngineError: the engine cannot run it.
        """
        fixed = self.fixed_batch("evaluate")
        if fixed is not None and len(data) % fixed:
            raise InputError(
                f"{self.name} takes batches of {fixed}, and {len(data)} samples leave {len(data) % fixed} over: evaluate on a "
                f"multiple of {fixed}, or export the model with a symbolic batch"
            )
        totals = Totals()
        for batch, _ in _batches(data, fixed or batch_size):
            totals.add(self.totals(batch))
        return figures(totals.added(), self.options.get("loss_terms", {}))

    def totals(self, batch: Batch) -> dict[str, np.ndarray]:
        """Return the totals of a batch from which loss and metrics are computed, by their names in the graph.

        Args:
            batch: batch of a data set, samples first.

        Raises:
            ConfigurationError: no loss is known.
        """
        evaluate, spec = self._evaluation(), self.to_evaluate
        return evaluate(spec.to_model(batch))

    def shape_of(self, output: str) -> tuple[int | str | None, ...] | None:
        """Return the extents of an output of ``predict``, samples first; None if its rank is unknown."""
        entry = next(entry for entry in self._signature["predict"].outputs if entry.name == output)
        return samples_first(entry).shape

    def fixed_batch(self, graph: str) -> int | None:
        """Return the fixed batch size of ``predict`` or ``evaluate``; None if any size fits."""
        entries = [
            entry for entry in self._signature[graph].inputs_of(Role.DATA) if entry.extents and entry.sample_axis is not None
        ]
        extents = {extent for entry in entries if isinstance(extent := sample_extent(entry), int)}
        return int(min(extents)) if len(extents) == 1 else None

    def close(self) -> None:
        """Free the engine's resources; the model cannot be used any more."""
        self._close()

    def _evaluation(self) -> Callable[[Batch], dict[str, np.ndarray]]:
        if self._evaluate_totals is None:
            raise ConfigurationError(
                f"{self.name} does not say which loss it was trained on: name one (loss='cross_entropy', --loss cross_entropy)"
            )
        return self._evaluate_totals


def open_model(
    source: str | Path,
    *,
    program: str | Path | None = None,
    best: bool | None = None,
    average: bool | None = None,
    loss: losses.LossLike | None = None,
    metrics: Sequence[str | metrics.Metric] | None = None,
    outputs: str | Sequence[str] | None = None,
    sample_axis: AskedAxes = None,
    engine: str | Engine = "auto",
    threads: int | None = None,
    to_evaluate: bool = True,
) -> TrainedModel:
    """Open a model for prediction and evaluation.

    Args:
        source: the folder of a run; a checkpoint; a saved program as a folder or one file; or any ONNX file.
        program: saved program of a checkpoint that is not in the folder of its run.
        best: for a run, True for the best epoch, False for the latest state; None: the exported one, which is the best if
            ``burnish finetune`` had evaluation data.
        average: True to read the averaged weights of the optimizer instead of the parameters; None: as the run exported.
        loss, metrics, outputs: for an ONNX file, as in ``burnish.compile``; None: as recorded in a file that burnish exported. A
            program has its own.
        sample_axis: for an ONNX file, as in ``burnish.compile``. A program has its own.
        engine, threads: as in ``Session``.
        to_evaluate: False for prediction only: no graph with the loss is made from an ONNX file.

    Raises:
        ModelError, CheckpointError: the source cannot be read.
        ConfigurationError: an option is not for such a source, or does not fit the model.
        DataError: the model's description of its data cannot be read.
    """
    path, runs_on = Path(source), _RunsOn(engines.get(engine), threads)
    objective = {"loss": loss, "metrics": metrics, "outputs": outputs, "sample_axis": sample_axis}
    if path.is_dir() or path.suffix == ".safetensors" or program is not None:
        _refuse(objective, f"'{path}' is of a program, compiled with its own")
        if (path / MANIFEST).is_file():
            _refuse({"program": program, "best": best or None}, f"'{path}' is a program and no run")
            return _of_program(f"the program '{path}'", Program.load(path), None, average, runs_on)
        return _of_checkpoint(path, program, best, average, runs_on)
    _refuse({"best": best or None}, f"'{path}' is one model")
    if holds_program(path):
        _refuse(objective, f"'{path}' is a program, compiled with its own")
        loaded = Program.load(path)
        return _of_program(f"the program '{path}'", loaded, loaded.saved_state, average, runs_on)
    _refuse({"average": average or None}, f"'{path}' holds one set of weights, whatever they are")
    return _of_file(path, objective, runs_on, to_evaluate)


class _RunsOn(NamedTuple):
    """The engine of a model, and its threads inside one operator; None is the engine's choice."""

    engine: Engine
    threads: int | None

    def session(self, program: Program, state: Mapping[str, np.ndarray] | None = None) -> Session:
        return Session(program, self.engine, state, threads=self.threads)

    def load(self, model: ir.Model) -> LoadedModel:
        check_threads(self.threads)
        # An engine of another package may not know the argument.
        return self.engine.load(model) if self.threads is None else self.engine.load(model, self.threads)


def _of_checkpoint(
    path: Path, program: str | Path | None, best: bool | None, average: bool | None, runs_on: _RunsOn
) -> TrainedModel:
    if path.is_file():
        _refuse({"best": best or None}, f"'{path}' is one checkpoint, and best chooses among those of a run")
    checkpoint = checkpoint_of(path, best)
    folder = Path(program) if program is not None else program_beside(checkpoint)
    if folder is None:
        raise CheckpointError(
            f"The program of '{checkpoint}' is not beside it: a run keeps it in its folder 'program'. Say where it is (--program)"
        )
    if average is None and exported_parameters(folder.parent) == AVERAGE:
        average = True
    session = runs_on.session(Program.load(folder))
    session.restore(checkpoint)
    what = f"the run '{path}'" if is_run(path) else f"the checkpoint '{path}'"
    state = f"{what}, {'best' if checkpoint.name == BEST else 'latest'} state" if is_run(path) else what
    steps = f"{session.step_count:,} step{'s' * (session.step_count != 1)}"
    return model_of_session(f"{state} after {steps}", session, average, closes=True)


def _of_program(
    name: str, program: Program, state: Mapping[str, np.ndarray] | None, average: bool | None, runs_on: _RunsOn
) -> TrainedModel:
    return model_of_session(name, runs_on.session(program, state), average, closes=True)


def model_of_session(name: str, session: Session, average: bool | None = None, closes: bool = False) -> TrainedModel:
    """Return the model that a session trains, in its present state.

    Args:
        name: description of the model in words.
        session: session that runs it.
        average: True to read the averaged weights of the optimizer instead of the parameters.
        closes: True if ``close`` of the model closes the session.

    Raises:
        ConfigurationError: the optimizer keeps no average.
    """
    program, parameters = session.program, AVERAGE if average else None
    if parameters is not None:
        averages(program.signature, parameters)  # raises an error if the program keeps no average

    def with_features(batch: Batch) -> Batch:
        return session.features.batch(batch) if session.features.names else batch

    return TrainedModel(
        f"{name}, the average of its weights" if average else name,
        signature={name: program.signature[name] for name in ("predict", "evaluate")},
        samples=program.signature.samples,
        options=program.options,
        metadata={**program.metadata, **session.metadata},
        predict_graph=program.predict,
        predict=lambda batch: session.predict(batch, parameters),
        evaluate_totals=lambda batch: session.evaluate_totals(with_features(batch), parameters),
        close=session.close if closes else lambda: None,
    )


def _of_file(path: Path, asked: Mapping[str, Any], runs_on: _RunsOn, to_evaluate: bool) -> TrainedModel:
    metadata = {entry.key: entry.value for entry in read_proto(path)[0].metadata_props}
    recorded = {} if asked["loss"] is not None else read_objective(metadata)
    axes = asked["sample_axis"]
    objective = {name: value for name, value in asked.items() if name != "sample_axis"}
    settings: dict[str, Any] = {name: recorded.get(name) if value is None else value for name, value in objective.items()}
    if isinstance(settings["outputs"], list) and len(settings["outputs"]) <= 1:
        settings["outputs"] = next(iter(settings["outputs"]), None)
    inference = compile_inference(path, **(settings if to_evaluate else {}), sample_axis=axes)
    predict = runs_on.load(inference.predict)
    checked = BatchCheck(inference.signature["predict"])
    options = inference.options
    if recorded and not to_evaluate:
        options = {"loss": recorded["loss"], "predictions": [{"output": name} for name in recorded["outputs"]]}
    return TrainedModel(
        f"the model '{path}'",
        signature=inference.signature,
        samples=inference.signature["predict"].inputs_of(Role.DATA),
        options=options,
        metadata=inference.metadata,
        predict_graph=inference.predict,
        predict=lambda batch: predict(checked(batch)),
        evaluate_totals=None if inference.evaluate is None else _evaluation(inference, runs_on),
    )


def _evaluation(inference: Inference, runs_on: _RunsOn) -> Callable[[Batch], dict[str, np.ndarray]]:
    assert inference.evaluate is not None
    evaluate = runs_on.load(inference.evaluate)
    checked = BatchCheck(inference.signature["evaluate"])
    return lambda batch: only_totals(evaluate(checked(batch)))


def text_of_model(asked: Text | None, known: TextDescription | None, model: Path, data: str | Path | None = None) -> Text | None:
    """Return the tokenization for a trained model, from its description of texts and the tokenizer in its run.

    Args:
        asked: settings of the caller, or None.
        known: the model's description of its training texts.
        model: a run, or a file in its folder.
        data: data to read; None for data in memory.

    Returns:
        The settings; None if the model was not trained on texts and nothing was requested, or the data have no texts.

    Raises:
        DataError: the data do not exist.
    """
    if asked is None and (known is None or known.task is None):
        return None
    if asked is None and data is not None and format_of(data).holds not in ("table", "texts"):
        return None
    text = asked or Text(joined=known.joined, task=known.task) if known else asked
    beside = next((each / TOKENIZER for each in (model, *model.parents[:2]) if (each / TOKENIZER).is_file()), None)
    return text if text is None or text.tokenizer is not None or beside is None else replace(text, tokenizer=beside)


def holds_program(path: Path) -> bool:
    """Return True if an ONNX file is a program in one file, written by burnish."""
    return any(entry.key == TRAINING for entry in read_proto(path)[0].metadata_props)


def _refuse(options: Mapping[str, object], why: str) -> None:
    for name, value in options.items():
        if value is not None:
            raise ConfigurationError(f"{name}: {why}: leave it out")


def _batches(data: Dataset, batch_size: int) -> Iterator[tuple[Mapping[str, np.ndarray], int]]:
    for start in range(0, len(data), batch_size):
        indices: Iterable[int] = range(start, min(start + batch_size, len(data)))
        chosen = np.asarray(indices, dtype=np.int64)
        yield data.batch(chosen), len(chosen)
