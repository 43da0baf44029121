"""Folders of .wav files: what is read of each form, resampled and made of it, what a model keeps, and what is refused."""

from __future__ import annotations

import struct
import wave
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from burnish.data import DataSpec, open_dataset
from burnish.data.formats import format_of
from burnish.data.model_metadata import DataDescription
from burnish.data.sound.dataset import SoundFiles, SoundFolder
from burnish.data.sound.settings import Sound, read_sound
from burnish.data.sound.transform import log_mel, mel_filters, resampled
from burnish.data.sound.wav import open_wav
from burnish.data.splitting import EvalSplit, held_out, parts
from burnish.data.unlabelled import open_samples
from burnish.errors import ConfigurationError, DataError
from specs.program_inputs import class_entry, classification, data_entry, value_entry

RATE = 8000


def tone(frequency: float, seconds: float = 0.25, rate: int = RATE, size: float = 0.5) -> np.ndarray:
    return size * np.sin(2 * np.pi * frequency * np.arange(round(seconds * rate)) / rate)


def coded(values: np.ndarray, form: int, bits: int) -> bytes:
    if form == 3:
        return values.astype(f"<f{bits // 8}").tobytes()
    if bits == 8:
        return (np.round(values * 127) + 128).astype("u1").tobytes()
    whole = np.round(values * (2 ** (bits - 1) - 1)).astype("<i8")
    return whole.reshape(-1, 1).view("u1")[:, : bits // 8].tobytes()


def written(
    path: Path, values: np.ndarray, rate: int = RATE, form: int = 1, bits: int = 16, extensible: bool = False, **said: int
) -> Path:
    """Write a .wav file by hand: samples [n] or [n, channels]; ``said`` is what the header says instead."""
    channels = 1 if values.ndim == 1 else values.shape[1]
    content = coded(values.reshape(-1), form, bits)
    block = said.get("block", channels * bits // 8)
    head = struct.pack("<HHIIHH", 0xFFFE if extensible else form, channels, rate, rate * block, block, bits)
    if extensible:
        head += struct.pack("<HHIH", 22, bits, 0, form) + bytes.fromhex("000000001000800000aa00389b71")
    chunks = b"fmt " + struct.pack("<I", len(head)) + head + b"LIST" + struct.pack("<I", 3) + b"abc\0"
    chunks += b"data" + struct.pack("<I", said.get("size", len(content))) + content
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks)
    return path


def folder(path: Path, **options: Any) -> Path:
    for name, frequency in (("high", 2000), ("low", 300)):
        for number in range(4):
            written(path / name / f"{number}.wav", tone(frequency + 10 * number), **options)
    return path


def spectrograms(*shape: int | str | None) -> DataSpec:
    return classification(*shape, classes=2)


@pytest.mark.parametrize(
    ("form", "bits", "error"), [(1, 8, 1e-2), (1, 16, 1e-4), (1, 24, 1e-6), (1, 32, 1e-8), (3, 32, 1e-7), (3, 64, 1e-15)]
)
@pytest.mark.parametrize("extensible", [False, True])
def test_every_form_of_numbers(tmp_path: Path, form: int, bits: int, error: float, extensible: bool) -> None:
    values = tone(440)
    path = written(tmp_path / "a.wav", values, form=form, bits=bits, extensible=extensible)
    file = open_wav(path)
    assert (file.rate, file.channels, file.count) == (RATE, 1, len(values))
    np.testing.assert_allclose(file.mono(), values, atol=error)
    np.testing.assert_allclose(file.mono(10), values[:10], atol=error)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_files_of_the_standard_library(tmp_path: Path, width: int) -> None:
    values = tone(440)
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(width)
        file.setframerate(RATE)
        file.writeframes(coded(values, 1, 8 * width))
    np.testing.assert_allclose(open_wav(tmp_path / "a.wav").mono(), values, atol=2.0 ** (2 - 8 * width))


def test_channels_are_averaged(tmp_path: Path) -> None:
    values = np.stack([tone(440), tone(900)], axis=1)
    np.testing.assert_allclose(open_wav(written(tmp_path / "a.wav", values)).mono(), values.mean(axis=1), atol=1e-4)


@pytest.mark.parametrize(("rate", "to"), [(44100, 16000), (8000, 16000), (48000, 8000), (22050, 16000), (7, 5)])
def test_resampling_is_that_of_scipy(rate: int, to: int) -> None:
    signal = pytest.importorskip("scipy.signal")
    samples = np.random.default_rng(0).normal(size=3001)
    shared = np.gcd(rate, to)
    np.testing.assert_allclose(
        resampled(samples, rate, to), signal.resample_poly(samples, to // shared, rate // shared), atol=1e-12
    )


def test_resampling_keeps_a_tone_and_removes_what_the_rate_cannot_hold() -> None:
    kept = resampled(tone(1000, 1, 44100), 44100, 16000)[1000:-1000]
    np.testing.assert_allclose(kept, tone(1000, 1, 16000)[1000:-1000], atol=1e-3)
    assert np.abs(resampled(tone(12000, 1, 44100), 44100, 16000)[1000:-1000]).max() < 1e-2


def test_a_spectrogram_beside_its_definition() -> None:
    samples = tone(1000)
    found = log_mel(samples, mel_filters(8, 256, RATE, 0.0, 4000.0), 250, 8)
    for frame in range(8):
        piece = np.zeros(256)
        part = samples[frame * 250 : frame * 250 + 256]
        piece[: len(part)] = part
        window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(256) / 256)
        energy = np.array([abs((piece * window * np.exp(-2j * np.pi * k * np.arange(256) / 256)).sum()) ** 2 for k in range(129)])
        edges = 700 * (10 ** (np.linspace(0, 2595 * np.log10(1 + 4000 / 700), 10) / 2595) - 1)
        for band in range(8):
            low, middle, high = edges[band : band + 3]
            weights = [
                max(0.0, min((f - low) / (middle - low), (high - f) / (high - middle))) for f in np.arange(129) * RATE / 256
            ]
            assert found[band, frame] == pytest.approx(np.log(energy @ weights + 1e-6), abs=1e-9)
    assert found.argmax(axis=0).tolist() == [3] * 8


def test_a_folder_becomes_pictures_of_the_size_that_the_model_takes(tmp_path: Path) -> None:
    path = folder(tmp_path / "sounds")
    assert format_of(path).name == "sounds"
    data = open_dataset(path, spectrograms(1, 16, 20))
    assert isinstance(data, SoundFolder)
    assert (len(data), data.classes, data.note) == (8, ("high", "low"), None)
    batch = data.batch(np.array([0, 7]))
    assert (batch["x"].shape, batch["x"].dtype, batch["labels"].tolist()) == ((2, 1, 16, 20), np.float32, [0, 1])
    assert batch["x"][0, 0].mean(axis=1).argmax() > batch["x"][1, 0].mean(axis=1).argmax() + 4
    assert -4 < batch["x"].min() < batch["x"].max() < 4
    assert data.sound == Sound(rate=RATE, seconds=0.25, bands=16, frames=20, n_fft=256, hop=100, fmax=4000.0)
    assert data.sound.text() == (
        "mono, 8,000 samples a second, cut or padded to 0.25 s; log-mel spectrogram: 16 bands from 0 to 4000 Hz, 20 frames, "
        "windows of 256 samples every 100"
    )


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((2000,), (2000,)),
        (("samples",), (2000,)),
        ((1, 2000), (1, 2000)),
        ((1, None), (1, 2000)),
        ((2000, 1), (2000, 1)),
        ((1000,), (1000,)),
        ((3000,), (3000,)),
        ((16, 20), (16, 20)),
        ((3, 16, 20), (3, 16, 20)),
        ((16, 20, 1), (16, 20, 1)),
        ((1, None, None), (1, 64, 25)),
    ],
)
def test_every_shape_of_an_input(tmp_path: Path, shape: tuple[Any, ...], expected: tuple[int, ...]) -> None:
    data = open_dataset(folder(tmp_path / "sounds"), spectrograms(*shape))
    found = data.batch(np.array([4]))["x"][0]
    assert found.shape == expected
    samples = open_wav(tmp_path / "sounds/low/0.wav").mono()
    if np.prod(expected) in (1000, 2000, 3000):
        kept = min(int(np.prod(expected)), 2000)
        np.testing.assert_allclose(found.reshape(-1)[:kept], samples[:kept], atol=1e-7)
        assert not found.reshape(-1)[kept:].any()


