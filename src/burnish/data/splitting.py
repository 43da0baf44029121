"""Splitting off an evaluation part: a stratified share, or whole groups of rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from burnish.data.dataset import AugmentedDataset, Dataset, DividedDataset, EpochDataset
from burnish.data.model_metadata import DataDescription
from burnish.data.part import AugmentedPart, EpochPart, Part
from burnish.errors import CheckpointError, ConfigurationError, DataError
from burnish.files.file_writing import write_text
from burnish.program import Entry
from burnish.settings import read_number
from burnish.untrusted_files import UNREADABLE, read_json_file
from burnish.validation import is_number

SHARE = 0.2
"""Default share of ``group:COLUMN``."""
GROUP = "group:"
FORMS = "give a share, such as 0.2, or 'group:COLUMN' for whole groups of rows"
HELD_OUT = 3
"""Key of the random stream, distinct from those of loaders, masks and augmentation."""
SPLIT = "split.json"
"""File in the run's folder."""
SHOWN = 5


@dataclass(frozen=True)
class EvalSplit:
    """The part to hold out.

    Attributes:
        share: share of the samples, between 0 and 1.
        group: column of groups, which stay whole; None to choose single samples.
    """

    share: float
    group: str | None = None

    @classmethod
    def read(cls, asked: object) -> EvalSplit:
        """Parse ``eval_split``: a share, ``group:COLUMN``, or ``group:COLUMN:SHARE``.

        Raises:
            ConfigurationError: it has another form, or the share is not between 0 and 1.
        """
        if isinstance(asked, EvalSplit):
            return asked
        share, group = asked, None
        if isinstance(asked, str) and asked.startswith(GROUP):
            group, share = asked.removeprefix(GROUP), SHARE
            column, _, last = group.rpartition(":")
            if column and _as_number(last) is not None:
                group, share = column, last
            if not group:
                raise ConfigurationError(f"eval_split={asked!r} (--eval-split): the name of the column is missing; {FORMS}")
        number = _as_number(share) if isinstance(share, str) else share
        if not is_number(number):
            raise ConfigurationError(f"eval_split={asked!r} (--eval-split): {FORMS}")
        if not 0 < number < 1:
            raise ConfigurationError(
                f"eval_split={asked!r} (--eval-split): a share that leaves samples on both sides lies between 0 and 1: {FORMS}"
            )
        return cls(float(number), group)

    def text(self) -> str:
        """Return the text for ``read``."""
        if self.group is None:
            return f"{self.share:g}"
        is_plain = self.share == SHARE and _as_number(self.group.rpartition(":")[2]) is None
        return f"{GROUP}{self.group}" + ("" if is_plain else f":{self.share:g}")


def _as_number(text: str) -> float | None:
    try:
        return read_number(text)
    except ValueError:
        return None


@dataclass(frozen=True)
class Split:
    """The samples that are held out.

    Attributes:
        asked: the request.
        seed: seed of the choice.
        count: number of all samples.
        evaluation: sorted held-out numbers, int64.
        how: the choice in words: ``stratified by 'label', seed 0``.
        of: word for the samples.
        names: names of the held-out samples, such as files, or None.
        groups: held-out groups, or None.
        notes: remarks for the user.
    """

    asked: EvalSplit
    seed: int
    count: int
    evaluation: np.ndarray
    how: str
    of: str = "samples"
    names: tuple[str, ...] | None = None
    groups: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()

    @property
    def training(self) -> np.ndarray:
        """Sorted numbers of the training samples, int64."""
        return np.setdiff1d(np.arange(self.count), self.evaluation)

    @property
    def line(self) -> str:
        """One line on what was held out."""
        return f"held out {len(self.evaluation):,} of {self.count:,} {self.of} ({self.how})"

    @property
    def digest(self) -> str:
        """Short hash of the held-out numbers, for comparison between workers."""
        return hashlib.sha256(self.evaluation.tobytes()).hexdigest()[:16]

    def write(self, folder: Path) -> None:
        """Write ``split.json`` into the run's folder."""
        content = {
            "held_out": self.line,
            "eval_split": self.asked.text(),
            "seed": self.seed,
            self.of: self.count,
            "groups": None if self.groups is None else list(self.groups),
            "names": None if self.names is None else list(self.names),
            "evaluation": self.evaluation.tolist(),
        }
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items() if value is not None]
        write_text(folder / SPLIT, "{" + ",\n ".join(lines) + "}\n")


