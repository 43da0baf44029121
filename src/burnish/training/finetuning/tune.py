"""The whole of fine-tuning in one call."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from burnish.data import DataDescription, Dataset, DataSpec, ImageAugmentation, open_dataset
from burnish.engines import Engine
from burnish.importer import Source
from burnish.program import Program
from burnish.training.callbacks import EarlyStopping
from burnish.training.finetuning.planning import COSINE, plan
from burnish.training.finetuning.transfer import transfer
from burnish.training.result import TrainingResult
from burnish.training.trainer import Trainer

METRICS, STEP = "burnish.metrics", "step"
"""The metadata of a tuned file: its figures, and on which data they were taken."""


@dataclass(frozen=True)
class Finetuned:
    """What ``finetune`` came to.

    Attributes:
        path: of the tuned model.
        result: what the trainer reported; of several stages, the last.
        notes: what was decided, and why, a line each.
    """

    path: Path
    result: TrainingResult
    notes: tuple[str, ...]


def finetune(
    source: Source,
    data: str | Path,
    *,
    eval_data: str | Path | None = None,
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
    augment: str | ImageAugmentation | None = None,
    data_workers: int | None = None,
    adapters: Mapping[str, Any] | None = None,
    head_output: str | None = None,
    seed: int = 0,
    engine: str | Engine = "auto",
    device: str | None = None,
    threads: int | None = None,
    **options: Any,
) -> Finetuned:
    """Tune a classifier that somebody else has trained on data of yours, and write it.

    Its head is drawn anew where the classes are others, a file of one sample is opened for batches, and the learning rate is
    found by trial steps; ``notes`` of the result says so. With ``eval_data`` the best epoch is written, else the last.
    ``burnish finetune`` does the same, and keeps checkpoints.

    Args:
        source: path, bytes, ``onnx.ModelProto`` or ``onnx_ir.Model``; left as it is.
        data: as ``burnish.data.open_dataset`` takes it.
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
        patience: stop after so many epochs without a lower loss; None trains to the last.
        augment: random changes to images, ``crop``, ``flip`` and ``rand_augment``, as ``Trainer`` takes them; nothing is then
            computed once for each sample.
        data_workers: as ``Trainer`` takes it.
        adapters: settings of ``burnish.surgery.lora``, such as ``{"rank": 8, "alpha": 16}``: adapters and the head train, and are
            merged into what is written; None trains the weights themselves.
        head_output: the output with the classes, where there are several.
        options: as ``open_dataset`` takes them: ``label``, ``image_size``, ``pixels``, ``text``, ``missing``.

    Raises:
        ConfigurationError: no head can be told, or ``freeze_until`` names nothing, or an option is out of range.
        DataError: the data cannot be read, or hold no classes.
    """
    where: dict[str, Any] = {"output": head_output, "freeze_until": freeze_until, "adapters": adapters}
    prepared, dataset = transfer(source, data, seed=seed, **where, **options)
    run: dict[str, Any] = {"engine": engine, "device": device, "threads": threads}
    course: dict[str, Any] = {"epochs": epochs, "batch_size": batch_size, "seed": seed}
    rates: dict[str, Any] = {"lr": lr, "schedule": schedule, "unfreeze": unfreeze, "layer_decay": layer_decay}
    decided = plan(prepared, dataset, cached_features=cached_features and augment is None, **course, **rates, **run)
    state: Mapping[str, np.ndarray] | None = None
    with tempfile.TemporaryDirectory(prefix="burnish-finetune-") as folder:
        for number, stage in enumerate(decided.stages):
            program = decided.program(stage, len(dataset))
            trainer = Trainer(
                program,
                dataset,
                _evaluation(program, dataset, eval_data, options),
                epochs=stage.epochs,
                batch_size=decided.batch_size,
                seed=seed + number,
                run_directory=Path(folder, str(number)),
                state=_carried(program, state),
                augment=augment,
                data_workers=data_workers,
                callbacks=[EarlyStopping(patience)] if patience is not None and stage is decided.stages[-1] else [],
                **run,
            )
            result = trainer.run()
            if stage is decided.stages[-1]:
                trainer.session.metadata |= metrics_entry(take_best(trainer, result, eval_data is not None))
                trainer.session.export(output)
            state = trainer.session.state()
            trainer.session.close()
    return Finetuned(Path(output), result, (*prepared.notes, *decided.notes))


def take_best(trainer: Trainer, result: TrainingResult, is_evaluated: bool) -> dict[str, Any]:
    """Bring the best epoch back where there are evaluation data, and return what the figures of the session's state are.

    Args:
        trainer: whose run is over.
        result: of the run.
        is_evaluated: whether there are evaluation data; the last epoch stays where there are none.

    Returns:
        ``data``, which the figures are of, ``epoch`` (from 1), and each figure by name; ``metrics_entry`` takes it.
    """
    data = "evaluation" if is_evaluated else "training"
    best = result.best
    if not is_evaluated or best is None:
        return {"data": data, "epoch": result.steps // len(trainer.loader), **result.metrics}
    trainer.session.restore(trainer.best)
    return {"data": data, "epoch": best["epoch"], best["metric"]: best["value"]}


def metrics_entry(figures: Mapping[str, Any]) -> dict[str, str]:
    """Return the entry for ``metadata_props`` that says what a tuned file came to, as JSON."""
    return {METRICS: json.dumps(dict(figures))}


def _carried(program: Program, state: Mapping[str, np.ndarray] | None) -> dict[str, np.ndarray] | None:
    """The state of a stage that goes on from another; its schedule begins anew, and so do its steps. None for the first."""
    if state is None:
        return None
    carried = program.carry_state(state).state
    return {**carried, STEP: np.zeros_like(carried[STEP])} if STEP in carried else carried


def _evaluation(program: Program, dataset: Dataset, source: str | Path | None, options: Mapping[str, Any]) -> Dataset | None:
    """Data to evaluate on, read as those that are trained on; None where there are none."""
    if source is None:
        return None
    described = DataDescription.of(dataset)
    spec = DataSpec.by(program).like(described)
    return open_dataset(source, spec, classes=described.classes, **{**options, "pixels": None})
