"""Fine-tuning: a file that somebody else has trained learns other data, with as little to say as possible.

``tasks`` tells what is learned, of objects ``detectors`` what the file is, and it judges what a tuned detector gives.
``transfer`` makes the model ready, ``planning`` chooses stages, batch and schedule, ``rates`` the learning rate, ``tune`` trains.
``quantization`` makes integers of what is tuned.
"""

from burnish.finetuning.detectors import file_line
from burnish.finetuning.planning import Plan, Stage, Trial, plan
from burnish.finetuning.quantization import (
    Quantization,
    accuracies_line,
    calibration_batches,
    figure_of,
)
from burnish.finetuning.rates import UNKNOWN_RATE, find_rate, repeated
from burnish.finetuning.transfer import Transfer, folding_said, transfer
from burnish.finetuning.tune import Finetuned, check_quantized, check_together, finetune, metrics_entry, take_best

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
