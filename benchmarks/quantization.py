"""What quantization costs classifiers of numbers with two digits: after training, by ONNX Runtime's quantizer, and in training.

    python benchmarks/quantization.py              both models, three seeds; ten to fifteen minutes on two cores
    python benchmarks/quantization.py --models resnet --weights int8 --seeds 0 --epochs 2
    python benchmarks/quantization.py --rates 0.03 0.1 0.3 --seeds 0 1    what the rate of quantized models was chosen by
    python benchmarks/quantization.py --rates 0.3 --distill 0 0.5 0.9     and how far they learn what the model in float32 says
    python benchmarks/quantization.py --speed                      how fast quantized files are, a minute

A residual network and a MobileNetV2 (He et al. 2015, Sandler et al. 2018), small ones, learn 100 classes in float32: two of
scikit-learn's digits side by side, moved, of different contrast, with noise. The 4,000 pictures to test on, others for each seed,
are made of digits that no picture to train on holds. Each model is then quantized after training, by
``onnxruntime.quantization.quantize_static`` (min-max, 7 of 8 bits), and by ``burnish.surgery.quantize`` and further training, for
as long, at the part of the rate and by the loss that ``burnish finetune --quantize`` takes: what the model in float32 says of the
classes, and the labels.

Columns: accuracy on the test pictures; that in float32 after the same further training without quantization; which part of the
accuracy that was lost after training comes back; how far the exported file is from evaluation at most, in steps of its outputs;
how many outputs in a million differ at all; how many of the layers ONNX Runtime computes with integers; and how
much faster the file is than float32 there, on one thread. A mean's part is that of the mean accuracies, left out where less than
0.2 points were lost: 4,000 pictures say nothing of that.

With ``--rates`` nothing is tested: models train on pictures of four fifths of the training digits, and pictures of the last fifth
judge them.

With ``--speed`` nothing is trained: files with initial weights, in float32 and in int8 per channel, run on one thread of ONNX
Runtime with its default options. Columns: milliseconds of the best of interleaved runs, and their quotient.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import torch
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

import burnish
from burnish import losses, surgery
from burnish.data.digits import digits_arrays
from burnish.finetuning.quantization import DISTILLED, Quantization
from burnish.losses import LossLike
from burnish.models import residual_network
from torch_models import MobileNetV2, export_onnx, mobilenet_v2

BATCH = 64
CALIBRATED = 256
CLASSES = 100
HEIGHT, WIDTH, SIDE = 10, 18, 8
"""Of a picture, and of a digit in it."""
NOISE = 0.08
TRAINED_ON, TESTED_ON = 6000, 4000
RATE, WARMUP = 0.1, 0.05
"""The highest learning rate in float32, and the part of the steps in which it rises."""
LEAST_LOSS = 0.002
MOBILE = ((1, 16, 1, 1), (4, 24, 2, 1), (4, 32, 2, 2))
WEIGHTS = {"int8": "int8 per channel", "int8-tensor": "int8", "int4": "int4 per channel", "int4-tensor": "int4"}
"""What the columns call formats of weights; two have one scale for a whole tensor."""
INTEGER_LAYERS = ("QLinearConv", "QGemm", "QLinearMatMul", "ConvInteger", "MatMulInteger", "MatMulIntegerToFloat")


@dataclass(frozen=True)
class Pictures:
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

    @property
    def calibration(self) -> list[dict[str, np.ndarray]]:
        return [{"x": part} for part in np.split(self.x[:CALIBRATED], 4)]

    def accuracy(self, logits: np.ndarray) -> float:
        return float(np.mean(logits.argmax(axis=1) == self.labels))


class Row(NamedTuple):
    """The figures of one model in one format of weights."""

    float32: float
    longer: float
    after: float
    trained: float
    simulated: float
    steps: float
    differ: float
    integer_layers: float
    layers: float
    faster: float

    @property
    def recovered(self) -> str:
        lost = self.float32 - self.after
        return f"{(self.trained - self.after) / lost:9.0%}" if lost >= LEAST_LOSS else f"{'-':>9}"

    def text(self, name: str, kind: str, seed: str) -> str:
        accuracies = f"{self.float32:8.2%} {self.longer:8.2%} {self.after:14.2%} {self.trained:12.2%} {self.simulated:10.2%}"
        distance = f"{self.steps:6.2f} {self.differ:7.0f}"
        layers = f"{self.integer_layers:5.0f}/{self.layers:.0f}"
        return f"{name:10} {kind:11} {seed:>4} {accuracies} {self.recovered} {distance} {layers} {self.faster:7.2f} x"


HEADER = (
    "model      weights     seed  float32   longer after training  in training  simulated recovered  steps  differ integers "
    " faster"
)


def numbers(images: np.ndarray, digits: np.ndarray, count: int, channels: int, seed: int) -> Pictures:
    """Return pictures of two digits side by side, each somewhere within its half, and the number that they make."""
    generator = np.random.default_rng(seed)
    chosen = generator.integers(0, len(digits), (count, 2))
    x = np.zeros((count, HEIGHT, WIDTH), np.float32)
    for picture, pair in zip(x, chosen, strict=True):
        for place, index in enumerate(pair):
            top = generator.integers(0, HEIGHT - SIDE + 1)
            left = place * SIDE + generator.integers(0, WIDTH - 2 * SIDE + 1)
            region = picture[top : top + SIDE, left : left + SIDE]
            np.maximum(region, images[index] * generator.uniform(0.5, 1), out=region)
    x += generator.normal(0, NOISE, x.shape) * generator.uniform(0.2, 1, (count, 1, 1))
    return Pictures(np.repeat(x[:, None], channels, axis=1), 10 * digits[chosen[:, 0]] + digits[chosen[:, 1]])


def tested(channels: int, seed: int) -> tuple[Pictures, Pictures]:
    """The pictures to train on, and those that judge."""
    return (
        numbers(*digits_arrays("train"), TRAINED_ON, channels, 2 * seed),
        numbers(*digits_arrays("test"), TESTED_ON, channels, 2 * seed + 1),
    )


def developed(channels: int, seed: int) -> tuple[Pictures, Pictures]:
    """Pictures to choose settings by: of training digits alone."""
    images, digits = digits_arrays("train")
    cut = len(digits) * 4 // 5
    return (
        numbers(images[:cut], digits[:cut], TRAINED_ON, channels, 1000 + 2 * seed),
        numbers(images[cut:], digits[cut:], TESTED_ON, channels, 1001 + 2 * seed),
    )


def source(name: str, seed: int) -> tuple[ir.Model | onnx.ModelProto, int]:
    """A model with initial weights, and how many channels its images have."""
    if name == "resnet":
        return residual_network((1, HEIGHT, WIDTH), classes=CLASSES, width=8, seed=seed), 1
    torch.manual_seed(seed)
    module = MobileNetV2(MOBILE, stem=16, head=128, classes=CLASSES)
    return export_onnx(module, torch.zeros(2, 3, HEIGHT, WIDTH)), 3


def tuned(
    model: object, data: Pictures, epochs: int, rate: float, seed: int = 0, loss: LossLike = "cross_entropy"
) -> burnish.Session:
    """Train a model as ``burnish finetune`` does, with a rate that rises and falls by a cosine, and return the session."""
    steps = epochs * (len(data.x) // BATCH)
    rise = round(WARMUP * steps)
    falling = burnish.optim.schedules.cosine(rate, steps - rise)
    schedule = burnish.optim.schedules.warmup(falling, rise) if rise else falling
    session = burnish.Session(
        burnish.compile(model, loss=loss, optimizer=burnish.optim.sgd(lr=schedule, momentum=0.9)), seed=seed, threads=1
    )
    for batch in data.batches(epochs, seed):
        session.step(batch)
    return session


class Calibration(CalibrationDataReader):
    def __init__(self, x: np.ndarray):
        self._batches = iter([{"x": part} for part in np.split(x, 4)])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._batches, None)


def after_training(path: Path, data: Pictures, weights: str) -> Path:
    """Quantize a file by ONNX Runtime's quantizer."""
    model, quantized = onnx.load(path), path.with_name(f"{path.stem}-after-{weights}.onnx")
    if weights.startswith("int4"):
        model = onnx.version_converter.convert_version(model, 21)
        onnx.save(model, path.with_name("opset21.onnx"))
        path = path.with_name("opset21.onnx")
    quantize_static(
        path,
        quantized,
        Calibration(data.x[:CALIBRATED]),
        quant_format=QuantFormat.QDQ,
        per_channel=not weights.endswith("-tensor"),
        reduce_range=weights.startswith("int8"),
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8 if weights.startswith("int8") else QuantType.QInt4,
    )
    return quantized


