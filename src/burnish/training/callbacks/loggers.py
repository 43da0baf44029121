"""Loggers for other tools: TensorBoard, MLflow, Weights & Biases, by name and settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from burnish.data.batches import BatchLoader
from burnish.engines.base import LoadedModel
from burnish.errors import ConfigurationError, escaped
from burnish.installing import install_command
from burnish.program import Role
from burnish.settings import check_settings, read_settings, suggestion, with_settings
from burnish.training.callbacks.base import Callback, EpochReport, Run, StepReport
from burnish.training.environment import resident_bytes, session_line
from burnish.training.html_report.pictures import missing_pillow, png
from burnish.training.html_report.samples import judge, judged_samples
from burnish.training.inputs import BatchCheck
from burnish.training.metric_totals import Means
from burnish.training.run_files import AVERAGE
from burnish.training.run_results import TrainingInterrupted
from burnish.training.session import Session
from burnish.training.trained_model import model_of_session
from burnish.validation import is_whole

LONGEST_VALUE = 500
"""Most characters of an option; MLflow rejects more."""


NOT_INSTALLED = {
    "mlflow": "MLflow is not installed",
    "wandb": "Weights & Biases is not installed",
    "tensorboardX": "TensorBoard's event files need tensorboardX, which is not installed",
}


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigurationError(f"{NOT_INSTALLED[name]}: {install_command(name)}") from error


class _Tracker(Callback):
    def __init__(self, every: int):
        self._speed = Speed(every)

    def on_step_end(self, run: Run, report: StepReport) -> None:
        figures = self._speed.add(report)
        if figures is not None:
            resident = resident_bytes()
            self._log({**figures, **({} if resident is None else {"memory/resident_bytes": float(resident)})}, report.step)

    def on_epoch_end(self, run: Run, report: EpochReport) -> None:
        figures = {f"evaluation/{name}": value for name, value in report.evaluation.items()}
        self._log({**figures, "epoch": float(report.epoch)}, report.step)

    def _log_rest(self) -> None:
        if (rest := self._speed.rest()) is not None:
            step, figures = rest
            self._log(figures, step)

    def _log(self, figures: Mapping[str, float], step: int) -> None:
        raise NotImplementedError


class MLflow(_Tracker):
    """Log a run to MLflow: options as parameters, figures as metrics, ``metrics.csv`` as an artifact. It needs mlflow-skinny.

    The run ends as ``FINISHED``, as ``KILLED`` after Ctrl-C, or as ``FAILED``.

    Args:
        experiment: name of the experiment, which is created if missing.
        name: name of the run; None lets MLflow choose one.
        tracking_uri: MLflow's storage: a server, ``sqlite:///file``, or a folder; None: as MLflow is configured.
        every: steps whose figures are averaged into one entry.

    Attributes:
        run_id: id of the run in MLflow; None before it begins.

    Raises:
        ConfigurationError: MLflow is not installed.
    """

    def __init__(self, experiment: str = "burnish", name: str | None = None, *, tracking_uri: str | None = None, every: int = 10):
        super().__init__(every)
        self.experiment, self.name = experiment, name
        self._client = _package("mlflow").MlflowClient(tracking_uri)
        self.run_id: str | None = None

    def on_run_begin(self, run: Run) -> None:
        client = self._client
        known = client.get_experiment_by_name(self.experiment)
        experiment = client.create_experiment(self.experiment) if known is None else known.experiment_id
        self.run_id = client.create_run(experiment, run_name=self.name).info.run_id
        for name, value in options_of(run).items():
            client.log_param(self.run_id, name, option_text(value))

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        if self.run_id is None:
            return
        self._log_rest()
        table = run.run_directory / "metrics.csv"
        if table.is_file():
            self._client.log_artifact(self.run_id, str(table))
        status = "FINISHED" if error is None else "KILLED" if isinstance(error, TrainingInterrupted) else "FAILED"
        self._client.set_terminated(self.run_id, status)

    def _log(self, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            self._client.log_metric(self.run_id, name, value, step=step)


class WeightsAndBiases(_Tracker):
    """Log a run to Weights & Biases: options as its configuration, and figures. It needs wandb.

    Args:
        project: name of the project.
        name: name of the run; None lets Weights & Biases choose one.
        mode: ``online``, ``offline`` (written to ``folder``, and sent later by ``wandb sync``), or None: as wandb is configured.
        folder: folder of wandb's files; None is the folder of the run.
        every: steps whose figures are averaged into one entry.

    Raises:
        ConfigurationError: wandb is not installed.
    """

    def __init__(
        self,
        project: str = "burnish",
        name: str | None = None,
        *,
        mode: str | None = None,
        folder: str | Path | None = None,
        every: int = 10,
    ):
        super().__init__(every)
        self._wandb = _package("wandb")
        self.project, self.name, self.mode, self.folder = project, name, mode, folder
        self._run: Any = None

    def on_run_begin(self, run: Run) -> None:
        folder = Path(self.folder or run.run_directory)
        folder.mkdir(parents=True, exist_ok=True)
        settings: dict[str, Any] = {"project": self.project, "name": self.name, "mode": self.mode, "dir": str(folder)}
        self._run = self._wandb.init(config=options_of(run), **settings)

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        if self._run is not None:
            self._log_rest()
            self._run.finish(exit_code=0 if error is None else 1)

    def _log(self, figures: Mapping[str, float], step: int) -> None:
        self._run.log(dict(figures), step=step)


def options_of(run: Run) -> dict[str, Any]:
    """Return the options of a run: those of compiling, epochs, batch size, seed, engine."""
    options = {name: value for name, value in run.program.options.items() if value not in (None, [], {}, "")}
    course = {"epochs": run.epochs}
    if not isinstance(run.loader, BatchLoader):
        course |= {"batch_size": run.loader.batch_size, "seed": run.loader.seed}
    return {**options, **course, "engine": session_line(run.session.describe())}


def option_text(value: Any) -> str:
    """Return the value of an option as a text, shortened to the limit of trackers."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 1] + "…"


