"""Fine-tuning from a model and data to the tuned file; ``burnish.finetune`` and the command line call ``tune``."""

from __future__ import annotations

import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from burnish import losses
from burnish.adapters.peft_format import check_names
from burnish.data import DataDescription, Dataset, DataSource, DataSpec
from burnish.data.image.augmentation import read_augmentation
from burnish.data.table_coding import TableDescription
from burnish.data.table_graph import fed_by
from burnish.errors import CarryOverWarning, ConfigurationError
from burnish.files.file_writing import check_output
from burnish.files.model_file import save_model
from burnish.finetuning.chance import warning_of
from burnish.finetuning.choices import OBJECTS, QUANTIZED, Choices
from burnish.finetuning.detectors import file_line
from burnish.finetuning.normalization import takes_one_sample
from burnish.finetuning.options import FinetuneOptions
from burnish.finetuning.planning import Plan, Stage, plan
from burnish.finetuning.preparation import Transfer, transfer
from burnish.finetuning.quantization import Quantization, accuracies_line, figure_of
from burnish.finetuning.tasks import name_of, open_source
from burnish.graph.annotations import FIGURES
from burnish.importer import Source, load
from burnish.options import takes
from burnish.program import Program
from burnish.quantization.quantize import check_unquantized, remaining_line
from burnish.training.callbacks import EarlyStopping
from burnish.training.cells import cell
from burnish.training.checkpoint import open_checkpoint
from burnish.training.predictor import Prediction, Predictor
from burnish.training.run_position import is_better
from burnish.training.run_results import TrainingResult, curves
from burnish.training.trainer import Trainer
from burnish.warn import warn

STEP = "step"


@dataclass(frozen=True)
class Finetuned:
    """The result of ``finetune``.

    Attributes:
        path: path of the tuned model.
        result: result of the trainer, for several stages of the last.
        notes: decisions with reasons, one per line.
        accuracies: with ``quantize``, those of ``float32``, ``quantized_after_training`` and ``quantized_in_training``; else
            empty.
        opening: options of ``burnish.Predictor`` for ``predict`` and ``evaluate``: the engine, and the reading of data.
        evaluation: evaluation data of the training: ``eval_data``, or the part held out by ``eval_split``; None without either.
    """

    path: Path
    result: TrainingResult
    notes: tuple[str, ...]
    accuracies: Mapping[str, float] = field(default_factory=dict)
    opening: Mapping[str, Any] = field(default_factory=dict, repr=False)
    evaluation: Dataset | None = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        """The file and its metrics in one line."""
        reached = ", ".join(f"{name}={value:.6g}" for name, value in self.result.metrics.items())
        return f"Finetuned('{self.path}', {reached}, {self.result.steps:,} steps)"

    def _repr_html_(self) -> str:
        rows = [("file", self.path), *self.result.table()]
        rows += [(name.replace("_", " "), f"{value:.4g}") for name, value in self.accuracies.items()]
        return cell("Fine-tuned model", rows, curves(self.result.history), self.notes)

    @cached_property
    def predictor(self) -> Predictor:
        """The tuned model, opened to predict; it stays open until its ``close``."""
        return Predictor(self.path, **self.opening)

    def predict(self, x: Any, *, batch_size: int | None = None) -> Prediction | list[Prediction]:
        """Return the tuned model's prediction for one sample, or for several; see ``burnish.Predictor.predict``.

        Args:
            x: path of an image, a folder or a table, an array, arrays by input name, a text, or a list of these.
            batch_size: samples at once; None: 32.

        Raises:
            DataError: there are no samples, or they do not fit the model.
        """
        return self.predictor.predict(x, batch_size=batch_size)

    def evaluate(self, data: DataSource | None = None) -> dict[str, float]:
        """Return loss and metrics of the tuned model over labelled data; see ``burnish.Predictor.evaluate``.

        Args:
            data: as in ``finetune``; None: ``evaluation``.

        Raises:
            ConfigurationError: no data are given, and the training had no evaluation data.
            DataError: the data cannot be read or do not fit the model.
        """
        data = self.evaluation if data is None else data
        if data is None:
            raise ConfigurationError(
                "evaluate: name the data, as none were held out for evaluation: tune with eval_split=0.2 or eval_data=..., and "
                "evaluate() takes those"
            )
        return self.predictor.evaluate(data)


