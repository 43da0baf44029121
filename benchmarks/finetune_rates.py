"""``burnish.finetune`` with its own learning rate beside eight fixed ones, on networks that have learned nothing, or little.

    python benchmarks/finetune_rates.py [NETWORK ...] [--starts random epoch] [--seeds 3] [--save]

Each network begins with random weights, or after one epoch of training by Adam on the same data. It is then tuned for five
epochs, once with the rate that ``finetune`` finds, and once with each rate from 10^-4 to 10^-0.5 by half decades. The share is
the accuracy on held-out data after the last epoch, over that of the best of the eight fixed rates for that seed. ``finetune`` was
fitted on the networks for digits; of the others, the transformer and the LSTM were looked at on the way, and the rest were not.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import json
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

import burnish
from burnish import models
from burnish.errors import NonFiniteLossError

RESULTS = Path(__file__).parent / "results"
EPOCHS = 5
RATES = tuple(10.0 ** (exponent / 2) for exponent in range(-8, 0))
WANTED = 0.95
VOCABULARY, LENGTH = 200, 16
SPLIT = 0.75
Data = Any


@dataclass(frozen=True)
class Case:
    """A network and the data that it learns.

    Attributes:
        build: makes the network with the weights of a seed.
        data: returns the data to train on, and those to evaluate on.
    """

    build: Callable[[int], onnx.ModelProto]
    data: Callable[[], tuple[Data, Data]]


def digits() -> tuple[Data, Data]:
    return "digits:train", "digits:test"


def _split(arrays: dict[str, np.ndarray]) -> tuple[Data, Data]:
    """Both parts of arrays by input name, in an order of their own."""
    count = len(arrays["labels"])
    order = np.random.default_rng(0).permutation(count)
    cut = round(SPLIT * count)
    return tuple({name: array[part] for name, array in arrays.items()} for part in (order[:cut], order[cut:]))  # type: ignore[return-value]


def table() -> tuple[Data, Data]:
    """569 tumours, 30 columns, standardized."""
    from sklearn.datasets import load_breast_cancer

    x, labels = load_breast_cancer(return_X_y=True)
    return _split({"x": np.float32((x - x.mean(0)) / x.std(0)), "labels": labels.astype(np.int64)})


def spirals() -> tuple[Data, Data]:
    """Three spirals in a plane, which no linear layer tells apart."""
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 3, 1200)
    radius = rng.uniform(0.1, 1.0, 1200)
    angle = 4 * radius + 2 * np.pi * labels / 3 + rng.normal(0, 0.12, 1200)
    x = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1)
    return _split({"x": np.float32(2 * x), "labels": labels.astype(np.int64)})


def sequences() -> tuple[Data, Data]:
    """Noisy waves of four kinds, two channels each: slow or fast, turning left or right, at random phases."""
    rng = np.random.default_rng(2)
    labels = rng.integers(0, 4, 1200)
    speed = np.array([0.3, -0.3, 1.0, -1.0])[labels][:, None]
    at = np.arange(16)[None] * speed + rng.uniform(0, 2 * np.pi, (1200, 1))
    x = np.stack([np.sin(at), np.cos(at)], 2) + rng.normal(0, 0.1, (1200, 16, 2))
    return _split({"x": np.float32(x), "labels": labels.astype(np.int64)})


def texts() -> tuple[Data, Data]:
    """Texts in tokens, of five topics, of which each has twelve words of its own."""
    rng = np.random.default_rng(3)
    labels = rng.integers(0, 5, 800)
    ids = rng.integers(61, VOCABULARY, (800, LENGTH))
    for row, label in zip(ids, labels, strict=True):
        row[rng.choice(LENGTH, 5, replace=False)] = 1 + 12 * label + rng.integers(0, 12, 5)
    return _split({"input_ids": ids.astype(np.int64), "attention_mask": np.ones_like(ids), "labels": labels.astype(np.int64)})


def textures() -> tuple[Data, Data]:
    """Pictures of four classes of stripes, in noise: three channels, 16 x 16."""
    rng = np.random.default_rng(4)
    labels = rng.integers(0, 4, 800)
    rows, columns = np.mgrid[:16, :16]
    angle = (labels * np.pi / 4)[:, None, None]
    waves = np.sin(0.9 * (rows * np.cos(angle) + columns * np.sin(angle)) + rng.uniform(0, 2 * np.pi, (800, 1, 1)))
    x = waves[:, None] * rng.uniform(0.3, 1, (800, 3, 1, 1)) + rng.normal(0, 0.6, (800, 3, 16, 16))
    return _split({"x": np.float32(x), "labels": labels.astype(np.int64)})


def created(name: str, classes: int, *shape: int) -> Callable[[int], onnx.ModelProto]:
    return lambda seed: models.create(name, classes=classes, input_shape=shape, seed=seed)


def plain(seed: int) -> onnx.ModelProto:
    """A network of convolutions without normalization for digits, as many a tutorial has it, with PyTorch's initial weights."""
    rng = np.random.default_rng(seed)

    def layer(name: str, *shape: int) -> list[onnx.TensorProto]:
        bound = 1 / np.sqrt(np.prod(shape[1:]))
        drawn = (rng.uniform(-bound, bound, shape), rng.uniform(-bound, bound, shape[0]))
        parts = zip(("weight", "bias"), drawn, strict=True)
        return [onnx.numpy_helper.from_array(np.float32(array), f"{name}.{part}") for part, array in parts]

    model = onnx.parser.parse_model("""
<ir_version: 10, opset_import: ["": 18]>
plain (float[batch, 1, 8, 8] x) => (float[batch, 10] logits) {
    a = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, "conv1.weight", "conv1.bias")
    b = Relu (a)
    c = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (b)
    d = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (c, "conv2.weight", "conv2.bias")
    e = Relu (d)
    f = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (e)
    g = Flatten <axis = 1> (f)
    h = Gemm <transB = 1> (g, "hidden.weight", "hidden.bias")
    i = Relu (h)
    logits = Gemm <transB = 1> (i, "classifier.weight", "classifier.bias")
}""")
    layers = {"conv1": (16, 1, 3, 3), "conv2": (32, 16, 3, 3), "hidden": (64, 128), "classifier": (10, 64)}
    model.graph.initializer.extend(tensor for name, shape in layers.items() for tensor in layer(name, *shape))
    return model


