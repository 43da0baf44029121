"""The options of fine-tuning, each declared once: ``burnish.finetune`` and the command line take them.

Nothing heavy is imported here: the help of the command line lists these options.
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
    """Return a choice of the head; raise ConfigurationError for one that there is not."""
    if head not in HEADS:
        raise ConfigurationError(f"head={head!r} (--head): give {', '.join(map(repr, HEADS))}{suggestion(str(head), HEADS)}")
    return head


def _read_unfreeze(text: str) -> str | list[int]:
    """Return epochs with commas between as numbers, and a word as it is."""
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
    """What is tuned, and how fast: options that the command line has as they are; ``FinetuneOptions`` says what each is."""

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
    """What fine-tuning is asked for.

    Args:
        eval_data: the same, to evaluate on after every epoch.
        eval_split: hold out a part of ``data`` for that instead, as ``Trainer`` takes it: a share, such as 0.2, of each class, or
            ``"group:COLUMN"``. ``notes`` of the result say what was held out.
        output: where the tuned model is written.
        epochs, seed, engine, device, threads: as ``Trainer`` takes them.
        batch_size: None: as many samples as fit into memory, 32 at most, fewer where there are few.
        lr: None is ``find_rate``'s.
        schedule: ``cosine``, after a short rise, or ``constant``.
        freeze_until: ``head``, or where training begins (``transfer``).
        unfreeze: ``gradual``, or epochs: when the layers before the head begin to train (``plan``).
        layer_decay: what the rate is multiplied by from each layer to the one before it, such as 0.9.
        cached_features: compute what stands before the layers that train once for each sample, where that can be done.
        patience: stop after so many epochs without a lower loss, in the last stage, and again in the training as integers; None
            trains to the last.
        callbacks: as ``Trainer`` takes them; they are told of each stage as of a run of its own.
        augment: random changes to images, ``crop,flip,rand_augment:2:9,mixup:0.2,cutmix:1`` or some of these, as ``Trainer``
            takes them; nothing is then computed once for each sample. MixUp and CutMix are done in the graph
            (``burnish.losses.mixed``); MixUp mixes rows of a table too.
        data_workers: as ``Trainer`` takes it.
        adapters: settings of ``burnish.surgery.lora``, such as ``{"rank": 8, "alpha": 16}``, or a folder of PEFT to go on with:
            adapters and the head train, and are merged into what is written; None trains the weights themselves.
        save_adapters: where adapters are written by themselves as well, by form, as ``Session.export`` takes it:
            ``{"apart": "tuned.onnx", "peft": "folder"}``.
        quantize: ``int8`` or ``int4``, settings behind a colon, or settings of ``burnish.surgery.quantize`` with ``epochs``,
            ``rate`` (a factor of ``lr``) and ``distill`` (the part of the loss that is what the tuned model says): after the
            tuning, the model is quantized, calibrated on the data, and trained for a third of the epochs (with 4 bits for as
            many) as it will compute with integers; what is written holds these. ``accuracies`` of the result, and its last note,
            say what that costs.
        head: ``auto`` keeps the file's head where its metadata name the classes of the data; ``new`` draws one in any case, and
            ``keep`` keeps it, as for data of the same classes by number.
        folded_norm: ``auto`` trains with batch normalization where the file says that an exporter folded it into layers, and
            folds it again at the end; ``insert`` puts it after every convolution that has none; ``keep`` leaves layers as they
            are.
        head_output: the output with the classes, where there are several; of a detector boxes and scores, where they are not
            found: any values of the model, by name.
        sample_axis: along which axis of the model's inputs the samples stand, as ``burnish.compile`` takes it; the tuned file
            keeps it.
        loss: in place of the one that fits: cross-entropy of classes and masks, ``mse`` of values, ``bce_with_logits`` of labels
            of yes or no, of a detector the one that is found. It decides what is learned: ``cross_entropy`` of numbers that were
            taken for values takes them for classes.
        metrics: in place of those that fit, or that fit the loss where that is named; the first decides which epoch is best.
        label, label_separator, image_size, pixels, text, sound, missing, columns: as ``burnish.data.open_dataset`` takes them.
        train_on: of texts that a language model learns, the tokens that count, as ``burnish.data.Text`` takes it.
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
        """The options that data are opened with."""
        names = ("label", "label_separator", "image_size", "pixels", "text", "sound", "missing", "columns")
        options = {name: getattr(self, name) for name in names}
        return options if self.train_on is None else {**options, "text": self._text_with_answers()}

    def _text_with_answers(self) -> Text:
        """The settings of texts with ``train_on`` among them.

        Raises:
            ConfigurationError: ``text`` says something else.
        """
        text = as_text(self.text) or Text()
        if text.train_on not in (None, self.train_on):
            raise ConfigurationError(f"train_on={self.train_on!r}, and text has train_on={text.train_on!r}: give one of them")
        return replace(text, train_on=self.train_on)

    @property
    def running(self) -> dict[str, Any]:
        """The options of what runs the model, as ``Session`` takes them."""
        return {name: getattr(self, name) for name in ("engine", "device", "threads")}
