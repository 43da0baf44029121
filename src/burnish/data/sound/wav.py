""".wav files. The header is checked before any sound is read, and only the needed part of the sound is read."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from burnish.errors import DataError
from burnish.untrusted_files import check_regular

SUFFIX = ".wav"
PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
CODECS = {2: "ADPCM", 6: "A-law", 7: "mu-law", 17: "IMA ADPCM", 49: "GSM", 80: "MPEG", 85: "MP3"}
STREAMED = 0xFFFFFFFF
"""Declared size of sound that was written to a pipe; it extends to the end of the file."""
DTYPES = {(PCM, 8): "u1", (PCM, 16): "<i2", (PCM, 24): "u1", (PCM, 32): "<i4", (FLOAT, 32): "<f4", (FLOAT, 64): "<f8"}
MOST_CHANNELS = 1024
LARGEST_FORMAT = 1 << 16
"""Most bytes of the format chunk."""
CONVERT = "write it again as PCM (ffmpeg -i sound.wav -c:a pcm_s16le new.wav)"


class UnreadableSound(DataError):
    """A file that is not a readable .wav file."""

    def __init__(self, file: Path, reason: str, remedy: str):
        super().__init__(f"{file}: {reason}; {remedy}")
        self.what = f"{file} ({reason})"


@dataclass(frozen=True)
class Wav:
    """A .wav file with a valid header.

    Attributes:
        path: path of the file.
        rate: samples per second.
        channels: number of channels.
        count: samples per channel.
        form, bits: number format, ``PCM`` or ``FLOAT``, and its bits.
        start: byte offset of the sound.
    """

    path: Path
    rate: int
    channels: int
    count: int
    form: int
    bits: int
    start: int

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.count / self.rate

    def mono(self, most: int | None = None) -> np.ndarray:
        """Return the average of the channels, -1 to 1, float64 [samples].

        Args:
            most: most samples to read from the start; None for all.

        Raises:
            UnreadableSound: the file was truncated, cannot be read, or holds NaN or infinity.
        """
        count = self.count if most is None else min(most, self.count)
        size = count * self.channels * self.bits // 8
        try:
            with self.path.open("rb") as file:
                file.seek(self.start)
                content = file.read(size)
        except OSError as error:
            raise UnreadableSound(self.path, f"cannot be read: {error.strerror or error}", "put the file back") from error
        if len(content) < size:
            raise UnreadableSound(self.path, "has become shorter since it was opened", "put the whole file back")
        values = self._numbers(content).reshape(count, self.channels)
        if not np.isfinite(values).all():
            raise UnreadableSound(self.path, "holds a NaN or infinite sample", "remove or repair it")
        return values.mean(axis=1)

    def _numbers(self, content: bytes) -> np.ndarray:
        """Return the interleaved samples of all channels, float64."""
        read = np.frombuffer(content, DTYPES[self.form, self.bits])
        if self.form == FLOAT:
            return read.astype(np.float64)
        if self.bits == 8:
            return (read.astype(np.float64) - 128) / 128
        if self.bits == 24:
            # NumPy has no 24-bit integers: fill the upper three bytes of 32-bit ones.
            whole = np.zeros((len(read) // 3, 4), np.uint8)
            whole[:, 1:] = read.reshape(-1, 3)
            read = whole.reshape(-1).view("<i4")
            return read / 2.0**31
        return read / 2.0 ** (self.bits - 1)


def open_wav(path: Path) -> Wav:
    """Read the header of a .wav file.

    Raises:
        UnreadableSound: the file is truncated, empty, of an unsupported format, or not a .wav file.
    """
    try:
        check_regular(path)
        with path.open("rb") as file:
            return _header(path, file, os.fstat(file.fileno()).st_size)
    except OSError as error:
        raise UnreadableSound(path, f"cannot be read: {error.strerror or error}", "choose files that you may read") from error


def _header(path: Path, file: BinaryIO, length: int) -> Wav:
    opening = file.read(12)
    if len(opening) < 12 or opening[:4] != b"RIFF" or opening[8:] != b"WAVE":
        what = "is an empty file" if not length else "is no .wav file, as it does not begin with RIFF and WAVE"
        raise UnreadableSound(path, what, CONVERT)
    said: tuple[int, int, int, int, int] | None = None
    while len(head := file.read(8)) == 8:
        name, size = head[:4], struct.unpack("<I", head[4:])[0]
        start = file.tell()
        if name == b"fmt ":
            said = _format(path, file.read(min(size, LARGEST_FORMAT)))
        elif name == b"data":
            return _sound(path, said, start, size, length - start)
        # RIFF pads chunks to an even number of bytes.
        file.seek(start + size + size % 2)
    raise UnreadableSound(path, "breaks off in its header, before any sound", "fetch or write it again")


def _format(path: Path, content: bytes) -> tuple[int, int, int, int, int]:
    """Return format, channels, rate, bytes per frame of all channels, and bits."""
    if len(content) < 16:
        raise UnreadableSound(path, "breaks off in its header, before any sound", "fetch or write it again")
    form, channels, rate, _, block, bits = struct.unpack("<HHIIHH", content[:16])
    # The extensible header has the actual format in its GUID.
    if form == EXTENSIBLE and len(content) >= 26:
        form = struct.unpack("<H", content[24:26])[0]
    return form, channels, rate, block, bits


def _sound(path: Path, said: tuple[int, int, int, int, int] | None, start: int, size: int, there: int) -> Wav:
    """Return the file; its header declares ``size`` bytes of sound, and ``there`` bytes follow."""
    if said is None:
        raise UnreadableSound(path, "does not say how its sound is written (no 'fmt ')", "fetch or write it again")
    form, channels, rate, block, bits = said
    if (form, bits) not in DTYPES:
        what = f"holds {CODECS[form]}" if form in CODECS else f"holds sound of format {form} with {bits} bits"
        raise UnreadableSound(path, f"{what}, and PCM of 8, 16, 24 or 32 bits and floats are read", CONVERT)
    if not rate or not 1 <= channels <= MOST_CHANNELS or block != channels * bits // 8:
        what = f"says in its header {channels} channels of {bits} bits in {block} bytes, at {rate:,} samples a second"
        raise UnreadableSound(path, what, "its header is damaged: fetch or write it again")
    size = there if size == STREAMED else size
    if size > there:
        what = f"is cut off: its header says {size:,} bytes of sound, and {there:,} follow"
        raise UnreadableSound(path, what, "fetch or write it again")
    count = size // block
    if not count:
        raise UnreadableSound(path, "holds no sound", "remove it, or record it again")
    return Wav(path, rate, channels, count, form, bits, start)
