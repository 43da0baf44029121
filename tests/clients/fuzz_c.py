"""Puts broken files through the parsers of the C client, built with the address and undefined-behaviour sanitizers.

    python tests/clients/fuzz_c.py --seconds 60 [--first CASE] [--cases N] [--kind json]

Each kind of file has the time on its own. A case that fails names its number: run that one with ``--first`` and ``--cases 1``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import c_library
import numpy as np
import onnx_ir as ir

import burnish
from oracles.small_networks import Network
from oracles.standard_operators import STANDARD

KINDS = ("text", "json", "safetensors", "onnx", "npy")
LIMITS = "detect_leaks=1:allocator_may_return_null=1:max_allocation_size_mb=1024:soft_rss_limit_mb=1024"
"""A parser that asks for more than 1 GiB is refused it, and says so."""


def tiny() -> ir.Model:
    """A dense layer: the smaller the files, the more cases in a second."""
    network = Network("tiny", [3])
    return network.model(network.dense("é\U0001f600", network.input, 3, 2))


def write_manifest(source: Path, target: Path) -> None:
    """Write what the client reads of a program.json, in one line."""
    manifest = json.loads(source.read_text("utf-8"))
    kept = {key: value for key, value in manifest.items() if key != "options"}
    kept["signature"] = {name: value for name, value in manifest["signature"].items() if name not in ("grad", "apply")}
    target.write_bytes(c_library.restamped(json.dumps(kept).encode()))


def write_corpus(folder: Path) -> dict[str, list[Path]]:
    """Write a few small files of each kind."""
    adapted = burnish.surgery.lora(tiny(), rank=1, alpha=2)
    sources = {"plain": (tiny(), burnish.optim.ema(burnish.optim.sgd(lr=0.01), decay=0.9)), "adapters": (adapted, "sgd")}
    for name, (source, optimizer) in sources.items():
        program = burnish.compile(source, optimizer=optimizer)
        program.save(folder / name)
        write_manifest(folder / name / "program.json", folder / f"{name}.json")
        session = burnish.Session(program, engine=STANDARD, threads=1)
        session.metadata["classes"] = "a, ü, \U0001f600\n"
        session.step({"x": np.ones((2, 3), np.float32), "labels": np.arange(2)})
        session.save_checkpoint(folder / f"{name}.safetensors", extra={"at": [1, 2.5e-3, None, True, "\\"]})
    (folder / "texts.text").write_text(
        r'{"a": [1, -2.5e+3, "\u00e9\ud83d\ude00\n", {"b": [[], {}, null, true, false]}], "é": ""}', "utf-8"
    )
    arrays = {"x": np.zeros((3, 2, 4), np.float32), "labels": np.arange(5), "flags": np.ones((2, 1), bool)}
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return {
        "text": [folder / "texts.text"],
        "json": [folder / f"{name}.json" for name in sources],
        "safetensors": [folder / "plain.safetensors"],
        "onnx": [folder / "plain" / "predict.onnx", folder / "plain" / "step.onnx"],
        "npy": [folder / f"{name}.npy" for name in arrays],
    }


def build(folder: Path, kind: str) -> Path:
    """Build the harness: that of .npy files holds the program that trains, all others the client."""
    output = folder / f"fuzz_{kind == 'npy'}"
    if not output.exists():
        lib = c_library.link_folder(folder / "lib")
        sources = [str(Path(__file__).with_name("fuzz_c.c"))]
        if kind == "npy":
            sources += ["-DFUZZ_NPY", str(c_library.SOURCES / "burnish.c")]
        options = ["-std=c11", "-O1", *c_library.SANITIZED, f"-I{c_library.SOURCES}", f"-L{lib}", f"-Wl,-rpath,{lib}"]
        subprocess.run([c_library.CC, *sources, *options, "-o", str(output), "-lonnxruntime", "-lm"], check=True)
    return output


def fuzz(folder: Path, corpus: Mapping[str, list[Path]], kind: str, seconds: int, first: int, cases: int) -> str:
    """Run cases of one kind; return what the harness printed.

    Raises:
        AssertionError: a case failed; the message is the sanitizer's.
    """
    # What a checkpoint is read for, and graphs are renamed by.
    manifest = folder / "plain.json"
    command = [str(build(folder, kind)), str(seconds), str(first), str(cases), str(manifest), *map(str, corpus[kind])]
    run = subprocess.run(command, capture_output=True, text=True, errors="replace", env={**os.environ, "ASAN_OPTIONS": LIMITS})
    assert run.returncode == 0, f"{kind}: {run.stderr[-6000:]}"
    return run.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60, help="for each kind")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--cases", type=int, default=10**12)
    parser.add_argument("--kind", choices=KINDS, action="append", help="all by default")
    given = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        corpus = write_corpus(Path(name))
        for kind in given.kind or KINDS:
            try:
                print(f"{kind}: {fuzz(Path(name), corpus, kind, given.seconds, given.first, given.cases)}", flush=True)
            except AssertionError as error:
                failed = 1
                print(f"FAILED {error}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
