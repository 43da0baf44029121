"""The options of a trainer, checked before anything is read.

The help of the command line lists these options, so this module imports nothing heavy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.errors import ConfigurationError
from burnish.options import Options, declarations, option, same_option
from burnish.validation import is_number, is_whole

if TYPE_CHECKING:
    import numpy as np

    from burnish.data import DataSource, Text
    from burnish.data.image.augmentation import ImageAugmentation
    from burnish.data.loader import Augmentation
    from burnish.data.preprocessing import PixelsLike
    from burnish.data.sound.settings import SoundLike
    from burnish.data.splitting import EvalSplit
    from burnish.distributed import DataParallel
    from burnish.engines import Engine
    from burnish.training.callbacks.base import Callback
    from burnish.training.learning_rates import Factor
    from burnish.training.progress import Progress


def _check_count(name: str) -> Callable[[Any], int]:
    def check(number: Any) -> int:
        if not is_whole(number) or number < 1:
            raise ConfigurationError(f"{name}={number!r}: give a whole number of 1 or more")
        return int(number)  # NumPy's numbers cannot be stored in a checkpoint's record

    return check


def _check_seed(seed: Any) -> int:
    from burnish.random import check_seed

    check_seed(seed)
    return int(seed)


def _check_seconds(seconds: Any) -> float:
    if not is_number(seconds) or not 0 < seconds < math.inf:
        raise ConfigurationError(f"step_timeout={seconds!r}: give a number of seconds above 0, or leave it out for no limit")
    return float(seconds)


def _check_parallel(parallel: Any) -> Any:
    from burnish.distributed import DataParallel

    DataParallel.check(parallel)
    return parallel


def _check_eval_split(asked: Any) -> EvalSplit:
    from burnish.data.splitting import EvalSplit

    return EvalSplit.read(asked)


def _check_sound(sound: Any) -> Any:
    from burnish.data.sound.settings import read_sound

    read_sound(sound)
    return sound


def check_one_evaluation(eval_data: object, eval_split: object) -> None:
    """Raise ConfigurationError if both evaluation data and a held-out part are given."""
    if eval_data is not None and eval_split is not None:
        raise ConfigurationError(
            "eval_data (--eval-data) names data to evaluate on, and eval_split (--eval-split) holds out a part of the training "
            "data for that: give one of them"
        )


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions(Options):
    """The evaluation option without separate data; ``Trainer`` documents it."""

    eval_split: EvalSplit | str | float | None = option(
        None,
        check=_check_eval_split,
        help="Part of --data held out to evaluate on: a share such as 0.2, or whole groups by group:COLUMN.\n\nA share is "
        "taken of each class. group:patient holds out all rows of some patients, about a fifth of the rows; group:patient:0.3 "
        "another share.",
        is_common=True,
        metavar="SHARE",
    )


@dataclass(frozen=True, kw_only=True)
class SoundOptions(Options):
    """The preprocessing of sounds; ``burnish.data.open_dataset`` documents it."""

    sound: SoundLike | None = option(
        None,
        check=_check_sound,
        help="Preprocessing of .wav files, such as rate=16000,seconds=2,bands=64.\n\nSettings are rate, seconds, bands, frames, "
        "n_fft, hop, fmin, fmax, mean and std.",
        shown_default="as the model and the files say",
        metavar="SETTINGS",
    )


@dataclass(frozen=True, kw_only=True)
class RunOptions(Options):
    """The options shared by trainers and the commands that train; ``Trainer`` documents each option."""

    epochs: int = option(
        1, check=_check_count("epochs"), help="Passes over the data.", is_common=True, short="-e", kind=int, least=1
    )
    batch_size: int = option(
        32, check=_check_count("batch_size"), help="Samples of a batch.", is_common=True, short="-b", kind=int, least=1
    )
    seed: int = option(
        0,
        check=_check_seed,
        help="Seed of all random numbers: weights, order, augmentation, dropout.",
        kind=int,
        least=0,
    )
    threads: int | None = option(None, help="Processor threads.", shown_default="the engine's choice", kind=int, least=1)
    engine: str | Engine = option("auto", help="Engine that computes: onnxruntime, torch or reference.")
    device: str | None = option(None, help="Device: cpu or cuda.", shown_default="the engine's choice")
    checkpoint_every: int | None = option(
        None,
        check=_check_count("checkpoint_every"),
        help="Save a checkpoint after so many steps too, within an epoch.",
        kind=int,
        least=1,
    )
    step_timeout: float | None = option(
        None,
        check=_check_seconds,
        help="Stop the run, with its state saved, if a step takes longer.",
        shown_default="no limit",
        metavar="SECONDS",
        kind=float,
    )
    keep_checkpoints: int = option(
        1, check=_check_count("keep_checkpoints"), help="Number of checkpoints to keep; 1 is the latest.", kind=int, least=1
    )
    journal: bool = option(
        False,
        help="Save only the changed rows of embedding tables that are updated by rows.",
        kind=bool,
    )
    tables: str | Path | None = option(
        None, help="Folder for embedding tables that are updated by rows, as files mapped into memory.", kind=Path
    )
    best_metric: str | None = option(None, help="Metric that decides the best epoch.", shown_default="the first metric")

    def run_options(self) -> dict[str, Any]:
        """Return these options by name, for ``Trainer``."""
        return {name: getattr(self, name) for name in declarations(RunOptions)}


@dataclass(frozen=True)
class TrainerOptions(RunOptions):
    """The options of a trainer; ``Trainer`` documents each option."""

    eval_data: DataSource | None = option(None)
    _: KW_ONLY
    eval_split: EvalSplit | str | float | None = same_option(EvaluationOptions, "eval_split", help=None)
    run_directory: str | Path = option("runs/latest")
    parameters: str | None = option(None)
    resume: bool = option(False)
    overwrite: bool = option(False)
    state: Mapping[str, np.ndarray] | None = option(None)
    lr: float | None = option(None)
    schedule: str | Factor = option("constant")
    monitor: str | None = option(None)
    augment: Augmentation | str | ImageAugmentation | None = option(None)
    data_workers: int | None = option(None)
    pixels: PixelsLike | None = option(None)
    text: Text | None = option(None)
    sound: SoundLike | None = same_option(SoundOptions, "sound", help=None)
    progress: bool | Progress = option(True)
    parallel: DataParallel | None = option(None, check=_check_parallel)
    callbacks: Sequence[Callback] = option(())

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resume and self.overwrite:
            raise ConfigurationError("resume goes on with a run, and overwrite drops it: give one of them")
        check_one_evaluation(self.eval_data, self.eval_split)
