"""Preprocessing of sound, as a value that the model keeps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

import numpy as np

from burnish.data.preprocessing import image_layout, shape_text
from burnish.data.sound.transform import mel_filters
from burnish.errors import ConfigurationError, DataError
from burnish.program import Entry
from burnish.settings import PlainSettings, read_settings, with_settings
from burnish.validation import is_number, is_whole

HIGHEST_RATE = 16_000
"""Highest default rate."""
LONGEST_SECONDS = 10.0
"""Longest default length."""
BANDS = 64
WINDOW_SECONDS, HOP_SECONDS = 0.025, 0.010
MEAN = STD = 4.5
LARGEST_WINDOW = 1 << 16
LARGEST_RATE = 1_000_000
MOST_VALUES = 1 << 28
"""Most samples of a sound, or values of a spectrogram."""
FOLLOWING = {"rate": ("hop", "n_fft", "fmax"), "seconds": ("hop",), "frames": ("hop",), "hop": ("seconds",), "bands": ("n_fft",)}
"""Settings that are derived again if another one changes."""
Kind = Literal["samples", "spectrogram"]


@dataclass(frozen=True, kw_only=True)
class Sound(PlainSettings):
    """Preprocessing of a sound: mono samples of a fixed rate and length, or their log-mel spectrogram.

    Channels are averaged, rates resampled (``resampled``), and lengths truncated or padded with silence. Samples are in -1 to 1.
    A spectrogram is ``(log(energy + 1e-6) - mean) / std`` of triangular bands on HTK's mel scale, under a periodic Hann window;
    frame ``i`` begins at sample ``i * hop``. Settings that are None follow from the model's input and the training data
    (``for_input``).

    Attributes:
        rate: samples per second.
        seconds: length of a sound.
        bands: height of the spectrogram.
        frames: width of the spectrogram.
        n_fft: samples per window, a power of two.
        hop: samples from one frame to the next.
        fmin, fmax: frequency range of the bands, in Hz.
        mean, std: offset and divisor of the logarithms.

    Example:
        >>> from burnish.data.sound.settings import read_sound
        >>> read_sound("rate=8000,bands=40").bands
        40
    """

    rate: int | None = None
    seconds: float | None = None
    bands: int | None = None
    frames: int | None = None
    n_fft: int | None = None
    hop: int | None = None
    fmin: float = 0.0
    fmax: float | None = None
    mean: float = -MEAN
    std: float = STD

    def __post_init__(self) -> None:
        for name in ("rate", "bands", "frames", "n_fft", "hop"):
            value = getattr(self, name)
            if value is not None and (not is_whole(value) or not 1 <= value <= LARGEST_RATE):
                raise ConfigurationError(f"sound: {name}={value!r}: give a whole number, 1 or more (--sound {name}=...)")
        for name in ("seconds", "fmax", "std"):
            value = getattr(self, name)
            if value is not None and (not is_number(value) or value <= 0):
                raise ConfigurationError(f"sound: {name}={value!r}: give a number above 0 (--sound {name}=...)")
        if not is_number(self.mean) or not is_number(self.fmin) or self.fmin < 0:
            raise ConfigurationError(f"sound: mean={self.mean!r}, fmin={self.fmin!r}: give numbers, and no fmin below 0")
        if self.n_fft is not None and (self.n_fft & (self.n_fft - 1) or not 4 <= self.n_fft <= LARGEST_WINDOW):
            raise ConfigurationError(
                f"sound: n_fft={self.n_fft}: give a power of two from 4 to {LARGEST_WINDOW:,}, such as 512 (--sound n_fft=512)"
            )
        if self.rate is not None:
            highest = self.rate / 2 if self.fmax is None else self.fmax
            if highest > self.rate / 2 or self.fmin >= highest:
                raise ConfigurationError(
                    f"sound: bands from fmin={self.fmin:g} to fmax={highest:g} Hz, and {self.rate:,} samples a second hold sound "
                    f"up to {self.rate / 2:g} Hz: give fmin < fmax <= {self.rate / 2:g}"
                )

    @property
    def is_spectrogram(self) -> bool:
        """True if the model takes a spectrogram rather than samples; valid after ``for_input``."""
        return self.frames is not None

    @property
    def length(self) -> int:
        """Samples of a sound."""
        assert self.rate is not None
        assert self.seconds is not None
        return max(1, round(self.rate * self.seconds))

    def filters(self) -> np.ndarray:
        """Return the weights of frequencies in each band, float64 [bands, n_fft // 2 + 1]."""
        assert self.rate is not None
        assert self.n_fft is not None
        assert self.bands is not None
        return mel_filters(self.bands, self.n_fft, self.rate, self.fmin, self.fmax or self.rate / 2)

    def for_input(self, entry: Entry, source: str, rate: int, seconds: float) -> Sound:
        """Return the settings completed by the model's input and the files.

        Args:
            entry: the model's input: samples ``[batch, samples]`` or ``[batch, 1, samples]``, or a spectrogram ``[batch, bands,
                frames]`` or ``[batch, channels, bands, frames]`` with 1 or 3 equal channels, first or last.
            source: name for errors.
            rate: most common rate of the files.
            seconds: length of the longest file.

        Raises:
            DataError: the input does not take sound or contradicts the settings, or a spectrogram band would be empty.
        """
        if not entry.dtype.is_floating_point():
            raise DataError(f"{source}: the model's input '{entry.name}' takes {entry.dtype}, and sounds are numbers in between")
        chosen = replace(self, rate=self.rate or min(rate, HIGHEST_RATE))
        assert chosen.rate is not None
        if kind_of(entry, source) == "samples":
            return self._of_samples(chosen, entry, source, seconds)
        return self._of_spectrogram(chosen, entry, source, seconds)

    def _of_samples(self, chosen: Sound, entry: Entry, source: str, seconds: float) -> Sound:
        set_for_pictures = [name for name in ("bands", "frames", "n_fft", "hop") if getattr(self, name) is not None]
        if set_for_pictures:
            raise DataError(
                f"{source}: sound: {set_for_pictures[0]} is for a spectrogram, and the model's input '{entry.name}' of shape "
                f"{shape_text(entry.extents)} takes samples: leave it out"
            )
        assert chosen.rate is not None
        (takes,) = (extent for extent in (entry.extents[1:] if len(entry.extents) == 2 else _samples_of(entry)))
        if not isinstance(takes, int):
            made = replace(chosen, seconds=self.seconds or min(seconds, LONGEST_SECONDS))
            return replace(made, seconds=made.length / chosen.rate)
        asked = None if self.seconds is None else round(self.seconds * chosen.rate)
        if asked not in (None, takes):
            raise DataError(
                f"{source}: sound: {self.seconds:g} s at {chosen.rate:,} samples a second are {asked:,} samples, and the model's "
                f"input '{entry.name}' takes {takes:,}: leave seconds out"
            )
        return replace(chosen, seconds=takes / chosen.rate)

    def _of_spectrogram(self, chosen: Sound, entry: Entry, source: str, seconds: float) -> Sound:
        _, _, bands, frames = image_layout(entry, source)
        for name, takes in (("bands", bands), ("frames", frames)):
            asked = getattr(self, name)
            if takes is not None and asked not in (None, takes):
                raise DataError(
                    f"{source}: sound: {name}={asked}, and the model's input '{entry.name}' of shape {shape_text(entry.extents)} "
                    f"takes {takes} {name}: leave {name} out"
                )
        rate, bands, frames = chosen.rate, bands or self.bands or BANDS, frames or self.frames
        assert rate is not None
        wanted = self.seconds or min(seconds, LONGEST_SECONDS)
        length = max(1, round(wanted * rate))
        hop = self.hop or (max(1, round(rate * HOP_SECONDS)) if frames is None else max(1, -(-length // frames)))
        frames = frames or -(-length // hop)
        if self.hop is not None and self.seconds is None:
            length = hop * frames
        elif abs(frames * hop - length) > max(hop, frames):
            raise DataError(
                f"{source}: sound: {frames} frames with a hop of {hop} are {frames * hop / rate:.3g} s at {rate:,} samples "
                f"a second, and seconds={wanted:g}: leave seconds or hop out"
            )
        made = replace(chosen, seconds=length / rate, bands=bands, frames=frames, hop=hop, fmax=chosen.fmax or rate / 2)
        return replace(made, n_fft=self.n_fft or _window(made, source)).checked(source)

    def checked(self, source: str) -> Sound:
        """Return the settings; raise DataError if a band is empty or the spectrogram is too large."""
        assert self.bands is not None
        assert self.frames is not None
        if self.bands * self.frames > MOST_VALUES:
            raise DataError(
                f"{source}: sound: {self.bands:,} bands x {self.frames:,} frames are more than are computed: give fewer"
            )
        if not (self.filters().sum(axis=1) > 0).all():
            raise DataError(
                f"{source}: sound: some of {self.bands} bands are narrower than a window of {self.n_fft} samples tells apart, "
                "and would be empty: give fewer bands (--sound bands=...), or a larger n_fft"
            )
        return self

    def text(self) -> str:
        """Return the settings in one line."""
        rate = "" if self.rate is None else f"{self.rate:,} samples a second, "
        length = "" if self.seconds is None else f"cut or padded to {self.seconds:.4g} s"
        if not self.is_spectrogram:
            return f"mono, {rate}{length}"
        return (
            f"mono, {rate}{length}; log-mel spectrogram: {self.bands} bands from {self.fmin:g} to {self.fmax:g} Hz, "
            f"{self.frames} frames, windows of {self.n_fft} samples every {self.hop}"
        )

    def options(self) -> dict[str, Any]:
        """Return the settings as JSON-compatible values for ``read_sound``."""
        return asdict(self)


SoundLike = str | Mapping[str, Any] | Sound


def read_sound(sound: SoundLike, base: Sound | None = None) -> Sound:
    """Return sound settings.

    Args:
        sound: ``rate=16000,bands=64``, settings by name, or a ``Sound``.
        base: settings to change; the defaults if None.

    Raises:
        ConfigurationError: an unknown setting or invalid value.
    """
    if isinstance(sound, Sound):
        return sound
    if isinstance(sound, str):
        sound = read_settings("sound", f"sound:{sound}")[1]
    if not isinstance(sound, Mapping):
        raise ConfigurationError(
            f"sound={sound!r} (--sound): give settings such as 'rate=16000,bands=64', or by name: {{'rate': 16000, 'bands': 64}}"
        )
    kept = {} if base is None else {field.name: getattr(base, field.name) for field in fields(base)}
    for name, others in FOLLOWING.items():
        if name in sound and sound[name] != kept.get(name):
            kept |= dict.fromkeys(others)
    return with_settings("sound", Sound, {**kept, **sound})


def kind_of(entry: Entry, source: str) -> Kind:
    """Return the kind of sound that an input takes.

    Raises:
        DataError: the shape fits neither samples nor a spectrogram.
    """
    extents = entry.extents
    if len(extents) == 2 or (len(extents) == 3 and 1 in extents[1:]):
        return "samples"
    if len(extents) == 3 and 2 in extents[1:]:
        raise DataError(
            f"{source}: the model's input '{entry.name}' of shape {shape_text(extents)} takes two channels, and sounds are mixed "
            "to one: take a model of one channel"
        )
    try:
        image_layout(entry, source)
    except DataError as error:
        raise DataError(
            f"{source}: the model's input '{entry.name}' has shape {shape_text(extents)}, and sounds fill [batch, samples] or "
            "[batch, 1, samples], or as a spectrogram [batch, 1, bands, frames] or [batch, bands, frames]"
        ) from error
    return "spectrogram"


def _samples_of(entry: Entry) -> tuple[int | str | None]:
    """Return the extent of samples in ``[batch, 1, samples]`` or ``[batch, samples, 1]``."""
    return (entry.extents[2] if entry.extents[1] == 1 else entry.extents[1],)


def _window(sound: Sound, source: str) -> int:
    """Return the smallest window that covers a hop and 25 ms and leaves no band empty."""
    assert sound.rate is not None
    assert sound.hop is not None
    size = 1 << max(2, math.ceil(math.log2(max(sound.hop, sound.rate * WINDOW_SECONDS))))
    while size < LARGEST_WINDOW and not (replace(sound, n_fft=size).filters().sum(axis=1) > 0).all():
        size *= 2
    return min(size, LARGEST_WINDOW)