class Speed:
    """Averages of figures and speed over steps.

    Args:
        every: steps per average.
    """

    def __init__(self, every: int):
        self._every = every
        self._means = Means()
        self._since: StepReport | None = None
        self._pending: StepReport | None = None

    def add(self, report: StepReport) -> dict[str, float] | None:
        """Add a step; return ``train/<figure>``, ``learning_rate`` and ``speed/samples_per_second`` if they are due."""
        self._means.add(report.figures, report.batch_samples)
        # The first step also loads the graph, so speed is measured from its end.
        self._since, self._pending = self._since or report, report
        return None if report.step % self._every else self._averages(report)

    def rest(self) -> tuple[int, dict[str, float]] | None:
        """Return the number of the last step, and averages over the steps since the last ones; None if there are none."""
        last = self._pending
        return None if last is None else (last.step, self._averages(last))

    def _averages(self, report: StepReport) -> dict[str, float]:
        since = self._since or report
        averages = {f"train/{name}": value for name, value in self._means.values().items()}
        if report.rate is not None:
            averages["learning_rate"] = report.rate
        seconds = report.seconds - since.seconds
        if seconds > 0:
            averages["speed/samples_per_second"] = (report.samples - since.samples) / seconds
        self._means, self._since, self._pending = Means(), report, None
        return averages


GRAY, RED_GREEN_BLUE = 1, 3
"""TensorBoard's numbers of colour spaces (tensorboard/compat/proto/summary.proto, Summary.Image)."""


