"""The whole of fine-tuning in one call."""

from __future__ import annotations

import inspect
import json
import tempfile
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from burnish import losses
from burnish.adapters.exports import FORMS
from burnish.adapters.peft_format import check_names
from burnish.data import DataDescription, Dataset, DataSource, DataSpec, ImageAugmentation
from burnish.data.image.augmentation import read_augmentation
from burnish.engines import Engine
from burnish.errors import CarryOverWarning, ConfigurationError
from burnish.files.file_writing import check_output
from burnish.files.model_file import save_model
from burnish.finetuning.detectors import file_line
from burnish.finetuning.normalization import AUTO
from burnish.finetuning.planning import COSINE, Plan, Stage, plan
from burnish.finetuning.quantization import Quantization, accuracies_line, figure_of
from burnish.finetuning.tasks import open_source
from burnish.finetuning.transfer import Transfer, transfer
from burnish.importer import Source
from burnish.program import Program
from burnish.quantization.quantize import check_unquantized, remaining_line
from burnish.sample_axes import AskedAxes
from burnish.settings import suggestion
from burnish.training.callbacks import Callback, EarlyStopping
from burnish.training.checkpoint import open_checkpoint
from burnish.training.run_position import is_better
from burnish.training.run_results import TrainingResult
from burnish.training.trainer import Trainer

READING = ("label", "image_size", "pixels", "text", "missing")
"""Options with which data are opened."""
METRICS, STEP = "burnish.metrics", "step"
"""The metadata of a tuned file: its figures, and on which data they were taken."""


@dataclass(frozen=True)
class Finetuned:
    """What ``finetune`` came to.

    Attributes:
        path: of the tuned model.
        result: what the trainer reported; of several stages, the last.
        notes: what was decided, and why, a line each.
        accuracies: with ``quantize``, those of ``float32``, ``quantized_after_training`` and ``quantized_in_training``; else
            empty.
    """

    path: Path
    result: TrainingResult
    notes: tuple[str, ...]
    accuracies: Mapping[str, float] = field(default_factory=dict)


