"""Folders of .wav files: one subfolder per class for training and evaluation, or unlabeled files for prediction."""

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
"""Suffixes of unsupported sound files."""
CACHED_BYTES = 1 << 30
FILTER_SECONDS = 0.1
"""Extra length to read, since the resampling filter looks ahead."""


def is_sounds(path: Path) -> bool:
    """True if the first sound or picture file in a folder and its subfolders is a sound."""
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
    """Reads .wav files for one input of a model, and caches up to 1 GiB of results.

    Args:
        spec: inputs of the program.
        files: the sounds; they determine rate and length if no settings do.
        sound: requested settings; by default those of the model's metadata.
        source: name for errors.

    Attributes:
        sound: complete settings.

    Raises:
        DataError: the program has several inputs, or its input does not take this sound.
        ConfigurationError: invalid settings.
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
        return {**self.__dict__, "_cache": {}, "_kept": CACHED_BYTES}

    def read(self, file: Wav) -> np.ndarray:
        """Return a sound in the input's shape, without a sample axis.

        Raises:
            UnreadableSound: the file cannot be read any more.
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
        """Return the samples, [length], or the spectrogram, [bands, frames]."""
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
        """Return notes on files that are resampled, mixed or truncated."""
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
    """Sounds in files, read on demand.

    Args:
        files: the sounds, in sample order.
        reader: sound reader.
        source: name for errors.
        notes: remarks for the user.

    Attributes:
        sound: complete settings.
        names: file paths.
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
        return [str(file.path) for file in self._files]

    @property
    def note(self) -> str | None:
        return f"{self._source}: {'; '.join(self._notes)}" if self._notes else None

    def name_of(self, index: int) -> str:
        return str(self._files[index].path)

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return sounds, by the name of the model's input.

        Raises:
            DataError: a file cannot be read any more.
        """
        return {self._reader.entry.name: np.stack([self._reader.read(self._files[int(index)]) for index in indices])}


class SoundFolder(Sounds):
    """Sounds in one subfolder per class.

    Classes are numbered in the sorted order of the subfolders, and files are sorted by name. Unreadable and empty files are left
    out and named.

    Args:
        path: the folder.
        spec: inputs of the program.
        classes: class names by index, instead of sorted subfolders.
        sound: settings; see ``open_dataset``.

    Attributes:
        classes: class names.
        groups: always None.

    Raises:
        DataError: no sound can be read, a class is not in ``classes`` or the model, or the input does not take this sound.
        ConfigurationError: invalid settings.
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
        """Return sounds, and their class indices or probabilities, by input name.

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
        return len(self)

    def sample_classes(self, label: Entry | None) -> tuple[np.ndarray, str] | None:
        return self._classes_of, "class"

    def part(self, indices: np.ndarray, like: DataDescription | None = None) -> Self:
        """Return some of the sounds. Their rate and length are determined again, or taken from ``like``."""
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
    """Unlabeled sounds: a file, or all .wav files in a folder and its subfolders, sorted.

    Args:
        path: the file or the folder.
        spec, sound: see ``SoundFolder``.
        files: explicit files instead of those in ``path``.
        all_read: True to raise an error for an unreadable file; else such files are left out and named.

    Raises:
        DataError: see ``SoundFolder``.
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
