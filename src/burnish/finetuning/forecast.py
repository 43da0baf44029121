"""A forecast of a fine-tuning run with its memory and time, before it starts: ``check``."""

from __future__ import annotations

import os
import textwrap
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from burnish import losses
from burnish.adapters.graph import read_adapters
from burnish.data import DataDescription, Dataset, DataSource, DataSpec
from burnish.data.dataset import DividedDataset
from burnish.errors import BurnishError, EngineError
from burnish.finetuning.options import FinetuneOptions
from burnish.finetuning.planning import Plan, Stage, available_memory, largest_batch, plan, step_memory
from burnish.finetuning.preparation import Transfer, quietly, transfer
from burnish.finetuning.rates import UNKNOWN_RATE, repeated
from burnish.finetuning.tasks import name_of
from burnish.importer import Source
from burnish.kernels.compiling import model_name
from burnish.losses.base import Wrapping
from burnish.optim.base import RatedOptimizer
from burnish.options import takes
from burnish.program import Program, Role
from burnish.training.environment import peak_while, session_line
from burnish.training.run_data import fixed_batch, samples_left_out
from burnish.training.session import Session

WARMUP, MEASURED = 2, 3
"""Warm-up steps and measured steps."""
LABELS_READ = 20_000
"""Most samples to read for counting classes, if the data do not list their labels."""
TRIED_SECONDS = 5.0
"""The largest batch is tried if its step takes at most this many seconds."""
WIDTH, MOST_LINES, COLUMN, ROWS_OF_ONE = 80, 24, 11, 3
CLASSES_SHOWN = 8


