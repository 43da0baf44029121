"""Callbacks of a trainer: the base class, early stopping, and loggers for other tools.

A callback receives events and may stop the run. It takes no part in the computation of a step. Terminal output is in
``burnish.training.progress``, the run folder in ``burnish.training.run_folder``.
"""

from burnish.training.callbacks.base import Callback, EarlyStopping, EpochReport, Run, StepReport
from burnish.training.callbacks.html_report import HtmlReport
from burnish.training.callbacks.loggers import MLflow, TensorBoard, WeightsAndBiases, check_logger, logger

__all__ = [
    "Callback",
    "EarlyStopping",
    "EpochReport",
    "HtmlReport",
    "MLflow",
    "Run",
    "StepReport",
    "TensorBoard",
    "WeightsAndBiases",
    "check_logger",
    "logger",
]
