"""Package a program as a folder that trains without Python: a C client, the program, and its graphs in ONNX Runtime's format."""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import shutil
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import onnxruntime

from burnish.errors import CheckpointError, ConfigurationError, EngineError
from burnish.files.file_writing import flush_folder, locked, partial_path, remove_left_behind
from burnish.files.folder import MANIFEST, save_program
from burnish.files.model_file import constant_bytes
from burnish.program import Program, Role
from burnish.program.signature import FEATURES

GRAPHS = ("init", "step", "evaluate", "predict")
"""The graphs that the client runs, in addition to ``features`` if there is one."""
SOURCES = ("burnish.h", "burnish.c", "burnish.hpp", "burnish_ort.h", "main.c", "Makefile")
IN_PACKAGE = "c_client"
"""The folder of the sources next to this module in an installation; a checkout has them in ``clients/c``."""
OPERATORS = "required_operators.config"
SUMS = "SHA256SUMS"
"""The digests of the graphs and of their program, in the format of ``sha256sum``."""
LARGEST = 1 << 30
"""Bytes of constants from which a graph is not written in ONNX Runtime's format, which is limited to 2 GiB."""

README = """# A training program for machines without Python

- `program`: the program. The C client reads `program.json`, `state.safetensors` and the graphs {graphs}; burnish in Python
  reads all of it.
- `models`: the same graphs in ONNX Runtime's own format, for builds of it that read no other, and `{operators}`, what its
  `build.py --include_ops_by_config` takes for a build that has these operators alone. `{sums}` has their digests, which the
  client checks.
- `burnish.h`, `burnish.c`, `burnish_ort.h`: the client; `burnish.hpp`: the same for C++; `main.c`: a program that trains with it.

    make ORT=/path/to/onnxruntime
{training} Inputs:

{inputs}
"""
TRAINING = """    ./train program {data} --batch 16 --steps 100 --checkpoint last.safetensors --export tuned.onnx

It goes on from `last.safetensors` when it is started again. `--models models` runs the graphs of that folder."""
OTHER_LAYOUT = """
`train` takes samples of the first axis, and refuses this program, in which those of {moved} stand elsewhere: call `burnish_step`
on batches in the layout of the model, from a program like `main.c`."""


def package(program: Program, folder: Path) -> None:
    """Write a program, the C client and the list of operators for a reduced build of ONNX Runtime into a new folder, atomically.

    Args:
        program: the program to train.
        folder: a new or empty folder.

    Raises:
        CheckpointError: the folder is not empty, or cannot be written.
        ConfigurationError: an input is text, which the client does not support.
        EngineError: ONNX Runtime cannot load a graph.
    """
    texts = [entry.name for entry in program.signature["step"].inputs_of(Role.DATA) if entry.dtype.name == "STRING"]
    if texts:
        raise ConfigurationError(
            f"runtime='c': the input '{texts[0]}' is text, which the C client cannot give: train it in Python"
        )
    if not _is_utf8(str(folder)):
        raise ConfigurationError(
            f"runtime='c': the name of '{folder}' is no UTF-8, and ONNX Runtime writes to no other: choose another folder"
        )
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise CheckpointError(f"'{folder}' is a file, or holds files: give the path of a new folder for the package")
    partial = partial_path(folder)
    try:
        with locked(partial, is_folder=True):
            _write(program, partial)
            if folder.is_dir():
                folder.rmdir()
            os.rename(partial, folder)
        flush_folder(folder.parent)
        remove_left_behind(folder)
    except OSError as error:
        raise CheckpointError(
            f"The package could not be written to '{folder}': {error}. Free space on the disk, or choose another folder"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _write(program: Program, folder: Path) -> None:
    save_program(program, folder / "program")
    _write_models(program, folder / "program", folder / "models")
    for name, content in _sources():
        (folder / name).write_bytes(content)
    (folder / "README.md").write_text(_readme(program), encoding="utf-8")


def _write_models(program: Program, source: Path, folder: Path) -> None:
    folder.mkdir()
    written = []
    for name in _graphs(program):
        if constant_bytes(program.graphs[name]) > LARGEST:
            raise EngineError(f"The {name} graph holds more than 1 GiB of constants, for which ONNX Runtime's format has no room")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.optimized_model_filepath = str(folder / f"{name}.ort")
        options.add_session_config_entry("session.save_model_format", "ORT")
        levels = onnxruntime.GraphOptimizationLevel
        # Optimizations would write the arrays that init fills into the file, which are as large as the optimizer's state.
        options.graph_optimization_level = levels.ORT_DISABLE_ALL if name == "init" else levels.ORT_ENABLE_ALL
        try:
            # Its blocked layout only fits the current processor.
            onnxruntime.InferenceSession(
                source / f"{name}.onnx", options, providers=["CPUExecutionProvider"], disabled_optimizers=["NchwcTransformer"]
            )
        except Exception as error:  # the errors of ONNX Runtime have no common base class
            raise EngineError(
                f"ONNX Runtime {onnxruntime.__version__} cannot write the {name} graph in its format: {error}"
            ) from error
        written.append(folder / f"{name}.ort")
    _write_operators(written, folder / OPERATORS)
    listed = {f"../{source.name}/{MANIFEST}": source / MANIFEST, **{path.name: path for path in written}}
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {name}\n" for name, path in listed.items()]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def _graphs(program: Program) -> tuple[str, ...]:
    return GRAPHS if program.features is None else (*GRAPHS, FEATURES)


def _write_operators(models: list[Path], path: Path) -> None:
    from onnxruntime.tools.ort_format_model import create_config_from_models

    # It reports its output path, which is not the final path of the package.
    logging.getLogger("ort_format_model.utils").setLevel(logging.WARNING)
    with contextlib.redirect_stdout(io.StringIO()):
        create_config_from_models(models, path, False)
    lines = path.read_text(encoding="utf-8").replace(f"{path.parent}{os.sep}", "")
    path.write_text(lines, encoding="utf-8")


def _sources() -> Iterator[tuple[str, bytes]]:
    installed = resources.files("burnish.engines.onnxruntime") / IN_PACKAGE
    checkout = Path(__file__).parents[4] / "clients" / "c"
    for name in SOURCES:
        try:
            yield name, (installed / name).read_bytes() if installed.is_dir() else (checkout / name).read_bytes()
        except OSError as error:
            raise EngineError(
                f"This installation of burnish has no '{name}' of the C client ({error}): install it anew, or take the folder "
                "clients/c of its repository"
            ) from error


def _readme(program: Program) -> str:
    entries = (*program.signature.samples, *program.signature["step"].inputs_of(Role.LABEL))
    data = " ".join(f"--data {entry.name}={entry.name.replace('/', '_')}.npy" for entry in entries)
    shapes = {entry.name: ", ".join("?" if extent is None else str(extent) for extent in entry.extents) for entry in entries}
    inputs = "\n".join(f"- `{entry.name}`: {entry.numpy_dtype.name}, shape [{shapes[entry.name]}]" for entry in entries)
    graphs = ", ".join(f"`{name}.onnx`" for name in _graphs(program))
    moved = " and ".join(f"`{entry.name}`" for entry in entries if entry.sample_axis != 0)
    training = OTHER_LAYOUT.format(moved=moved) if moved else TRAINING.format(data=data)
    return README.format(graphs=graphs, operators=OPERATORS, sums=SUMS, training=training, inputs=inputs)
