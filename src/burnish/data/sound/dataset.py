"""Folders of .wav files: with one subfolder per class, to train and evaluate on; and files without classes, to predict."""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from burnish.data.data_spec import DataSpec
from burnish.data.image.labelled import check_class_count, label_of_images
from burnish.data.image.reader import SUFFIXES as PICTURES
from burnish.data.image.reader import image_files, some_of
from burnish.data.image_folder import check_names, check_parts
from burnish.data.model_metadata import DataDescription
from burnish.data.sound.settings import Sound, SoundLike, read_sound
from burnish.data.sound.transform import log_mel, resampled
from burnish.data.sound.wav import SUFFIX, UnreadableSound, Wav, open_wav
from burnish.errors import DataError
from burnish.program import Entry

UNREAD = frozenset({".mp3", ".flac", ".ogg", ".opus", ".m4a", ".aac", ".aiff", ".aif", ".wma", ".au"})
"""Of files with sound that are not read."""
CACHED_BYTES = 1 << 30
FILTER_SECONDS = 0.1
"""How much more of a file is read than is taken, so that resampling has what comes after."""


def is_sounds(path: Path) -> bool:
    """Return whether the first file in a folder and its subfolders that holds a sound or a picture holds a sound."""
    if not path.is_dir():
        return False
    for place, folders, names in os.walk(path):
        folders.sort()
        for name in sorted(names):
            suffix = Path(name).suffix.lower()
            if (suffix == SUFFIX or suffix in UNREAD or suffix in PICTURES) and not name.startswith("."):
                return suffix not in PICTURES
        if Path(place) != path and len(Path(place).relative_to(path).parts) > 2:
            folders.clear()
    return False


