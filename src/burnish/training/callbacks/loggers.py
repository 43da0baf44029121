"""The loggers by name, asked for by text: ``mlflow:experiment=digits``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from burnish.errors import ConfigurationError
from burnish.settings import check_settings, read_settings, suggestion, with_settings
from burnish.training.callbacks.base import Callback
from burnish.training.callbacks.tensorboard import TensorBoard
from burnish.training.callbacks.trackers import MLflow, WeightsAndBiases

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