class TensorBoard(Callback):
    """Write event files for TensorBoard: ``tensorboard --logdir FOLDER``. It needs tensorboardX.

    Scalars: ``train/<figure>`` and ``learning_rate`` of steps, ``evaluation/<figure>`` of epochs, ``speed/samples_per_second``,
    ``memory/resident_bytes``, and ``memory/planned_step_bytes`` once. Histograms after each epoch: ``weights/<name>``, and
    ``gradients/<name>`` of its last batch. Images: the worst examples of the evaluation data, with a text of their predictions. A
    text ``configuration`` lists the options of the run.

    With several workers, only the first writes, and only scalars.

    Args:
        folder: folder of the files; a resumed run adds another file.
        every: steps whose figures are averaged into one entry.
        histograms: epochs between histograms; 0 for none. Gradients are computed once more for them, with the memory of another
            step.
        examples: number of worst examples after each epoch; 0 for none.
        parameters: ``average`` uses the averaged weights of the optimizer for the examples.

    Raises:
        ConfigurationError: tensorboardX is not installed, or a number is out of range.
    """

    def __init__(
        self, folder: str | Path, *, every: int = 10, histograms: int = 1, examples: int = 8, parameters: str | None = None
    ):
        for name, value, least in (("every", every, 1), ("histograms", histograms, 0), ("examples", examples, 0)):
            if not is_whole(value) or value < least:
                raise ConfigurationError(f"{name}={value!r}: give a whole number of {least} or more")
        _package("tensorboardX")
        self.folder, self.every, self.histograms, self.examples = Path(folder), every, histograms, examples
        self.parameters = parameters
        self._writer: Any = None
        self._speed = Speed(every)
        self._last_batch: Mapping[str, Any] = {}
        self._gradients: Gradients | None = None

    def on_run_begin(self, run: Run) -> None:
        self._writer = _package("tensorboardX").SummaryWriter(str(self.folder))
        self._gradients = Gradients(run.session)
        step = int(run.rows[-1]["step"] or 0) if run.rows else 0  # the step of the run: the state may come from other steps
        if run.loader.batch_size:  # unknown for an iterable of batches
            self._writer.add_scalar("memory/planned_step_bytes", run.program.planned_peak(run.loader.batch_size).bytes, step)
        # An indented block is code, which Markdown leaves unchanged.
        lines = [f"    {name}: {escaped(option_text(value))}" for name, value in options_of(run).items()]
        self._writer.add_text("configuration", "\n".join(lines), step)

    def on_step_end(self, run: Run, report: StepReport) -> None:
        self._last_batch = report.batch
        means = self._speed.add(report)
        if means is None:
            return
        for name, value in means.items():
            self._writer.add_scalar(name, value, report.step)
        self._add_memory(report.step)

    def on_epoch_end(self, run: Run, report: EpochReport) -> None:
        for name, value in report.evaluation.items():
            self._writer.add_scalar(f"evaluation/{name}", value, report.step)
        if run.group.world_size > 1:  # workers with parts of the state would have to take part
            self._writer.flush()
            return
        if self.histograms and report.epoch % self.histograms == 0:
            self._add_histograms(run, report.step)
        if self.examples:
            self._add_examples(run, report.step)
        self._writer.flush()

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        if self._writer is None:
            return
        if (rest := self._speed.rest()) is not None:
            step, means = rest
            for name, value in means.items():
                self._writer.add_scalar(name, value, step)
        self._writer.close()

    def _add_memory(self, step: int) -> None:
        if (resident := resident_bytes()) is not None:
            self._writer.add_scalar("memory/resident_bytes", resident, step)

    def _add_histograms(self, run: Run, step: int) -> None:
        state = run.session.state()
        for name, array in state.items():
            if name.startswith("param/"):
                self._add_histogram(f"weights/{name.removeprefix('param/')}", array, step)
        if self._gradients is not None and self._last_batch:
            for name, gradient in self._gradients(self._last_batch, state).items():
                self._add_histogram(f"gradients/{name}", gradient, step)

    def _add_histogram(self, tag: str, array: np.ndarray, step: int) -> None:
        values = array.astype(np.float64).reshape(-1)
        values = values[np.isfinite(values)]
        if values.size:
            self._writer.add_histogram(tag, values, step)

    def _add_examples(self, run: Run, step: int) -> None:
        loader = run.eval_loader or run.loader
        model = model_of_session("the run", run.session, self.parameters == AVERAGE)
        judgement = judge(model, judged_samples(loader), run.loader.batch_size, self.examples)
        if not judgement.worst:
            return
        without_pictures = missing_pillow()
        if without_pictures is not None and any(example.pixels is not None for example in judgement.worst):
            run.note(f"TensorBoard shows no examples: {without_pictures}")
        lines = ["| | sample | said | is | error |", "|---|---|---|---|---|"]
        for rank, example in enumerate(judgement.worst):
            cells = (rank, example.name or example.index, example.said, example.truth, f"{example.error:.4g}")
            lines.append(f"| {' | '.join(_cell(str(cell)) for cell in cells)} |")
            if example.pixels is not None and without_pictures is None:
                self._add_image(f"worst/{rank}", example.pixels, step)
        self._writer.add_text("worst examples", "\n".join(lines), step)

    def _add_image(self, tag: str, pixels: np.ndarray, step: int) -> None:
        from tensorboardX.proto.summary_pb2 import Summary

        height, width = pixels.shape[:2]
        space = GRAY if pixels.ndim == 2 else RED_GREEN_BLUE
        image = Summary.Image(height=height, width=width, colorspace=space, encoded_image_string=png(pixels))
        self._writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), step)