def transformer(seed: int) -> onnx.ModelProto:
    network = models.bert(VOCABULARY, 5, width=32, heads=4, layers=2, positions=LENGTH, seed=seed)
    return ir.to_proto(network)


DIGITS = {
    "cnn": Case(created("cnn", 10, 1, 8, 8), digits),
    "resnet": Case(created("resnet", 10, 1, 8, 8), digits),
    "plain": Case(plain, digits),
    "mlp": Case(created("mlp", 10, 1, 8, 8), digits),
}
OTHERS = {
    "mlp-table": Case(created("mlp", 2, 30), table),
    "mlp-spirals": Case(created("mlp", 3, 2), spirals),
    "lstm-sequences": Case(created("lstm", 4, 16, 2), sequences),
    "transformer-texts": Case(transformer, texts),
    "cnn-textures": Case(created("cnn", 4, 3, 16, 16), textures),
    "resnet-textures": Case(created("resnet", 4, 3, 16, 16), textures),
}
CASES = {**DIGITS, **OTHERS}


def begun(model: onnx.ModelProto, train: Data, seed: int, path: Path) -> Path:
    """Train a network for one epoch by Adam, and write it as others would: for inference, with normalization folded."""
    program = burnish.compile(model, loss="cross_entropy", optimizer=burnish.optim.adam(lr=1e-3))
    folder = path.with_suffix("")
    trainer = burnish.Trainer(program, train, epochs=1, batch_size=32, seed=seed, run_directory=folder, progress=False, threads=1)
    trainer.run()
    return trainer.session.export(path)


def tuned(model: Any, case: Case, seed: int, folder: Path, lr: float | None) -> dict[str, Any]:
    """What a run of five epochs came to: its rate, the accuracy on held-out data, seconds, and what was said."""
    train, held = case.data()
    begin = time.perf_counter()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            result = burnish.finetune(
                model, train, eval_data=held, output=folder / "tuned.onnx", epochs=EPOCHS, lr=lr, seed=seed, threads=1
            )
    except NonFiniteLossError:
        return {"lr": lr, "accuracy": 0.0}
    return {
        "lr": lr,
        "accuracy": result.result.metrics["accuracy"],
        "seconds": round(time.perf_counter() - begin, 2),
        "notes": result.notes,
    }


def measure(name: str, start: str, seed: int, folder: Path) -> dict[str, Any]:
    """A row of the table: the accuracy with the rate that is found, and with each fixed one."""
    case = CASES[name]
    model: Any = case.build(seed)
    if start == "epoch":
        model = begun(model, case.data()[0], seed, folder / f"{name}-{seed}.onnx")
    found = tuned(model, case, seed, folder, None)
    line = next(note for note in found["notes"] if note.startswith("lr:"))
    fixed = {f"{rate:.2g}": tuned(model, case, seed, folder, rate)["accuracy"] for rate in RATES}
    best = max(fixed.values())
    return {
        "network": name,
        "start": start,
        "seed": seed,
        "lr": float(line.split()[1].rstrip(";,:")),
        "accuracy": round(found["accuracy"], 4),
        "seconds": found["seconds"],
        "fixed": {rate: round(accuracy, 4) for rate, accuracy in fixed.items()},
        "share": round(found["accuracy"] / best, 4),
        "notes": found["notes"],
    }


def shown(row: dict[str, Any]) -> str:
    best = max(row["fixed"], key=row["fixed"].__getitem__)
    return (
        f"{row['network']:18} {row['start']:7} {row['seed']:4} {row['lr']:8.2g} {100 * row['accuracy']:8.1f} "
        f"{100 * row['fixed'][best]:8.1f} {best:>8} {100 * row['share']:7.1f} {row['seconds']:6.1f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=f"of {', '.join(CASES)}; all by default")
    parser.add_argument("--starts", nargs="+", choices=["random", "epoch"], default=["random", "epoch"])
    parser.add_argument("--seeds", type=int, default=3, help="how many, from 0")
    parser.add_argument("--save", action="store_true", help="write the result to benchmarks/results/")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows = []
    print("network            start   seed       lr  found %   best %  at rate   share      s", flush=True)
    with tempfile.TemporaryDirectory(prefix="burnish-rates-") as folder:
        for name in arguments.networks or CASES:
            for start in arguments.starts:
                for seed in range(arguments.seeds):
                    rows.append(measure(name, start, seed, Path(folder)))
                    print(shown(rows[-1]), flush=True)
    enough = sum(row["share"] >= WANTED for row in rows)
    print(f"{enough} of {len(rows)} reach {WANTED:.0%} of the best fixed rate; least {min(row['share'] for row in rows):.1%}")
    if arguments.save or arguments.output:
        date = datetime.date.today().isoformat()
        result = {"date": date, "epochs": EPOCHS, "versions": {"onnxruntime": onnxruntime.__version__}, "rows": rows}
        (arguments.output or RESULTS / f"{date}-finetune-rates.json").write_text(json.dumps(result, indent=1) + "\n")
    return int(any(row["share"] < WANTED for row in rows if row["network"] in DIGITS))


if __name__ == "__main__":
    raise SystemExit(main())