@takes(FinetuneOptions, otherwise="burnish.Trainer")
def finetune(source: Source, data: DataSource, options: FinetuneOptions) -> Finetuned:
    """Fine-tune a trained model on your own data, and write it: a classifier, segmentation model, detector or language model.

    The head is re-initialized unless the file's classes are those of the data; a language model keeps it. A file for one sample
    is opened for batches, and trial steps find the learning rate; ``notes`` of the result list such decisions. With ``eval_data``
    or ``eval_split`` the best epoch is written, otherwise the last.

    ``burnish finetune`` does the same, and keeps checkpoints.

    Args:
        source: path, bytes, ``onnx.ModelProto`` or ``onnx_ir.Model``; not changed.
        data: path for ``burnish.data.open_dataset``; or ``(x, y)``, arrays by input name, a data set, or a Hugging Face data set,
            as in ``Trainer``. Not an iterable of batches: the data are read before training.

    Raises:
        ConfigurationError: no head can be found, ``freeze_until`` names nothing, an option is out of range, or an output path
            cannot be written.
        DataError: the data cannot be read, or have no classes.
    """
    check_output(Path(options.output), "output", read=(source, data, options.eval_data))
    for form, path in (options.save_adapters or {}).items():
        check_output(Path(path), f"save_adapters[{form!r}]", is_folder=form == "peft")
    with tempfile.TemporaryDirectory(prefix="burnish-finetune-") as folder:
        run = OneFile(Path(folder), options)
        path, result, accuracies = tune(source, data, options, run)
        fed = None if run.dataset_table is None else fed_by(path)
        if fed is not None:
            run.say(f"{path}: {fed}")
    names = ("engine", "threads", "label", "image_size", "text", "missing")
    opening = {name: getattr(options, name) for name in names}
    return Finetuned(path, result, tuple(run.notes), accuracies, opening, run.data(path, True))


@dataclass
class Run(ABC):
    """A fine-tuning run: ``tune`` decides what to train; subclasses train, report and store.

    Attributes:
        folder: folder for intermediate files.
        resumes: True if the run continues from files in the folder.
    """

    folder: Path
    resumes: bool

    @abstractmethod
    def say(self, line: str) -> None:
        """Report a decision or a result."""

    def begun(self) -> Choices | None:
        """Return the choices of a run that resumes; None for a new run."""
        return None

    @abstractmethod
    def begin(self, choices: Choices, planned: Plan, dataset: Dataset) -> None:
        """Store the choices, plan and data for ``train``."""

    @abstractmethod
    def train(self, choices: Choices, number: int, quantized: Path | None, loss: losses.Loss) -> tuple[Path, TrainingResult]:
        """Train a stage.

        Args:
            choices: choices of the run.
            number: number of the stage, from 0.
            quantized: quantized model that the stage starts from, or None.
            loss: the loss.

        Returns:
            The path of the tuned model (if all layers train in the stage), and the training result.
        """

    @abstractmethod
    def data(self, tuned: Path, is_evaluation: bool) -> Dataset | None:
        """Return the training or evaluation data as a tuned model reads them; None if there are none."""

    def called(self, quantized: Path) -> str:
        """Return the name of the untrained quantized model in reports."""
        return str(quantized)

    @abstractmethod
    def end(self, figures: Mapping[str, Any]) -> None:
        """Store the accuracies of quantization, with their metric and data."""


def tune(
    source: Source, data: DataSource, options: FinetuneOptions, run: Run
) -> tuple[Path, TrainingResult, Mapping[str, float]]:
    """Tune a model: make or load the choices, train each stage, and quantize the tuned model if asked.

    Args:
        source, data: as in ``finetune``.
        options: options of the run; a resumed run ignores those that its choices settle.
        run: run that trains the stages.

    Returns:
        The path of the tuned model, the training result of its last stage, and ``Finetuned.accuracies``.
    """
    choices = run.begun() or _choose(source, data, options, run)
    loss, files, integers = losses.get(choices.loss), dict[str, Path](), None
    for number, stage in enumerate(choices.stages):
        if not stage.quantized:
            tuned, result = run.train(choices, number, None, loss)
            if choices.is_whole(number) and choices.chance is not None:
                best = result.best if options.is_evaluated else None
                if (said := warning_of(choices.chance, choices.remedies, result.history, best)) is not None:
                    warn(said)
            continue
        files = {"float32": tuned, "quantized_after_training": run.folder / QUANTIZED}
        integers = Quantization.read(choices.quantize)
        taught = integers.objective(loss, tuned, choices.outputs)
        _quantize(integers, choices, data, options, run, files)
        tuned, result = run.train(choices, number, files["quantized_after_training"], taught)
    evaluation = run.data(tuned, True) if choices.kind == OBJECTS else None
    if evaluation is not None:
        line = file_line(tuned, evaluation, choices.batch_size, "evaluation", options.engine)
        if line is not None:
            run.say(line)
    if integers is None:
        return tuned, result, {}
    judged, which = run.data(files["float32"], True), "evaluation"
    if judged is None:
        judged, which = _training_data(run, files["float32"]), "training"
    files["quantized_in_training"], metric = tuned, choices.metrics[0]
    accuracies = {name: figure_of(path, metric, judged, choices.batch_size, options.engine) for name, path in files.items()}
    run.end({"data": which, "metric": metric, **accuracies})
    run.say(accuracies_line(accuracies, metric, which))
    return tuned, result, accuracies


