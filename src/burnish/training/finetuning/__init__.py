"""What is decided before and while a file that somebody else has trained learns other data, and the call that does all of it.

``tasks`` tells what is learned, of objects ``detectors`` what the file is. ``transfer`` makes the model ready, ``planning``
chooses stages, batch, rate and schedule, by ``trials``, ``tune`` trains. ``quantization`` makes integers of what is tuned, and
``file_detections`` judges what a file with a detector gives.
"""

from burnish.training.finetuning.file_detections import file_line
from burnish.training.finetuning.planning import Plan, Stage, plan
from burnish.training.finetuning.quantization import (
    Quantization,
    accuracies_line,
    calibration_batches,
    figure_of,
)
from burnish.training.finetuning.rates import UNKNOWN_RATE, find_rate, repeated
from burnish.training.finetuning.transfer import Transfer, folding_said, transfer
from burnish.training.finetuning.trials import Trial
from burnish.training.finetuning.tune import Finetuned, check_quantized, check_together, finetune, metrics_entry, take_best

__all__ = [
    "UNKNOWN_RATE",
    "Finetuned",
    "Plan",
    "Quantization",
    "Stage",
    "Transfer",
    "Trial",
    "accuracies_line",
    "calibration_batches",
    "check_quantized",
    "check_together",
    "figure_of",
    "file_line",
    "find_rate",
    "finetune",
    "folding_said",
    "metrics_entry",
    "plan",
    "repeated",
    "take_best",
    "transfer",
]
