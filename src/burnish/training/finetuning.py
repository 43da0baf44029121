"""What is decided before a file that somebody else has trained learns other data: its head, what stays, and the learning rate."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from burnish import optim
from burnish.compiler.compile import compile
from burnish.data import DataDescription, Dataset, DataSpec, Loader, open_dataset
from burnish.engines import Engine
from burnish.errors import ConfigurationError, DataError, NonFiniteLossError
from burnish.importer import InitializerKind, Source, classify_initializers, load
from burnish.program import Program
from burnish.settings import matches_pattern, suggestion
from burnish.surgery import Head, find_head, replace_head
from burnish.training.session import Session
from burnish.training.trainer import Trainer, TrainingResult

HEAD = "head"
HEAD_SCALE = 10.0
"""How much faster a head that was drawn anew learns than the layers that were trained already."""
LOWEST_RATE, HIGHEST_RATE, TRIALS = 1e-5, 1.0, 40
SMOOTHING, DIVERGED = 0.7, 3.0
UNKNOWN_RATE = 0.001


@dataclass(frozen=True)
class Transfer:
    """A model made ready for other data.

    Attributes:
        model: with a head for the classes in the data.
        head: that layer.
        is_new: whether it was drawn anew.
        frozen: the initializers that stay as they are.
        batch: ``open`` where the file takes one sample at a time, else None.
        notes: what was decided, and why, a line each.
    """

    model: ir.Model
    head: Head
    is_new: bool
    frozen: tuple[str, ...]
    batch: str | None
    notes: tuple[str, ...]

    def groups(self) -> dict[str, Any]:
        """Return what the parameters are set to, as ``burnish.optim.groups`` takes it."""
        scaled: dict[str, Any] = {}
        if self.is_new and not self._head_alone:
            scaled = {name: {"lr_scale": HEAD_SCALE} for name in self.head.initializers}
        return {**scaled, **dict.fromkeys(self.frozen, "frozen")}

    def optimizer(self, rate: float) -> optim.Optimizer:
        """Return SGD with momentum at this rate, the head's ten times as high where it is new and not alone."""
        plain, groups = optim.sgd(lr=rate, momentum=0.9), self.groups()
        return optim.groups(plain, groups) if groups else plain

    @property
    def _head_alone(self) -> bool:
        return set(_trainable(self.model)) <= {*self.frozen, *self.head.initializers}


def transfer(
    source: Source,
    data: str | Path,
    *,
    output: str | None = None,
    freeze_until: str | None = None,
    seed: int = 0,
    **options: Any,
) -> tuple[Transfer, Dataset]:
    """Return a model made ready for the classes in data, and the data.

    Args:
        source: path, bytes, ``onnx.ModelProto`` or ``onnx_ir.Model``; left as it is.
        data: as ``burnish.data.open_dataset`` takes it.
        output: of the model, where it has several.
        freeze_until: ``head`` trains the head alone; the name of a node, or a name or pattern of initializers, leaves everything
            before the first of these as it is; None trains everything.
        seed: of the new head.
        options: as ``open_dataset`` takes them: ``label``, ``image_size``, ``pixels``, ``text``.

    Raises:
        ConfigurationError: no head can be told, or ``freeze_until`` names nothing.
        DataError: the data cannot be read, or hold no classes.
    """
    model = load(source)
    head = find_head(model, output)
    batch = "open" if _takes_one_sample(model) else None
    spec = _unbounded(DataSpec.by(_probe(model, head, batch)))
    dataset = open_dataset(data, spec, **options)
    names = DataDescription.of(dataset).classes
    count = len(names) if names else _classes_in(dataset, spec)
    before, notes = head.classes, []
    is_new = count != head.classes or (names is not None and spec.described.classes != names)
    if is_new:
        model = replace_head(model, count, output, seed)
        head = find_head(model, output)
        notes.append(f"head: '{head.weight.name}' is drawn anew for {count} classes; the file had {before}")
    else:
        notes.append(f"head: '{head.weight.name}' stays, as the file's {count} classes are those of the data")
    if batch is not None:
        notes.append("batch: the file takes one sample at a time, and is opened for batches of any size")
    frozen = _frozen(model, head, freeze_until)
    if frozen:
        notes.append(f"frozen: {len(frozen)} weights before {freeze_until!r} stay as they are, bit for bit")
    elif is_new:
        notes.append(f"rates: the new head learns {HEAD_SCALE:g} times as fast as the layers that were trained already")
    return Transfer(model, head, is_new, frozen, batch, tuple(notes)), dataset