def _choose(source: Source, data: DataSource, options: FinetuneOptions, run: Run) -> Choices:
    """Prepare the model, plan its training, report both, and pass them to the run."""
    prepared, dataset = transfer(source, data, options)
    if options.quantize is not None:
        _check_quantized(prepared)
    if "peft" in (options.save_adapters or ()):
        check_names(prepared.model.metadata_props)
    for line in prepared.notes:
        run.say(line)
    planned = plan(prepared, dataset, options)
    for line in planned.notes:
        run.say(line)
    choices = Choices.of(str(source) if isinstance(source, str | Path) else "", planned, len(dataset), options.quantize)
    run.begin(choices, planned, dataset)
    return choices


def _check_quantized(prepared: Transfer) -> None:
    """Raise ConfigurationError if the task cannot be quantized or the model already is."""
    check_unquantized(prepared.model.graph)
    if not prepared.task.metrics:
        raise ConfigurationError(
            f"quantize: what it costs is said in a metric, and the loss {prepared.task.loss.name} has none: name one "
            "(metrics=[...], --metrics), or quantize what is tuned (burnish quantize)"
        )
    if prepared.task.kind == OBJECTS:
        raise ConfigurationError(
            "quantize: of a detector the loss reads values inside of the model, which quantization would take apart: tune it, "
            "and quantize what is tuned (burnish quantize)"
        )


def _quantize(
    integers: Quantization, choices: Choices, data: DataSource, options: FinetuneOptions, run: Run, files: Mapping[str, Path]
) -> None:
    """Write and report the quantized tuned model, calibrated on the training data; a resumed run keeps its file."""
    tuned, quantized = files.values()
    if run.resumes and quantized.is_file():
        return
    dataset = _training_data(run, tuned)
    model = integers.applied(tuned, dataset, choices.outputs, choices.batch_size, options.engine)
    save_model(model, quantized)
    count, weights = sum(node.op_type == "QuantizeLinear" for node in model.graph), integers.options["weights"]
    run.say(f"{run.called(quantized)}: {weights}, {count} quantizations, calibrated on {name_of(data)}")
    if (remaining := remaining_line(model)) is not None:
        run.say(f"{run.called(quantized)}: {remaining}")


def _training_data(run: Run, tuned: Path) -> Dataset:
    dataset = run.data(tuned, False)
    assert dataset is not None
    return dataset


class OneFile(Run):
    """A run that keeps only the tuned file.

    Args:
        folder: folder of its checkpoints.
        options: options of the run.
    """

    plan: Plan
    dataset: Dataset

    def __init__(self, folder: Path, options: FinetuneOptions) -> None:
        super().__init__(folder, False)
        self.options = options
        self.notes: list[str] = []
        self._state: Mapping[str, np.ndarray] | None = None
        self._earlier: list[tuple[Mapping[str, Any] | None, Path]] = []
        self._evaluation: Dataset | None = None
        self._last_export: Callable[[], Path]

    def say(self, line: str) -> None:
        self.notes.append(line)

    def called(self, quantized: Path) -> str:
        return "quantized"

    def begin(self, choices: Choices, planned: Plan, dataset: Dataset) -> None:
        self.plan, self.dataset = planned, dataset

    def end(self, figures: Mapping[str, Any]) -> None:
        """Export the file again so that it takes raw columns, once its accuracies are known."""
        if self.dataset_table is not None:
            self._last_export()

    @property
    def dataset_table(self) -> TableDescription | None:
        """The column preprocessing of the data; None if they are no table, or are read unchanged."""
        return DataDescription.of(self.dataset).table

    def data(self, tuned: Path, is_evaluation: bool) -> Dataset | None:
        return self._evaluation if is_evaluation else self.dataset

    def train(self, choices: Choices, number: int, quantized: Path | None, loss: losses.Loss) -> tuple[Path, TrainingResult]:
        options, is_whole = self.options, choices.is_whole(number)
        if quantized is None:
            plan, stage = self.plan, self.plan.stages[number]
        else:
            plan = _plan_of_integers(self.plan, choices, load(quantized), loss)
            stage = plan.stages[0]
        program = plan.program(stage, len(self.dataset))
        stopping = [EarlyStopping(options.patience)] if options.patience is not None and is_whole else []
        trainer = Trainer(
            program,
            self.dataset,
            self._opened(program),
            epochs=stage.epochs,
            batch_size=choices.batch_size,
            seed=options.seed + number,
            run_directory=self.folder / str(number),
            state=None if quantized is not None else _carried(program, self._state),
            callbacks=[*options.callbacks, *stopping],
            augment=None if options.augment is None else read_augmentation(options.augment).unmixed,
            data_workers=options.data_workers,
            **options.running,
        )
        trainer.run_folder.is_kept = False
        result = trainer.run()
        path = Path(options.output) if number + 1 == len(choices.stages) else self.folder / "float32.onnx"
        if is_whole:
            earlier = self._earlier if quantized is None else ()
            trainer.session.metadata |= metrics_entry(take_best(trainer, result, options.is_evaluated, earlier))
            # For evaluation and further training, the file reads columns as the data set gives them.
            export = partial(trainer.session.export, path, fold_norm=number + 1 == len(choices.stages))
            export(columns=choices.quantize is None)
            self._last_export = export
            for form, place in (options.save_adapters or {}).items():
                trainer.session.export(place, adapters=form)
        self._state = trainer.session.state()
        self._earlier.append((result.best, trainer.best))
        self._evaluation = None if trainer.eval_loader is None else trainer.eval_loader.dataset
        trainer.session.close()
        return path, result

    def _opened(self, program: Program) -> Dataset | None:
        if self.options.eval_data is None:
            return self.plan.transfer.evaluation
        described = DataDescription.of(self.dataset)
        spec = DataSpec.by(program).like(described)
        return open_source(
            self.options.eval_data, spec, classes=described.classes, **{**self.options.reading, "pixels": None, "sound": None}
        )


