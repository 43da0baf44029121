"""The options of fine-tuning, declared once for ``burnish.finetune`` and the command line.

The help of the command line lists these options, so this module imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.compiler.options import CompileOptions, read_outputs
from burnish.data.text.settings import Text, as_text
from burnish.errors import ConfigurationError
from burnish.options import Options, option, same_option
from burnish.settings import is_natural_text, suggestion
from burnish.training.trainer_options import EvaluationOptions, RunOptions, SoundOptions, check_one_evaluation
from burnish.validation import is_whole

if TYPE_CHECKING:
    from burnish import losses
    from burnish.data import DataSource, ImageAugmentation
    from burnish.data.preprocessing import PixelsLike
    from burnish.data.sound.settings import SoundLike
    from burnish.data.splitting import EvalSplit
    from burnish.data.text.settings import TextLike
    from burnish.engines import Engine
    from burnish.sample_axes import AskedAxes
    from burnish.training.callbacks import Callback

AUTO, NEW, KEEP = "auto", "new", "keep"
INSERT = "insert"
HEADS = (AUTO, NEW, KEEP)
CONSTANT, COSINE, ONE_CYCLE = "constant", "cosine", "one_cycle"


def check_head(head: str) -> str:
    """Return a valid choice of the head; raise ConfigurationError otherwise."""
    if head not in HEADS:
        raise ConfigurationError(f"head={head!r} (--head): give {', '.join(map(repr, HEADS))}{suggestion(str(head), HEADS)}")
    return head


def _read_unfreeze(text: str) -> str | list[int]:
    """Return comma-separated epochs as numbers, and a word unchanged."""
    parts = [part.strip() for part in text.split(",")]
    return [int(part) for part in parts] if all(map(is_natural_text, parts)) else text


def _check_batch_size(size: Any) -> int:
    if not is_whole(size) or size < 1:
        raise ConfigurationError(f"batch_size={size!r}: give a whole number of samples, 1 or more, or leave it out")
    return int(size)


def _check_missing(missing: str) -> str:
    from burnish.data.missing_values import check_missing

    check_missing(missing)
    return missing


def _check_columns(columns: str) -> str:
    from burnish.data.table import check_scaling

    return check_scaling(columns)


def _check_quantize(asked: str | Mapping[str, Any]) -> str | Mapping[str, Any]:
    from burnish.finetuning.quantization import Quantization

    Quantization.read(asked)
    return asked


@dataclass(frozen=True, kw_only=True)
class TuningOptions(Options):
    """Options shared with the command line; ``FinetuneOptions`` documents them."""

    freeze_until: str | None = option(
        None,
        help="Layers to freeze: those before this node or weight pattern, or all but the head (head).",
        is_common=True,
        metavar="NAME",
    )
    unfreeze: str | Sequence[int] | None = option(
        None,
        help="Unfreeze layers step by step: gradual, or after these epochs (1,3).",
        metavar="WHEN",
        read=_read_unfreeze,
    )
    cached_features: bool = option(
        True,
        help="Compute the results of frozen layers once per sample, if possible.",
        spelled="--cached-features/--no-cached-features",
        kind=bool,
    )
    head: str = option(
        AUTO,
        check=check_head,
        help="Output layer: auto (kept if its classes match, else re-initialized), new or keep.",
        is_common=True,
        metavar="WHICH",
    )
    folded_norm: str = option(
        AUTO,
        help="Batch normalization that an exporter folded: auto (train with it), insert (after every convolution) or keep.",
        metavar="WAY",
    )
    lr: float | None = option(None, help="Learning rate.", shown_default="found by trial steps", is_common=True, kind=float)
    layer_decay: float | None = option(
        None,
        help="Factor of the learning rate from each layer to the one before it, such as 0.9.",
        metavar="FACTOR",
        kind=float,
    )
    schedule: str = option(
        COSINE, help="Schedule of the learning rate: cosine (after a short rise), constant, linear or another."
    )
    patience: int | None = option(
        None, help="Stop after so many epochs without a lower loss.", shown_default="no early stop", kind=int, least=1
    )
    head_output: str | Sequence[str] | None = option(
        None,
        help="Output with the classes; of a detector boxes and scores, with a comma between.",
        shown_default="found by itself",
        metavar="NAME",
        spelled="--outputs",
        read=read_outputs,
    )
    sample_axis: AskedAxes = same_option(CompileOptions, "sample_axis")
    loss: losses.LossLike | None = option(
        None,
        help="Loss in place of the one that fits the data, such as ssd:grids=[[8,8]],scales=[0.2,0.4].",
        shown_default="the one that fits",
    )
    metrics: Sequence[str] | None = same_option(
        CompileOptions,
        "metrics",
        check=None,
        help="Metrics; the first decides which epoch is best.",
        shown_default="those that fit the loss",
    )
    quantize: str | Mapping[str, Any] | None = option(
        None,
        check=_check_quantize,
        help="Quantize the tuned model and train it further: int8, int4, or int8:epochs=2,method=entropy.",
        metavar="FORM",
    )


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions(TuningOptions):
    """The options of fine-tuning.

    Args:
        eval_data: data to evaluate on after every epoch, in the forms of ``data``.
        eval_split: part of ``data`` to hold out for evaluation instead, as in ``Trainer``: a share of each class, such as 0.2, or
            ``"group:COLUMN"``. ``notes`` of the result list the held-out part.
        output: path of the tuned model.
        epochs, seed, engine, device, threads: as in ``Trainer``.
        batch_size: samples per step; None: as many as fit into memory, at most 32, fewer for small data.
        lr: learning rate; None: found by ``find_rate``.
        schedule: ``cosine`` after a short rise, ``constant``, or another.
        freeze_until: ``head``, or the place where training begins (``transfer``).
        unfreeze: ``gradual``, or the epochs after which the layers before the head start to train (``plan``).
        layer_decay: factor of the rate from each layer to the one before it, such as 0.9.
        cached_features: compute the results of the layers before the trained ones once per sample, if possible.
        patience: stop after so many epochs without a lower loss, in the last stage and again in quantized training; None trains
            to the end.
        callbacks: as in ``Trainer``; each stage is a run of its own to them.
        augment: random changes to images, such as ``crop,flip,rand_augment:2:9,mixup:0.2,cutmix:1``, as in ``Trainer``; results
            are then not cached. MixUp and CutMix run in the graph (``burnish.losses.mixed``); MixUp also mixes rows of a table.
        data_workers: as in ``Trainer``.
        adapters: settings of ``burnish.surgery.lora``, such as ``{"rank": 8, "alpha": 16}``, or a PEFT folder to continue from:
            adapters and the head train, and are merged into the tuned file. None trains the weights themselves.
        save_adapters: paths for the adapters as separate files, by form, as in ``Session.export``: ``{"apart": "tuned.onnx",
            "peft": "folder"}``.
        quantize: ``int8`` or ``int4``, with settings after a colon, or settings of ``burnish.surgery.quantize`` with ``epochs``,
            ``rate`` (a factor of ``lr``) and ``distill`` (the weight of the tuned model's outputs in the loss). After tuning, the
            model is quantized, calibrated on the data, and trained in quantized form for a third of the epochs (for all with 4
            bits); the tuned file is quantized. ``accuracies`` of the result and its last note tell the cost in accuracy.
        head: ``auto`` keeps the file's head if its metadata name the classes of the data; ``new`` always re-initializes it;
            ``keep`` keeps it, for data with the same numbered classes.
        folded_norm: ``auto`` trains with batch normalization if the file records that an exporter folded it into layers, and
            folds it again at the end; ``insert`` adds it after every convolution that has none; ``keep`` leaves layers unchanged.
        head_output: output with the classes, if there are several; for a detector boxes and scores, if not found: names of any
            values of the model.
        sample_axis: axis of the samples in the model's inputs, as in ``burnish.compile``; the tuned file keeps it.
        loss: replaces the default: cross-entropy for classes and masks, ``mse`` for values, ``bce_with_logits`` for yes-or-no
            labels, the detected loss for a detector. It also decides the task: with ``cross_entropy``, numbers are classes.
        metrics: replace the default metrics of the task or the loss; the first decides which epoch is best.
        label, label_separator, image_size, pixels, text, sound, missing, columns: as in ``burnish.data.open_dataset``.
        train_on: tokens that count in the loss of a language model, as in ``burnish.data.Text``.
    """

    eval_data: DataSource | None = option(None)
    eval_split: EvalSplit | str | float | None = same_option(EvaluationOptions, "eval_split", help=None)
    output: str | Path = option("tuned.onnx")
    epochs: int = same_option(RunOptions, "epochs", 5, help=None)
    batch_size: int | None = option(None, check=_check_batch_size)
    callbacks: Sequence[Callback] = option(())
    augment: str | ImageAugmentation | None = option(None)
    data_workers: int | None = option(None)
    adapters: Mapping[str, Any] | str | Path | None = option(None)
    save_adapters: Mapping[str, str | Path] | None = option(None)
    seed: int = same_option(RunOptions, "seed", help=None)
    engine: str | Engine = same_option(RunOptions, "engine", help=None)
    device: str | None = same_option(RunOptions, "device", help=None)
    threads: int | None = same_option(RunOptions, "threads", help=None)
    label: str | None = option(None)
    label_separator: str | None = option(None)
    image_size: tuple[int, int] | None = option(None)
    pixels: PixelsLike | None = option(None)
    text: TextLike | None = option(None)
    train_on: str | None = same_option(Text, "train_on", help=None)
    sound: SoundLike | None = same_option(SoundOptions, "sound", help=None)
    missing: str = option(
        "auto",
        check=_check_missing,
        help="Missing values of a table: error, drop (leave rows out), mean, median, most_frequent, or auto.\n\n"
        "auto: fill them as in training, with the median of standardized columns, and else error.",
        metavar="HOW",
    )
    columns: str = option(
        "auto",
        check=_check_columns,
        help="Number columns of a table: standardize, raw, or auto (standardized if the model's weights are initial).",
        metavar="HOW",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_evaluation(self.eval_data, self.eval_split)
        if self.quantize is not None and self.adapters is not None:
            raise ConfigurationError(
                "quantize: integers are trained in the weights, and with adapters these stay as they are: tune with adapters "
                "first, and give the tuned file, into which they are merged, to a run with quantize (--quantize)"
            )
        if self.save_adapters and self.adapters is None:
            raise ConfigurationError("save_adapters: the run trains no adapters: give some, such as adapters={'rank': 8}")
        if self.save_adapters:
            from burnish.adapters.exports import FORMS

            for form in self.save_adapters:
                if form not in FORMS:
                    raise ConfigurationError(f"save_adapters: '{form}'{suggestion(form, FORMS)}: give {', '.join(FORMS)}")

    @property
    def is_evaluated(self) -> bool:
        """True if there are data to evaluate on."""
        return self.eval_data is not None or self.eval_split is not None

    @property
    def reading(self) -> dict[str, Any]:
        """The options for opening data."""
        names = ("label", "label_separator", "image_size", "pixels", "text", "sound", "missing", "columns")
        options = {name: getattr(self, name) for name in names}
        return options if self.train_on is None else {**options, "text": self._text_with_answers()}

    def _text_with_answers(self) -> Text:
        """The text settings, with ``train_on`` included.

        Raises:
            ConfigurationError: ``text`` has another ``train_on``.
        """
        text = as_text(self.text) or Text()
        if text.train_on not in (None, self.train_on):
            raise ConfigurationError(f"train_on={self.train_on!r}, and text has train_on={text.train_on!r}: give one of them")
        return replace(text, train_on=self.train_on)

    @property
    def running(self) -> dict[str, Any]:
        """The options for running the model, as in ``Session``."""
        return {name: getattr(self, name) for name in ("engine", "device", "threads")}
