"""Runs training steps with the kernels for ONNX Runtime, compiled for Windows, under Wine: ``python -m emulation.windows``.

Zig compiles them for Windows. Zig and the Windows package of ONNX Runtime are fetched from the package index; Wine has to be
installed. The results must be the ones of this machine. This says nothing of an installation: burnish installs no kernels on
Windows.
"""

from __future__ import annotations

import io
import os
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import torch
from torch import nn

import burnish
from burnish.engines.onnxruntime import OnnxRuntimeEngine
from burnish.kernels import compiling
from emulation.processors import OPERATORS, PROJECT
from emulation.setting_up import FOLDER

WINDOWS = FOLDER / "windows"
ZIG = "ziglang==0.17.1"
TARGET = ("-target", "x86_64-windows-gnu")
FLAGS = ("-std=c++20", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd", "-mcpu=x86_64_v3", "-w")
ELEMENT_TYPES = {"float32": 1, "int64": 7, "bool": 9, "float64": 11, "uint32": 12}


class Mobile(nn.Sequential):
    """Convolutions of all kinds, pooling, and chains of elementwise operators."""

    def __init__(self) -> None:
        stem = (nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        blocks = (*self.block(16, 24, 3, 1), *self.block(24, 24, 5, 1), *self.block(24, 32, 3, 2))
        head = (nn.Conv2d(32, 64, 1), nn.Hardswish(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
        super().__init__(*stem, *blocks, *head)

    @staticmethod
    def block(channels: int, out: int, kernel: int, stride: int) -> tuple[nn.Module, ...]:
        return (
            *(nn.Conv2d(channels, 64, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU6()),
            *(nn.Conv2d(64, 64, kernel, stride, kernel // 2, groups=64, bias=False), nn.BatchNorm2d(64), nn.ReLU6()),
            *(nn.Conv2d(64, out, 1, bias=False), nn.BatchNorm2d(out)),
        )


class Recurrent(nn.Module):
    """An embedding, an LSTM, a GRU and layer normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(50, 32), nn.LayerNorm(40), nn.Linear(40, 10)
        self.first, self.second = nn.LSTM(32, 48, batch_first=True), nn.GRU(48, 40, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.second(self.first(self.table(x))[0])[0][:, -1]))


def exported(module: nn.Module, x: np.ndarray) -> bytes:
    file = io.BytesIO()
    options = {"dynamo": False, "training": torch.onnx.TrainingMode.TRAINING, "opset_version": 17}
    torch.onnx.export(module, (torch.from_numpy(x),), file, input_names=["x"], output_names=["logits"], **options)
    return file.getvalue()


def set_up() -> None:
    """Fetch, and compile.

    Raises:
        SystemExit: Wine is missing, a package cannot be had, or the compiler refuses a file.
    """
    if shutil.which("wine") is None:
        sys.exit("this needs Wine: install wine64 and wine (apt-get install wine64 wine)")
    WINDOWS.mkdir(parents=True, exist_ok=True)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    if not (WINDOWS / "zig").exists():
        run(*pip, "install", "--target", str(WINDOWS / "zig"), ZIG)
    name = f"onnxruntime=={onnxruntime.__version__}"
    options = ("--no-deps", "--platform", "win_amd64", "--python-version", "3.11", "--only-binary", ":all:")
    run(*pip, "download", *options, "--dest", str(WINDOWS), name)
    (wheel,) = WINDOWS.glob(f"onnxruntime-{onnxruntime.__version__}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (WINDOWS / "onnxruntime.dll").write_bytes(archive.read("onnxruntime/capi/onnxruntime.dll"))
    folders = [word for folder in compiling.header_folders(OPERATORS) for word in ("-I", str(folder))]
    objects = []
    for source in (OPERATORS, *compiling.parts_of(OPERATORS)):
        objects.append(str(WINDOWS / f"{source.stem}.obj"))
        zig("c++", *FLAGS, *folders, "-c", str(source), "-o", objects[-1])
    zig("c++", "-shared", *objects, "-o", str(WINDOWS / "operators.dll"))
    own = Path(__file__).with_name("windows_step.c")
    zig("cc", "-O2", "-I", str(PROJECT / "clients" / "c"), str(own), "-o", str(WINDOWS / "step.exe"))


def zig(language: str, *arguments: str) -> None:
    run(sys.executable, "-m", "ziglang", language, *TARGET, *arguments, PYTHONPATH=str(WINDOWS / "zig"))


def run(*command: str, **settings: str) -> str:
    done = subprocess.run(command, cwd=WINDOWS, env=os.environ | settings, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command[:4])} ... ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stderr


def pack(arrays: dict[str, np.ndarray]) -> bytes:
    """The arrays as windows_step.c reads them."""
    packed = bytearray()
    for name, array in arrays.items():
        shape = [*array.shape, *[0] * (8 - array.ndim)]
        packed += struct.pack("<256sii8qq", name.encode(), ELEMENT_TYPES[str(array.dtype)], array.ndim, *shape, array.nbytes)
        packed += array.tobytes() + bytes(-array.nbytes % 8)
    return bytes(packed)


def unpack(data: bytes, like: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    found, place = {}, 0
    for name, array in like.items():
        place += struct.calcsize("<256sii8qq")
        found[name] = np.frombuffer(data, array.dtype, array.size, place).reshape(array.shape)
        place += (array.nbytes + 7) // 8 * 8
    return found


def step(name: str, source: object, x: np.ndarray) -> set[str]:
    """Compute a step here and there; returns the kernels that it calls.

    Raises:
        SystemExit: the step fails under Wine.
        AssertionError: the results differ.
    """
    random = np.random.default_rng(1)
    batch = {"x": x, "labels": random.integers(0, 10, len(x))}
    engine = OnnxRuntimeEngine(kernels=True)
    program = burnish.compile(source, optimizer=burnish.optim.sgd(lr=0.01, momentum=0.9))
    session = burnish.Session(program, engine=engine, threads=2)
    session.step(batch)
    (opened,) = session._runner.graphs_of_step()
    model, values = ir.to_proto(opened.model), {**session.state(), **batch, "lr": np.array(0.01, np.float32)}
    constants = {tensor.name for tensor in model.graph.initializer}
    fed = {value.name: np.asarray(values[value.name]) for value in model.graph.input if value.name not in constants}
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.register_custom_ops_library(str(engine.kernels))
    here = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in here.get_outputs()]
    expected = dict(zip(names, map(np.asarray, here.run(names, fed)), strict=True))
    onnx.save(model, WINDOWS / "model.onnx")
    (WINDOWS / "inputs").write_bytes(pack(fed))
    (WINDOWS / "outputs").write_bytes(pack({name: np.zeros_like(array) for name, array in expected.items()}))
    wine = {"WINEPREFIX": str(WINDOWS / "prefix"), "WINEDEBUG": "-all"}
    run("wine", "step.exe", "model.onnx", "inputs", "outputs", "operators.dll", **wine)
    found = unpack((WINDOWS / "outputs").read_bytes(), expected)
    largest = 0.0
    for output, array in expected.items():
        difference = np.linalg.norm(found[output].astype(np.float64) - array.astype(np.float64))
        scale = np.linalg.norm(array.astype(np.float64))
        # As between emulated processors: compilers and instructions sum in other orders.
        assert difference <= 1e-4 * scale + 1e-6, f"{name}: {output} differs by {difference} of {scale}"
        largest = max(largest, difference / (scale + 0.01))
    print(f"{name}: {len(expected)} outputs, the largest difference {largest:.1e} of a tensor's norm + 0.01", flush=True)
    return {node.op_type for node in model.graph.node if node.domain == "burnish"}


def main() -> None:
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    set_up()
    images, pixels = (random.normal(size=size).astype(np.float32) for size in ((8, 1, 8, 8), (8, 3, 64, 64)))
    words = random.integers(0, 50, (8, 12))
    called = step("residual network", burnish.models.residual_network(width=8, blocks=(1, 1)), images)
    called |= step("mobile network", exported(Mobile(), pixels), pixels)
    called |= step("recurrent network", exported(Recurrent(), words), words)
    print(f"{len(called)} operators: {', '.join(sorted(called))}")


if __name__ == "__main__":
    main()
