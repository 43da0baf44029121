"""Fine-tuning: a file that somebody else has trained learns other data, with as little to say as possible.

``tasks`` tells what is learned, of objects ``detectors`` what the file is, and it judges what a tuned detector gives.
``preparation`` makes the model ready, ``planning`` chooses stages, batch and schedule, ``rates`` the learning rate. ``tune``
trains, and ``quantization`` makes integers of what is tuned. ``choices`` is what the folder of a run keeps of all this.
"""

from typing import TYPE_CHECKING

from burnish.lazy_imports import exports

if TYPE_CHECKING:
    from burnish.finetuning.tune import Finetuned, finetune

__all__ = ["Finetuned", "finetune"]

if not TYPE_CHECKING:  # to a type checker a module's __getattr__ has every name
    __getattr__, __dir__ = exports(__name__, {"tune": "Finetuned finetune"})
