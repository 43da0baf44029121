"""The description of the training data in a model's ``metadata_props``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from burnish.data.label_coding import LabelDescription
from burnish.data.preprocessing import Preprocessing, read_pixels
from burnish.data.sound.settings import Sound, read_sound
from burnish.data.table_coding import TableDescription
from burnish.data.text.settings import TextDescription
from burnish.errors import BurnishError, DataError
from burnish.graph.annotations import CLASS_NUMBERS, CLASSES, COLUMNS, INITIAL, PIXELS, SOUND, TARGETS, TEXT, Annotation
from burnish.untrusted_files import UNREADABLE
from burnish.validation import is_whole


@dataclass(frozen=True)
class DataDescription:
    """The known facts about the data that a model was trained on. None means unknown or not applicable.

    Attributes:
        preprocessing: preprocessing of image pixels.
        classes: class names by index.
        numbers: the model's own class numbers, if they differ from the indices.
        text: tokenization of texts.
        table: table columns, if some are categorical.
        sound: preprocessing of sounds.
        labels: table columns of numeric or yes/no targets.
        is_initial: True if the weights are untrained.
    """

    preprocessing: Preprocessing | None = None
    classes: tuple[str, ...] | None = None
    numbers: tuple[int, ...] | None = None
    text: TextDescription | None = None
    table: TableDescription | None = None
    sound: Sound | None = None
    labels: LabelDescription | None = None
    is_initial: bool = field(default=False, compare=False)

    @classmethod
    def of(cls, dataset: object) -> DataDescription:
        """Return the description of a dataset, from its attributes of these names (``described`` for text)."""
        described, classes = getattr(dataset, "preprocessing", None), getattr(dataset, "classes", None)
        text, table = getattr(dataset, "described", None), getattr(dataset, "table", None)
        sound, labels = getattr(dataset, "sound", None), getattr(dataset, "labels", None)
        is_named = isinstance(classes, Sequence) and not isinstance(classes, str)
        return cls(
            described if isinstance(described, Preprocessing) else None,
            tuple(map(str, classes)) if is_named and classes else None,
            text=text if isinstance(text, TextDescription) else None,
            table=table if isinstance(table, TableDescription) else None,
            sound=sound if isinstance(sound, Sound) else None,
            labels=labels if isinstance(labels, LabelDescription) else None,
        )

    @classmethod
    def read(cls, metadata: Mapping[str, str], source: str = "the model") -> DataDescription:
        """Return the description that ``metadata`` wrote.

        Raises:
            DataError: an entry is damaged.
        """
        described, classes = _entry(metadata, PIXELS, dict, source), _entry(metadata, CLASSES, list, source)
        if classes is not None and not all(isinstance(name, str) for name in classes):
            raise _damaged(source, CLASSES, "a name is no text")
        numbers = _entry(metadata, CLASS_NUMBERS, list, source)
        if numbers is not None and not all(map(is_whole, numbers)):
            raise _damaged(source, CLASS_NUMBERS, "a number is no integer")
        texts = _entry(metadata, TEXT, dict, source)
        try:
            read = None if described is None else read_pixels(described)
        except BurnishError as error:
            raise _damaged(source, PIXELS, str(error)) from error
        try:
            text = None if texts is None else TextDescription.read(texts)
        except (BurnishError, *UNREADABLE) as error:
            raise _damaged(source, TEXT, str(error)) from error
        columns = _entry(metadata, COLUMNS, dict, source)
        try:
            table = None if columns is None else TableDescription.read(columns)
        except UNREADABLE as error:
            raise _damaged(source, COLUMNS, str(error)) from error
        sounds = _entry(metadata, SOUND, dict, source)
        try:
            sound = None if sounds is None else read_sound(sounds)
        except BurnishError as error:
            raise _damaged(source, SOUND, str(error)) from error
        targets = _entry(metadata, TARGETS, dict, source)
        try:
            labels = None if targets is None else LabelDescription.read(targets)
        except UNREADABLE as error:
            raise _damaged(source, TARGETS, str(error)) from error
        named, numbered = tuple(classes) if classes else None, tuple(numbers) if numbers else None
        return cls(read, named, numbered, text, table, sound, labels, INITIAL.key in metadata)

    def metadata(self) -> dict[str, str]:
        """Return the known facts as entries for ``metadata_props``: JSON by key."""
        said: list[tuple[Annotation[Any], Any]] = [
            (PIXELS, None if self.preprocessing is None else self.preprocessing.options()),
            (TEXT, None if self.text is None else self.text.options()),
            (SOUND, None if self.sound is None else self.sound.options()),
            (COLUMNS, None if self.table is None else self.table.options()),
            (TARGETS, None if self.labels is None else self.labels.options()),
            (CLASSES, None if self.classes is None else list(self.classes)),
            (CLASS_NUMBERS, None if self.numbers is None else list(self.numbers)),
        ]
        texts = {annotation.key: annotation.write(what) for annotation, what in said if what is not None}
        # JSON escapes can hold file names that are not UTF-8 (lone surrogates); a model's metadata cannot.
        return {key: text.encode("utf-8", "backslashreplace").decode() for key, text in texts.items()}


def _entry(metadata: Mapping[str, str], annotation: Annotation[Any], kind: type, source: str) -> Any:
    if annotation.key not in metadata:
        return None
    try:
        value = annotation.read(metadata[annotation.key])
    except ValueError as error:
        raise _damaged(source, annotation, str(error)) from error
    if not isinstance(value, kind):
        raise _damaged(source, annotation, f"it is a {type(value).__name__}")
    return value


def _damaged(source: str, annotation: Annotation[Any], what: str) -> DataError:
    return DataError(f"{source}: its metadata '{annotation.key}' cannot be read ({what}); export it again, or remove that entry")
