"""Fine-tuning: train a model that somebody else has trained on other data, with few options.

``tasks`` finds the task, ``detectors`` recognizes detectors and evaluates tuned ones. ``preparation`` prepares the model,
``planning`` chooses stages, batch size and schedule, ``rates`` the learning rate. ``forecast`` predicts the course and cost of a
run before it starts. ``tune`` trains, and ``quantization`` quantizes the tuned model. ``choices`` stores these decisions in the
folder of the run.
"""

from typing import TYPE_CHECKING

from burnish.lazy_imports import exports

if TYPE_CHECKING:
    from burnish.finetuning.forecast import Forecast, check
    from burnish.finetuning.tune import Finetuned, finetune

__all__ = ["Finetuned", "Forecast", "check", "finetune"]

if not TYPE_CHECKING:  # for a type checker, a module with __getattr__ has every name
    __getattr__, __dir__ = exports(__name__, {"forecast": "Forecast check", "tune": "Finetuned finetune"})
