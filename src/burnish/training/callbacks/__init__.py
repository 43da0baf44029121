"""Callbacks, which run beside a trainer: the base class, early stopping, and loggers that write for other tools.

A callback is told of events and may stop the run. It computes nothing of a step: that is the program's. What a person sees on a
terminal is ``burnish.training.progress``'s, and the folder of the run ``burnish.training.run_folder``'s.
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