def _cell(text: str) -> str:
    """A text as a Markdown cell; TensorBoard renders it and removes scripts."""
    return escape(escaped(text)).replace("|", "&#124;")


class Gradients:
    """Gradients of batches in the present state of a session, which is not changed.

    The first call loads the program's graph ``grad`` next to the session's own: that takes as much memory as a step.
    """

    def __init__(self, session: Session):
        self._session = session
        self._loaded: LoadedModel | None = None

    def __call__(self, batch: Mapping[str, Any], state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the gradient of each trained parameter by name, except tables that are read by rows.

        Args:
            batch: batch for ``Session.step``.
            state: state of the session, from ``Session.state``.

        Raises:
            InputError: the batch does not fit the program.
            EngineError: the engine fails.
        """
        program, session = self._session.program, self._session
        signature = program.signature["grad"]
        if self._loaded is None:
            self._loaded = session.engine.load(program.grad)
        inputs = dict(BatchCheck(signature)(batch))
        inputs |= {entry.name: state[entry.name] for entry in signature.inputs if entry.is_state}
        for entry in signature.inputs_of(Role.HYPERPARAMETER):
            inputs[entry.name] = np.asarray(entry.default, entry.numpy_dtype)
        outputs = self._loaded(inputs)
        trained = {f"grad:{name.partition('/')[2]}" for name in program.signature["step"].updates if name.startswith("param/")}
        return {name.removeprefix("grad:"): array for name, array in outputs.items() if name in trained}


LOGGERS: dict[str, Any] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WeightsAndBiases}
PACKAGES = {"tensorboard": "tensorboardX", "mlflow": "mlflow", "wandb": "wandb"}
EVENTS = "events"
"""Default folder of TensorBoard's event files, in the folder of the run."""


def check_logger(text: str) -> None:
    """Check the name, settings and package of a logger before a run begins.

    Raises:
        ConfigurationError: the logger is unknown, a setting is unknown, or its package is not installed.
    """
    kind, settings = _read(text)
    given = {"folder": ..., **settings} if kind == "tensorboard" else settings
    check_settings(f"logger '{kind}'", LOGGERS[kind], given)
    _package(PACKAGES[kind])


def logger(text: str, folder: Path, parameters: str | None = None) -> Callback:
    """Return a logger of a run.

    Args:
        text: ``tensorboard``, ``mlflow`` or ``wandb``, with settings of ``TensorBoard``, ``MLflow`` or ``WeightsAndBiases`` after
            a colon: ``mlflow:experiment=digits,name=first``.
        folder: folder of the run. By default TensorBoard writes to ``events`` in it, and the other two use it as the name of the
            run.
        parameters: weights to evaluate, as in ``Trainer``.

    Raises:
        ConfigurationError: as ``check_logger``, or a setting has an invalid value.
    """
    kind, settings = _read(text)
    by_default: dict[str, Any] = {"name": str(folder)}
    if kind == "tensorboard":
        by_default = {"folder": folder / EVENTS, "parameters": parameters}
    made: Callback = with_settings(f"logger '{kind}'", LOGGERS[kind], {**by_default, **settings})
    return made


def _read(text: str) -> tuple[str, dict[str, Any]]:
    kind, settings = read_settings("logger", text)
    if kind not in LOGGERS:
        raise ConfigurationError(
            f"logger '{kind}': there is no such logger{suggestion(kind, LOGGERS)}; give {', '.join(LOGGERS)}"
        )
    return kind, settings
