"""The plan of a fine-tuning run: stages, cached features, batch size, learning rate and schedule."""

from __future__ import annotations

import itertools
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from burnish import optim
from burnish.analysis.memory_plan import planned_peak
from burnish.compiler.compile import compile
from burnish.compiler.options import STEPS_PER_EPOCH
from burnish.data import Dataset, DataSpec, TextDataset
from burnish.errors import ConfigurationError, ObjectiveWarning, UnsupportedOperatorError, UntrainedWeightsWarning
from burnish.finetuning.chance import Chance, chance_of, remedies
from burnish.finetuning.options import CONSTANT, ONE_CYCLE, FinetuneOptions
from burnish.finetuning.preparation import Transfer, folding_said, quietly
from burnish.finetuning.rates import (
    HIGHEST_OF_ADAMW,
    HIGHEST_RATE,
    UNKNOWN_RATE,
    USUAL_OF_ADAMW,
    USUAL_OF_ADAPTERS,
    feature_batches,
    find_rate,
    repeated,
    tests_of,
)
from burnish.finetuning.tasks import LANGUAGE
from burnish.graph import garbage_kept
from burnish.importer.reading import read_model
from burnish.optim import schedules
from burnish.optim.base import Rate, RatedOptimizer
from burnish.program import Program, Role
from burnish.program.layout import samples_first
from burnish.program.state import Weights
from burnish.training.run_data import fixed_batch, samples_left_out
from burnish.training.session import Session
from burnish.validation import is_whole

GRADUAL = "gradual"
PARTS = 3
"""Parts into which gradual unfreezing divides the layers before the head."""
BATCHES_AT_THE_START = 4
WARMUP = 0.05
"""Share of a stage's steps in which the learning rate rises."""


@dataclass(frozen=True)
class Stage:
    """A part of a run in which the same weights train.

    Attributes:
        frozen: names of the frozen initializers.
        epochs: number of epochs.
        cached: True if the results of the layers before the trained ones are computed once.
    """

    frozen: tuple[str, ...]
    epochs: int
    cached: bool = False


@dataclass(frozen=True)
class Plan:
    """The plan of a run.

    Attributes:
        transfer: the prepared model.
        stages: the stages in order, each continuing from the state of the last.
        batch_size: samples per step.
        lr: highest learning rate.
        schedule: ``cosine``, ``constant`` or another of ``burnish.optim.schedules``, with settings after a colon.
        layer_decay: factor of the rate from each layer to the one before it; None for one rate.
        notes: decisions with reasons, one per line.
        trials: programs of stages compiled while planning.
        chance: figures of a model that has learned nothing; None if unknown.
        remedies: actions to try if the run ends at chance.
    """

    transfer: Transfer
    stages: tuple[Stage, ...]
    batch_size: int
    lr: float
    schedule: str
    layer_decay: float | None
    notes: tuple[str, ...]
    trials: Mapping[Stage, Trial] = field(default_factory=dict, compare=False, repr=False)
    chance: Chance | None = None
    remedies: tuple[str, ...] = ()

    def trial(self, stage: Stage) -> Trial | None:
        """Return the compiled trial of a stage for reuse by a run; None if there is none, or it does not fit."""
        trial = self.trials.get(stage)
        return trial if trial is not None and trial.is_of(self.transfer) else None

    def program(self, stage: Stage, samples: int) -> Program:
        """Return the program of a stage for so many samples; it computes the learning rate if that changes."""
        steps = self.steps(stage, samples)
        rate = scheduled(self.lr, self.schedule, warmup_steps(steps, self.schedule), steps)
        trial = self.trial(stage)
        with folding_said():
            if trial is not None:
                return trial.taken().with_optimizer(trial.optimizer(rate))
            return compiled(self.transfer, stage, rate, self.layer_decay, self.steps_of_epoch(samples))

    def steps(self, stage: Stage, samples: int) -> int:
        return stage.epochs * self.steps_of_epoch(samples)

    def steps_of_epoch(self, samples: int) -> int:
        """Return the batches per epoch; a partial batch is left out if the model's batch size is fixed."""
        whole, rest = divmod(samples, self.batch_size)
        return whole if self.transfer.has_fixed_batch else whole + bool(rest)