def finetune(
    source: Source,
    data: DataSource,
    *,
    eval_data: DataSource | None = None,
    output: str | Path = "tuned.onnx",
    epochs: int = 5,
    batch_size: int | None = None,
    lr: float | None = None,
    schedule: str = COSINE,
    freeze_until: str | None = None,
    unfreeze: str | Sequence[int] | None = None,
    layer_decay: float | None = None,
    cached_features: bool = True,
    patience: int | None = None,
    callbacks: Sequence[Callback] = (),
    augment: str | ImageAugmentation | None = None,
    data_workers: int | None = None,
    adapters: Mapping[str, Any] | str | Path | None = None,
    save_adapters: Mapping[str, str | Path] | None = None,
    quantize: str | Mapping[str, Any] | None = None,
    head: str = AUTO,
    folded_norm: str = AUTO,
    head_output: str | Sequence[str] | None = None,
    sample_axis: AskedAxes = None,
    loss: losses.LossLike | None = None,
    metrics: Sequence[str] | None = None,
    seed: int = 0,
    engine: str | Engine = "auto",
    device: str | None = None,
    threads: int | None = None,
    **options: Any,
) -> Finetuned:
    """Tune a model that somebody else has trained on data of yours, and write it: a classifier, one of segmentation, a detector.

    Its head is drawn anew unless the file names the classes of the data as its own, a file of one sample is opened for batches,
    and the learning rate is found by trial steps; ``notes`` of the result says so. With ``eval_data`` the best epoch is written,
    else the last.
    ``burnish finetune`` does the same, and keeps checkpoints.

    Args:
        source: path, bytes, ``onnx.ModelProto`` or ``onnx_ir.Model``; left as it is.
        data: a path, as ``burnish.data.open_dataset`` takes it; ``(x, y)``, arrays by input name, a data set, or one of Hugging
            Face ``datasets``, as ``Trainer`` takes them. No batches as they come: the data are read before they are trained on.
        eval_data: the same, to evaluate on after every epoch.
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
        loss: in place of the one that fits: cross-entropy of classes and masks, of a detector the one that is found.
        metrics: in place of those that fit, or that fit the loss where that is named; the first decides which epoch is best.
        options: as ``open_dataset`` takes them: ``label``, ``image_size``, ``pixels``, ``text``, ``missing``.

    Raises:
        ConfigurationError: no head can be told, or ``freeze_until`` names nothing, or an option is out of range; or a result
            cannot be written where it is to be.
        DataError: the data cannot be read, or hold no classes.
    """
    where: dict[str, Any] = {"output": head_output, "freeze_until": freeze_until, "adapters": adapters}
    where |= {"folded_norm": folded_norm, "batch_size": batch_size, "head": head}
    where |= {"loss": loss, "metrics": metrics, "augment": augment, "sample_axis": sample_axis}
    integers = None if quantize is None else Quantization.read(quantize)
    _check_options(options)
    check_together(integers, adapters, save_adapters)
    check_output(Path(output), "output", read=(source, data, eval_data))
    for form, path in (save_adapters or {}).items():
        check_output(Path(path), f"save_adapters[{form!r}]", is_folder=form == "peft")
    prepared, dataset = transfer(source, data, seed=seed, **where, **options)
    check_quantized(integers, prepared)
    if "peft" in (save_adapters or ()):
        check_names(prepared.model.metadata_props)
    engines: dict[str, Any] = {"engine": engine, "device": device, "threads": threads}
    course: dict[str, Any] = {"epochs": epochs, "batch_size": batch_size, "seed": seed}
    rates: dict[str, Any] = {"lr": lr, "schedule": schedule, "unfreeze": unfreeze, "layer_decay": layer_decay}
    decided = plan(prepared, dataset, cached_features=cached_features and augment is None, **course, **rates, **engines)
    changes = None if augment is None else read_augmentation(augment).unmixed
    run = _Run(
        decided, dataset, eval_data, options, patience, callbacks, {"augment": changes, "data_workers": data_workers, **engines}
    )
    with tempfile.TemporaryDirectory(prefix="burnish-finetune-") as folder:
        tuned = Path(output) if integers is None else Path(folder, "float32.onnx")
        result = run.train(Path(folder), tuned, seed, save_adapters or {}, fold=integers is None)
        accuracies: dict[str, float] = {}
        if integers is not None:
            result, accuracies = run.quantized(integers, Path(folder), tuned, Path(output), seed + len(decided.stages))
    notes = (*prepared.notes, *decided.notes, *run.notes)
    return Finetuned(Path(output), result, notes, accuracies)


def _check_options(options: Mapping[str, Any]) -> None:
    """Raise ConfigurationError for an option that neither ``finetune`` nor ``open_dataset`` has."""
    for name in options:
        if name not in READING:
            own = [*inspect.signature(finetune).parameters, *READING]
            raise ConfigurationError(
                f"finetune has no option '{name}'{suggestion(name, own)}: what it takes is in its docstring; for anything else "
                "train with burnish.Trainer"
            )


def check_quantized(integers: Quantization | None, prepared: Transfer) -> None:
    """Raise ConfigurationError for integers that a detector would end in, or that the model holds already."""
    if integers is not None:
        check_unquantized(prepared.model.graph)
    if integers is not None and not prepared.task.metrics:
        raise ConfigurationError(
            f"quantize: what it costs is said in a metric, and the loss {prepared.task.loss.name} has none: name one "
            "(metrics=[...], --metrics), or quantize what is tuned (burnish quantize)"
        )
    if integers is not None and prepared.task.kind == "objects":
        raise ConfigurationError(
            "quantize: of a detector the loss reads values inside of the model, which quantization would take apart: tune it, "
            "and quantize what is tuned (burnish quantize)"
        )