def test_other_rates_channels_and_lengths_are_named(tmp_path: Path) -> None:
    path = folder(tmp_path / "sounds")
    written(path / "low/stereo.wav", np.stack([tone(300), tone(300)], axis=1))
    written(path / "low/rate.wav", tone(300, rate=44100), rate=44100)
    written(path / "low/long.wav", tone(300, 20.0))
    data = open_dataset(path, spectrograms("samples"), sound="seconds=0.25")
    assert data.note == (  # type: ignore[attr-defined]
        f"{path}: 1 of 11 sounds are resampled to 8,000 samples a second (from 44,100); 1 of 11 have several channels, which are "
        "averaged; 1 of 11 are longer than 0.25 s and lose the rest (--sound seconds=...)"
    )
    whole = data.batch(np.arange(4, 11))["x"]
    np.testing.assert_allclose(whole[6], whole[0], atol=1e-4)  # the stereo one is the tone of 0.wav, and so is the long one
    np.testing.assert_allclose(whole[5][100:-100], whole[0][100:-100], atol=2e-3)
    assert open_dataset(path, spectrograms("samples")).sound.seconds == 10.0  # type: ignore[attr-defined]


def test_high_rates_become_16000(tmp_path: Path) -> None:
    data = open_dataset(folder(tmp_path / "sounds", rate=44100), spectrograms("samples"))
    assert data.sound.rate == 16000  # type: ignore[attr-defined]
    assert open_dataset(tmp_path / "sounds", spectrograms("samples"), sound={"rate": 22050}).sound.rate == 22050  # type: ignore[attr-defined]


