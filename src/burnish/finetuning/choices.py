"""The choices made when a fine-tuning run began, stored in its folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from burnish.data.splitting import SPLIT
from burnish.errors import CheckpointError
from burnish.files.file_writing import write_text
from burnish.finetuning.chance import Chance
from burnish.finetuning.planning import Plan
from burnish.finetuning.quantization import Quantization
from burnish.training.run_files import RECORD, CheckpointFolder, remove_results
from burnish.training.run_folder import CURVES
from burnish.training.run_results import STAGES, TABLE
from burnish.untrusted_files import UNREADABLE, read_json_file

OBJECTS = "objects"
SGD, ADAMW = "sgd", "adamw:weight_decay=0"
"""Optimizers of ``Transfer.optimizer`` in the syntax of the command line."""
CHOICES, START, QUANTIZED, ACCURACIES = "finetune.json", "start.onnx", "quantized.onnx", "quantization.json"
"""Files in the folder of a run: the choices, the model with its new head, the quantized tuned model before it trains, and the
accuracies."""


@dataclass(frozen=True)
class ChosenStage:
    """A part of a run in which the same weights train.

    Attributes:
        epochs: number of epochs.
        cached: True if the results of the layers before the trained ones are computed once.
        groups: settings of parameters, as for ``burnish.optim.groups``.
        quantized: True if the model trains in quantized form.
        lr: learning rate, if it differs from the run's.
    """

    epochs: int
    cached: bool
    groups: Mapping[str, Any]
    quantized: bool = False
    lr: float | None = None


@dataclass(frozen=True)
class Choices:
    """The choices made when a run began.

    Attributes:
        model: the tuned model.
        samples: number of samples in the data.
        lr, layer_decay, schedule, batch_size: as in ``Plan``.
        kind, loss, metrics: those of the task; the loss as settings.
        optimizer: name, with settings after a colon.
        outputs: outputs that the loss reads, separated by commas.
        head: names of the layer that gives the classes.
        batch: ``open`` for a file that takes one sample at a time.
        quantize: as in ``burnish.finetune``.
        stages: the stages in order.
        chance, remedies: as in ``Plan``.
    """

    model: str
    samples: int
    lr: float
    layer_decay: float | None
    schedule: str
    batch_size: int
    kind: str
    loss: Mapping[str, Any]
    metrics: tuple[str, ...]
    optimizer: str
    outputs: str
    head: Any
    batch: str | None
    quantize: Any
    stages: tuple[ChosenStage, ...]
    chance: Chance | None = None
    remedies: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: str, planned: Plan, samples: int, quantize: str | Mapping[str, Any] | None) -> Choices:
        """Return the choices of a plan; with ``quantize``, they end with a stage of quantized training."""
        prepared, task = planned.transfer, planned.transfer.task
        stages = [ChosenStage(stage.epochs, stage.cached, prepared.groups(stage.frozen)) for stage in planned.stages]
        if quantize is not None:
            integers = Quantization.read(quantize)
            epochs = integers.length(sum(stage.epochs for stage in stages))
            held = {name: group for name, group in stages[-1].groups.items() if group == "frozen"}
            stages.append(ChosenStage(epochs, False, held, True, planned.lr * integers.rate))
        return cls(
            model,
            samples,
            planned.lr,
            planned.layer_decay,
            planned.schedule,
            planned.batch_size,
            task.kind,
            task.loss.options(),
            tuple(task.metrics),
            ADAMW if prepared.uses_adamw else SGD,
            task.outputs if isinstance(task.outputs, str) else ",".join(task.outputs),
            prepared.head.names,
            prepared.batch,
            quantize,
            tuple(stages),
            planned.chance,
            planned.remedies,
        )

    @classmethod
    def read(cls, folder: Path) -> Choices:
        """Return the choices of the run in a folder.

        Raises:
            CheckpointError: the folder has no run that can be resumed.
        """
        try:
            kept = read_json_file(folder / CHOICES)
            given = {field.name: kept[field.name] for field in fields(cls)}
            given |= {"lr": float(kept["lr"]), "batch_size": int(kept["batch_size"]), "samples": int(kept["samples"])}
            stages = [{**stage, "epochs": int(stage["epochs"]), "groups": dict(stage["groups"])} for stage in kept["stages"]]
            given |= {"metrics": tuple(kept["metrics"]), "remedies": tuple(map(str, kept["remedies"]))}
            given["chance"] = None if kept["chance"] is None else Chance(**kept["chance"])
            return cls(**{**given, "stages": tuple(ChosenStage(**each) for each in stages)})
        except UNREADABLE as error:
            raise CheckpointError(
                f"'{folder}' holds no run of burnish finetune that can go on ({error}): begin one, without --resume"
            ) from error

    def write(self, folder: Path) -> None:
        """Write the file that ``read`` reads."""
        content = asdict(self)
        for stage in content["stages"]:
            if not stage["quantized"]:
                del stage["quantized"], stage["lr"]
        write_text(folder / CHOICES, json.dumps(content, indent=1) + "\n")

    def rate(self, stage: ChosenStage) -> float:
        """Return the (highest) learning rate of a stage."""
        return self.lr if stage.lr is None else stage.lr

    def is_whole(self, number: int) -> bool:
        """True if all layers train in a stage: the last floating-point stage and the quantized one."""
        return number + 1 == len(self.stages) or self.stages[number + 1].quantized


def remove_tuning(folder: Path, source: Path) -> None:
    """Remove the files of a fine-tuning run from a folder that another run overwrites.

    Args:
        folder: folder of the run.
        source: model of the other run, which is kept.
    """
    if (folder / CHOICES).is_file():
        remove_stages(folder)
        remove_results(folder, [] if source.exists() and (folder / START).resolve() == source.resolve() else [START])


def remove_stages(folder: Path) -> None:
    """Remove the files of an earlier run: otherwise its checkpoints would count as those of the last stage."""
    checkpoints = CheckpointFolder(folder / "checkpoints")
    if not ((folder / CHOICES).is_file() or checkpoints.exists):
        return
    remove_results(folder)
    checkpoints.clear()
    for name in (CHOICES, RECORD, TABLE, CURVES, QUANTIZED, ACCURACIES, SPLIT):
        (folder / name).unlink(missing_ok=True)
    stages = folder / STAGES
    for stage in list(stages.iterdir()) if stages.is_dir() else ():
        if stage.name.isdecimal():
            shutil.rmtree(stage, ignore_errors=True)
    with suppress(OSError):  # the folder may hold other files
        stages.rmdir()
