"""Fine-tuning: a file that somebody else has trained learns other data, with as little to say as possible.

``tasks`` tells what is learned, of objects ``detectors`` what the file is, and it judges what a tuned detector gives.
``preparation`` makes the model ready, ``planning`` chooses stages, batch and schedule, ``rates`` the learning rate. ``forecast``
says what a run would do and take, before it starts. ``tune`` trains, and ``quantization`` makes integers of what is tuned.
``choices`` is what the folder of a run keeps of all this.
"""

from typing import TYPE_CHECKING

from burnish.lazy_imports import exports

if TYPE_CHECKING:
    from burnish.finetuning.forecast import Forecast, check
    from burnish.finetuning.tune import Finetuned, finetune

__all__ = ["Finetuned", "Forecast", "check", "finetune"]

if not TYPE_CHECKING:  # to a type checker a module's __getattr__ has every name
    __getattr__, __dir__ = exports(__name__, {"forecast": "Forecast check", "tune": "Finetuned finetune"})
