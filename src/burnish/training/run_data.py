"""The training and evaluation data of a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from burnish.data import ArrayDataset, DataDescription, Dataset, DataSource, DataSpec, Loader, Text, TextDataset, as_dataset
from burnish.data.batches import Batches, BatchLoader, is_batches
from burnish.data.image.augmentation import ImageAugmentation, mixing, read_augmentation
from burnish.data.image.labelled import DecodedImages
from burnish.data.loader import Augmentation
from burnish.data.preprocessing import PixelsLike
from burnish.data.sound.settings import SoundLike
from burnish.data.splitting import EvalSplit, Split, held_out, parts, split_of
from burnish.data.text.settings import LONGEST, TextDescription
from burnish.distributed.connection.process_group import ProcessGroup
from burnish.errors import ConfigurationError, DataError, EngineError, InputError, ObjectiveWarning
from burnish.optim.accumulate import steps_to_an_update
from burnish.program import Entry, Program, Role
from burnish.program.layout import sample_extent
from burnish.training.feature_dataset import FeatureDataset
from burnish.training.features import Features
from burnish.training.inputs import broken_rule, check_batch
from burnish.training.session import Session
from burnish.training.trained_model import TrainedModel
from burnish.warn import warn

MOST_PROCESSES = 4
RARE = 1e-3
"""Probability below which chance is ruled out."""
FEW_IMAGES = 1000
"""Most images for which one process is faster than the start of others."""
COMPUTED_ONCE = (
    ", and the features of this program are computed once, by one process: leave that out, or compile without cached_features"
)


@dataclass
class RunData:
    """Data sets that fit a program.

    Attributes:
        train: training data.
        evaluation: evaluation data after each epoch, or None.
        described: description of the training data, used to read the evaluation data.
        augment: random changes to batches of the training data.
        changes: these and the changes to images, in words; None if there are none, or for a user's function.
        remarks: remarks on the data reported so far.
        spec: inputs of the program.
        cut: a note if texts are longer than the model takes, else None.
        split: held-out part of the training data, or None.
    """

    train: Dataset | Batches
    evaluation: Dataset | Batches | None
    described: DataDescription
    augment: Augmentation | None = None
    changes: str | None = None
    remarks: tuple[str, ...] = ()
    spec: DataSpec | None = None
    cut: str | None = None
    split: Split | None = None

    @classmethod
    def open(
        cls,
        program: Program,
        train: DataSource,
        evaluation: DataSource | None,
        pixels: PixelsLike | None,
        text: Text | None = None,
        augment: Augmentation | str | ImageAugmentation | None = None,
        sound: SoundLike | None = None,
        asked: EvalSplit | None = None,
        seed: int = 0,
        kept: dict[str, Any] | None = None,
    ) -> RunData:
        """Open both sources as in ``Trainer``.

        Args:
            program: the program to train.
            train, evaluation, pixels, text, augment, sound: as in ``Trainer``.
            asked, seed, kept: held-out part of the training data, as in ``burnish.data.splitting.held_out``.

        Raises:
            ConfigurationError: ``augment`` does not fit the data or the loss.
            DataError: the data cannot be read, or do not fit the program.
            InputError: evaluation data do not fit the program (checked now rather than after an epoch of training).
        """
        spec = DataSpec.by(program)
        if asked is not None and is_batches(train):
            raise ConfigurationError(
                f"eval_split={asked.text()} holds out samples by number, and a stream of batches has none: give batches to "
                "evaluate on as eval_data, or train on a data set, such as arrays or a folder"
            )
        if text is None and (is_batches(train) or is_batches(evaluation)):
            return cls._of_batches(program, train, evaluation, spec, pixels=pixels, text=text, augment=augment, sound=sound)
        train_set, cut = as_dataset(train, spec, pixels=pixels, text=text, split=asked, sound=sound), None
        if text is not None and not isinstance(train, Dataset):
            opened = partial(as_dataset, train, spec, None, pixels, split=asked)
            train_set, cut = within_the_model(program, train_set, text, opened)
        eval_set = None
        if asked is not None:
            train_set, eval_set = parts(train_set, held_out(train_set, asked, seed, spec.label, kept))
        split = split_of(train_set)
        described = DataDescription.of(train_set)
        if program.features is not None and augment is not None:
            raise ConfigurationError(f"augment changes the samples in each epoch{COMPUTED_ONCE}")
        train_set, of_batches, changes = cls.augmented(train_set, augment, spec)
        if evaluation is not None:
            text = train_set.text if text is not None and isinstance(train_set, TextDataset) else text
            eval_set = as_dataset(evaluation, spec.like(described), classes=described.classes, text=text)
        if eval_set is None:
            return cls(_begun(program, train_set, "train"), None, described, of_batches, changes, cut=cut, split=split)
        table = DataDescription.of(eval_set).table
        if table is not None and table != described.table:
            raise DataError(
                "eval_data: its columns are coded by categories and statistics of its own: open it as the training data are, "
                "open_dataset(..., DataSpec.by(program).like(DataDescription.of(train_data))), or give its path"
            )
        if program.features is None:
            try:
                some = np.arange(fixed_batch(program) or 1) % max(1, len(eval_set))
                check_batch(program.signature["evaluate"], spec.to_model(eval_set.batch(some)), part=True)
            except InputError as error:
                raise InputError(f"{'eval_data' if asked is None else 'eval_split'}: {error}") from error
        sets = _begun(program, train_set, "train"), _begun(program, eval_set, "evaluation")
        return cls(*sets, described, of_batches, changes, cut=cut, split=split)

    @classmethod
    def _of_batches(
        cls, program: Program, train: DataSource, evaluation: DataSource | None, spec: DataSpec, **options: Any
    ) -> RunData:
        asked = [name for name, value in options.items() if value is not None and is_batches(train)]
        if asked or program.features is not None:
            what = asked[0] if asked else "cached_features"
            raise ConfigurationError(f"{what}: batches are taken as they come: change them where they are made, and leave it out")

        def opened(source: DataSource, known: DataSpec, classes: Any = None) -> Dataset | Batches:
            if is_batches(source):
                return source if isinstance(source, Batches) else Batches(cast(Any, source))
            return as_dataset(source, known, classes, options["pixels"], options["text"], sound=options["sound"])

        train_set = opened(train, spec)
        described = DataDescription.of(train_set)
        train_set, changes, words = train_set, None, None
        if not isinstance(train_set, Batches):
            train_set, changes, words = cls.augmented(train_set, options["augment"], spec)
        known = spec.like(described)
        eval_set = None if evaluation is None else opened(evaluation, known, described.classes)
        return cls(train_set, eval_set, described, changes, words, spec=known)

    @staticmethod
    def augmented(
        dataset: Dataset, augment: Augmentation | str | ImageAugmentation | None, spec: DataSpec
    ) -> tuple[Dataset, Augmentation | None, str | None]:
        """Return the data set with changes to its images, the changes to its batches, and both in words.

        Raises:
            ConfigurationError: changes to images are requested, but the data are not image files.
        """
        if augment is None or not isinstance(augment, str | ImageAugmentation):
            return dataset, augment, None
        asked = read_augmentation(augment)
        if asked.changes_images:
            if not isinstance(dataset, DecodedImages):
                raise ConfigurationError(
                    f"augment: {asked.text()} are changes to image files as they are read, and the data are of type "
                    f"{type(dataset).__name__}: give a folder of images, or a function that changes batches"
                )
            dataset = dataset.augmented_by(asked)
        return dataset, mixing(asked, spec) if asked.mixes else None, asked.text()

    def training_loader(self, program: Program, batch_size: int, seed: int, group: ProcessGroup, processes: int | None) -> Loader:
        """Return the batches of one worker; a last one that the program does not take is left out.

        Args:
            program: the program to train.
            batch_size: samples in a batch of all workers.
            seed: seed of the order and of random changes.
            group: workers, including this one.
            processes: processes that read ahead; None: some if images are decoded in every epoch.

        Raises:
            ConfigurationError: a program with cached features has several workers.
        """
        if program.features is not None and group.world_size > 1:
            raise ConfigurationError(f"several workers train{COMPUTED_ONCE}")
        if group.world_size > 1 and Batches in map(type, (self.train, self.evaluation)):
            raise ConfigurationError(
                "several workers share the samples of a data set, and batches that come as they are have no parts: give a set"
            )
        if isinstance(self.train, Batches):
            assert self.spec is not None
            return BatchLoader(self.train, self.spec)
        drop_last = samples_left_out(program, len(self.train), batch_size, group.world_size) > 0
        if processes is None or program.features is not None:
            processes = reading_processes(self.train)
        return Loader(
            self.train,
            batch_size,
            seed,
            drop_last=drop_last,
            augment=self.augment,
            rank=group.rank,
            workers=group.world_size,
            processes=processes,
            spec=DataSpec.of_steps(program),
        )

    def evaluation_loader(self, program: Program, batch_size: int) -> Loader | None:
        """Return the evaluation batches in order; a partial one is left out if the model's batch size is fixed."""
        if isinstance(self.evaluation, Batches):
            assert self.spec is not None
            return BatchLoader(self.evaluation, self.spec)
        if self.evaluation is None:
            return None
        drop_last = self._not_evaluated(program, batch_size) > 0
        return Loader(self.evaluation, batch_size, shuffle=False, drop_last=drop_last, spec=DataSpec.of_steps(program))

    def _not_evaluated(self, program: Program, batch_size: int) -> int:
        """The number of evaluation samples that do not fill a batch of the model."""
        if self.evaluation is None or isinstance(self.evaluation, Batches) or fixed_batch(program) is None:
            return 0
        try:
            return samples_left_out(program, len(self.evaluation), batch_size)
        except ConfigurationError as error:
            raise ConfigurationError(f"{'eval_data' if self.split is None else 'eval_split'}: {error}") from error

    def fill(self, features: Features, batch_size: int, folder: Path) -> Iterator[str]:
        """Compute the missing features of data sets; yield a line for each.

        Args:
            features, batch_size, folder: as in ``FeatureDataset.fill``.
        """
        for data in (self.train, self.evaluation):
            if isinstance(data, FeatureDataset) and not data.is_filled:
                yield data.fill(features, batch_size, folder, reading_processes(data.source, is_once=True))

    def notes(self, program: Program, loader: Loader, epochs: int) -> list[str]:
        """Return notes for the user on the data and the steps of a run.

        Args:
            program: the program to train.
            loader: result of ``training_loader``.
            epochs: epochs of the run.

        Raises:
            ConfigurationError: the run has fewer steps than an update accumulates.
        """
        notes = [note for data in (self.train, self.evaluation) if (note := getattr(data, "note", None)) is not None]
        notes = notes if self.cut is None else [self.cut, *notes]
        notes = notes if self.split is None else [self.split.line, *self.split.notes, *notes]
        if isinstance(self.train, Batches):
            return notes
        batch_size = loader.batch_size
        if rest := samples_left_out(program, len(self.train), batch_size, loader.workers):
            notes.append(f"Each epoch leaves {rest} of its samples out: the program takes no batch of {rest}")
        if rest := self._not_evaluated(program, batch_size):
            notes.append(f"Evaluation leaves out the last {rest} samples: the program takes no batch of {rest}")
        return notes + accumulation_notes(program, epochs * len(loader))

    def warn_of_few_classes(self, program: Program) -> None:
        """Warn if the data have fewer classes than the model has outputs: it learns that the others never occur.

        For numeric labels the largest counts, if that many samples would hardly miss higher classes by chance.
        """
        labels = program.signature["step"].inputs_of(Role.LABEL)
        if len(labels) != 1 or len(labels[0].extents) != 1 or labels[0].maximum is None or labels[0].dtype.is_floating_point():
            return
        label, outputs, names = labels[0], int(labels[0].maximum) + 1, self.described.classes
        if names is not None:
            classes, said = len(names), "classes"
        elif isinstance(self.train, ArrayDataset) and label.name in self.train.arrays:
            counted = self.train.arrays[label.name]
            counted = counted if label.ignored is None else counted[counted != label.ignored]
            classes = int(counted.max()) + 1 if counted.size else outputs
            if (classes / outputs) ** counted.size > RARE:
                return
            said = f"classes (no label is above {classes - 1})"
        else:
            return
        if classes < outputs:
            warn(
                ObjectiveWarning(
                    f"the model has outputs for {outputs:,} classes, and the data have {classes:,} {said}: it learns that "
                    "nothing is of the others. burnish finetune (burnish.finetune) gives it a head for the classes in the data"
                )
            )

    def new_remarks(self) -> list[str]:
        """Return remarks on the data that are new since the last call."""
        remarks = [remark for data in (self.train, self.evaluation) if (remark := getattr(data, "remark", None)) is not None]
        new = [remark for remark in remarks if remark not in self.remarks]
        self.remarks = tuple(remarks)
        return new

    def course(self) -> dict[str, Any]:
        """Return the properties of the data that a resumed run must match."""
        preprocessing, text = self.described.preprocessing, self.described.text
        asked = None if self.split is None else self.split.asked.text()
        course = {
            "eval_split": asked,
            "samples": len(self.train),
            "pixels": None if preprocessing is None else preprocessing.text(),
        }
        if self.changes is not None:
            course["augment"] = self.changes
        if self.described.sound is not None:
            course["sound"] = self.described.sound.text()
        return course if text is None else {**course, "text": text.options()}


