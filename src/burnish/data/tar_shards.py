"""Images and their classes in tar archives of the WebDataset format: a sample's files share their name and are adjacent."""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from burnish.data.data_spec import DataSpec
from burnish.data.image.labelled import LabelledImages, check_class_count, label_of_images
from burnish.data.image.reader import SUFFIXES, reader_for, some_of
from burnish.data.preprocessing import PixelsLike
from burnish.errors import DataError
from burnish.settings import is_natural_text, is_number_text
from burnish.untrusted_files import UNREADABLE, check_regular, read_json
from burnish.validation import is_whole

SUFFIX = ".tar"
LARGEST_FILE = 1 << 30
LARGEST_LABEL = 1 << 16
CLASS, JSON = "cls", "json"
KEYS = ("label", "class", "cls", "class_name")
"""JSON keys that may hold a sample's class."""
MOST_SHARDS, MOST_DIGITS, MOST_CLASSES = 100_000, 18, 1_000_000
SEQUENCE = re.compile(r"\{([0-9]+)\.\.([0-9]+)\}")


@dataclass(frozen=True)
class TarMember:
    """A file in an archive, read in place: nothing is unpacked, and its name is not used as a path.

    Attributes:
        shard: the archive.
        name: name of the file.
        offset, size: position and length of its bytes.
    """

    shard: Path
    name: str
    offset: int
    size: int

    def open(self) -> BinaryIO:
        """Return the contents as a file."""
        check_regular(self.shard)
        with self.shard.open("rb") as file:
            file.seek(self.offset)
            return io.BytesIO(file.read(self.size))

    def __str__(self) -> str:
        return f"{self.shard}: {self.name}"


