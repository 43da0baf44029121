"""Programs of small networks that clients in other languages train, with what Python computes of them.

As a script it writes them into a folder, or goes on from the checkpoint of a client:

    python tests/clients/client_programs.py write FOLDER [NETWORK ...]
    python tests/clients/client_programs.py resume FOLDER/NETWORK CHECKPOINT BEGIN END
    python tests/clients/client_programs.py predict FOLDER/NETWORK MODEL
    python tests/clients/client_programs.py write-settled FOLDER
    python tests/clients/client_programs.py write-vectors FOLDER
    python tests/clients/client_programs.py write-small FOLDER
    python tests/clients/client_programs.py compare-settled FOLDER
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import vectors
from safetensors.numpy import load_file, save_file

import burnish
from burnish.graph import Tensor
from burnish.models import bert, residual_network
from burnish.optim.schedules import cosine, warmup
from oracles.mobilenet import mobilenet_v2
from oracles.small_networks import CLASSES, Network, mobile, perceptron
from oracles.standard_operators import STANDARD

STEPS, CHECKPOINT_AT, BATCHES = 100, 50, 10
CACHED = "cached"
"""The network whose features are cached."""
MOBILENETS = ("mobilenet-frozen", "mobilenet-cached")
"""Of the campaign alone."""
SCHEDULED = 120
"""Steps of the schedule that follows ten of warm-up; it is not at its end when the steps are done."""


def recurrent() -> ir.Model:
    """An LSTM over the rows of a sequence, and a dense layer on its last state."""
    width, hidden, length = 6, 10, 7
    network = Network("recurrent", [length, width])
    builder = network.builder
    steps = builder.op("Transpose", network.input, perm=[1, 0, 2])
    weights = (network.drawn(name, 1, 4 * hidden, size, fan_in=size) for name, size in (("lstm.w", width), ("lstm.r", hidden)))
    bias = network.weight("lstm.b", np.zeros((1, 8 * hidden)))
    _, last, _ = builder.op("LSTM", steps, *weights, bias, hidden_size=hidden, outputs=3)
    state = builder.op("Squeeze", last, builder.integers([0]))
    return network.model(network.dense("head", state, hidden, CLASSES))


def convolutional() -> ir.Model:
    """Two convolutions with pooling, without normalization: what a WebGPU backend trains."""
    network = Network("convolutional", [1, 8, 8])
    builder = network.builder
    x: Tensor = network.input
    for name, channels_in, channels in (("first", 1, 8), ("second", 8, 12)):
        kernels = network.drawn(f"{name}.weight", channels, channels_in, 3, 3, fan_in=9 * channels_in)
        bias = network.drawn(f"{name}.bias", channels, fan_in=9 * channels_in)
        x = builder.op("Relu", builder.op("Conv", x, kernels, bias, kernel_shape=[3, 3], pads=[1] * 4))
        x = builder.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
    flat = builder.op("Reshape", x, builder.integers([-1, 48]))
    return network.model(network.dense("head", flat, 48, CLASSES))


def text_classifier() -> ir.Model:
    return bert(vocabulary=40, classes=CLASSES, width=16, layers=1, heads=2, positions=12, dropout=0.1)


NETWORKS: Mapping[str, tuple[Callable[[], ir.Model], Callable[[], Any]]] = {
    "residual": (
        lambda: residual_network(width=4, classes=CLASSES, blocks=(1, 1)),
        lambda: burnish.optim.adamw(lr=warmup(cosine(2e-3, steps=SCHEDULED), 10)),
    ),
    "mobile": (mobile, lambda: burnish.optim.sgd(lr=0.005, momentum=0.9)),
    "text": (text_classifier, lambda: burnish.optim.adam(lr=1e-3)),
    "recurrent": (recurrent, lambda: burnish.optim.rmsprop(lr=1e-3)),
    "dropout": (
        lambda: perceptron(dropout=True),
        lambda: burnish.optim.ema(burnish.optim.accumulate(burnish.optim.adamw(lr=1e-2), 4), decay=0.9),
    ),
    "convolutional": (convolutional, lambda: burnish.optim.sgd(lr=0.02, momentum=0.9)),
}


def batches(model: ir.Model, size: int = 8) -> list[dict[str, np.ndarray]]:
    """Batches that a classifier can learn from: their values are about a center that belongs to the class."""
    generator = np.random.default_rng(1)
    result = []
    for _ in range(BATCHES):
        labels = generator.integers(0, CLASSES, size)
        batch = {"labels": labels}
        for value in model.graph.inputs:
            extents = [size, *(extent if isinstance(extent, int) else 12 for extent in value.shape.dims[1:])]
            along = labels.reshape(-1, *[1] * (len(extents) - 1))
            if value.name == "attention_mask":
                batch[value.name] = np.ones(extents, np.int64)
            elif value.dtype == ir.DataType.INT64:
                batch[value.name] = (generator.integers(0, 8, extents) + 8 * along) % 40
            else:
                batch[value.name] = (generator.normal(size=extents) + 0.5 * (along - 2)).astype(np.float32)
        result.append(batch)
    return result


def read_batches(folder: Path) -> list[dict[str, np.ndarray]]:
    """The batches that ``write`` put into a folder."""
    arrays = load_file(folder / "batches.safetensors")
    names = {name.partition("/")[2] for name in arrays}
    return [{name: arrays[f"{index}/{name}"] for name in names} for index in range(BATCHES)]


def save_batches(path: Path, data: Sequence[Mapping[str, np.ndarray]]) -> None:
    """Write the arrays of each batch as ``<index of the batch>/<name>``."""
    save_file({f"{index}/{key}": array for index, batch in enumerate(data) for key, array in batch.items()}, path)


def write(name: str, folder: Path) -> None:
    """Write a program, its batches, and what Python computes in 100 steps of them, with a checkpoint after half of these.

    Beside the program is the same one for WebGPU.
    """
    build, optimizer = NETWORKS[name]
    model = build()
    program = burnish.compile(model, optimizer=optimizer(), metrics=("accuracy",))
    shutil.rmtree(folder, ignore_errors=True)
    program.save(folder / "program")
    burnish.compile(build(), optimizer=optimizer(), metrics=("accuracy",), target="webgpu").save(folder / "webgpu")
    data = batches(model)
    save_batches(folder / "batches.safetensors", data)
    with burnish.Session(program, engine=STANDARD, seed=7, threads=1) as session:
        save_file(session.state(), folder / "initial.safetensors")
        figures = []
        for step in range(STEPS):
            if step == CHECKPOINT_AT:
                session.save_checkpoint(folder / "half.safetensors", {"position": step})
            figures.append(session.step(data[step % BATCHES]))
        inputs = {key: array for key, array in data[0].items() if key != "labels"}
        save_file(session.state(), folder / "final.safetensors")
        save_file(dict(session.predict(inputs)), folder / "predicted.safetensors")
        session.export(folder / "tuned.onnx", fold_norm=False)
        expected = {
            "onnxruntime": onnxruntime.__version__,
            "steps": figures,
            "evaluated": session.evaluate(data[0]),
            "evaluated_data": session.evaluate_data(data),
            "averaged": session.evaluate(data[0], parameters="average") if name == "dropout" else None,
        }
    (folder / "expected.json").write_text(json.dumps(expected), encoding="utf-8")
    if name == "dropout":
        program.save(folder / "program.onnx")
        shutil.make_archive(str(folder / "program"), "zip", folder, "program")


def write_cached(folder: Path) -> None:
    """Write a program whose backbone is frozen and has its features cached, and what Python computes in two epochs of its head.

    ``features.safetensors`` has the features of each batch.
    """
    model = residual_network(width=4, classes=CLASSES, blocks=(1, 1))
    shutil.rmtree(folder, ignore_errors=True)
    for name, target in (("program", None), ("webgpu", "webgpu")):
        optimizer = burnish.optim.adamw(lr=5e-2)
        options = {} if target is None else {"target": target}
        burnish.compile(
            model, trainable=["classifier*"], cached_features="auto", optimizer=optimizer, metrics=("accuracy",), **options
        ).save(folder / name)
    data = batches(model)
    save_batches(folder / "batches.safetensors", data)
    program = burnish.Program.load(folder / "program")
    with burnish.Session(program, engine=STANDARD, seed=7, threads=1) as session:
        features = [session.features(batch) for batch in data]
        save_batches(folder / "features.safetensors", features)
        figures = []
        for step in range(2 * BATCHES):
            if step == BATCHES:
                session.save_checkpoint(folder / "half.safetensors", {"position": step})
            index = step % BATCHES
            figures.append(session.step({**features[index], "labels": data[index]["labels"]}))
        save_file(dict(session.predict({"x": data[0]["x"]})), folder / "predicted.safetensors")
        session.export(folder / "tuned.onnx", fold_norm=False)
    expected = {"onnxruntime": onnxruntime.__version__, "steps": figures}
    (folder / "expected.json").write_text(json.dumps(expected), encoding="utf-8")


def write_settled(folder: Path) -> None:
    """Write programs whose export is another graph than the one that trains, with a checkpoint after two steps and the export."""
    model = convolutional()
    data = batches(model)
    samples = [{"x": batch["x"]} for batch in data[:2]]
    made = {
        "lora": burnish.surgery.lora(convolutional(), rank=3, alpha=6),
        "dora": burnish.surgery.lora(convolutional(), rank=2, variant="dora"),
        "pruned": burnish.surgery.prune(convolutional(), 0.5),
        "quantized": burnish.surgery.quantize(
            convolutional(), weights="int8 per channel", activations="uint8", calibration=samples
        ),
        "int4": burnish.surgery.quantize(convolutional(), weights="int4 per channel", activations="uint8", calibration=samples),
        "ia3": burnish.surgery.lora(convolutional(), variant="ia3"),
    }
    for name, changed in made.items():
        program = burnish.compile(changed, optimizer=burnish.optim.sgd(lr=0.1, momentum=0.9))
        program.save(folder / name / "program")
        with burnish.Session(program, engine=STANDARD, threads=1) as session:
            for batch in data[:2]:
                session.step(batch)
            session.save_checkpoint(folder / name / "python.safetensors")
            session.export(folder / name / "python.onnx", fold_norm=False)


def compare(own: Path, other: Path) -> dict[str, Any]:
    """Return in what two models differ: their nodes, initializers and largest difference of what they predict."""
    models = [onnx.load(path) for path in (own, other)]
    arrays = [{tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer} for model in models]
    for path in (own, other):
        onnx.checker.check_model(path, full_check=True)
    batch = batches(convolutional())[0]["x"]
    results = [onnxruntime.InferenceSession(path).run(None, {"x": batch})[0] for path in (own, other)]
    kinds = [{name: (str(array.dtype), array.shape) for name, array in held.items()} for held in arrays]
    apart = {
        name: float(np.abs(array.astype(np.float64) - arrays[1][name]).max())
        for name, array in arrays[0].items()
        if kinds[1].get(name) == kinds[0][name]
    }
    return {
        "operators": [sorted(node.op_type for node in model.graph.node) for model in models],
        "kinds": kinds[0] == kinds[1],
        "apart": max(apart.values(), default=0.0),
        "integers": max((value for name, value in apart.items() if arrays[0][name].dtype.kind in "iu"), default=0.0),
        "predicted": float(np.abs(results[0] - results[1]).max()),
    }


def write_mobilenet(name: str, folder: Path) -> None:
    """Write MobileNetV2 at 224 x 224 pixels with a frozen backbone, and what Python computes in two epochs of two batches.

    Args:
        name: ``mobilenet-frozen``, whose steps run the whole network, or ``mobilenet-cached``, whose steps begin at features.
        folder: to write into.
    """
    model, generator = mobilenet_v2(), np.random.default_rng(0)
    options = {"cached_features": "auto"} if name == "mobilenet-cached" else {}
    optimizer = burnish.optim.sgd(lr=0.01, momentum=0.9)
    program = burnish.compile(model, optimizer=optimizer, trainable=["head.*"], **options)
    shutil.rmtree(folder, ignore_errors=True)
    program.save(folder / "program")
    data = [
        {"x": generator.normal(size=(2, 3, 224, 224)).astype(np.float32), "labels": generator.integers(0, 10, 2)}
        for _ in range(2)
    ]
    save_batches(folder / "batches.safetensors", data)
    with burnish.Session(program, engine=STANDARD, threads=1) as session:
        if options:
            data = [{**session.features({"x": batch["x"]}), "labels": batch["labels"]} for batch in data]
        losses = [session.step(batch)["loss"] for batch in 2 * data]
    expected = {"onnxruntime": onnxruntime.__version__, "losses": losses}
    (folder / "expected.json").write_text(json.dumps(expected), encoding="utf-8")


def write_small(folder: Path) -> None:
    """Write the smallest program, in a folder and in one file, and checkpoints of it and of one with adapters."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
        g (float[b,2] x) => (float[b,2] y) <float[2,2] w = {1,2,3,4}> { y = MatMul(x, w) }""")
    small = burnish.compile(model, loss="mse", optimizer="sgd")
    small.save(folder / "program")
    small.save(folder / "program.onnx")
    adapted = burnish.compile(burnish.surgery.lora(model, rank=1), loss="mse", optimizer="adam")
    for name, program in (("checkpoint", small), ("adapters", adapted)):
        burnish.Session(program, engine=STANDARD, threads=1).save_checkpoint(folder / f"{name}.safetensors")


def resume(folder: Path, checkpoint: Path, begin: int, end: int) -> list[dict[str, float]]:
    """Restore the checkpoint of a client in Python, and return the figures of the steps from ``begin`` to ``end``."""
    data = read_batches(folder)
    with burnish.Session(burnish.Program.load(folder / "program"), engine=STANDARD, threads=1) as session:
        session.restore(checkpoint)
        return [session.step(data[step % BATCHES]) for step in range(begin, end)]


def predict(folder: Path, model: Path) -> dict[str, list[float]]:
    """Run a model that a client exported on the first batch, and return its outputs, flat."""
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    batch = read_batches(folder)[0]
    outputs = session.run(None, {value.name: batch[value.name] for value in session.get_inputs()})
    return {value.name: array.ravel().tolist() for value, array in zip(session.get_outputs(), outputs, strict=True)}


def main(command: str, folder: str, *arguments: str) -> None:
    if command == "write":
        for name in arguments or (*NETWORKS, CACHED):
            if name == CACHED:
                write_cached(Path(folder, name))
            elif name in MOBILENETS:
                write_mobilenet(name, Path(folder, name))
            else:
                write(name, Path(folder, name))
    elif command == "resume":
        checkpoint, begin, end = arguments
        print(json.dumps(resume(Path(folder), Path(checkpoint), int(begin), int(end))))
    elif command == "write-settled":
        write_settled(Path(folder))
    elif command == "write-small":
        write_small(Path(folder))
    elif command == "write-vectors":
        vectors.write_programs(Path(folder))
    elif command == "compare-settled":
        own = sorted(Path(folder).glob("*/javascript.onnx"))
        print(json.dumps({path.parent.name: compare(path, path.with_name("python.onnx")) for path in own}))
    elif command == "predict":
        print(json.dumps(predict(Path(folder), Path(arguments[0]))))
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(*sys.argv[1:])
