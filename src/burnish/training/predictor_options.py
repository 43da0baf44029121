"""The options of a predictor: weights of a saved model, engine, reading of samples and outputs.

The help of the command line lists these options, so this module imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.compiler.options import CompileOptions
from burnish.errors import ConfigurationError
from burnish.options import Options, option, same_option
from burnish.training.trainer_options import RunOptions, SoundOptions
from burnish.validation import is_number

if TYPE_CHECKING:
    from burnish import losses, metrics
    from burnish.data.preprocessing import PixelsLike
    from burnish.data.sound.settings import SoundLike
    from burnish.data.text.settings import Text, TextLike
    from burnish.engines import Engine
    from burnish.sample_axes import AskedAxes

ACTIVATIONS = ("softmax", "sigmoid", "none")


def check_activation(activation: Any) -> Any:
    """Return a valid activation or None; raise ConfigurationError otherwise."""
    if activation is not None and activation not in ACTIVATIONS:
        raise ConfigurationError(f"activation: there is no '{activation}'; choose among {', '.join(ACTIVATIONS)}")
    return activation


def _check_score(score: Any) -> float:
    if not is_number(score) or not 0 <= score <= 1:
        raise ConfigurationError(f"score={score!r}: give a number from 0 to 1, such as 0.25")
    return float(score)


def _check_text(text: Any) -> Text | None:
    from burnish.data.text.settings import as_text

    return as_text(text)


@dataclass(frozen=True, kw_only=True)
class SavedModelOptions(Options):
    """The weights to read from a saved model, and the engine; ``Predictor`` documents each option."""

    program: str | Path | None = option(
        None, help="Saved program of a checkpoint that is not in the folder of its run.", metavar="PATH", kind=Path
    )
    best: bool | None = option(
        None,
        help="Weights of a run: the best epoch, or the latest state.",
        shown_default="the one it exported",
        is_common=True,
        spelled="--best/--latest",
        kind=bool,
    )
    average: bool | None = option(
        None,
        help="Use the average of the weights that the optimizer keeps, or not.",
        shown_default="as the run exported",
        spelled="--average/--no-average",
        kind=bool,
    )
    sample_axis: AskedAxes = same_option(CompileOptions, "sample_axis")
    engine: str | Engine = same_option(RunOptions, "engine")
    threads: int | None = same_option(RunOptions, "threads")


@dataclass(frozen=True, kw_only=True)
class AnswerOptions(Options):
    """The interpretation of outputs; ``Predictor`` documents each option."""

    outputs: str | None = option(
        None, help="Output to show, if there are several.", shown_default="the one that the loss reads", metavar="NAME"
    )
    activation: str | None = option(
        None,
        check=check_activation,
        help="Function that makes probabilities of the output: softmax, sigmoid or none.",
        shown_default="as the model says",
    )
    score: float = option(
        0.25, check=_check_score, help="Lowest score of a detector's boxes to show.", is_common=True, kind=float
    )


@dataclass(frozen=True, kw_only=True)
class PredictorOptions(SavedModelOptions, AnswerOptions):
    """The options of a predictor; ``Predictor`` documents each option."""

    loss: losses.LossLike | None = option(None)
    metrics: Sequence[str | metrics.Metric] | None = option(None)
    label: str | None = option(None)
    image_size: tuple[int, int] | None = option(None)
    pixels: PixelsLike | None = option(None)
    text: TextLike | None = option(None, check=_check_text)
    sound: SoundLike | None = same_option(SoundOptions, "sound", help=None)
    missing: str = option("auto")