class SoundReader:
    """Reads .wav files for one input of a model; what is made of them is kept while it fits into 1 GiB.

    Args:
        spec: what the program takes.
        files: the sounds; of the first data that are read, they tell the rate and the length.
        sound: settings that were asked for; None: what the model's metadata say, else the defaults.
        source: what to call the data in an error.

    Attributes:
        sound: the settings, with nothing left open.

    Raises:
        DataError: the program has several inputs, or its input takes no sound, or not this.
        ConfigurationError: no such settings.
    """

    def __init__(self, spec: DataSpec, files: Sequence[Wav], sound: SoundLike | None, source: str):
        self.entry = spec.only_data(source)
        known = spec.described.sound
        asked = (known or Sound()) if sound is None else read_sound(sound, known)
        rate = Counter(file.rate for file in files).most_common(1)[0][0]
        self.sound = asked.for_input(self.entry, source, rate, max(file.seconds for file in files))
        self._filters = self.sound.filters() if self.sound.is_spectrogram else None
        self._cache: dict[Path, np.ndarray] = {}
        self._kept = 0

    def __getstate__(self) -> dict[str, Any]:
        """What a reading process gets: nothing that was read."""
        return {**self.__dict__, "_cache": {}, "_kept": CACHED_BYTES}

    def read(self, file: Wav) -> np.ndarray:
        """Return a sound as the input takes it, without the axis of the samples.

        Raises:
            UnreadableSound: it cannot be read any more.
        """
        found = self._cache.get(file.path)
        if found is not None:
            return found
        values = self._shaped(self._values(file)).astype(self.entry.numpy_dtype)
        if self._kept + values.nbytes <= CACHED_BYTES:
            self._cache[file.path] = values
            self._kept += values.nbytes
        return values

    def _values(self, file: Wav) -> np.ndarray:
        """The samples, [length], or the spectrogram, [bands, frames]."""
        sound = self.sound
        assert sound.rate is not None
        needed = -(-sound.length * file.rate // sound.rate) + round(FILTER_SECONDS * file.rate)
        samples = resampled(file.mono(needed), file.rate, sound.rate)[: sound.length]
        samples = np.concatenate([samples, np.zeros(sound.length - len(samples))])
        if self._filters is None:
            return samples
        assert sound.hop is not None
        assert sound.frames is not None
        return (log_mel(samples, self._filters, sound.hop, sound.frames) - sound.mean) / sound.std

    def _shaped(self, values: np.ndarray) -> np.ndarray:
        extents = self.entry.extents[1:]
        if values.ndim == 1:
            return values if len(extents) == 1 else values[None] if extents[0] == 1 else values[:, None]
        if len(extents) == 2:
            return values
        is_first = extents[0] in (1, 3)
        return np.repeat(values[None], extents[0], 0) if is_first else np.repeat(values[..., None], extents[2], 2)  # type: ignore[arg-type]

    def notes(self, files: Sequence[Wav]) -> list[str]:
        """Return what a person should know of what becomes of the files."""
        notes, sound = [], self.sound
        assert sound.rate is not None
        other = [file for file in files if file.rate != sound.rate]
        if other:
            rates = ", ".join(f"{rate:,}" for rate in sorted({file.rate for file in other})[:3])
            notes.append(
                f"{len(other):,} of {len(files):,} sounds are resampled to {sound.rate:,} samples a second (from {rates})"
            )
        mixed = sum(file.channels > 1 for file in files)
        if mixed:
            notes.append(f"{mixed:,} of {len(files):,} have several channels, which are averaged")
        seconds = sound.length / sound.rate
        long = sum(file.seconds > seconds + 0.5 / sound.rate for file in files)
        if long:
            notes.append(f"{long:,} of {len(files):,} are longer than {seconds:.4g} s and lose the rest (--sound seconds=...)")
        return notes


class Sounds:
    """Sounds in files, read when they are asked for.

    Args:
        files: the sounds, in the order of the samples.
        reader: reads them.
        source: what to call the data in an error.
        notes: what a person should know of the data.

    Attributes:
        sound: what is done to a sound, with nothing left open.
        names: of the files, as the path of the data leads to them.
    """

    def __init__(self, files: Sequence[Wav], reader: SoundReader, source: str, notes: Sequence[str] = ()):
        self._files, self._reader, self._source = list(files), reader, source
        self._notes = [*notes, *reader.notes(files)]
        self.sound = reader.sound
        self.preprocessing = None

    def __len__(self) -> int:
        return len(self._files)

    @property
    def names(self) -> list[str]:
        """The names of the files."""
        return [str(file.path) for file in self._files]

    @property
    def note(self) -> str | None:
        """What a person should know of the data."""
        return f"{self._source}: {'; '.join(self._notes)}" if self._notes else None

    def name_of(self, index: int) -> str:
        """Return the file of a sample."""
        return str(self._files[index].path)

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return sounds, by the name of the model's input.

        Raises:
            DataError: a file cannot be read any more.
        """
        return {self._reader.entry.name: np.stack([self._reader.read(self._files[int(index)]) for index in indices])}


class SoundFolder(Sounds):
    """Sounds in one subfolder per class. Classes are numbered in sorted order of the subfolders' names, files in that of theirs.

    Files that cannot be read are left out and named; so are empty files.

    Args:
        path: the folder.
        spec: what the program takes.
        classes: names of the classes in the order of their indices, instead of the subfolders' sorted names.
        sound: settings, as ``open_dataset`` takes them.

    Attributes:
        classes: the names of the classes.
        groups: None: files have no columns.

    Raises:
        DataError: no sound that can be read, a subfolder that is not among ``classes``, more classes than the model has, or an
            input that takes no sound, or not this.
        ConfigurationError: no such settings.
    """

    groups = None

    def __init__(self, path: Path, spec: DataSpec, classes: Sequence[str] | None = None, sound: SoundLike | None = None):
        source = str(path)
        self._label, self._targets = label_of_images(spec, source, "sounds")
        folders = sorted(child.name for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))
        check_parts(folders, path)
        notes = check_names(folders, path)
        names = tuple(classes) if classes is not None else spec.class_order(folders)
        unknown = next((name for name in folders if name not in names), None)
        if unknown is not None:
            raise DataError(
                f"{path}: class '{unknown}' is not among the classes that are trained: {', '.join(names)}; remove this folder, "
                "or add the class to the training data"
            )
        check_class_count(names, spec, source)
        files = [(file, names.index(name)) for name in folders for file in image_files(path / name, {SUFFIX})]
        beside = [file for file in image_files(path, {SUFFIX}) if file.parent == path]
        if beside and not files:
            raise DataError(
                f"{path}: {len(beside):,} .wav files and no subfolder; to train and evaluate on, a folder of sounds has one "
                "subfolder per class, with the files in it"
            )
        if beside:
            notes.append(f"{len(beside):,} .wav files beside the classes' folders, of no class, left out: {some_of(beside)}")
        opened, left_out = _opened([file for file, _ in files], path)
        notes += left_out
        place, self._spec, self._asked = dict(files), spec, sound
        super().__init__(opened, SoundReader(spec, opened, sound, source), source, notes)
        self.classes = names
        self._classes_of = np.asarray([place[file.path] for file in opened], np.int64)
        few = [name for name, count in zip(names, np.bincount(self._classes_of, minlength=len(names)), strict=False) if not count]
        if few:
            self._notes.append(f"no sound of the class{'es' * (len(few) > 1)} {some_of(few)}")

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return sounds, and their class indices or probabilities, by the names of the program's inputs.

        Raises:
            DataError: a file cannot be read any more.
        """
        classes = self._classes_of[np.asarray(indices, np.int64)]
        if self._targets is None:
            labels = classes.astype(self._label.numpy_dtype)
        else:
            labels = np.eye(self._targets, dtype=self._label.numpy_dtype)[classes]
        return {**super().batch(indices), self._label.name: labels}

    @property
    def divisible(self) -> int:
        """How many sounds there are."""
        return len(self)

    def sample_classes(self, label: Entry | None) -> tuple[np.ndarray, str] | None:
        """Return the class of each sound, and what says so, in words."""
        return self._classes_of, "class"

    def part(self, indices: np.ndarray, like: DataDescription | None = None) -> Self:
        """Return some of the sounds; rate and length of them follow from these, or are those of another part."""
        part, places = copy.copy(self), np.asarray(indices, np.int64)
        part._files = [self._files[place] for place in places.tolist()]
        part._classes_of = self._classes_of[places]
        part._notes = self._notes if like is None else []
        if like is None:
            part._reader = SoundReader(self._spec, part._files, self._asked, self._source)
        else:
            part._reader = SoundReader(self._spec.like(like), part._files, None, self._source)
        part.sound = part._reader.sound
        return part


class SoundFiles(Sounds):
    """Sounds without labels: a file, or all .wav files in a folder and its subfolders, in sorted order.

    Args:
        path: the file or the folder.
        spec, sound: as ``SoundFolder`` takes them.
        files: the files, where they are not those of ``path``.
        all_read: True if each file has to be readable; else those that are not are left out and named.

    Raises:
        DataError: as ``SoundFolder``.
    """

    def __init__(
        self,
        path: Path,
        spec: DataSpec,
        sound: SoundLike | None = None,
        files: Sequence[Path] | None = None,
        all_read: bool = False,
    ):
        files = files if files is not None else image_files(path, {SUFFIX}) if path.is_dir() else [path]
        if len(files) == 1 or all_read:
            opened, notes = [open_wav(file) for file in files], list[str]()
        else:
            opened, notes = _opened(files, path)
        super().__init__(opened, SoundReader(spec, opened, sound, str(path)), str(path), notes)


def _opened(files: Sequence[Path], path: Path) -> tuple[list[Wav], list[str]]:
    """Return the files that can be read, and notes on those that are left out."""
    opened, failed = list[Wav](), list[UnreadableSound]()
    for file in files:
        try:
            opened.append(open_wav(file))
        except UnreadableSound as error:
            failed.append(error)
    if not opened and failed:
        raise failed[0]
    others = _others(path)
    if not opened:
        what = f"; {len(others):,} sounds are in formats that are not read ({some_of(others)})" if others else ""
        remedy = (
            "convert them, each by ffmpeg -i sound.mp3 sound.wav" if others else "a folder of sounds has one subfolder per class"
        )
        raise DataError(f"{path}: no .wav files{what}: {remedy}")
    notes = []
    if failed:
        named = some_of(error.what for error in failed)
        notes.append(f"{len(failed):,} of {len(files):,} sounds cannot be read and are left out: {named}")
    if others:
        notes.append(f"{len(others):,} sounds in formats that are not read, left out: {some_of(others)}")
    return opened, notes


def _others(path: Path) -> Collection[Path]:
    return image_files(path, UNREAD) if path.is_dir() else ()
