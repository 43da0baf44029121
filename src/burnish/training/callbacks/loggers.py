"""Runs in MLflow and in Weights & Biases: figures of steps and epochs, options, how the run ended."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from burnish.data.batches import BatchLoader
from burnish.errors import ConfigurationError
from burnish.installing import install_command
from burnish.settings import check_settings, read_settings, suggestion, with_settings
from burnish.training.callbacks.base import Callback, EpochReport, Run, StepReport
from burnish.training.callbacks.tensorboard import TensorBoard
from burnish.training.environment import resident_bytes, session_line
from burnish.training.metric_totals import Means
from burnish.training.run_results import TrainingInterrupted

LONGEST_VALUE = 500
"""Characters of an option; MLflow refuses more."""


class _Tracker(Callback):
    """The base of both trackers: which figures are logged when."""

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
        """Log the steps since the last averages, which the run ends with."""
        if (rest := self._speed.rest()) is not None:
            step, figures = rest
            self._log(figures, step)

    def _log(self, figures: Mapping[str, float], step: int) -> None:
        raise NotImplementedError


class MLflow(_Tracker):
    """Logs a run to MLflow: options as parameters, figures as metrics, ``metrics.csv`` as an artifact. It needs mlflow-skinny.

    The run ends as ``FINISHED``, as ``KILLED`` after Ctrl-C, or as ``FAILED``.

    Args:
        experiment: its name; it is made where it is not there.
        name: of the run; None lets MLflow choose one.
        tracking_uri: where MLflow keeps runs: a server, ``sqlite:///file``, or a folder; None: as MLflow is configured.
        every: log the figures of so many steps together, as their average.

    Attributes:
        run_id: of the run in MLflow; None before it began.

    Raises:
        ConfigurationError: MLflow is not installed.
    """

    def __init__(self, experiment: str = "burnish", name: str | None = None, *, tracking_uri: str | None = None, every: int = 10):
        super().__init__(every)
        self.experiment, self.name = experiment, name
        self._client = self.package().MlflowClient(tracking_uri)
        self.run_id: str | None = None

    @staticmethod
    def package() -> Any:
        """Return the package that it needs.

        Raises:
            ConfigurationError: it is not installed.
        """
        try:
            import mlflow
        except ImportError as error:
            raise ConfigurationError(f"MLflow is not installed: {install_command('mlflow')}") from error
        return mlflow

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
    """Logs a run to Weights & Biases: options as its configuration, and figures. It needs wandb.

    Args:
        project: its name.
        name: of the run; None lets Weights & Biases choose one.
        mode: ``online``, ``offline`` (written to ``folder``, and sent later by ``wandb sync``), or None: as wandb is configured.
        folder: where wandb writes; None is the folder of the run.
        every: log the figures of so many steps together, as their average.

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
        self._wandb = self.package()
        self.project, self.name, self.mode, self.folder = project, name, mode, folder
        self._run: Any = None

    @staticmethod
    def package() -> Any:
        """Return the package that it needs.

        Raises:
            ConfigurationError: it is not installed.
        """
        try:
            import wandb
        except ImportError as error:
            raise ConfigurationError(f"Weights & Biases is not installed: {install_command('wandb')}") from error
        return wandb

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
    """Return what a run was started with: what its program was compiled with, epochs, samples in a batch, seed, engine."""
    options = {name: value for name, value in run.program.options.items() if value not in (None, [], {}, "")}
    course = {"epochs": run.epochs}
    if not isinstance(run.loader, BatchLoader):
        course |= {"batch_size": run.loader.batch_size, "seed": run.loader.seed}
    return {**options, **course, "engine": session_line(run.session.describe())}


def option_text(value: Any) -> str:
    """Return the value of an option as a text, no longer than trackers take."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 1] + "…"


class Speed:
    """Gathers the reports of steps, and gives averages every so many.

    Args:
        every: steps.
    """

    def __init__(self, every: int):
        self._every = every
        self._means = Means()
        self._since: StepReport | None = None
        self._pending: StepReport | None = None

    def add(self, report: StepReport) -> dict[str, float] | None:
        """Add a step; return ``train/<figure>``, ``learning_rate`` and ``speed/samples_per_second`` where it is time for them."""
        self._means.add(report.figures, report.batch_samples)
        # The first step also loads the graph: speed is measured from its end on.
        self._since, self._pending = self._since or report, report
        return None if report.step % self._every else self._averages(report)

    def rest(self) -> tuple[int, dict[str, float]] | None:
        """Return the number of the last step, and the same of the steps since the last averages; None where there are none."""
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


LOGGERS: dict[str, Any] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WeightsAndBiases}
EVENTS = "events"
"""In the folder of a run: TensorBoard's event files, where nothing says another folder."""


def check_logger(text: str) -> None:
    """Refuse a logger that does not exist or cannot be, before a run begins.

    Raises:
        ConfigurationError: there is no such logger, it takes no such setting, or its package is not installed.
    """
    kind, settings = _read(text)
    given = {"folder": ..., **settings} if kind == "tensorboard" else settings
    check_settings(f"logger '{kind}'", LOGGERS[kind], given)
    LOGGERS[kind].package()


def logger(text: str, folder: Path, parameters: str | None = None) -> Callback:
    """Return a logger of a run.

    Args:
        text: ``tensorboard``, ``mlflow`` or ``wandb``, with settings of ``TensorBoard``, ``MLflow`` or ``WeightsAndBiases`` after
            a colon: ``mlflow:experiment=digits,name=first``.
        folder: of the run. TensorBoard writes to ``events`` in it, and runs in the other two are called after it, where the text
            does not say otherwise.
        parameters: what is judged, as ``Trainer`` takes it.

    Raises:
        ConfigurationError: as ``check_logger``, or a setting has a value that cannot be used.
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
