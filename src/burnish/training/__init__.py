"""Training: a program's state on an engine, the trainer's loop and run folder, checks of batches.

The program defines a step, the engine runs its graph, and ``burnish.data`` supplies batches.
"""

from typing import TYPE_CHECKING

from burnish.lazy_imports import exports

if TYPE_CHECKING:
    from burnish.training.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
    from burnish.training.predictions import Answer, read_answer
    from burnish.training.predictor import Prediction, Predictor
    from burnish.training.profiling import Profile, profile
    from burnish.training.run_results import TrainingInterrupted, TrainingResult
    from burnish.training.session import Session
    from burnish.training.trained_model import TrainedModel, open_model
    from burnish.training.trainer import Trainer

__all__ = [
    "Answer",
    "Checkpoint",
    "Prediction",
    "Predictor",
    "Profile",
    "Session",
    "TrainedModel",
    "Trainer",
    "TrainingInterrupted",
    "TrainingResult",
    "open_model",
    "profile",
    "read_answer",
    "read_checkpoint",
    "write_checkpoint",
]

if not TYPE_CHECKING:  # for a type checker, a module with __getattr__ has every name
    __getattr__, __dir__ = exports(
        __name__,
        {
            "predictions": "Answer read_answer",
            "checkpoint": "Checkpoint read_checkpoint write_checkpoint",
            "predictor": "Prediction Predictor",
            "profiling": "Profile profile",
            "run_results": "TrainingInterrupted TrainingResult",
            "session": "Session",
            "trained_model": "TrainedModel open_model",
            "trainer": "Trainer",
        },
    )