def read_split(folder: Path) -> dict[str, Any] | None:
    """Return the split in a run's folder, for ``held_out``; None if there is none.

    Raises:
        CheckpointError: the file cannot be read.
    """
    path = folder / SPLIT
    if not path.is_file():
        return None
    try:
        kept = read_json_file(path)
        numbers = kept["evaluation"]
        if not numbers or not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError("its numbers of samples are none")
        return {"folder": str(folder), "seed": int(kept["seed"]), **{key: value for key, value in kept.items() if key != "seed"}}
    except UNREADABLE as error:
        raise CheckpointError(
            f"'{path}' cannot be read ({error}): put the file that the run wrote back, or start a new run"
        ) from error


def held_out(
    dataset: Dataset, asked: EvalSplit, seed: int, label: Entry | None = None, kept: dict[str, Any] | None = None
) -> Split:
    """Choose the samples of a dataset to hold out for evaluation.

    The same share of each class is held out, but never a class's only sample. Groups stay whole, with class shares as close as
    possible. The choice depends only on classes, groups, seed and request.

    Args:
        dataset: the samples; a ``DividedDataset`` provides classes and groups.
        asked: the request.
        seed: seed of the choice.
        label: the input that the loss compares with.
        kept: split of a resumed run from ``read_split``, used again.

    Raises:
        DataError: a side would be empty, training would lose a class, or the data are not those of the resumed run.
        ConfigurationError: the resumed run had another ``eval_split``.
    """
    divided = dataset if isinstance(dataset, DividedDataset) else None
    count = len(dataset) if divided is None else divided.divisible
    of = "samples" if count == len(dataset) else "texts"
    told = None if divided is None else divided.sample_classes(label)
    groups = None if divided is None else divided.groups
    if asked.group is not None and groups is None:
        raise DataError(
            f"eval_split='{asked.text()}': data of type {type(dataset).__name__} do not say their column '{asked.group}': give a "
            "share, such as 0.2, or the part to evaluate on as eval_data (--eval-data)"
        )
    if count < 2:
        raise DataError(f"eval_split: the data have {count} of {of}, and nothing can be held out: give more of them")
    classes, by = (None, "at random") if told is None else (told[0], f"stratified by {told[1]}")
    names = getattr(dataset, "classes", None)
    generator = np.random.default_rng((seed, HELD_OUT))
    held: tuple[str, ...] | None = None
    if kept is not None:
        evaluation = _kept(dataset, asked, seed, count, of, kept)
        held = None if kept.get("groups") is None else tuple(map(str, kept["groups"]))
    elif groups is None:
        evaluation = _share(count, classes, asked.share, generator)
    else:
        evaluation, held = _whole_groups(groups, classes, asked, generator)
    if groups is not None and held is not None:
        by = f"{len(held):,} of {len(np.unique(groups)):,} groups by '{asked.group}', {by}"
    named = getattr(dataset, "name_of", None)
    return Split(
        asked,
        seed,
        count,
        evaluation,
        f"{by}, seed {seed}",
        of,
        None if named is None or divided is None else tuple(named(int(number)) for number in evaluation),
        held,
        _left_out_classes(classes, evaluation, names),
    )


def parts(dataset: Dataset, split: Split) -> tuple[Dataset, Dataset]:
    """Return the training part and the evaluation part of a dataset.

    Statistics such as column means come from the training part and apply to both. Classes are those of the whole. The training
    part remembers the split (``split_of``).
    """
    whole: Any = dataset
    kind = EpochPart if isinstance(dataset, EpochDataset) else AugmentedPart if isinstance(dataset, AugmentedDataset) else Part
    part = whole.part if isinstance(dataset, DividedDataset) else partial(kind, dataset)
    train: Any = part(split.training)
    train.held_out = split
    return train, part(split.evaluation, DataDescription.of(train))


def split_of(dataset: object) -> Split | None:
    """Return the split that produced a training part; None for other datasets."""
    split = getattr(dataset, "held_out", None)
    return split if isinstance(split, Split) else None


def _share(count: int, classes: np.ndarray | None, share: float, generator: np.random.Generator) -> np.ndarray:
    """Choose a share of the samples, in proportion to class sizes, but never all of a class."""
    if classes is None:
        return np.sort(generator.permutation(count)[: min(max(1, round(share * count)), count - 1)])
    _, inverse, sizes = np.unique(classes, return_inverse=True, return_counts=True)
    most = sizes - 1
    wanted = min(max(1, round(share * count)), int(most.sum()))
    if not wanted:
        raise DataError(
            f"eval_split: each of the {len(sizes):,} classes has one sample, and the training part would have none of those that "
            "are held out: give more samples of each class, or other data as eval_data (--eval-data)"
        )
    exact = wanted * sizes / count
    quotas = np.minimum(np.floor(exact).astype(np.int64), most)
    # Largest remainders first, ties at random.
    while (rest := wanted - int(quotas.sum())) > 0:
        missing = np.where(quotas < most, exact - quotas, -np.inf)
        first = np.lexsort((generator.random(len(sizes)), -missing))[:rest]
        quotas[first] += quotas[first] < most[first]
    order = generator.permutation(count)
    members = order[np.argsort(inverse[order], kind="stable")]
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    place = np.arange(count) - np.repeat(starts, sizes)
    return np.sort(members[place < np.repeat(quotas, sizes)])