def test_a_model_keeps_the_settings_and_reads_by_them(tmp_path: Path) -> None:
    data = open_dataset(folder(tmp_path / "sounds"), spectrograms(1, 16, 20), sound="bands=16,fmin=50,seconds=0.2")
    described = DataDescription.read(DataDescription.of(data).metadata())
    assert described.sound == data.sound  # type: ignore[attr-defined]
    spec = replace(spectrograms(1, 16, 20), described=described)
    one = written(tmp_path / "one.wav", tone(300, rate=44100), rate=44100)
    samples = open_samples(one, spec)
    assert isinstance(samples.dataset, SoundFiles)
    assert (samples.dataset.sound, samples.names) == (described.sound, [str(one)])
    many = open_samples(tmp_path / "sounds", spec)
    assert len(many.names) == 8
    np.testing.assert_array_equal(many.dataset.batch(np.array([3]))["x"], data.batch(np.array([3]))["x"])
    other = open_dataset(tmp_path / "sounds", spec, sound="rate=4000")
    assert other.sound == Sound(rate=4000, seconds=0.2, bands=16, frames=20, n_fft=128, hop=40, fmin=50.0, fmax=2000.0)  # type: ignore[attr-defined]
    with pytest.raises(DataError, match=r"'burnish.sound' cannot be read .*export it again, or remove that entry"):
        DataDescription.read({"burnish.sound": '{"rate": -1}'})


def test_rate_and_length_are_those_of_the_training_part(tmp_path: Path) -> None:
    path = folder(tmp_path / "sounds")
    split = held_out(open_dataset(path, spectrograms("samples")), EvalSplit(0.3), 0, class_entry(2))
    assert split.line == "held out 2 of 8 sounds (stratified by class, seed 0)".replace("sounds", "samples")
    written(Path((split.names or ("",))[0]), tone(300, 0.75))
    train, evaluation = parts(open_dataset(path, spectrograms("samples")), split)
    assert train.sound == evaluation.sound  # type: ignore[attr-defined]
    assert train.sound.seconds == 0.25  # type: ignore[attr-defined]
    assert evaluation.batch(np.arange(2))["x"].shape == (2, 2000)


def test_files_that_cannot_be_read_are_left_out_and_named(tmp_path: Path) -> None:
    path = folder(tmp_path / "sounds")
    (path / "low/0.wav").write_bytes(b"")
    (path / "low/notes.mp3").write_bytes(b"ID3")
    data = open_dataset(path, spectrograms("samples"))
    assert len(data) == 7
    assert "1 of 8 sounds cannot be read and are left out: " in str(data.note)  # type: ignore[attr-defined]
    assert "0.wav (is an empty file)" in str(data.note)  # type: ignore[attr-defined]
    assert "1 sounds in formats that are not read, left out: " in str(data.note)  # type: ignore[attr-defined]


def changed(path: Path, old: bytes, new: bytes) -> None:
    path.write_bytes(written(path, tone(300)).read_bytes().replace(old, new, 1))


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: path.write_bytes(b""), "is an empty file; write it again as PCM"),
        (lambda path: path.write_bytes(b"no sound at all"), "is no .wav file, .*; write it again as PCM .*ffmpeg"),
        (lambda path: path.write_bytes(written(path, tone(300)).read_bytes()[:30]), "breaks off in its header"),
        (lambda path: path.write_bytes(written(path, tone(300)).read_bytes()[:1000]), "is cut off: .* 4,000 bytes .* 9.. follow"),
        (lambda path: written(path, tone(300)[:0]), "holds no sound; remove it"),
        (lambda path: written(path, tone(300), rate=0), ".* at 0 samples a second; its header is damaged"),
        (lambda path: written(path, tone(300), block=7), ".* 1 channels of 16 bits in 7 bytes, .* its header is damaged"),
        (lambda path: changed(path, b"\1\0\1\0", b"\7\0\1\0"), "holds mu-law, and"),
        (lambda path: changed(path, b"fmt ", b"fmx "), "does not say how its sound is written"),
        (lambda path: written(path, np.full(100, np.nan), form=3, bits=32), "holds a NaN or infinite sample"),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, write: Any, message: str) -> None:
    path = tmp_path / "one.wav"
    write(path)
    with pytest.raises(DataError, match=rf"one\.wav: {message}"):
        open_samples(path, spectrograms("samples")).dataset.batch(np.arange(1))


