"""What a run of ``burnish finetune`` chose when it began, kept in its folder, and what becomes of the files that it tunes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from burnish.cli.compilation_options import AdapterOptions, Compilation, SampleAxisOption
from burnish.cli.console import output
from burnish.cli.data_options import Pixels, TextOptions
from burnish.cli.optimizer_options import OptimizerOptions
from burnish.cli.option_groups import OptionGroup, values_of
from burnish.cli.train_options import Course, Data, Results
from burnish.compiler.options import CompileOptions
from burnish.errors import CheckpointError
from burnish.files.file_writing import write_text
from burnish.settings import is_natural_text
from burnish.untrusted import UNREADABLE, read_json_file

if TYPE_CHECKING:
    from burnish.data import Dataset
    from burnish.finetuning import Plan, Quantization, Trial


OBJECTS = "objects"
TUNED, QUANTIZED, ACCURACIES, CURVES = "tuned.onnx", "quantized.onnx", "quantization.json", "curves.png"
"""In folders of runs: the tuned model, its quantized form before it is trained as such, the accuracies, and the curves."""


@dataclass(frozen=True)
class QuantizedStage:
    """The stage in which a tuned model trains as it will compute with integers.

    Attributes:
        folder: of the run.
        earlier: of the stage that tuned the model.
        choices: of the run.
        data, pixels, texts, course: of the command.
    """

    folder: Path
    earlier: Path
    choices: Mapping[str, Any]
    data: Data
    pixels: Pixels
    texts: TextOptions
    course: Course

    @property
    def start(self) -> Path:
        """The quantized model that the stage begins with."""
        return self.folder / QUANTIZED

    @property
    def tuned(self) -> Path:
        """The tuned model in float32."""
        return self.earlier / TUNED

    @property
    def loss(self) -> Any:
        """What the quantized model learns, as settings: for classes, what the tuned model says of them beside the labels."""
        from burnish import losses
        from burnish.finetuning import Quantization

        integers = Quantization.read(self.choices["quantize"])
        return integers.objective(losses.get(self.choices["loss"]), self.tuned, self.choices["outputs"]).options()

    def begun(self, is_resumed: bool) -> QuantizedStage:
        """Write the quantized model, calibrated on the training data, and say so; that of a run that goes on stays.

        Returns:
            The stage itself.
        """
        from burnish.files.model_file import save_model
        from burnish.finetuning import Quantization
        from burnish.quantization.quantize import remaining_line

        if is_resumed and self.start.is_file():
            return self
        integers = Quantization.read(self.choices["quantize"])
        dataset = self._opened(self.data.data)
        chosen = self.choices["outputs"], self.choices["batch_size"], self.course.chosen_engine()
        model = integers.applied(self.tuned, dataset, *chosen)
        save_model(model, self.start)
        count = sum(node.op_type == "QuantizeLinear" for node in model.graph)
        weights = integers.options["weights"]
        output().print(f"{self.start}: {weights}, {count} quantizations, calibrated on {self.data.data}")
        if (remaining := remaining_line(model)) is not None:
            output().print(f"{self.start}: {remaining}")
        return self

    def end(self, written: Path) -> None:
        """Print and write the accuracies: on the evaluation data, where there are some."""
        from burnish.finetuning import accuracies_line, figure_of

        which = "training" if self.data.eval_data is None else "evaluation"
        dataset, engine = self._opened(self.data.eval_data or self.data.data), self.course.chosen_engine()
        metric = self.choices["metrics"][0]
        files = {"float32": self.tuned, "quantized_after_training": self.start, "quantized_in_training": written}
        accuracies = {name: figure_of(path, metric, dataset, self.course.batch_size, engine) for name, path in files.items()}
        content = json.dumps({"data": which, "metric": metric, **accuracies}, indent=1) + "\n"
        write_text(self.folder / ACCURACIES, content)
        output().print(accuracies_line(accuracies, metric, which))

    def _opened(self, source: str) -> Dataset:
        return _opened(self.tuned, source, self.data, self.pixels, self.texts)


def say_precision(tuned: Path, data: Data, pixels: Pixels, texts: TextOptions, course: Course) -> None:
    """Print how precise a detector's file is by the boxes that it leaves itself, where there are evaluation data."""
    from burnish.finetuning import file_line

    if data.eval_data is None:
        return
    dataset = _opened(tuned, data.eval_data, data, pixels, texts)
    line = file_line(tuned, dataset, course.batch_size, "evaluation", course.chosen_engine())
    if line is not None:
        output().print(line)