def _begun(program: Program, dataset: Dataset, name: str) -> Dataset:
    return dataset if program.features is None else FeatureDataset(dataset, name)


def reading_processes(dataset: Dataset, is_once: bool = False) -> int:
    """Return the default number of processes that read a data set ahead: none if images are decoded once and kept.

    Args:
        dataset: the data set.
        is_once: True if it is read only once.
    """
    if not isinstance(dataset, DecodedImages) or (dataset.read_once and not (is_once and len(dataset) > FEW_IMAGES)):
        return 0
    return min(MOST_PROCESSES, max(1, (os.cpu_count() or 1) // 2))


def batches_per_epoch(program: Program, samples: int, batch_size: int, workers: int = 1) -> int:
    """Return the steps of an epoch over so many samples, without a last batch of a size that the program does not take.

    Raises:
        ConfigurationError: as ``samples_left_out``.
    """
    rest = samples_left_out(program, samples, batch_size, workers)
    return (samples - rest) // batch_size if rest else -(-samples // batch_size)


def samples_left_out(program: Program, samples: int, batch_size: int, workers: int = 1) -> int:
    """Return the number of samples at the end of an epoch that do not fill a batch of the program.

    Args:
        program: the program to train or evaluate.
        samples: samples in the data.
        batch_size: samples in a batch of all workers.
        workers: number of workers that share a batch.

    Raises:
        ConfigurationError: the program takes no batch of ``batch_size``, or of as many samples as there are.
    """
    signature = program.signature["step"]
    rule = broken_rule(signature, batch_size)
    if rule is not None and samples >= batch_size:
        raise ConfigurationError(f"batch_size={batch_size}: {rule.reason}; give another batch_size, or {rule.remedy}")
    _check_fixed(program, samples, batch_size, workers)
    rest = samples % batch_size
    takes_any = broken_rule(signature, rest) is None and fixed_batch(program) is None
    return rest if samples > batch_size and rest and not takes_any else 0


def fixed_batch(program: Program) -> int | None:
    """Return the fixed batch size of the model; None if any size fits."""
    if program.options.get("batch"):
        return None
    return fixed_samples(program.signature.samples)


def fixed_samples(entries: Iterable[Entry]) -> int | None:
    """Return the fixed number of samples of inputs; None if any number fits."""
    return fixed_extent(sample_extent(entry) for entry in entries if entry.extents and entry.sample_axis is not None)


def fixed_extent(samples: Iterable[object]) -> int | None:
    """Return the common fixed extent of the sample axes; None if they differ, or are open."""
    different = set(samples)
    extent = different.pop() if len(different) == 1 else None
    return extent if isinstance(extent, int) else None


def accumulation_notes(program: Program, steps: int) -> list[str]:
    """Return a note if the last steps of a run are too few for an accumulating update.

    Args:
        program: the program to train.
        steps: steps of the run.

    Raises:
        ConfigurationError: all steps are too few, and nothing would train.
    """
    every = steps_to_an_update(program.options.get("optimizer"))
    if steps < every:
        raise ConfigurationError(
            f"accumulate: an update takes {every} steps, and the run has {steps}, so that nothing would train: accumulate fewer, "
            "or give smaller batches or more epochs"
        )
    rest = steps % every
    return (
        [f"The last {rest} of the {steps:,} steps wait for an update that the run does not reach: it takes {every}"]
        if rest
        else []
    )


def _check_fixed(program: Program, samples: int, batch_size: int, workers: int) -> None:
    """Raise ConfigurationError if no batch has the fixed size of a model."""
    fixed = fixed_batch(program)
    if fixed is None or min(samples, batch_size) == fixed * workers:
        return
    opened = (
        "compile it with batch='open' (--batch open), which lets it take batches of any size"
        if fixed == 1
        else "export it with an open batch (dynamic axes)"
    )
    size, at_once = fixed * workers, f"the model takes {fixed} sample{'' if fixed == 1 else 's'} at once"
    if samples < size:
        raise ConfigurationError(f"samples: the data have {samples}, and {at_once}: give more, or {opened}")
    raise ConfigurationError(f"batch_size={batch_size}: {at_once}: give {size} (--batch-size {size}), or {opened}")


FEWEST = 2
"""Fewest tokens, which any model takes."""


def within_the_model(
    program: Program, dataset: Dataset, asked: Text | None, reopened: Callable[[Text], Dataset]
) -> tuple[Dataset, str | None]:
    """Return data with texts cut to the model's length, and a note; None if none are longer.

    The model is run on the longest text, padded to 512 tokens if texts may have so many; if that fails but two tokens work, the
    largest working length is searched. The data are then opened with this length, so that other texts, such as evaluation data,
    are cut there too.

    Args:
        program: program of the model. Nothing is run if the model records its length, or takes only one length.
        dataset: the data; other data than texts are returned unchanged.
        asked: settings of the caller.
        reopened: function that opens the same data with other settings.

    Raises:
        ConfigurationError: the caller requested texts longer than the model takes.
        DataError: a text is longer, and the settings make that an error.
    """
    if not isinstance(dataset, TextDataset) or not len(dataset) or dataset.is_length_known:
        return dataset, None
    names = [entry.name for entry in program.signature.samples]
    spec = DataSpec.by(program)
    with Session(program) as session:
        taken = _longest(lambda batch: session.predict(spec.to_model({name: batch[name] for name in names})), dataset)
    return _cut_off(dataset, taken, asked, reopened)


def within_the_opened(
    model: TrainedModel, dataset: Dataset, asked: Text | None, reopened: Callable[[Text], Dataset]
) -> tuple[Dataset, str | None]:
    """Return data cut to the length of an opened model, as ``within_the_model``."""
    if not isinstance(dataset, TextDataset) or not len(dataset) or dataset.is_length_known:
        return dataset, None
    names = [entry.name for entry in model.to_predict.data]
    taken = _longest(lambda batch: model.predict(ArrayDataset({name: batch[name] for name in names})), dataset)
    return _cut_off(dataset, taken, asked, reopened)


def _cut_off(
    dataset: TextDataset, taken: int | None, asked: Text | None, reopened: Callable[[Text], Dataset]
) -> tuple[Dataset, str | None]:
    """The data reopened for a model with this limit of tokens, and a note; unchanged without a limit."""
    if taken is None:
        return dataset, None
    if asked is not None and asked.length is not None:
        raise ConfigurationError(
            f"text: length={asked.length}, and the model runs on {taken} tokens at most, as far as its table of positions goes: "
            f"give {taken} at most (--max-tokens)"
        )
    text = asked or dataset.text
    buckets = None if text.buckets is None or asked is None else (*(size for size in text.buckets if size < taken), taken)
    cut = reopened(replace(text, length=taken, buckets=buckets))
    assert isinstance(cut, TextDataset)
    said = f"texts: the model runs on {taken} tokens at most, as far as its table of positions goes: "
    if cut.text.joined:
        return cut, f"{said}they are joined and cut into pieces of {taken} (--max-tokens: shorter ones)"
    if not cut.cut:
        return cut, None
    return cut, f"{said}{cut.cut:,} of {len(cut):,} texts are longer, and lose the rest (--max-tokens: fewer)"


def length_of(dataset: TextDataset, spec: DataSpec) -> TextDescription:
    """Return the text description for the model's metadata: the earlier one, with the length now known to fit."""
    return replace(spec.described.text or TextDescription(), length=dataset.text.length)


def _longest(predict: Callable[[Mapping[str, np.ndarray]], object], dataset: TextDataset) -> int | None:
    """The largest number of tokens that the model takes; None if it takes all that texts may have, or fails even on two."""
    most = max(dataset.longest, min(dataset.text.length or 0, LONGEST))

    def fits(tokens: int) -> bool:
        try:
            predict(dataset.padded(tokens))
        except EngineError:
            return False
        return True

    if fits(most) or not fits(FEWEST):
        return None
    low, high = FEWEST, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