def runtime(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return onnxruntime.InferenceSession(path, options)


def outputs(path: Path, x: np.ndarray) -> np.ndarray:
    return np.asarray(runtime(path).run(None, {"x": x})[0])


def best_times(paths: Sequence[Path], x: np.ndarray, rounds: int = 40) -> list[float]:
    """The seconds that files take, the best of interleaved runs."""
    sessions = [runtime(path) for path in paths]
    best = [np.inf] * len(sessions)
    for _ in range(rounds):
        for index, session in enumerate(sessions):
            start = time.perf_counter()
            session.run(None, {"x": x})
            best[index] = min(best[index], time.perf_counter() - start)
    return best


def speedup(slow: Path, fast: Path, x: np.ndarray) -> float:
    """How many times as fast a file is."""
    before, after = best_times([slow, fast], x)
    return before / after


def steps_apart(path: Path, session: burnish.Session, x: np.ndarray) -> tuple[float, float]:
    """The largest difference between an exported file and evaluation, in steps of the output's scale, and how many outputs in a
    million differ."""
    (scale,) = (tensor for tensor in onnx.load(path).graph.initializer if tensor.name == "logits_scale")
    difference = np.abs(outputs(path, x) - session.predict({"x": x})["logits"]) / onnx.numpy_helper.to_array(scale)
    return float(difference.max()), float(1e6 * np.mean(difference > 0))


def integer_layers(path: Path) -> tuple[int, int]:
    """How many layers ONNX Runtime computes with integers, and of how many layers in the file."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(path.with_suffix(".optimized.onnx")), 3
    onnxruntime.InferenceSession(path, options)
    optimized = Counter(node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node)
    layers = sum(node.op_type in ("Conv", "Gemm", "MatMul") for node in onnx.load(path).graph.node)
    return sum(optimized[name] for name in INTEGER_LAYERS), layers


class Trained(NamedTuple):
    """A model in float32: its file to quantize, its file to run, and its accuracy."""

    plain: Path
    folded: Path
    accuracy: float


def in_float32(model: object, train: Pictures, test: Pictures, epochs: int, seed: int, folder: Path) -> Trained:
    session = tuned(model, train, epochs, RATE, seed)
    plain, folded = folder / "plain.onnx", folder / "folded.onnx"
    session.export(plain, fold_norm=False)
    session.export(folded)
    return Trained(plain, folded, test.accuracy(outputs(folded, test.x)))


def measure(
    name: str, kinds: Sequence[str], seed: int, epochs: int, data: tuple[Pictures, Pictures], folder: Path
) -> Iterator[tuple[str, Row]]:
    """Train a model, quantize it each way, and give the figures of each format of weights."""
    train, test = data
    float32 = in_float32(source(name, seed)[0], train, test, epochs, seed, folder)
    longer: dict[tuple[int, float], float] = {}
    for kind in kinds:
        integers = Quantization.read({"weights": WEIGHTS[kind]})
        course = integers.length(epochs), RATE * integers.rate
        loss = integers.objective(losses.get("cross_entropy"), float32.plain, "logits")
        if course not in longer:
            session = tuned(float32.plain, train, *course, seed + 1, loss)
            longer[course] = test.accuracy(session.predict({"x": test.x})["logits"])
        after = test.accuracy(outputs(after_training(float32.folded, train, kind), test.x))
        quantized = surgery.quantize(float32.plain, WEIGHTS[kind], calibration=train.calibration)
        trained = tuned(quantized, train, *course, seed + 1, loss)
        path = trained.export(folder / f"{kind}.onnx")
        yield (
            kind,
            Row(
                float32.accuracy,
                longer[course],
                after,
                test.accuracy(outputs(path, test.x)),
                test.accuracy(trained.predict({"x": test.x})["logits"]),
                *steps_apart(path, trained, test.x),
                *integer_layers(path),
                speedup(float32.folded, path, test.x[:BATCH]),
            ),
        )


def timed() -> Iterator[tuple[str, object, tuple[int, ...], tuple[int, ...]]]:
    """The models whose speed is measured: names, models, shapes of a sample, and batches."""
    for width in (8, 16, 32):
        model = residual_network(width=width)
        yield f"digits ResNet, {width} channels", model, (1, 8, 8), (1, 4, 64)
    yield "ResNet of two digits, 8 channels", source("resnet", 0)[0], (1, HEIGHT, WIDTH), (1, 4, 64)
    yield "MobileNetV2 of two digits", source("mobilenet", 0)[0], (3, HEIGHT, WIDTH), (1, 4, 64)
    torch.manual_seed(0)
    shape = (3, 224, 224)
    yield "MobileNetV2, 224 x 224", export_onnx(mobilenet_v2(), torch.zeros(2, *shape)), shape, (1, 4)


def measure_speed() -> None:
    """Print how fast files in float32 and int8 are."""
    print(f"{'model':34} {'batch':>5} {'float32':>9} {'int8':>9}  faster")
    for name, model, shape, batches in timed():
        x = np.random.default_rng(0).normal(size=(max(batches), *shape)).astype(np.float32)
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder, f"{kind}.onnx") for kind in ("float32", "int8")]
            for path, kind in zip(paths, (model, surgery.quantize(model, calibration=[{"x": x[:4]}])), strict=True):
                burnish.Session(burnish.compile(kind, optimizer="sgd"), threads=1).export(path)
            for batch in batches:
                rounds = 10 if x[:batch].size > 100_000 else 200
                slow, fast = best_times(paths, x[:batch], rounds)
                figures = f"{1e3 * slow:9.3f} {1e3 * fast:9.3f} {slow / fast:6.2f} x"
                print(f"{name:34} {batch:5} {figures}", flush=True)


def compare(arguments: argparse.Namespace) -> None:
    """Print the rows of every model and seed, and their means."""
    print(HEADER)
    for name in arguments.models:
        rows: dict[str, list[Row]] = defaultdict(list)
        for seed in arguments.seeds:
            data = tested(source(name, seed)[1], seed)
            with tempfile.TemporaryDirectory() as folder:
                for kind, row in measure(name, arguments.weights, seed, arguments.epochs, data, Path(folder)):
                    rows[kind].append(row)
                    print(row.text(name, kind, str(seed)), flush=True)
        for kind, each in rows.items():
            print(Row(*np.mean(each, axis=0)).text(name, kind, "mean"), flush=True)


def searched(
    plain: Path,
    quantized: object,
    train: Pictures,
    kind: str,
    tried: Sequence[tuple[float, float]],
    epochs: int,
    seed: int,
) -> Iterator[burnish.Session]:
    """Give the quantized model as it is, and trained at each factor of the rate and part of what the model in float32 says."""
    yield burnish.Session(burnish.compile(quantized, optimizer="sgd"))
    for rate, part in tried:
        integers = Quantization.read({"weights": WEIGHTS[kind], "rate": rate, "distill": part})
        loss = integers.objective(losses.get("cross_entropy"), plain, "logits")
        yield tuned(quantized, train, integers.length(epochs), RATE * integers.rate, seed + 1, loss)


def search(arguments: argparse.Namespace) -> None:
    """Print how well each factor of the learning rate does, with each part of distillation, on pictures that judge no model."""
    tried = [(rate, part) for rate in arguments.rates for part in arguments.distill]
    print("model      weights     seed  float32 quantized " + " ".join(f"{f'{rate:g}, {part:g}':>8}" for rate, part in tried))
    for name in arguments.models:
        for seed in arguments.seeds:
            model, channels = source(name, seed)
            train, judging = developed(channels, seed)
            with tempfile.TemporaryDirectory() as folder:
                float32 = in_float32(model, train, judging, arguments.epochs, seed, Path(folder))
                for kind in arguments.weights:
                    quantized = surgery.quantize(float32.plain, WEIGHTS[kind], calibration=train.calibration)
                    before, *each = (
                        judging.accuracy(session.predict({"x": judging.x})["logits"])
                        for session in searched(float32.plain, quantized, train, kind, tried, arguments.epochs, seed)
                    )
                    figures = " ".join(f"{accuracy:8.2%}" for accuracy in each)
                    print(f"{name:10} {kind:11} {seed:4} {float32.accuracy:8.2%} {before:9.2%} {figures}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=("resnet", "mobilenet"), default=["resnet", "mobilenet"])
    parser.add_argument("--weights", nargs="+", choices=tuple(WEIGHTS), default=[*WEIGHTS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=12, help="in float32")
    parser.add_argument("--rates", nargs="+", type=float, help="factors of the learning rate to choose from")
    parser.add_argument("--distill", nargs="+", type=float, default=[DISTILLED], help="parts of the loss to choose from")
    parser.add_argument("--speed", action="store_true", help="measure how fast files are, and nothing else")
    arguments = parser.parse_args()
    logging.getLogger().setLevel(logging.ERROR)  # the quantizer advises to prepare the model, which an export is
    if arguments.speed:
        measure_speed()
    else:
        (compare if arguments.rates is None else search)(arguments)


if __name__ == "__main__":
    main()