def shards_of(source: str | Path) -> list[Path]:
    """Return the archives of a source: one archive, those in a folder, or a sequence such as ``train-{000..009}.tar``.

    Raises:
        DataError: an archive of a sequence is missing.
    """
    path = Path(source)
    if path.is_dir():
        return sorted(path.glob(f"*{SUFFIX}"))
    found = SEQUENCE.search(str(source))
    if found is None or path.exists():
        return [path]
    first, last = found.groups()
    if max(len(first), len(last)) > MOST_DIGITS or int(last) - int(first) >= MOST_SHARDS:
        raise DataError(f"{source}: a sequence of more than {MOST_SHARDS:,} archives: name those that are there")
    if int(last) < int(first):
        raise DataError(f"{source}: the sequence ends before it begins: write {{{last}..{first}}}")
    names = [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    shards = [Path(SEQUENCE.sub(name, str(source), count=1)) for name in names]
    missing = [shard for shard in shards if not shard.is_file()]
    if missing:
        raise DataError(f"{source}: {len(missing)} of {len(shards)} archives are not there: {some_of(missing)}")
    return shards


class TarImages(LabelledImages):
    """Images in tar archives, each with its class.

    Headers are read once and images by offset, so a run can shuffle, resume, and share images among processes and workers. An
    image ``<name>.jpg`` (or another format) has its class in ``<name>.cls``, an index or a name, or in ``<name>.json`` under
    ``label``, ``class`` or ``cls``.

    Args:
        source: see ``shards_of``.
        spec, classes, size, pixels: see ``ImageFolder``.

    Raises:
        DataError: an archive is compressed, damaged or truncated, has no images with classes, or does not fit the program.
    """

    def __init__(
        self,
        source: str | Path,
        spec: DataSpec,
        classes: Sequence[str] | None = None,
        size: tuple[int, int] | None = None,
        pixels: PixelsLike | None = None,
    ):
        name = str(source)
        label_of_images(spec, name)
        reader = reader_for(spec, name, size, pixels)
        samples = list(read_samples(source))
        labelled = [(image, label) for image, label in samples if label is not None]
        if not labelled:
            raise DataError(
                f"{source}: {len(samples)} images and no class; beside <name>.jpg an archive holds <name>.cls, or <name>.json "
                "with the key 'label'"
            )
        names, indices = _classes([label for _, label in labelled], spec, classes, name)
        check_class_count(names, spec, name)
        left_out = len(samples) - len(labelled)
        notes = [f"{left_out:,} of {len(samples):,} images have no class and are left out"] if left_out else []
        super().__init__([image for image, _ in labelled], indices, names, spec, reader, name, notes)


def read_samples(source: str | Path) -> Iterator[tuple[TarMember, int | str | None]]:
    """Yield the images in archives, each with its class or None.

    Raises:
        DataError: see ``TarImages``.
    """
    for shard in shards_of(source):
        yield from _of_shard(shard)


def _of_shard(shard: Path) -> Iterator[tuple[TarMember, int | str | None]]:
    image: TarMember | None = None
    label: int | str | None = None
    current = ""
    for member in _members(shard):
        folder, _, base = member.name.rpartition("/")
        stem, _, suffix = base.partition(".")
        key = f"{folder}/{stem}"
        if key != current:
            if image is not None:
                yield image, label
            image, label, current = None, None, key
        kind = suffix.lower().rpartition(".")[2]
        if f".{kind}" in SUFFIXES and image is None:
            image = member
        elif kind in (CLASS, JSON) and label is None:
            label = _label(member, kind)
    if image is not None:
        yield image, label


def _members(shard: Path) -> Iterator[TarMember]:
    """Yield the regular files of an archive; links and folders are skipped."""
    try:
        check_regular(shard)
        length = shard.stat().st_size
        with tarfile.open(shard, "r:") as archive:  # uncompressed, so that members can be read in place
            for info in archive:
                if not 0 <= info.size <= min(LARGEST_FILE, length - info.offset_data):
                    raise DataError(
                        f"{shard}: '{info.name}' is said to have {info.size:,} bytes, and {max(length - info.offset_data, 0):,} "
                        f"follow; at most {LARGEST_FILE >> 30} GiB are read: fetch or write the archive again"
                    )
                if info.isreg() and not info.issparse():
                    yield TarMember(shard, info.name, info.offset_data, info.size)
            end = archive.offset
        _check_end(shard, end)
    except (tarfile.TarError, EOFError, *UNREADABLE) as error:
        reason = str(error) or type(error).__name__
        raise DataError(
            f"{shard}: no tar archive that can be read in its place ({reason}); unpack it where it is compressed (gunzip)"
        ) from error


def _check_end(shard: Path, end: int) -> None:
    """Raise DataError if an archive does not end in zeros: ``tarfile`` stops silently at a damaged header.

    Args:
        shard: the archive.
        end: offset after the last header.
    """
    with shard.open("rb") as file:
        file.seek(end)
        has_mark = file.read(tarfile.BLOCKSIZE) == bytes(tarfile.BLOCKSIZE)
        if has_mark and not any(block.strip(b"\0") for block in iter(lambda: file.read(1 << 20), b"")):
            return
    what = "more follows behind the mark of its end, as where archives are joined" if has_mark else "it is damaged or breaks off"
    raise DataError(f"{shard}: {what}, at byte {end:,} of {shard.stat().st_size:,}; fetch or write the archive again")


def _label(member: TarMember, kind: str) -> int | str | None:
    if member.size > LARGEST_LABEL:
        raise DataError(f"{member}: {member.size:,} bytes, and a class has {LARGEST_LABEL:,} at most")
    try:
        text = member.open().read().decode("utf-8").strip()
        value = read_json(text) if kind == JSON else int(text) if is_natural_text(text) else text
    except ValueError as error:
        raise DataError(f"{member}: no class in UTF-8, or no JSON ({error})") from error
    if kind == JSON:
        value = next((value[key] for key in KEYS if key in value), None) if isinstance(value, dict) else None
    is_index = is_whole(value) and 0 <= value < MOST_CLASSES
    is_name = isinstance(value, str) and value != "" and not (kind == CLASS and _is_number(value))
    if value is not None and not is_index and not is_name:
        raise DataError(f"{member}: the class is {value!r}, and an index below {MOST_CLASSES:,} or a name is expected")
    return value


def _is_number(text: str) -> bool:
    """True for numbers such as ``-1`` and ``1.5``; ``nan`` may be the name of a class."""
    return is_number_text(text) and text.lstrip("+-.")[0].isdigit()


def _classes(
    labels: Sequence[int | str], spec: DataSpec, classes: Sequence[str] | None, source: str
) -> tuple[tuple[str, ...], list[int]]:
    numbers = [label for label in labels if isinstance(label, int)]
    if len(numbers) == len(labels):
        known = classes or spec.described.classes
        count = max(numbers) + 1
        return (tuple(known) if known is not None and len(known) >= count else tuple(map(str, range(count)))), numbers
    if numbers:
        raise DataError(f"{source}: some classes are numbers and some names; write all of them in one way")
    found = sorted({str(label) for label in labels})
    names = tuple(classes) if classes is not None else spec.class_order(found)
    unknown = next((name for name in found if name not in names), None)
    if unknown is not None:
        raise DataError(
            f"{source}: class '{unknown}' is not among the classes that are trained: {', '.join(names)}; remove these samples, "
            "or add the class to the training data"
        )
    place = {name: index for index, name in enumerate(names)}
    return names, [place[str(label)] for label in labels]
