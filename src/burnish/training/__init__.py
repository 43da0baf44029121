"""Training: a program's state on an engine, the trainer's loop and the folder of its run, checks of batches.

What a step computes is the program's; how a graph is run is the engine's; where batches come from is ``burnish.data``'s.
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

if not TYPE_CHECKING:  # to a type checker a module's __getattr__ has every name
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