def test_sound_that_was_written_to_a_pipe(tmp_path: Path) -> None:
    path = written(tmp_path / "a.wav", tone(300), size=0xFFFFFFFF)
    assert open_wav(path).count == 2000


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        (
            spectrograms(1, 16, 20),
            "bands=8",
            r"bands=8, and the model's input 'x' of shape \[batch, 1, 16, 20\] takes 16 bands: leave",
        ),
        (spectrograms(2000), "bands=8", "bands is for a spectrogram, and the model's input 'x' .* takes samples: leave it out"),
        (
            spectrograms(2000),
            "seconds=1",
            "1 s at 8,000 samples a second are 8,000 samples, and .* takes 2,000: leave seconds out",
        ),
        (spectrograms(1, 16, 20), "seconds=1,hop=10", "20 frames with a hop of 10 are 0.025 s .*: leave seconds or hop out"),
        (spectrograms(1, 512, 20), "n_fft=256", "some of 512 bands are narrower than a window of 256 .*: give fewer bands"),
        (spectrograms(2, 2000), None, r"of shape \[batch, 2, 2000\] takes two channels, and sounds are mixed to one"),
        (spectrograms(5, 16, 20), None, r"'x' has shape \[batch, 5, 16, 20\], and sounds fill \[batch, samples\]"),
        (
            DataSpec((data_entry(2000, dtype=ir.DataType.INT64),), class_entry(2)),
            None,
            "takes .*, and sounds are numbers in between",
        ),
        (DataSpec((data_entry(2000),), value_entry()), None, "sounds give classes, and the loss compares with numbers"),
        (classification(2000, classes=1), None, r"2 classes \(high ... low\), and the model has 1"),
    ],
)
def test_models_and_settings_that_do_not_fit(tmp_path: Path, spec: DataSpec, options: str | None, message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_dataset(folder(tmp_path / "sounds"), spec, sound=options).batch(np.arange(1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("rat=8000", r"no option 'rat' \(did you mean 'rate'\?\)"),
        ("rate", "settings are written name=value"),
        ("rate=fast", "rate='fast': give a whole number"),
        ("rate=0", "rate=0: give a whole number, 1 or more"),
        ("seconds=-1", "seconds=-1: give a number above 0"),
        ("n_fft=300", "n_fft=300: give a power of two"),
        ("rate=8000,fmax=9000", "up to 4000 Hz: give fmin < fmax <= 4000"),
        (7, "sound=7 .*: give settings such as 'rate=16000,bands=64'"),
    ],
)
def test_settings_that_there_are_not(options: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_sound(options)


def test_folders_that_are_none_of_sounds(tmp_path: Path) -> None:
    flat = tmp_path / "flat"
    written(flat / "a.wav", tone(300))
    with pytest.raises(DataError, match=r"1 .wav files and no subfolder; to train and evaluate on, .* one subfolder per class"):
        open_dataset(flat, spectrograms("samples"))
    for name in ("a", "b"):
        (tmp_path / "mp3" / name).mkdir(parents=True)
        (tmp_path / "mp3" / name / "a.mp3").write_bytes(b"ID3")
    with pytest.raises(DataError, match=r"no .wav files; 2 sounds are in formats that are not read .*: convert them, .*ffmpeg"):
        open_dataset(tmp_path / "mp3", spectrograms("samples"))
    with pytest.raises(DataError, match=r"digits .* holds no sounds, and sound \(--sound\) says what is done"):
        open_dataset("digits", classification(1, 8, 8, classes=10), sound="rate=8000")
    with pytest.raises(DataError, match=r"sounds have none \(sound=..., --sound\)"):
        open_dataset(folder(tmp_path / "sounds"), spectrograms("samples"), pixels="unit")
    with pytest.raises(DataError, match="class 'low' is not among the classes that are trained: high"):
        open_dataset(tmp_path / "sounds", spectrograms("samples"), classes=["high"])
