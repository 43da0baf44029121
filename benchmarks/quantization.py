"""What quantization costs a classifier of digits: after training, by ONNX Runtime's quantizer, and in training, by burnish.

    python benchmarks/quantization.py              both models, int8 and int4 weights; two to three minutes on two cores
    python benchmarks/quantization.py --models resnet --weights int8 --epochs 1

A residual network and a MobileNetV2 (He et al. 2015, Sandler et al. 2018), small ones, train on scikit-learn's digits in float32.
Each is then quantized after training (``onnxruntime.quantization.quantize_static``, min-max, 7 of 8 bits), and by
``burnish.surgery.quantize`` and some epochs more. Columns: accuracy on the test digits; how much of the accuracy that was lost
after training comes back; how far the exported file is from evaluation, in steps of its outputs; and how much faster it is than
float32 in ONNX Runtime, on one thread. Where the test digits show no loss, there is nothing to come back.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import torch
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

import burnish
from burnish import surgery
from burnish.data.digits import digits_arrays
from burnish.models import residual_network
from torch_models import MobileNetV2, export_onnx

BATCH = 64
CALIBRATED = 256
MOBILE = ((1, 16, 1, 1), (4, 24, 2, 2), (4, 32, 2, 2))
WEIGHTS = {"int8": "int8 per channel", "int4": "int4 per channel", "int4-tensor": "int4"}
"""What the columns call formats of weights; the last has one scale for a whole tensor."""


@dataclass(frozen=True)
class Digits:
    """Images [N, channels, height, width] and labels [N]."""

    x: np.ndarray
    labels: np.ndarray

    def batches(self, epochs: int, seed: int) -> Iterator[dict[str, np.ndarray]]:
        generator = np.random.default_rng(seed)
        for _ in range(epochs):
            order = generator.permutation(len(self.x))
            for start in range(0, len(order) - BATCH + 1, BATCH):
                chosen = order[start : start + BATCH]
                yield {"x": self.x[chosen], "labels": self.labels[chosen]}

    def accuracy(self, logits: np.ndarray) -> float:
        return float(np.mean(logits.argmax(axis=1) == self.labels))


def digits(split: str, scale: int, channels: int) -> Digits:
    images, labels = digits_arrays(split)  # type: ignore[arg-type]
    enlarged = images.repeat(scale, axis=1).repeat(scale, axis=2)
    return Digits(np.repeat(enlarged[:, None], channels, axis=1), labels)


def source(name: str) -> tuple[ir.Model | onnx.ModelProto, tuple[int, int]]:
    """A model with initial weights, and by how much the digits are enlarged, with how many channels."""
    if name == "resnet":
        return residual_network((1, 16, 16), width=16, blocks=(1, 1, 1)), (2, 1)
    torch.manual_seed(0)
    module = MobileNetV2(MOBILE, stem=24, head=128, classes=10)
    return export_onnx(module, torch.zeros(2, 3, 16, 16)), (2, 3)


def tuned(model: object, data: Digits, epochs: int, rate: float, seed: int = 0) -> burnish.Session:
    """Train a model, with a rate that falls by a cosine, and return the session."""
    steps = epochs * (len(data.x) // BATCH)
    optimizer = burnish.optim.sgd(lr=burnish.optim.schedules.cosine(rate, steps), momentum=0.9)
    session = burnish.Session(burnish.compile(model, optimizer=optimizer))
    for batch in data.batches(epochs, seed):
        session.step(batch)
    return session


class Calibration(CalibrationDataReader):
    def __init__(self, x: np.ndarray):
        self._batches = iter([{"x": part} for part in np.split(x, 4)])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._batches, None)


def after_training(path: Path, data: Digits, weights: str) -> Path:
    """Quantize a file by ONNX Runtime's quantizer."""
    model, quantized = onnx.load(path), path.with_name(f"{path.stem}-after-{weights}.onnx")
    if weights != "int8":
        model = onnx.version_converter.convert_version(model, 21)
        onnx.save(model, path.with_name("opset21.onnx"))
        path = path.with_name("opset21.onnx")
    quantize_static(
        path,
        quantized,
        Calibration(data.x[:CALIBRATED]),
        quant_format=QuantFormat.QDQ,
        per_channel=weights != "int4-tensor",
        reduce_range=weights == "int8",
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8 if weights == "int8" else QuantType.QInt4,
    )
    return quantized


