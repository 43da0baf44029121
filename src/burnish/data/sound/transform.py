"""Resampling and log-mel spectrograms, in float64."""

from __future__ import annotations

import functools
import math

import numpy as np

FLOOR = 1e-6
"""Offset of energies before the logarithm."""
ZEROS = 10
"""Zero crossings of the filter on each side, at the lower of the two rates."""
KAISER = 5.0


def resampled(samples: np.ndarray, rate: int, to: int) -> np.ndarray:
    """Return samples at another rate, with the result of ``scipy.signal.resample_poly`` at its defaults.

    The polyphase filter is a sinc under a Kaiser window, cut off at half of the lower rate.

    Args:
        samples: float64 [n].
        rate, to: samples per second before and after.

    Returns:
        float64 [ceil(n * to / rate)].
    """
    shared = math.gcd(rate, to)
    up, down = to // shared, rate // shared
    if up == down:
        return samples
    taps, half = _filter(up, down)
    count = -(-len(samples) * up // down)
    width = -(-len(taps) // up)
    # The output at time m reads taps[half + m * down - k * up] of sample k: up phases of width taps each.
    padded = np.concatenate([np.zeros(width), samples, np.zeros(width + down)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, width)
    result = np.empty(count)
    for phase in range(min(up, count)):
        place = half + phase * down
        last, offset = place // up, place % up
        own = np.zeros(width)
        chosen = taps[offset::up]
        own[width - len(chosen) :] = chosen[::-1]
        first = last - width + 1 + width
        part = result[phase::up]
        rows = first + down * np.arange(len(part))
        part[...] = windows[np.minimum(rows, len(windows) - 1)] @ own * (rows < len(windows))
    return result


@functools.lru_cache(maxsize=16)
def _filter(up: int, down: int) -> tuple[np.ndarray, int]:
    """Return the filter taps at ``up`` times the rate, and the number of taps before the middle."""
    largest = max(up, down)
    half = ZEROS * largest
    times = np.arange(-half, half + 1)
    taps = np.sinc(times / largest) / largest * np.kaiser(2 * half + 1, KAISER)
    return taps / taps.sum() * up, half


def mel_filters(bands: int, n_fft: int, rate: int, fmin: float, fmax: float) -> np.ndarray:
    """Return the weight of each frequency in each band: triangles on HTK's mel scale.

    Args:
        bands: number of bands.
        n_fft: samples per window.
        rate: samples per second.
        fmin, fmax: lower end of the lowest band and upper end of the highest, in Hz.

    Returns:
        float64 [bands, n_fft // 2 + 1].
    """
    mels = np.linspace(_mel(fmin), _mel(fmax), bands + 2)
    edges = 700 * (10 ** (mels / 2595) - 1)
    bins = np.arange(n_fft // 2 + 1) * (rate / n_fft)
    rising = (bins - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - bins) / (edges[2:] - edges[1:-1])[:, None]
    return np.maximum(0, np.minimum(rising, falling))


def _mel(frequency: float) -> float:
    return 2595 * math.log10(1 + frequency / 700)


def log_mel(samples: np.ndarray, filters: np.ndarray, hop: int, frames: int) -> np.ndarray:
    """Return the log energy of a sound in each band and frame.

    Args:
        samples: float64 [n], padded with silence.
        filters: weights from ``mel_filters``.
        hop: samples from one frame to the next.
        frames: number of frames.

    Returns:
        float64 [bands, frames].
    """
    n_fft = 2 * (filters.shape[1] - 1)
    padded = np.concatenate([samples, np.zeros(max(0, (frames - 1) * hop + n_fft - len(samples)))])
    windows = np.lib.stride_tricks.sliding_window_view(padded, n_fft)[::hop][:frames]
    energy = np.abs(np.fft.rfft(windows * np.hanning(n_fft + 1)[:-1], axis=1)) ** 2
    return np.asarray(np.log(filters @ energy.T + FLOOR))