def finetune(
    source: Source,
    data: str | Path,
    *,
    eval_data: str | Path | None = None,
    output: str | Path = "tuned.onnx",
    epochs: int = 5,
    batch_size: int = 32,
    lr: float | None = None,
    freeze_until: str | None = None,
    head_output: str | None = None,
    seed: int = 0,
    engine: str | Engine = "auto",
    device: str | None = None,
    threads: int | None = None,
    **options: Any,
) -> Finetuned:
    """Tune a classifier that somebody else has trained on data of yours, and write it.

    Its head is drawn anew where the classes are others, a file of one sample is opened for batches, and the learning rate is
    found by trial steps; ``notes`` of the result says so. ``burnish finetune`` does the same, and keeps checkpoints.

    Args:
        source: path, bytes, ``onnx.ModelProto`` or ``onnx_ir.Model``; left as it is.
        data: as ``burnish.data.open_dataset`` takes it.
        eval_data: the same, to evaluate on after every epoch.
        output: where the tuned model is written.
        epochs, batch_size, seed, engine, device, threads: as ``Trainer`` takes them.
        lr: None is ``find_rate``'s.
        freeze_until: ``head``, or where training begins (``transfer``).
        head_output: the output with the classes, where there are several.
        options: as ``open_dataset`` takes them: ``label``, ``image_size``, ``pixels``, ``text``.

    Raises:
        ConfigurationError: no head can be told, or ``freeze_until`` names nothing.
        DataError: the data cannot be read, or hold no classes.
    """
    prepared, dataset = transfer(source, data, output=head_output, freeze_until=freeze_until, seed=seed, **options)

    def compiled(rate: float) -> Program:
        optimizer = prepared.optimizer(rate)
        return compile(
            prepared.model, optimizer=optimizer, outputs=prepared.head.output, batch=prepared.batch, metrics=("accuracy",)
        )

    run: dict[str, Any] = {"engine": engine, "device": device, "threads": threads}
    rate = find_rate(compiled(UNKNOWN_RATE), repeated(dataset, batch_size, seed), **run) if lr is None else lr
    program, described = compiled(rate), DataDescription.of(dataset)
    eval_set = None
    if eval_data is not None:
        spec = DataSpec.by(program).like(described)
        eval_set = open_dataset(eval_data, spec, classes=described.classes, **{**options, "pixels": None})
    run |= {"epochs": epochs, "batch_size": min(batch_size, len(dataset)), "seed": seed}
    with tempfile.TemporaryDirectory(prefix="burnish-finetune-") as folder:
        trainer = Trainer(program, dataset, eval_set, run_directory=Path(folder) / "run", **run)
        result = trainer.run()
        path = trainer.session.export(output)
    return Finetuned(path, result, (*prepared.notes, f"lr: {rate:g}"))


@dataclass(frozen=True)
class Finetuned:
    """What ``finetune`` came to.

    Attributes:
        path: of the tuned model.
        result: what the trainer reported.
        notes: what was decided, and why, a line each.
    """

    path: Path
    result: TrainingResult
    notes: tuple[str, ...]


def find_rate(program: Program, batches: Iterable[Mapping[str, Any]], **options: Any) -> float:
    """Return a learning rate for a program: a tenth of that from which on its loss no longer falls.

    Steps on the batches, at rates that rise from 1e-5 to 1, from the program's initial state, in a session of their own. The rate
    at the least smoothed loss is what the search ends at. Source: Smith, "Cyclical learning rates for training neural networks",
    2017.

    Args:
        program: takes ``lr`` with each step.
        batches: as ``Session.step`` takes them; at most 40 are used.
        options: as ``Session`` takes them.
    """
    least = smoothed = math.inf
    best = UNKNOWN_RATE
    with Session(program, **options) as session:
        for trial, batch in enumerate(batches):
            if trial == TRIALS:
                break
            rate = LOWEST_RATE * (HIGHEST_RATE / LOWEST_RATE) ** (trial / (TRIALS - 1))
            try:
                loss = session.step(batch, lr=rate)["loss"]
            except NonFiniteLossError:
                break
            smoothed = loss if math.isinf(smoothed) else SMOOTHING * smoothed + (1 - SMOOTHING) * loss
            if smoothed > DIVERGED * least:
                break
            if smoothed < least:
                least, best = smoothed, rate
    return float(f"{best / 10:.1g}")


def repeated(dataset: Dataset, batch_size: int, seed: int) -> Iterable[Mapping[str, Any]]:
    """Batches of a data set, epoch after epoch, for the trials of ``find_rate``."""
    loader = Loader(dataset, min(batch_size, len(dataset)), seed=seed)
    for epoch in range(TRIALS):
        yield from loader.epoch(epoch)


def _probe(model: ir.Model, head: Head, batch: str | None) -> Program:
    """A program of the model as it is, which tells what data are to fill."""
    names = list(head.initializers)
    return compile(model, optimizer="sgd", trainable=names, outputs=head.output, batch=batch)


def _unbounded(spec: DataSpec) -> DataSpec:
    return spec if spec.label is None else replace(spec, label=replace(spec.label, maximum=None))


def _classes_in(dataset: Dataset, spec: DataSpec) -> int:
    """How many classes there are in data that do not name them: one more than the largest index."""
    if spec.label is None:
        raise DataError("the data give no labels: fine-tuning learns classes")
    largest = -1
    for begin in range(0, len(dataset), 1024):
        indices = np.arange(begin, min(begin + 1024, len(dataset)))
        largest = max(largest, int(dataset.batch(indices)[spec.label.name].max()))
    return largest + 1


def _takes_one_sample(model: ir.Model) -> bool:
    shapes = [value.shape for value in model.graph.inputs]
    return all(shape is not None and len(shape) > 1 and shape[0] == 1 for shape in shapes)


def _trainable(model: ir.Model) -> list[str]:
    kinds = classify_initializers(model)
    return [name for name, kind in kinds.items() if kind is InitializerKind.WEIGHT]


def _frozen(model: ir.Model, head: Head, until: str | None) -> tuple[str, ...]:
    """The initializers before a place in the graph."""
    if until is None:
        return ()
    wanted = set(head.initializers) if until == HEAD else {name for name in _trainable(model) if matches_pattern(name, until)}
    before: dict[str, None] = {}
    for node in model.graph:
        read = [value.name or "" for value in node.inputs if value is not None and value.is_initializer()]
        if node.name == until or wanted & set(read):
            known = set(_trainable(model)) - wanted
            return tuple(name for name in before if name in known)
        before |= dict.fromkeys(read)
    names = [*(node.name or "" for node in model.graph), *_trainable(model)]
    raise ConfigurationError(
        f"freeze_until={until!r} is no node, and no name or pattern of a weight{suggestion(until, names)}: give 'head', "
        "or one of these"
    )