def check_together(integers: Quantization | None, adapters: object, save_adapters: Collection[str] | None) -> None:
    """Raise ConfigurationError for options that contradict each other."""
    if integers is not None and adapters is not None:
        raise ConfigurationError(
            "quantize: integers are trained in the weights, and with adapters these stay as they are: tune with adapters first, "
            "and give the tuned file, into which they are merged, to a run with quantize (--quantize)"
        )
    if save_adapters and adapters is None:
        raise ConfigurationError("save_adapters: the run trains no adapters: give some, such as adapters={'rank': 8}")
    for form in save_adapters or ():
        if form not in FORMS:
            raise ConfigurationError(f"save_adapters: '{form}'{suggestion(form, FORMS)}: give {', '.join(FORMS)}")


@dataclass
class _Run:
    """What the parts of a run have in common.

    Attributes:
        plan: what was decided.
        dataset: that is trained on.
        eval_data: source of the data that are evaluated on; None where there are none.
        options: with which data are opened.
        patience: of early stopping, in the last stage of the plan and in the training as integers.
        callbacks: of all parts.
        trainer: options of ``Trainer``.
        notes: what it came to beyond the result, a line each.
    """

    plan: Plan
    dataset: Dataset
    eval_data: DataSource | None
    options: Mapping[str, Any]
    patience: int | None
    callbacks: Sequence[Callback]
    trainer: Mapping[str, Any]
    notes: list[str] = field(default_factory=list)

    def train(self, folder: Path, output: Path, seed: int, adapters: Mapping[str, str | Path], fold: bool) -> TrainingResult:
        """Train all stages of the plan, and write the model, and its adapters by themselves as asked."""
        state: Mapping[str, np.ndarray] | None = None
        earlier: list[tuple[Mapping[str, Any] | None, Path]] = []
        for number, stage in enumerate(self.plan.stages):
            program = self.plan.program(stage, len(self.dataset))
            is_last = stage is self.plan.stages[-1]
            trainer = self._trainer(program, stage, folder / str(number), seed + number, is_last, _carried(program, state))
            result = trainer.run()
            if is_last:
                trainer.session.metadata |= metrics_entry(take_best(trainer, result, self.eval_data is not None, earlier))
                trainer.session.export(output, fold_norm=fold)
                for form, path in adapters.items():
                    trainer.session.export(path, adapters=form)
                self._judge_file(output, trainer)
            state = trainer.session.state()
            earlier.append((result.best, trainer.best))
            trainer.session.close()
        return result

    def _judge_file(self, path: Path, trainer: Trainer) -> None:
        """Note how precise a detector's file is by the boxes that it leaves itself, on the evaluation data."""
        if self.plan.transfer.task.kind == "objects" and trainer.eval_loader is not None:
            judged = trainer.eval_loader.dataset
            line = file_line(path, judged, self.plan.batch_size, "evaluation", self.trainer["engine"])
            self.notes += [] if line is None else [line]

    def quantized(
        self, integers: Quantization, folder: Path, tuned: Path, output: Path, seed: int
    ) -> tuple[TrainingResult, dict[str, float]]:
        """Quantize the tuned model, train it as such, and write it; return the accuracies before and after both too."""
        size, engine = self.plan.batch_size, self.trainer["engine"]
        model = integers.applied(tuned, self.dataset, self.plan.transfer.head.output, size, engine)
        remaining = remaining_line(model)
        self.notes += [] if remaining is None else [f"quantized: {remaining}"]
        start = folder / "quantized.onnx"
        save_model(model, start)
        plan, stage = integers.planned(self.plan, model, tuned)
        program = plan.program(stage, len(self.dataset))
        trainer = self._trainer(program, stage, folder / "integers", seed, True, None)
        result = trainer.run()
        trainer.session.metadata |= metrics_entry(take_best(trainer, result, self.eval_data is not None))
        trainer.session.export(output)
        judged = trainer.eval_loader.dataset if trainer.eval_loader is not None else self.dataset
        trainer.session.close()
        files = {"float32": tuned, "quantized_after_training": start, "quantized_in_training": output}
        metric = self.plan.transfer.task.metrics[0]
        accuracies = {name: figure_of(path, metric, judged, size, engine) for name, path in files.items()}
        self.notes.append(accuracies_line(accuracies, metric, "training" if self.eval_data is None else "evaluation"))
        return result, accuracies

    def _trainer(
        self, program: Program, stage: Stage, folder: Path, seed: int, stops: bool, state: Mapping[str, np.ndarray] | None
    ) -> Trainer:
        return Trainer(
            program,
            self.dataset,
            _evaluation(program, self.dataset, self.eval_data, self.options),
            epochs=stage.epochs,
            batch_size=self.plan.batch_size,
            seed=seed,
            run_directory=folder,
            state=state,
            callbacks=[*self.callbacks, *([EarlyStopping(self.patience)] if self.patience is not None and stops else [])],
            **self.trainer,
        )