@dataclass(frozen=True)
class Forecast:
    """The course of fine-tuning a model on data, with its cost. All values are JSON-compatible.

    Attributes:
        model, data: the model and data checked.
        trainable: True if it can train; if not, only ``reason`` is set.
        reason: the obstacle, with a remedy; None if there is none.
        samples: ``count``, ``inputs`` (name: ``shape`` of one sample, and ``dtype``), ``classes`` (a list of ``name`` and
            ``samples``; None if the data have none, ``samples`` None if not counted), ``reading`` (sentences on data left out or
            changed).
        task: ``kind`` (classes, masks, objects and others), ``loss``, ``loss_options`` (with wrappers of the loss, such as
            standardized targets), ``reads`` (values that the loss reads), ``metrics``.
        head: ``layers`` (names of its tensors), ``is_new``, ``classes``.
        weights: ``trained`` and ``all`` (numbers of parameters), and ``frozen``: a list of ``names`` and ``reason``.
        optimizer: ``name``, ``settings``, ``lr`` (None: found by trial steps when the run starts), ``schedule``, ``epochs``.
        precision: such as ``float32``.
        batch: ``size`` of the run, ``largest`` that fits into memory by plan (None if not known; the number of samples if all
            fit), ``is_tried``: True if a step of the largest was taken.
        memory: ``planned`` and ``measured`` bytes of a step at ``size``, ``planned_largest``, ``free``; None if not known.
        speed: ``seconds_per_epoch`` (from the median of three steps), ``steps_per_epoch``, ``seconds`` of each step including
            reading, ``features_seconds`` to compute the features of frozen layers once (or None); ``engine`` and ``machine``.
        notes: decisions with reasons, as from ``burnish.finetune``.
    """

    model: str
    data: str
    trainable: bool
    reason: str | None = None
    samples: Mapping[str, Any] = field(default_factory=dict)
    task: Mapping[str, Any] = field(default_factory=dict)
    head: Mapping[str, Any] = field(default_factory=dict)
    weights: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    precision: str | None = None
    batch: Mapping[str, Any] = field(default_factory=dict)
    memory: Mapping[str, Any] = field(default_factory=dict)
    speed: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the attributes by name."""
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """Return the answers in at most 24 lines of 80 columns; the last line tells if some were left out."""
        if not self.trainable:
            return [f"{self.model} cannot be trained on {self.data}: {self.reason}"]
        rows = [*self._of_data(), *self._of_training(), *self._of_costs()]
        said = {name for name, _ in rows}
        notes = [tuple(note.split(": ", 1)) if ": " in note[:16] else ("note", note) for note in self.notes]
        rest = [(name, text) for name, text in notes if name.split()[0] not in said]
        first = textwrap.wrap(f"{self.model} can be trained on {self.data}", WIDTH)
        lines = [*first, *(line for row in rows for line in _wrapped(*row))]
        for place, row in enumerate(rest):
            more = _wrapped(*row)
            left = len(rest) - place
            if len(lines) + len(more) > MOST_LINES - (left > 1):
                break
            lines += more
        else:
            left = 0
        cut = len(lines) > MOST_LINES
        lines = lines[: MOST_LINES - 1] if cut or (left and len(lines) == MOST_LINES) else lines
        return [*lines, "--json says more"] if cut or left else lines

    def _of_data(self) -> Iterator[tuple[str, str]]:
        inputs = ", ".join(f"{name} {each['shape']} {each['dtype']}" for name, each in self.samples["inputs"].items())
        yield "data", f"{self.samples['count']:,} samples; one is {inputs}"
        classes = self.samples["classes"]
        if classes is not None:
            counts = [each["name"] if each["samples"] is None else f"{each['name']} {each['samples']:,}" for each in classes]
            more = f" and {len(counts) - CLASSES_SHOWN} more" if len(counts) > CLASSES_SHOWN else ""
            yield "classes", f"{len(counts):,}: {', '.join(counts[:CLASSES_SHOWN])}{more}"
        yield from (("reading", sentence) for sentence in self.samples["reading"])

    def _of_training(self) -> Iterator[tuple[str, str]]:
        head = next((note for note in self.notes if note.startswith("head: ")), None)
        if head is not None:
            yield "head", head.removeprefix("head: ")
        metrics = ", ".join(self.task["metrics"]) or "none"
        yield "loss", f"{self.task['loss']} of {', '.join(map(repr, self.task['reads']))}; metrics: {metrics}"
        yield "trains", f"{self.weights['trained']:,} of {self.weights['all']:,} parameters"
        if not self.weights["frozen"]:
            yield "frozen", "nothing"
        for each in self.weights["frozen"]:
            more = f" and {len(each['names']) - 1} more" if len(each["names"]) > 1 else ""
            yield "frozen", f"{each['names'][0]}{more}: {each['reason']}"
        made = self.optimizer
        settings = "".join(f", {name} {value}" for name, value in made["settings"].items())
        rate = "found by trial steps when the run starts" if made["lr"] is None else f"{made['lr']:g}"
        yield "optimizer", f"{made['name']}{settings}; rate {rate}, {made['schedule']}; {self.precision}"

    def _of_costs(self) -> Iterator[tuple[str, str]]:
        batch, memory, speed = self.batch, self.memory, self.speed
        planned = f"planned peak of a step {_size(memory['planned'])}"
        measured = "" if memory["measured"] is None else f", measured {_size(memory['measured'])}"
        free = "" if memory["free"] is None else f", of {_size(memory['free'])} free"
        yield "memory", f"{planned}{measured} at batch {batch['size']}{free}"
        largest = "not known: the system does not say how much memory is free"
        if batch["largest"] is not None:
            bound = " (all samples)" if batch["largest"] == self.samples["count"] else ""
            tried = "and a step of it was taken" if batch["is_tried"] else "not tried"
            planned = _size(memory["planned_largest"])
            largest = f"the largest that fits is {batch['largest']:,}{bound}, by a planned peak of {planned}, {tried}"
        yield "batch", f"{batch['size']}; {largest}"
        steps = ", ".join(f"{1000 * seconds:.3g}" for seconds in speed["seconds"])
        once = "" if speed["features_seconds"] is None else f", after {_time(speed['features_seconds'])} for features, once"
        yield (
            "time",
            (
                f"{_time(speed['seconds_per_epoch'])} for each of {self.optimizer['epochs']} epochs{once}: "
                f"{counted(speed['steps_per_epoch'], 'step')} ({MEASURED} measured after {WARMUP} to warm up: {steps} ms)"
            ),
        )
        yield "machine", f"{speed['machine']}; {speed['engine']}"


@takes(FinetuneOptions, otherwise="burnish.Trainer")
def check(source: Source, data: DataSource, options: FinetuneOptions) -> Forecast:
    """Return a forecast of ``burnish.finetune``: its decisions, memory and time.

    The model is prepared and the training planned as in ``burnish.finetune``, but without the trial steps that find the learning
    rate. Five steps are taken, and the last three measured. Nothing is written. ``print`` shows it in one screen. ``burnish check
    FILE --data DATA`` prints the same::

        found = burnish.finetuning.check("model.onnx", "photos")
        print(found)
        assert found.trainable and found.batch["largest"] >= 32

    Args:
        source, data: as in ``burnish.finetune``.

    Returns:
        The answers. If the model cannot train, ``trainable`` is False and ``reason`` tells why; errors of burnish are not raised.
    """
    model = str(source) if isinstance(source, str | os.PathLike) else "the model"
    try:
        return _found(model, source, data, options)
    except BurnishError as error:
        return Forecast(model, name_of(data), False, str(error))


def _found(model: str, source: Source, data: DataSource, options: FinetuneOptions) -> Forecast:
    prepared, dataset = transfer(source, data, options)
    planned = plan(prepared, dataset, replace(options, lr=UNKNOWN_RATE if options.lr is None else options.lr))
    stage, size = planned.stages[-1], planned.batch_size
    with quietly():
        program = planned.program(stage, len(dataset))
    one = dataset.batch(np.arange(1))
    memory = {"planned": step_memory(program, one)(size), "measured": None, "planned_largest": None, "free": available_memory()}
    is_planned = options.device in (None, "cpu") or fixed_batch(program) is not None
    largest = largest_batch(program, one, len(dataset)) if is_planned else None
    spec = DataSpec.by(program)
    with Session(program, **options.running) as session:
        took: list[float] = []
        speed = _features(session, dataset, planned, stage, options.seed)
        batches = repeated(dataset, size, options.seed, spec)
        if stage.cached:
            batches = (session.features.batch(batch) for batch in batches)
        prefetched = [next(batches) for _ in range(WARMUP + MEASURED)] if stage.cached else None

        def measure() -> None:
            supply = batches if prefetched is None else iter(prefetched)
            for number in range(WARMUP + MEASURED):
                begin = time.monotonic()
                session.step(next(supply))
                if number >= WARMUP:
                    took.append(time.monotonic() - begin)

        memory["measured"] = peak_while(measure)
        step, described = float(np.median(took)), session.describe()
        is_tried, largest = _tried(session, dataset, planned, stage, largest, step / size, options)
    if largest is not None:
        memory["planned_largest"] = step_memory(program, one)(largest)
    steps = planned.steps_of_epoch(len(dataset))
    speed |= {"seconds_per_epoch": step * steps, "steps_per_epoch": steps, "seconds": took}
    speed |= {"engine": session_line(described), "machine": model_name()}
    epochs = sum(each.epochs for each in planned.stages)
    return Forecast(
        model,
        name_of(data),
        True,
        samples=_samples(dataset, {value.name for value in prepared.model.graph.inputs}, program, one, spec, size),
        task={
            "kind": prepared.task.kind,
            "loss": _inner(prepared.task.loss).name,
            "loss_options": dict(prepared.task.loss.options()),
            "reads": [prepared.task.outputs] if isinstance(prepared.task.outputs, str) else [*prepared.task.outputs],
            "metrics": [*prepared.task.metrics],
        },
        head={"layers": [*prepared.head.initializers], "is_new": prepared.is_new, "classes": prepared.task.classes},
        weights=_weights(prepared, stage, program, options),
        optimizer={**_optimizer(prepared, stage), "lr": options.lr, "schedule": planned.schedule, "epochs": epochs},
        precision=described["precision"],
        batch={"size": size, "largest": largest, "is_tried": is_tried},
        memory=memory,
        speed=speed,
        notes=(*prepared.notes, *planned.notes),
    )


def _features(session: Session, dataset: Dataset, planned: Plan, stage: Stage, seed: int) -> dict[str, Any]:
    """Seconds to compute the features of all samples once, estimated from the second batch."""
    if not stage.cached:
        return {"features_seconds": None}
    batches = repeated(dataset, planned.batch_size, seed, DataSpec.by(session.program))
    session.features.batch(next(batches))
    begin = time.monotonic()
    session.features.batch(next(batches))
    return {"features_seconds": (time.monotonic() - begin) * planned.steps_of_epoch(len(dataset))}


def _tried(
    session: Session, dataset: Dataset, planned: Plan, stage: Stage, largest: int | None, each: float, options: FinetuneOptions
) -> tuple[bool, int | None]:
    """Take a step of the largest batch if it is short; return True if it was taken, and the largest batch."""
    if largest is None or largest <= planned.batch_size:
        return largest is not None, largest
    if stage.cached or each * largest > TRIED_SECONDS:
        return False, largest
    try:
        session.step(next(repeated(dataset, largest, options.seed, DataSpec.by(session.program))))
    except EngineError:  # for example, another process has taken memory
        return False, planned.batch_size
    return True, largest


def _samples(
    dataset: Dataset, inputs: Collection[str | None], program: Program, one: Mapping[str, np.ndarray], spec: DataSpec, size: int
) -> dict[str, Any]:
    """Describe the data; ``inputs`` are the model's, and ``one`` is the first sample."""
    shapes = {name: {"shape": list(array.shape[1:]), "dtype": str(array.dtype)} for name, array in one.items() if name in inputs}
    reading = [text for name in ("note", "remark") if (text := getattr(dataset, name, None)) is not None]
    if rest := samples_left_out(program, len(dataset), size):
        reading.append(f"the last {rest} samples of each epoch, as the model takes no batch of {rest}")
    return {"count": len(dataset), "inputs": shapes, "classes": _classes(dataset, spec), "reading": reading}