def _opened(tuned: Path, source: str, data: Data, pixels: Pixels, texts: TextOptions) -> Dataset:
    """Data as a tuned model reads them, which says what was done to pixels and texts."""
    from burnish.data import open_dataset
    from burnish.training.trained_model import open_model

    opened = open_model(tuned)
    described = opened.described
    return open_dataset(
        source,
        opened.to_evaluate,
        label=data.label,
        classes=described.classes,
        image_size=data.image_size,
        pixels=pixels.settings() if described.preprocessing is None else None,
        text=texts.settings_for(tuned, source, described),
        missing=data.missing,
    )


MIXES = ("mixup", "cutmix")
"""Changes that the graph makes."""
CHOICES, START, STAGES = "finetune.json", "start.onnx", "stages"
"""In the folder of the run: what was chosen, the model with its new head, and the folders of all stages but the last."""


@dataclass(frozen=True)
class Tuning(OptionGroup):
    """What is tuned, and how fast."""

    panel: ClassVar = "Tuning"
    freeze_until: Annotated[
        str | None,
        typer.Option(
            "--freeze-until",
            metavar="NAME",
            help="head: train the head alone. Or a node, or a name or pattern of weights: leave what comes before the first of "
            "these as it is.",
        ),
    ] = None
    unfreeze: Annotated[
        str | None,
        typer.Option(
            "--unfreeze",
            metavar="WHEN",
            help="gradual: the head alone first, and a third of the layers before it after each epoch. Or the epochs after which "
            "a further part trains, such as 1,3: as many parts as there are numbers.",
        ),
    ] = None
    cached_features: Annotated[
        bool,
        typer.Option(
            "--cached-features/--no-cached-features",
            help="Compute what stands before the layers that train once for each sample, where that can be done.",
        ),
    ] = True
    head: Annotated[
        str,
        typer.Option(
            "--head",
            metavar="WHICH",
            help="auto: keep the file's head where it names the classes of the data as its own, else draw one anew. new: draw "
            "one. keep: keep it, such as for data of the same classes by number.",
        ),
    ] = "auto"
    folded_norm: Annotated[
        str,
        typer.Option(
            "--folded-norm",
            metavar="WAY",
            help="auto: train with batch normalization after layers into which the exporter folded it. insert: after every "
            "convolution that has none. keep: leave layers as they are.",
        ),
    ] = "auto"
    lr: Annotated[float | None, typer.Option("--lr", help="Learning rate; by default found by some trial steps.")] = None
    layer_decay: Annotated[
        float | None,
        typer.Option(
            "--layer-decay", metavar="FACTOR", help="Multiply the rate by this from each layer to the one before it, such as 0.9."
        ),
    ] = None
    schedule: Annotated[
        str, typer.Option("--schedule", help="Of the learning rate: cosine, after a short rise, constant, linear or another.")
    ] = "cosine"
    patience: Annotated[int | None, typer.Option("--patience", min=1, help="Stop after so many epochs without a lower loss.")] = (
        None
    )
    outputs: Annotated[
        str | None,
        typer.Option(
            "--outputs",
            metavar="NAME",
            help="The output with the classes, where there are several; of a detector boxes and scores, with a comma between, "
            "where they are not found.",
        ),
    ] = None
    sample_axis: SampleAxisOption = None
    loss: Annotated[
        str | None,
        typer.Option("--loss", help="In place of the one that fits the data, such as ssd:grids=[[8,8]],scales=[0.2,0.4]."),
    ] = None
    metrics: Annotated[
        list[str] | None, typer.Option("--metrics", help="In place of those that fit; the first decides which epoch is best.")
    ] = None
    quantize: Annotated[
        str | None,
        typer.Option(
            "--quantize",
            metavar="FORM",
            help="int8 or int4: quantize the tuned model, and train it further as it will compute with integers; settings behind "
            "a colon, such as int8:epochs=2,method=entropy. Prints the accuracy before, after, and after this training.",
        ),
    ] = None

    def quantization(self) -> Quantization | None:
        """Return how the tuned model is quantized; None where it is not.

        Raises:
            ConfigurationError: ``--quantize`` names no form, or a setting that there is not.
        """
        from burnish.finetuning import Quantization

        return None if self.quantize is None else Quantization.read(self.quantize)