def take_best(
    trainer: Trainer, result: TrainingResult, is_evaluated: bool, earlier: Sequence[tuple[Mapping[str, Any] | None, Path]] = ()
) -> dict[str, Any]:
    """Bring the best epoch back where there are evaluation data, and return what the figures of the session's state are.

    Where an epoch of an earlier stage was better, its state becomes that of the session, and the best checkpoint of the run.

    Args:
        trainer: whose run is over.
        result: of the run.
        is_evaluated: whether there are evaluation data; the last epoch stays where there are none.
        earlier: of each stage before, in their order, the best epoch as ``TrainingResult.best`` has it, and its checkpoint.

    Returns:
        ``data``, which the figures are of, ``epoch`` (from 1), ``stage`` (from 1) where that is an earlier one, and each figure
        by name; ``metrics_entry`` takes it.
    """
    data = "evaluation" if is_evaluated else "training"
    best: Mapping[str, Any] | None = result.best
    if not is_evaluated or best is None:
        return {"data": data, "epoch": result.steps // len(trainer.loader), **result.metrics}
    stage = None
    for number, (other, path) in enumerate(earlier, start=1):
        if other is None or other["metric"] != best["metric"] or not path.exists():
            continue
        known: tuple[float | None, float | None] = (None, None)
        if other["value"] == best["value"]:
            known = (_loss_of(path), _loss_of(trainer.best if stage is None else stage[1]))
        if is_better(best["metric"], other["value"], best["value"], *known):
            best, stage = other, (number, path)
    figures = {"data": data, "epoch": best["epoch"], best["metric"]: best["value"]}
    if stage is None:
        trainer.session.restore(trainer.best)
        return figures
    number, path = stage
    # What had not trained by then is as the start model has it.
    trainer.session.load_state(trainer.program.initial_state(trainer.loader.seed))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CarryOverWarning)
        extra = trainer.session.restore(path, strict=False)
    trainer.run_folder.checkpoints.save_best(trainer.session, extra)
    return {**figures, "stage": number}


def _loss_of(path: Path) -> float | None:
    """The loss of the epoch that a best checkpoint is of; None where it does not say."""
    with open_checkpoint(path) as checkpoint:
        loss = checkpoint.extra.get("position", {}).get("best_loss")
    return float(loss) if isinstance(loss, int | float) else None


def metrics_entry(figures: Mapping[str, Any]) -> dict[str, str]:
    """Return the entry for ``metadata_props`` that says what a tuned file came to, as JSON."""
    return {METRICS: json.dumps(dict(figures))}


def _carried(program: Program, state: Mapping[str, np.ndarray] | None) -> dict[str, np.ndarray] | None:
    """The state of a stage that goes on from another; its schedule begins anew, and so do its steps. None for the first."""
    if state is None:
        return None
    carried = program.carry_state(state).state
    return {**carried, STEP: np.zeros_like(carried[STEP])} if STEP in carried else carried


def _evaluation(program: Program, dataset: Dataset, source: DataSource | None, options: Mapping[str, Any]) -> Dataset | None:
    """Data to evaluate on, read as those that are trained on; None where there are none."""
    if source is None:
        return None
    described = DataDescription.of(dataset)
    spec = DataSpec.by(program).like(described)
    return open_source(source, spec, classes=described.classes, **{**options, "pixels": None})