@garbage_kept()
def plan(transfer: Transfer, dataset: Dataset, options: FinetuneOptions) -> Plan:
    """Plan the fine-tuning of a model; trial steps find the rate if none is given.

    Args:
        transfer, dataset: results of ``transfer``.
        options: with ``batch_size`` None, as many samples as fit into memory, at most 32; with ``lr`` None, the rate found on the
            last stage (``find_rate``); with ``unfreeze`` None, everything not frozen trains from the start. ``gradual`` starts
            with the head and adds a third of the layers before it after each epoch. Or give ascending epochs, after each of which
            another part starts to train: one part per number.

    Raises:
        ConfigurationError: ``unfreeze`` does not fit the epochs or the model.
    """
    notes: list[str] = []
    stages = _stages(transfer, options.epochs, options.unfreeze)
    if len(stages) > 1:
        layers = len(transfer.layers)
        parts = ", then ".join(f"{stage.epochs} with {layers - _still(transfer, stage)}" for stage in stages[1:])
        notes.append(
            f"stages: the head alone for {stages[0].epochs} of {options.epochs} epochs, then {parts} of {layers} layers before it"
        )

    trials: dict[Stage, Trial] = {}

    def trial(stage: Stage) -> Program:
        if stage not in trials:
            trials[stage] = Trial.of(transfer, lambda: compiled(transfer, stage, UNKNOWN_RATE, options.layer_decay))
        return trials[stage].program

    is_cached = options.cached_features and options.augment is None
    stages = tuple(_with_cache(stage, trial, is_cached, notes) for stage in stages)
    last, batch_size, lr = stages[-1], options.batch_size, options.lr
    spec = transfer.spec
    chance = None if spec is None else chance_of(transfer.task.loss, dataset, spec)
    unknown: tuple[str, ...] = ()
    if batch_size is None or lr is None:
        program = trial(last)
        if batch_size is None:
            longest = dataset.padded(dataset.longest) if isinstance(dataset, TextDataset) else dataset.batch(np.arange(1))
            batch_size, why = chosen_batch(program, longest, len(dataset))
            notes.append(why)
        samples_left_out(program, len(dataset), batch_size)  # warns about samples left out, before the trial steps
        is_trained = transfer.is_trained
        if chance is not None and not (transfer.is_new or last.cached):
            begun = _loss_at_the_start(program, dataset, batch_size, options)
            if chance.is_reached({"loss": begun}):
                is_trained = is_trained or False
                notes.append(
                    f"start: with the head of the file the loss begins at {begun:.4g}, and chance comes to {chance.said}, so the "
                    "file knows nothing of these labels (head='new', --head new, draws a head for them)"
                )
                unknown = ("draw a head for these labels: head='new' (--head new)",)
        if transfer.uses_adamw and transfer.task.kind != LANGUAGE:
            notes.append("optimizer: AdamW, as SGD hardly trains an embedding table from random weights")
        if lr is None:
            batches = repeated(dataset, batch_size, options.seed, DataSpec.by(program))
            if last.cached:
                batches = feature_batches(program, batches, max(1, len(dataset) // batch_size), options.seed, **options.running)
            tests = tests_of(options.epochs * -(-len(dataset) // batch_size))
            with quietly():  # the run warns at its first step
                highest, usual = HIGHEST_RATE / transfer.largest_scale(last.frozen), None
                if transfer.uses_adamw:
                    highest = HIGHEST_OF_ADAMW
                    usual = USUAL_OF_ADAMW if options.adapters is None else USUAL_OF_ADAPTERS
                lr, why = find_rate(
                    program,
                    batches,
                    tests,
                    highest,
                    usual,
                    steps=max(1, last.epochs * -(-len(dataset) // batch_size)),
                    is_trained=is_trained is not False,
                    is_constant=options.schedule == CONSTANT,
                    **options.running,
                )
            notes.append(why)
    if options.layer_decay is not None:
        notes.append(f"rates: {options.layer_decay:g} times that from each layer to the one before it")
    tried = {stage: trials[stage] for stage in stages if stage in trials}
    planned = Plan(transfer, stages, min(batch_size, max(len(dataset), 1)), lr, options.schedule, options.layer_decay, (), tried)
    next_ones = () if spec is None or chance is None else (*unknown, *remedies(transfer, dataset, spec, options))
    return replace(planned, notes=(*notes, *_schedule_note(planned, len(dataset))), chance=chance, remedies=next_ones)


def _loss_at_the_start(program: Program, dataset: Dataset, batch_size: int, options: FinetuneOptions) -> float:
    batches = itertools.islice(repeated(dataset, batch_size, options.seed, DataSpec.by(program)), BATCHES_AT_THE_START)
    with quietly(), Session(program, **options.running) as session:
        return float(session.evaluate_data(batches)["loss"])


def compiled(transfer: Transfer, stage: Stage, rate: Rate, layer_decay: float | None = None, steps_per_epoch: int = 1) -> Program:
    """Return the program of a stage at this learning rate."""
    outputs = transfer.task.outputs
    return compile(
        transfer.model,
        loss=transfer.task.loss,
        optimizer=transfer.optimizer(rate, stage.frozen, layer_decay),
        outputs=outputs if isinstance(outputs, str) else list(outputs),
        batch=transfer.batch,
        metrics=transfer.task.metrics,
        steps_per_epoch=steps_per_epoch,
        cached_features="auto" if stage.cached else None,
    )


def warmup_steps(steps: int, schedule: str) -> int:
    """Return the steps in which the learning rate rises; 0 if the schedule has its own rise."""
    return 0 if schedule.partition(":")[0] in (CONSTANT, ONE_CYCLE) else round(WARMUP * steps)


def scheduled(lr: float, schedule: str, warmup: int, steps: int) -> Rate:
    """Return the learning rate over the steps of a run; a number if it is constant.

    Raises:
        ConfigurationError: the schedule is unknown, or lacks a setting.
    """
    if schedule == CONSTANT:
        return lr
    name, settings = schedules.SCHEDULES.read(schedule)
    given = {"lr": lr, "steps": steps - warmup}
    taken = {setting: value for setting, value in given.items() if setting in schedules.SCHEDULES.takes(name)}
    rate = schedules.get({"name": name, **taken, **settings})
    return schedules.warmup(rate, warmup) if warmup else rate


def _stages(transfer: Transfer, epochs: int, unfreeze: str | Sequence[int] | None) -> tuple[Stage, ...]:
    if unfreeze is None:
        return (Stage(transfer.frozen, epochs),)
    layers = transfer.layers
    if not layers:
        raise ConfigurationError(
            "unfreeze: nothing before the head is to train: leave unfreeze out, or freeze less (freeze_until, --freeze-until)"
        )
    if unfreeze == GRADUAL:
        unfreeze = range(1, 1 + min(PARTS, len(layers), epochs - 1))
    at = [] if isinstance(unfreeze, str) else [*unfreeze]
    if not at or not all(is_whole(epoch) and 0 < epoch < epochs for epoch in at) or sorted({*at}) != at:
        raise ConfigurationError(
            f"unfreeze={unfreeze!r}: give 'gradual', with two epochs or more, or the epochs after which a further part trains, "
            f"ascending, from 1 to {epochs - 1} of the {epochs} that there are"
        )
    if len(at) > len(layers):
        raise ConfigurationError(
            f"unfreeze: {len(at)} parts, and there are {len(layers)} layers before the head: give fewer epochs"
        )
    ends, stages = [*at, epochs], []
    for number, (begin, end) in enumerate(zip([0, *at], ends, strict=True)):
        still = layers[: len(layers) - round(len(layers) * number / len(at))]
        held = (*transfer.frozen, *(name for layer in still for name in layer))
        stages.append(Stage(held, end - begin))
    return tuple(stages)


def _still(transfer: Transfer, stage: Stage) -> int:
    """The number of layers frozen in this stage that train later."""
    return sum(layer[0] in stage.frozen for layer in transfer.layers)


def _with_cache(stage: Stage, trial: Callable[[Stage], Program], is_wanted: bool, notes: list[str]) -> Stage:
    """The stage with cached features, if possible; ``trial`` compiles a stage."""
    if not is_wanted or not stage.frozen:
        return stage
    try:
        program = trial(replace(stage, cached=True))
    except (ConfigurationError, UnsupportedOperatorError) as error:
        notes.append(f"features: not computed ahead: {error}")
        return stage
    entries = program.signature["step"].inputs_of(Role.DATA)
    others = {entry.name: samples_first(entry).extents[1:] for entry in entries}
    open_ones = [name for name, extents in others.items() if not all(isinstance(extent, int) for extent in extents)]
    if open_ones:
        notes.append(f"features: not computed ahead, as the length of '{open_ones[0]}' differs from batch to batch")
        return stage
    return replace(stage, cached=True)


def _schedule_note(planned: Plan, samples: int) -> list[str]:
    if planned.schedule == CONSTANT:
        return []
    steps = [planned.steps(stage, samples) for stage in planned.stages]
    rises = [warmup_steps(each, planned.schedule) for each in steps]
    over = ", then ".join(f"{each:,}" for each in steps)
    note = f"schedule: {planned.schedule} over {over} steps, after a rise over {', then '.join(map(str, rises))} of them"
    return [note if any(rises) else f"schedule: {planned.schedule} over {over} steps"]


MOST, FEWEST = 32, 8
STEPS_OF_AN_EPOCH = 10
"""Fewest steps in an epoch of a small data set, as long as batches have ``FEWEST`` samples."""
BESIDE_THE_PLAN = 2
"""Memory of a step relative to its planned peak: kernels need as much again."""


def chosen_batch(program: Program, samples: Mapping[str, np.ndarray], count: int) -> tuple[int, str]:
    """Return the samples per step, and a line with the reason.

    Args:
        program: training program.
        samples: a batch of the data, samples first.
        count: number of samples in the data.
    """
    fixed = fixed_batch(program)
    if fixed is not None:
        return fixed, f"batch {fixed}: the model takes no other"
    size, why = MOST, ""
    while size > FEWEST and count < STEPS_OF_AN_EPOCH * size:
        size //= 2
    if size < MOST:
        why = f"for {STEPS_OF_AN_EPOCH} steps or so in an epoch of {count:,} samples"
    free, planned_bytes = available_memory(), step_memory(program, samples)
    peak = planned_bytes(size)
    while free is not None and size > 1 and BESIDE_THE_PLAN * peak > free:
        size //= 2
        peak, why = planned_bytes(size), "as more would not fit"
    planned = f"the step's planned peak is {peak / 1e6:,.0f} MB" + ("" if free is None else f" of {free / 1e9:,.1f} GB free")
    return size, f"batch {size}: {why}{'; ' if why else ''}{planned}"


def step_memory(program: Program, samples: Mapping[str, np.ndarray]) -> Callable[[int], int]:
    """Return a function from a batch size to the planned peak of a step in bytes.

    Args:
        program: training program.
        samples: a batch of the data, samples first, which gives the open dimensions.
    """
    graph, extents = program.graphs.unlowered("grad"), _extents(program, samples)
    return lambda size: planned_peak(graph, size, extents).bytes


def largest_batch(program: Program, samples: Mapping[str, np.ndarray], count: int) -> int | None:
    """Return the largest batch whose planned step fits into free memory; None if that is unknown.

    The result is accurate to a sixteenth, and no larger than the data.

    Args:
        program, samples, count: as in ``chosen_batch``.
    """
    free, planned_bytes = available_memory(), step_memory(program, samples)
    if fixed_batch(program) is not None or free is None:
        return fixed_batch(program)
    fits, too_many = 0, 1
    while too_many < count and BESIDE_THE_PLAN * planned_bytes(too_many) <= free:
        fits, too_many = too_many, 2 * too_many
    too_many = min(too_many, count)
    if BESIDE_THE_PLAN * planned_bytes(too_many) <= free:
        return too_many
    while too_many - fits > max(1, fits // 16):
        middle = (fits + too_many) // 2
        if BESIDE_THE_PLAN * planned_bytes(middle) <= free:
            fits = middle
        else:
            too_many = middle
    return fits


def available_memory() -> int | None:
    """Return the bytes of memory free for this process; None if the system does not report it (only Linux does)."""
    free: list[int] = []
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
        limit, used = (Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory.current"))
        if limit.exists() and (most := limit.read_text(encoding="ascii").strip()) != "max":
            free.append(int(most) - int(used.read_text(encoding="ascii")))
    except (OSError, ValueError, IndexError):
        return None
    return min(free, default=None)


def _extents(program: Program, samples: Mapping[str, np.ndarray]) -> dict[str, int]:
    entries = program.signature["step"].inputs_of(Role.DATA, Role.LABEL)
    return {
        extent: size
        for entry in entries
        if entry.name in samples
        for extent, size in zip(samples_first(entry).extents[1:], samples[entry.name].shape[1:], strict=False)
        if isinstance(extent, str)
    }


SAID_BY_THE_RUN = (ObjectiveWarning, UntrainedWeightsWarning)
"""Warnings that trial steps leave to the run."""


@dataclass(frozen=True, eq=False)
class Trial:
    """A program compiled for trial steps.

    Attributes:
        transfer: weak reference to the prepared model.
        program: program at a constant rate, which the run replaces (``Program.with_optimizer``).
        seconds: compile time.
        unsaid: warnings to give when a run uses the program.
    """

    transfer: weakref.ref[Transfer]
    program: Program
    seconds: float
    unsaid: tuple[warnings.WarningMessage, ...]

    @classmethod
    def of(cls, transfer: Transfer, compiled: Callable[[], Program]) -> Trial:
        """Compile a program; keep back the warnings that only matter if it trains."""
        begin = time.monotonic()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            program = compiled()
        seconds = time.monotonic() - begin
        unsaid = tuple(each for each in caught if issubclass(each.category, SAID_BY_THE_RUN))
        _say(tuple(each for each in caught if each not in unsaid))
        return cls(weakref.ref(transfer), program, seconds, unsaid)

    def is_of(self, transfer: Transfer) -> bool:
        """True if this program serves a run of ``transfer`` with any number of steps per epoch."""
        return self.transfer() is transfer and STEPS_PER_EPOCH not in self.program.options

    def read_from(self, path: Path) -> Trial:
        """Return the same trial with weights read from a file, so that they need no memory once a session has them.

        Args:
            path: file of the compiled model.
        """
        weights, held = self.program.weights, read_model(path).graph.initializers
        if not isinstance(weights, Weights):
            return self
        moved = weights.read_from({name: value.const_value for name, value in held.items() if value.const_value is not None})
        moved.release()
        return replace(self, program=replace(self.program, weights=moved))

    def optimizer(self, rate: Rate) -> optim.Optimizer:
        """Return the program's optimizer at another rate or schedule, for ``Program.with_optimizer``."""
        return _at_rate(optim.get(self.program.options["optimizer"]), rate)

    def taken(self) -> Program:
        """Return the program for a run, and give its pending warnings."""
        _say(self.unsaid)
        return self.program


def _at_rate(optimizer: optim.Optimizer, rate: Rate) -> optim.Optimizer:
    if isinstance(optimizer, RatedOptimizer):
        return replace(optimizer, lr=rate)
    return replace(optimizer, optimizer=_at_rate(optimizer.optimizer, rate))  # type: ignore[attr-defined, type-var]


def _say(caught: tuple[warnings.WarningMessage, ...]) -> None:
    for each in caught:
        warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