def choose(
    model: Path,
    folder: Path,
    data: Data,
    pixels: Pixels,
    texts: TextOptions,
    tuning: Tuning,
    adapters: AdapterOptions,
    course: Course,
) -> tuple[dict[str, Any], list[Trial | None]]:
    """Put the model with its head into the folder of the run, and return what was chosen; it is said, and kept beside.

    Returns:
        What was chosen, and what was compiled for it of each stage, reading its weights from that model.
    """
    from burnish.files.model_file import save_model
    from burnish.finetuning import check_quantized, plan, transfer

    read = {"label": data.label, "image_size": data.image_size, "pixels": pixels.settings(), "text": texts.settings()}
    asked = values_of(CompileOptions, outputs=tuning.outputs, sample_axis=tuning.sample_axis, metrics=tuning.metrics)
    prepared, dataset = transfer(
        model,
        data.data,
        output=asked.get("outputs"),
        sample_axis=asked.get("sample_axis"),
        loss=tuning.loss,
        metrics=asked.get("metrics"),
        freeze_until=tuning.freeze_until,
        head=tuning.head,
        folded_norm=tuning.folded_norm,
        batch_size=course.named_batch_size,
        adapters=adapters.source(),
        augment=data.augment,
        seed=course.seed,
        missing=data.missing,
        **read,
    )
    check_quantized(tuning.quantization(), prepared)
    _say(prepared.notes)
    planned = plan(
        prepared,
        dataset,
        epochs=course.epochs,
        batch_size=course.named_batch_size,
        lr=tuning.lr,
        schedule=tuning.schedule,
        unfreeze=_read_unfreeze(tuning.unfreeze),
        layer_decay=tuning.layer_decay,
        cached_features=tuning.cached_features and data.augment is None,
        seed=course.seed,
        engine=course.chosen_engine(),
        device=course.device,
        threads=course.threads,
    )
    _say(planned.notes)
    folder.mkdir(parents=True, exist_ok=True)
    remove_stages(folder)
    save_model(prepared.model, folder / START)
    choices = {"model": str(model), "samples": len(dataset), **_of_plan(planned, tuning)}
    write_text(folder / CHOICES, json.dumps(choices, indent=1) + "\n")
    trials = [planned.trial(stage) for stage in planned.stages]
    return choices, [None if trial is None else trial.read_from(folder / START) for trial in trials]


def remove_tuning(folder: Path, source: Path) -> None:
    """Remove what a run of ``burnish finetune`` has written into a folder that another run overwrites.

    Args:
        folder: of the run.
        source: the model of the other one, which stays.
    """
    from burnish.training.run_files import remove_results

    if (folder / CHOICES).is_file():
        remove_stages(folder)
        remove_results(folder, [] if source.exists() and (folder / START).resolve() == source.resolve() else [START])


def remove_stages(folder: Path) -> None:
    """Remove what an earlier run in a folder has written: its checkpoints would be taken for those of the last stage else."""
    from burnish.training.run_files import RECORD, CheckpointFolder, remove_results
    from burnish.training.run_results import TABLE

    checkpoints = CheckpointFolder(folder / "checkpoints")
    if not ((folder / CHOICES).is_file() or checkpoints.exists):
        return
    remove_results(folder)
    checkpoints.clear()
    for name in (CHOICES, RECORD, TABLE, CURVES, QUANTIZED, ACCURACIES):
        (folder / name).unlink(missing_ok=True)
    stages = folder / STAGES
    for stage in list(stages.iterdir()) if stages.is_dir() else ():
        if stage.name.isdecimal():
            shutil.rmtree(stage, ignore_errors=True)
    with suppress(OSError):  # something else is in it
        stages.rmdir()