def _plan_of_integers(plan: Plan, choices: Choices, model: ir.Model, loss: losses.Loss) -> Plan:
    chosen = choices.stages[-1]
    batch = plan.transfer.batch if takes_one_sample(model) else None
    task = replace(plan.transfer.task, loss=loss)
    transfer = replace(plan.transfer, model=model, task=task, is_new=False, batch=batch)
    stage = Stage(plan.stages[-1].frozen, chosen.epochs)
    return replace(plan, transfer=transfer, stages=(stage,), lr=choices.rate(chosen), layer_decay=None)


def take_best(
    trainer: Trainer, result: TrainingResult, is_evaluated: bool, earlier: Sequence[tuple[Mapping[str, Any] | None, Path]] = ()
) -> dict[str, Any]:
    """Restore the best epoch if there are evaluation data, and return the figures of the session's state.

    If an epoch of an earlier stage was better, the session and the best checkpoint of the run get its state.

    Args:
        trainer: trainer of the finished run.
        result: result of the run.
        is_evaluated: True if there are evaluation data; otherwise the last epoch stays.
        earlier: for each earlier stage in order, its best epoch as in ``TrainingResult.best``, and its checkpoint.

    Returns:
        ``data`` of the figures, ``epoch`` (from 1), ``stage`` (from 1, only for an earlier one), and each figure by name, as for
        ``metrics_entry``.
    """
    data = "evaluation" if is_evaluated else "training"
    best: Mapping[str, Any] | None = result.best
    if not is_evaluated or best is None:
        return {"data": data, "epoch": result.steps // len(trainer.loader), **result.metrics}
    stage = None
    for number, (other, path) in enumerate(earlier, start=1):
        if other is None or other["metric"] != best["metric"] or not path.exists():
            continue
        known: tuple[float | None, float | None] = (None, None)
        if other["value"] == best["value"]:
            known = (_loss_of(path), _loss_of(trainer.best if stage is None else stage[1]))
        if is_better(best["metric"], other["value"], best["value"], *known):
            best, stage = other, (number, path)
    figures = {"data": data, "epoch": best["epoch"], best["metric"]: best["value"]}
    if stage is None:
        trainer.session.restore(trainer.best)
        return figures
    number, path = stage
    # Weights that had not trained by then come from the start model.
    trainer.session.load_state(trainer.program.initial_state(trainer.loader.seed))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CarryOverWarning)
        extra = trainer.session.restore(path, strict=False)
    trainer.run_folder.checkpoints.save_best(trainer.session, extra)
    return {**figures, "stage": number}


def _loss_of(path: Path) -> float | None:
    with open_checkpoint(path) as checkpoint:
        loss = checkpoint.extra.get("position", {}).get("best_loss")
    return float(loss) if isinstance(loss, int | float) else None


def metrics_entry(figures: Mapping[str, Any]) -> dict[str, str]:
    """Return the ``metadata_props`` entry with the figures of a tuned file, as JSON."""
    return {FIGURES.key: FIGURES.write(dict(figures))}


def _carried(program: Program, state: Mapping[str, np.ndarray] | None) -> dict[str, np.ndarray] | None:
    """The state for a stage after another; its steps and schedule start at 0. None for the first."""
    if state is None:
        return None
    carried = program.carry_state(state).state
    return {**carried, STEP: np.zeros_like(carried[STEP])} if STEP in carried else carried