def _classes(dataset: Dataset, spec: DataSpec) -> list[dict[str, Any]] | None:
    names, label = DataDescription.of(dataset).classes, spec.label
    of_samples: np.ndarray | None = None
    if isinstance(dataset, DividedDataset) and (told := dataset.sample_classes(label)) is not None:
        of_samples = np.asarray(told[0])
    elif label is not None and not label.dtype.is_floating_point() and len(dataset) <= LABELS_READ:
        first = dataset.batch(np.arange(1))
        if label.name in first and first[label.name].ndim == 1:
            places = np.array_split(np.arange(len(dataset)), max(1, len(dataset) // 1024))
            of_samples = np.concatenate([dataset.batch(part)[label.name] for part in places])
    if of_samples is None or of_samples.ndim != 1:
        return None if names is None else [{"name": str(name), "samples": None} for name in names]
    numbers, counts = np.unique(of_samples, return_counts=True)
    by_number = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
    if names is None:
        return [{"name": str(number), "samples": count} for number, count in by_number.items()]
    return [{"name": str(name), "samples": by_number.get(number, 0)} for number, name in enumerate(names)]


def _weights(prepared: Transfer, stage: Stage, program: Program, options: FinetuneOptions) -> dict[str, Any]:
    """Count the parameters that train; list the frozen ones with reasons."""
    signature = program.signature["step"]
    parameters = [entry.name.removeprefix("param/") for entry in signature.inputs_of(Role.PARAMETER)]
    updated = {name.removeprefix("param/") for name in signature.updates}
    groups = prepared.groups(stage.frozen)
    held = {name for name, group in groups.items() if group == "frozen"}
    trained = [name for name in parameters if name in updated and name not in held]
    sizes = {name: int(program.weights[f"param/{name}"].size) for name in parameters}
    initializers = prepared.model.graph.initializers
    still = [name for name in {**dict.fromkeys(parameters), **dict.fromkeys(stage.frozen)} if name not in {*trained}]
    for name in still:
        if name not in sizes and name in initializers and (tensor := initializers[name].const_value) is not None:
            sizes[name] = int(tensor.size)
    adapted = read_adapters(prepared.model.metadata_props)
    reasons: dict[str, list[str]] = {}
    preparing = dict(program.options.get("preparing", {}))
    for name in still:
        if name in prepared.frozen:
            reason = f"before {options.freeze_until!r} (freeze_until, --freeze-until)"
        elif name in prepared.idle:
            reason = "batch normalization after it takes it out again"
        elif name in preparing:
            reason = str(preparing.pop(name))
        elif adapted and name not in adapted.trained:
            reason = "adapters train beside it"
        else:
            reason = "no gradient of the loss reaches it"
        reasons.setdefault(reason, []).append(name)
    for name, why in preparing.items():
        reasons.setdefault(str(why), []).append(name)
    if layers := program.options.get("auto_frozen_layers", []):
        reasons["statistics of batch normalization of which nothing trains"] = [str(name) for name in layers]
    return {
        "trained": sum(sizes[name] for name in trained),
        "all": sum(sizes.values()),
        "frozen": [{"names": names, "reason": reason} for reason, names in reasons.items()],
    }


def _inner(loss: losses.Loss) -> losses.Loss:
    """The loss without its wrappers, such as standardized targets or mixed samples."""
    while isinstance(loss, Wrapping):
        loss = loss.loss
    return loss


def _optimizer(prepared: Transfer, stage: Stage) -> dict[str, Any]:
    made: Any = prepared.optimizer(UNKNOWN_RATE, stage.frozen)
    while not isinstance(made, RatedOptimizer):
        made = made.optimizer
    options = dict(made.options())
    name = options.pop("name", made.name)
    return {"name": name, "settings": {key: value for key, value in options.items() if key != "lr" and value}}


def counted(number: int, noun: str) -> str:
    """Return ``1 step`` or ``1,234 steps``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _size(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB" if count >= 1e6 else f"{count / 1e3:,.0f} kB"


def _time(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.2g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02} h"


def _wrapped(name: str, text: str) -> Sequence[str]:
    indent = " " * COLUMN
    lines = textwrap.wrap(text, WIDTH - COLUMN, break_on_hyphens=False) or [""]
    if len(lines) > ROWS_OF_ONE:
        lines = [*lines[: ROWS_OF_ONE - 1], lines[ROWS_OF_ONE - 1][: WIDTH - COLUMN - 4] + " ..."]
    return [f"{name:<{COLUMN}}{lines[0]}", *(indent + line for line in lines[1:])]