def _whole_groups(
    groups: np.ndarray, classes: np.ndarray | None, asked: EvalSplit, generator: np.random.Generator
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Choose groups in random order, each if it brings the class counts closer to the share.

    Returns:
        The sample numbers, and the groups.
    """
    values, of_group = np.unique(groups, return_inverse=True)
    of_group = of_group.reshape(-1)
    if len(values) < 2:
        raise DataError(
            f"eval_split='{asked.text()}': all rows have the value '{values[0]}' in the column '{asked.group}', and a group "
            "stays whole: name another column, or give a share, such as 0.2"
        )
    _, of_class = np.unique(np.zeros(len(groups)) if classes is None else classes, return_inverse=True)
    counts = np.zeros((len(values), int(of_class.max()) + 1), np.int64)
    np.add.at(counts, (of_group, of_class.reshape(-1)), 1)
    whole = counts.sum(axis=0)
    target, held = asked.share * whole, np.zeros_like(whole)
    chosen: list[int] = []
    order = generator.permutation(len(values))
    for group in order:
        after = held + counts[group]
        if (after < whole).all() and ((target - after) ** 2).sum() < ((target - held) ** 2).sum():
            chosen, held = [*chosen, int(group)], after
    if not chosen:  # every group exceeds the requested share
        possible = [int(group) for group in order if (counts[group] < whole).all()]
        if not possible:
            raise DataError(
                f"eval_split='{asked.text()}': each group of '{asked.group}' has all samples of a class, and the training part "
                "would have none of it: name another column, or give a share, such as 0.2"
            )
        chosen = [min(possible, key=lambda group: float(((target - counts[group]) ** 2).sum()))]
    chosen.sort()
    return np.flatnonzero(np.isin(of_group, chosen)), tuple(str(values[group]) for group in chosen)


def _kept(dataset: Dataset, asked: EvalSplit, seed: int, count: int, of: str, kept: dict[str, Any]) -> np.ndarray:
    folder = kept["folder"]
    if (kept.get("eval_split"), kept["seed"]) != (asked.text(), seed):
        raise ConfigurationError(
            f"The run in '{folder}' was started with eval_split={kept.get('eval_split')} and seed={kept['seed']}, and is now to "
            f"go on with eval_split={asked.text()} and seed={seed}: give it what it was started with, or start a new run"
        )
    evaluation = np.asarray(kept["evaluation"], np.int64)
    if kept.get(of) != count or evaluation.max() >= count:
        raise DataError(
            f"The run in '{folder}' was started with {kept.get(of)} {of}, of which it holds some out ({SPLIT}), and the data "
            f"have {count} now: give it the data that it was started with, or start a new run"
        )
    named = getattr(dataset, "name_of", None)
    if named is not None and kept.get("names") is not None:
        for number, name in zip(evaluation.tolist(), kept["names"], strict=False):
            if named(number) != name:
                raise DataError(
                    f"The run in '{folder}' was started with other data: sample {number} was '{name}' ({SPLIT}) and is "
                    f"'{named(number)}' now: give it the data that it was started with, or start a new run"
                )
    return evaluation


def _left_out_classes(classes: np.ndarray | None, evaluation: np.ndarray, names: Sequence[str] | None) -> tuple[str, ...]:
    if classes is None:
        return ()
    values, sizes = np.unique(classes, return_counts=True)
    rare = ~np.isin(values, classes[evaluation])
    if not rare.any():
        return ()
    called = [
        f"'{names[value]}' ({size})" if names is not None and 0 <= value < len(names) else f"{value} ({size})"
        for value, size in zip(values[rare].tolist(), sizes[rare].tolist(), strict=True)
    ]
    listed = ", ".join(called[:SHOWN]) + (f" and {len(called) - SHOWN} more" if len(called) > SHOWN else "")
    return (f"no sample of the class{'es' * (len(called) > 1)} {listed} is held out: evaluation says nothing of it",)
