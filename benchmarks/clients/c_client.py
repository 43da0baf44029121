"""The C client beside the Python session: time of a step, peak of resident memory, time to the first step, bytes of the program.

    python benchmarks/clients/c_client.py --model mobilenet --batches 1,2,4,8

Both train the same saved program on one ONNX Runtime library, in processes of their own, rounds interleaved; their losses must
agree in every bit. Needs gcc, and PyTorch for MobileNetV2.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

sys.path.insert(0, str(Path(__file__).parents[1]))

import burnish
from burnish.models import bert, residual_network
from burnish.program import Program
from contenders import Contender

ROOT = Path(__file__).parents[2]
C_FILES = ("program.json", "state.safetensors", "init.onnx", "step.onnx", "evaluate.onnx", "predict.onnx")
"""What the C client reads of a program's folder."""
WEIGHTS = "state.safetensors"
TURN = 1.0
Batch = dict[str, np.ndarray]


def images(batch: int, channels: int, size: int, classes: int) -> Batch:
    random = np.random.default_rng(0)
    x = random.standard_normal((batch, channels, size, size), dtype=np.float32)
    return {"x": x, "labels": random.integers(0, classes, batch)}


def digits() -> Program:
    return burnish.compile(residual_network(), optimizer="adamw")


def mobilenet(frozen: bool = False) -> Program:
    import torch

    import workloads

    torch.manual_seed(0)
    module = workloads.mobilenet_v2().eval()
    chosen = {"trainable": ["classifier*"]} if frozen else {}
    return burnish.compile(module, example_inputs=(torch.zeros(2, 3, 224, 224),), optimizer="sgd:lr=0.001,momentum=0.9", **chosen)


def text() -> Program:
    return burnish.compile(bert(8000, classes=4, width=128, layers=2, heads=4, positions=64), optimizer="adamw")


def words(batch: int) -> Batch:
    random = np.random.default_rng(0)
    tokens = random.integers(1, 8000, (batch, 64))
    return {"input_ids": tokens, "attention_mask": np.ones_like(tokens), "labels": random.integers(0, 4, batch)}


MODELS: Mapping[str, tuple[Callable[[], Program], Callable[[int], Batch], int]] = {
    "digits": (digits, lambda batch: images(batch, 1, 8, 10), 16),
    "mobilenet": (mobilenet, lambda batch: images(batch, 3, 224, 1000), 8),
    "mobilenet-frozen": (lambda: mobilenet(frozen=True), lambda batch: images(batch, 3, 224, 1000), 8),
    "text": (text, words, 16),
}
"""Name -> what compiles it, a batch of it, and the batch size where none is asked for."""


def build_contender(folder: Path) -> Path:
    """Compile the contender in C against the library of the Python package."""
    library = next((Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so*"))
    for name in ("libonnxruntime.so", "libonnxruntime.so.1"):
        (folder / name).symlink_to(library)
    sources = [ROOT / "clients" / "c" / "burnish.c", Path(__file__).with_name("contender.c")]
    command = ["gcc", "-std=c11", "-O2", f"-I{ROOT / 'clients' / 'c'}", *map(str, sources), "-o", str(folder / "contender")]
    subprocess.run([*command, f"-L{folder}", f"-Wl,-rpath,{folder}", "-lonnxruntime", "-lm"], check=True)
    return folder / "contender"


def start_c(binary: Path, program: Path, threads: int, batch: Batch, files: Mapping[str, Path]) -> Contender:
    """Start the contender in C, and wait until it has read its batch."""
    import onnx_ir as ir

    arguments: list[str] = []
    for name, array in batch.items():
        arguments += [name, str(int(ir.DataType.from_numpy(array.dtype))), "x".join(map(str, array.shape)), str(files[name])]
    command = [str(binary), str(program), str(threads), *arguments]
    contender = Contender("c", subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    contender.answer()
    return contender


def measure(binary: Path, program: Path, batch: Batch, threads: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Run both, and return what they took."""
    files = {name: folder / f"{name}.bin" for name in batch}
    for name, array in batch.items():
        array.tofile(files[name])
    told = {name: (array.dtype.str, array.shape, str(files[name])) for name, array in batch.items()}
    job = {"program": str(program), "threads": threads, "batch": told}
    contenders, first = {}, {}
    for name in ("c", "python"):
        began = time.perf_counter()
        if name == "c":
            contenders[name] = start_c(binary, program, threads, batch, files)
        else:
            contenders[name] = Contender.start(name, "clients/python_session.py", job)
        contenders[name].open()
        contenders[name].step()
        first[name] = time.perf_counter() - began
    for _ in range(2):
        for contender in contenders.values():
            contender.step()
    if contenders["c"].losses != contenders["python"].losses:
        raise SystemExit(f"the losses differ: {contenders['c'].losses} and {contenders['python'].losses}")
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, contender in contenders.items():
            seconds[name] += contender.turn(TURN)[0]
    memory = {name: contender.finish()["peak_bytes"] for name, contender in contenders.items()}
    return {
        name: {
            "median_seconds": statistics.median(seconds[name]),
            "best_seconds": min(seconds[name]),
            "steps": len(seconds[name]),
            "first_step_seconds": first[name],
            "peak_bytes": memory[name],
        }
        for name in contenders
    }


def described(result: Mapping[str, Any]) -> str:
    """A result in a line; times and memory are C's, then Python's."""
    c, python = result["c"], result["python"]
    median, best = (c[figure] / python[figure] for figure in ("median_seconds", "best_seconds"))
    return (
        f"{result['model']} at batch {result['batch']}: step {c['median_seconds'] * 1e3:.2f} and "
        f"{python['median_seconds'] * 1e3:.2f} ms, ratio {median:.3f} (of the best {best:.3f}); peak {c['peak_bytes'] / 1e6:.0f} "
        f"and {python['peak_bytes'] / 1e6:.0f} MB; first step after {c['first_step_seconds']:.2f} and "
        f"{python['first_step_seconds']:.2f} s; program {result['program_bytes'] / 1e3:.0f} kB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*MODELS], action="append", help="may be given again; by default all")
    parser.add_argument("--batches", help="batch sizes, with commas between; by default one for each model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="turns of a second of each")
    parser.add_argument("--json", type=Path, help="write all figures there")
    arguments = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory(prefix="burnish-") as name:
        folder = Path(name)
        binary = build_contender(folder)
        for model in arguments.model or MODELS:
            compiled, batch_of, usual = MODELS[model]
            program = compiled().save(folder / model)
            sizes = {file: (program / file).stat().st_size for file in C_FILES}
            bytes_without_weights = sum(sizes.values()) - sizes[WEIGHTS]
            for batch in map(int, arguments.batches.split(",")) if arguments.batches else [usual]:
                result = measure(binary, program, batch_of(batch), arguments.threads, arguments.rounds, folder)
                results.append({"model": model, "batch": batch, "program_bytes": bytes_without_weights, **sizes, **result})
                print(described(results[-1]), flush=True)
    if arguments.json is not None:
        told = {
            "machine": platform.machine(),
            "onnxruntime": onnxruntime.__version__,
            "threads": arguments.threads,
            "results": results,
        }
        arguments.json.write_text(json.dumps({**told, "results": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