def _of_plan(planned: Plan, tuning: Tuning) -> dict[str, Any]:
    """What is kept of a plan, with the stage in which the model trains as integers, where one is asked for."""
    prepared, task = planned.transfer, planned.transfer.task
    stages: list[dict[str, Any]] = [
        {"epochs": stage.epochs, "cached": stage.cached, "groups": prepared.groups(stage.frozen)} for stage in planned.stages
    ]
    integers = tuning.quantization()
    if integers is not None:
        epochs = integers.length(sum(stage.epochs for stage in planned.stages))
        held = {name: group for name, group in stages[-1]["groups"].items() if group == "frozen"}
        lr = planned.lr * integers.rate
        stages.append({"epochs": epochs, "cached": False, "groups": held, "quantized": True, "lr": lr})
    return {
        "lr": planned.lr,
        "layer_decay": planned.layer_decay,
        "schedule": planned.schedule,
        "batch_size": planned.batch_size,
        "kind": task.kind,
        "loss": task.loss.options(),
        "metrics": list(task.metrics),
        "outputs": task.outputs if isinstance(task.outputs, str) else ",".join(task.outputs),
        "head": prepared.head.names,
        "batch": prepared.batch,
        "quantize": tuning.quantize,
        "stages": stages,
    }


def _say(notes: Iterable[str]) -> None:
    for note in notes:
        output().print(note)


def _read_unfreeze(text: str | None) -> str | list[int] | None:
    """Return epochs with commas between as numbers, and a word as it is."""
    if text is None or not all(is_natural_text(part.strip()) for part in text.split(",")):
        return text
    return [int(part) for part in text.split(",")]


def read_choices(folder: Path) -> dict[str, Any]:
    """What was chosen when the run in a folder began."""
    try:
        choices = dict(read_json_file(folder / CHOICES))
        choices["lr"], choices["batch_size"], choices["samples"] = (
            float(choices["lr"]),
            int(choices["batch_size"]),
            int(choices["samples"]),
        )
        choices["stages"] = [
            {**stage, "epochs": int(stage["epochs"]), "groups": dict(stage["groups"])} for stage in choices["stages"]
        ]
        return choices
    except UNREADABLE as error:
        raise CheckpointError(
            f"'{folder}' holds no run of burnish finetune that can go on ({error}): begin one, without --resume"
        ) from error


def course_of(course: Course, choices: Mapping[str, Any], number: int, earlier: Path | None) -> Course:
    """The course of a stage: its part of the epochs, from the state of the one before, in an order of its own."""
    epochs = [stage["epochs"] for stage in choices["stages"]]
    grows = number == len(epochs) - 1 and not choices["stages"][number].get("quantized")
    return replace(
        course,
        epochs=max(course.epochs - sum(epochs[:-1]), 1) if grows else epochs[number],
        seed=course.seed + number,
        start_from=earlier,
    )


def results_of(results: Results, place: Path, is_last: bool) -> Results:
    """Where a stage leaves what it comes to, and whether it goes on with what is there."""
    from burnish.training.run_files import CheckpointFolder

    resumes = results.resume and CheckpointFolder(place / "checkpoints").exists
    return replace(
        results,
        folder=place,
        resume=resumes,
        overwrite=results.overwrite or (results.resume and not resumes),
        export=results.export if is_last else None,
        fold=results.fold and is_last,
    )


def unmixed(data: Data) -> Data:
    """Return the options of data without MixUp and CutMix, which are part of the loss."""
    parts = [] if data.augment is None else [part.strip() for part in data.augment.split(",")]
    rest = [part for part in parts if part.partition(":")[0] not in MIXES]
    return replace(data, augment=",".join(rest) or None)


def compilation_of(choices: Mapping[str, Any], stage: Mapping[str, Any]) -> Compilation:
    """The options of ``burnish train`` that the choices for a stage come to."""
    from burnish.finetuning.planning import warmup_steps

    groups, steps = stage["groups"], stage["epochs"] * -(-choices["samples"] // choices["batch_size"])
    scaled = [f"{name}=lr_scale={settings['lr_scale']}" for name, settings in groups.items() if settings != "frozen"]
    frozen = [name for name, settings in groups.items() if settings == "frozen"]
    return Compilation(
        optimizer=OptimizerOptions(
            lr=stage.get("lr", choices["lr"]),
            group=scaled or None,
            freeze=frozen or None,
            layer_decay=None if stage.get("quantized") else choices["layer_decay"],
            schedule=choices["schedule"],
            warmup=warmup_steps(steps, choices["schedule"]),
        ),
        options=CompileOptions(
            **values_of(CompileOptions, outputs=choices["outputs"], metrics=choices["metrics"]),
            batch=None if stage.get("quantized") else choices["batch"],
            loss=choices["loss"],
            cached_features="auto" if stage["cached"] else None,
        ),
    )