def runtime(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return onnxruntime.InferenceSession(path, options)


def outputs(path: Path, x: np.ndarray) -> np.ndarray:
    return np.asarray(runtime(path).run(None, {"x": x})[0])


def speedup(slow: Path, fast: Path, x: np.ndarray, rounds: int = 40) -> float:
    """How many times as fast a file is, by the best of interleaved runs."""
    sessions = [runtime(slow), runtime(fast)]
    best = [np.inf, np.inf]
    for _ in range(rounds):
        for index, session in enumerate(sessions):
            start = time.perf_counter()
            session.run(None, {"x": x})
            best[index] = min(best[index], time.perf_counter() - start)
    return best[0] / best[1]


def steps_apart(path: Path, session: burnish.Session, x: np.ndarray) -> float:
    """The largest difference between an exported file and evaluation, in steps of the output's scale."""
    (scale,) = (tensor for tensor in onnx.load(path).graph.initializer if tensor.name == "logits_scale")
    difference = np.abs(outputs(path, x) - session.predict({"x": x})["logits"]).max()
    return float(difference / onnx.numpy_helper.to_array(scale))


def measure(name: str, kinds: list[str], epochs: int, more: int, folder: Path) -> Iterator[str]:
    """Train a model, quantize it each way, and give the rows of the table."""
    model, (scale, channels) = source(name)
    train, test = digits("train", scale, channels), digits("test", scale, channels)
    session = tuned(model, train, epochs, 0.05)
    plain, folded = folder / f"{name}.onnx", folder / f"{name}-folded.onnx"
    session.export(plain, fold_norm=False)
    session.export(folded)
    full = test.accuracy(outputs(folded, test.x))
    for kind in kinds:
        lost = full - test.accuracy(outputs(after_training(folded, train, kind), test.x))
        calibration = [{"x": part} for part in np.split(train.x[:CALIBRATED], 4)]
        quantized = surgery.quantize(plain, WEIGHTS[kind], calibration=calibration)
        trained = tuned(quantized, train, more, 0.01, seed=1)
        path = trained.export(folder / f"{name}-{kind}.onnx")
        accuracy = test.accuracy(outputs(path, test.x))
        simulated = test.accuracy(trained.predict({"x": test.x})["logits"])
        recovered = f"{(accuracy - full + lost) / lost:6.0%}" if lost > 0 else "   -  "
        apart, faster = steps_apart(path, trained, test.x), speedup(folded, path, test.x[:BATCH])
        yield (
            f"{name:10} {kind:11} {full:8.2%} {full - lost:14.2%} {accuracy:12.2%} {simulated:10.2%} {recovered:>9} {apart:6.2f} "
            f"{faster:8.2f} x"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=("resnet", "mobilenet"), default=["resnet", "mobilenet"])
    parser.add_argument("--weights", nargs="+", choices=tuple(WEIGHTS), default=[*WEIGHTS])
    parser.add_argument("--epochs", type=int, default=10, help="in float32")
    parser.add_argument("--more", type=int, default=4, help="epochs of training as quantized")
    arguments = parser.parse_args()
    logging.getLogger().setLevel(logging.ERROR)  # the quantizer advises to prepare the model, which an export is
    print("model      weights      float32 after training  in training  simulated recovered  steps   faster")
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models:
            for row in measure(name, arguments.weights, arguments.epochs, arguments.more, Path(folder)):
                print(row, flush=True)


if __name__ == "__main__":
    main()
