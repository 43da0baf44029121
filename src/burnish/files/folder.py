"""A program in a folder: one ``.onnx`` per graph, ``program.json``, ``state.safetensors``."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from burnish.compiler.lowered_graphs import LoweredGraphs
from burnish.errors import CheckpointError
from burnish.files.consistency import inconsistency
from burnish.files.digest import BLANK, DIGEST, FORMAT_VERSION, agrees, check_version, stamped
from burnish.files.file_writing import (
    exchange,
    flush_folder,
    flush_to_disk,
    holding_lock,
    left_behind,
    locked,
    partial_path,
    remove_left_behind,
)
from burnish.files.identity import adapter_base, graph_hash, program_hash, proto_hash
from burnish.files.model_file import ONE_FILE_LIMIT, fits_one_file, parts, save_model
from burnish.files.state_file import StateFile, read_state_file, write_state_file
from burnish.importer import SourceModel, external_tensors, own_tensors
from burnish.importer.reading import Place, empty_tensors
from burnish.program import Program
from burnish.program.signature import FEATURES, GRAPH_NAMES, Role, Signature
from burnish.program.state import check_state
from burnish.untrusted_files import UNREADABLE, read_bytes, read_json

FORMAT = "burnish program"
MANIFEST = "program.json"
SEMANTIC_SUFFIX = ".semantic.onnx"
STATE_FILE = "state.safetensors"
SOURCE_FILE, SOURCE_DATA = "source.onnx", "source.data"
"""The model that the program was made from, and its data outside the state if one file cannot hold them."""


def save_program(program: Program, directory: Path) -> Path:
    """Write a program into ``directory`` atomically; see ``Program.save``."""
    _refuse_other_content(directory)
    partial = partial_path(directory)
    try:
        with locked(partial, is_folder=True):
            _write_files(program, partial)
            _put_in_place(partial, directory)
    except OSError as error:
        raise CheckpointError(
            f"The program could not be saved in '{directory}': {error}. What was there is untouched. "
            "Free space on the disk, or choose a folder you can write to"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return directory


def _refuse_other_content(directory: Path) -> None:
    if not directory.exists():
        return
    if not directory.is_dir():
        raise CheckpointError(f"'{directory}' is a file; a program is saved as a folder: give another path")
    present = {path.name for path in directory.iterdir()}
    if not present:
        return
    own = {MANIFEST}
    with contextlib.suppress(CheckpointError):
        own |= set(_read_manifest(directory, is_to_be_replaced=True)["files"])
    foreign = sorted(present - own)
    if foreign or MANIFEST not in present:
        names = ", ".join(f"'{name}'" for name in foreign[:3])
        raise CheckpointError(
            f"'{directory}' holds files that are not a saved program's ({names}): save the program into a folder of its own"
        )


def _write_files(program: Program, directory: Path) -> None:
    hashes = {name: _save_graph(model, directory / f"{name}.onnx") for name, model in program.graphs.items()}
    for name, model in program.semantic.items():
        save_model(model, directory / f"{name}{SEMANTIC_SUFFIX}")
    write_state_file(directory / STATE_FILE, program.weights, {"format": FORMAT, "version": str(FORMAT_VERSION)})
    if program.source is not None:
        _write_source(program.source, directory)
    files = {}
    for path in sorted(directory.iterdir()):
        flush_to_disk(path)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": _file_hash(path)}
    manifest = {
        DIGEST: BLANK,
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "signature": program.signature.to_dict(),
        "options": program.options,
        # The identity that checkpoints refer to, for clients that cannot compute it.
        "identity": {"program": program_hash(hashes, program.signature), "graphs": hashes},
        "base": list(adapter_base(program)),
        "opset_import": _opset_import(program),
        "files": files,
    }
    path = directory / MANIFEST
    path.write_bytes(stamped((json.dumps(manifest, indent=1) + "\n").encode()))
    flush_to_disk(path)
    flush_folder(directory)


def _write_source(source: SourceModel, directory: Path) -> None:
    """Write the model that a program was made from, next to the state, which has its weights."""
    with StateFile(directory / STATE_FILE, "state file") as state:

        def place(name: str) -> Place:
            found = next(entry for entry in (f"param/{name}", f"stat/{name}") if entry in state)
            return STATE_FILE, *state.place(found)

        data: dict[str, Place] = {}
        if sum(tensor.nbytes for tensor in source.tensors.values()) > ONE_FILE_LIMIT:
            with (directory / SOURCE_DATA).open("wb") as file:
                for name, tensor in source.tensors.items():
                    data[name] = (SOURCE_DATA, file.tell(), tensor.nbytes)
                    file.writelines(parts(tensor))
        proto = source.with_data(place, data)
    (directory / SOURCE_FILE).write_bytes(proto.SerializeToString(deterministic=True))


def _read_source(directory: Path, signature: Signature) -> SourceModel:
    try:
        source = SourceModel.read(onnx.ModelProto.FromString((directory / SOURCE_FILE).read_bytes()), directory, STATE_FILE)
    except Exception as error:  # the errors of the protobuf library have no class of their own
        raise _damaged(directory, f"{SOURCE_FILE} cannot be read as an ONNX model: {error}") from error
    states = {entry.name for entry in signature.state}
    for name, _ in empty_tensors(source.proto):
        if name not in source.tensors and states.isdisjoint((f"param/{name}", f"stat/{name}")):
            raise _damaged(directory, f"{SOURCE_FILE} has a weight '{name}' that the state has not")
    return source


def _opset_import(program: Program) -> list[dict[str, Any]]:
    """Return the newest version of each operator set in the graphs, in ONNX's terms."""
    imports = sorted((domain, version) for model in program.graphs.values() for domain, version in model.opset_imports.items())
    return [{"domain": domain, "version": version} for domain, version in dict(imports).items()]


def _save_graph(model: ir.Model, path: Path) -> str:
    """Write a graph and return its hash; from the file if it holds everything, because reading is faster than making a proto."""
    save_model(model, path)
    return proto_hash(onnx.ModelProto.FromString(path.read_bytes())) if fits_one_file(model) else graph_hash(model)


def _put_in_place(partial: Path, directory: Path) -> None:
    """Rename ``partial`` to ``directory``, replacing an earlier program.

    If the system cannot exchange the two, the earlier one is renamed first, and back if the second rename fails. If the process
    is killed in between, ``_recovered`` restores it.
    """
    earlier = partial_path(directory, "earlier")
    if not directory.exists():
        os.rename(partial, directory)
    elif not exchange(partial, directory):
        with holding_lock(directory):
            os.rename(directory, earlier)
            try:
                os.rename(partial, directory)
            except OSError:
                os.rename(earlier, directory)
                raise
    flush_folder(directory.parent)
    remove_left_behind(directory)


def _recovered(directory: Path) -> bool:
    """Restore a program that was moved aside by a process that was killed before it finished saving."""
    aside = [path for path in left_behind(directory) if path.suffix == ".earlier" and (path / MANIFEST).is_file()]
    for path in sorted(aside, key=lambda path: path.stat().st_mtime, reverse=True):
        with contextlib.suppress(OSError):
            os.rename(path, directory)
            return True
    return False


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_program(directory: Path) -> Program:
    """Read a program that ``save_program`` wrote; see ``Program.load``."""
    if not os.path.isfile(directory / MANIFEST) and (os.path.exists(directory) or not _recovered(directory)):
        raise CheckpointError(f"'{directory}' is not a saved program: it has no {MANIFEST}. Give the folder that was saved to")
    manifest = _read_manifest(directory)
    graphs = sorted(manifest["signature"])
    for name in [*(f"{graph}.onnx" for graph in graphs), STATE_FILE]:
        if name not in manifest["files"]:
            raise _damaged(directory, f"{MANIFEST} does not list {name}")
    for name, recorded in manifest["files"].items():
        _check_file(directory, name, recorded)
    signature = _read_signature(directory, manifest)
    weights, _ = read_state_file(directory / STATE_FILE, "state file", is_checked=True)
    entries = [entry for entry in signature.state if entry.role in (Role.PARAMETER, Role.STATISTIC)]
    check_state(
        entries, weights, CheckpointError, f"'{directory / STATE_FILE}'", "Save the program again from the original model"
    )
    models = {graph: _read_model(directory, f"{graph}.onnx", manifest["files"]) for graph in graphs}
    suffix = len(SEMANTIC_SUFFIX)
    semantic = {
        name[:-suffix]: _read_model(directory, name, manifest["files"])
        for name in manifest["files"]
        if name.endswith(SEMANTIC_SUFFIX)
    }
    problem = inconsistency(signature, models, manifest["options"])
    if problem is not None:
        raise _damaged(directory, f"{problem} ({MANIFEST})")
    source = _read_source(directory, signature) if SOURCE_FILE in manifest["files"] else None
    options = dict(manifest["options"])
    return Program(LoweredGraphs.read(models, signature, options, semantic), weights, source)


def _read_manifest(directory: Path, is_to_be_replaced: bool = False) -> dict[str, Any]:
    path = directory / MANIFEST
    try:
        content = read_bytes(path)
        manifest = read_json(content)
        if manifest["format"] != FORMAT:
            raise ValueError(f"format is {manifest['format']!r}, expected {FORMAT!r}")
        if not is_to_be_replaced:
            check_version(
                manifest["version"],
                f"The program in '{directory}'",
                f"make it again from the model, with burnish compile MODEL -o {directory}",
            )
    except UNREADABLE as error:
        raise _damaged(directory, f"{MANIFEST} cannot be read as one: {error}") from error
    if not is_to_be_replaced and not agrees(manifest.get(DIGEST), content):
        raise _damaged(directory, f"{MANIFEST} has changed since it was written")
    expected = {"signature": dict, "options": dict, "files": dict}
    for key, kind in expected.items():
        if not isinstance(manifest.get(key), kind):
            raise _damaged(directory, f"{MANIFEST} has no '{key}'")
    return manifest


def _check_file(directory: Path, name: str, recorded: Any) -> None:
    path = directory / name
    try:
        is_inside = Path(name).name == name and name not in ("", ".", "..") and path.resolve().parent == directory.resolve()
    except UNREADABLE as error:  # no file can have such a name
        raise _damaged(directory, f"{MANIFEST} names a file '{name}': {error}") from error
    if not is_inside:
        raise CheckpointError(
            f"{MANIFEST} of '{directory}' names '{name}', which lies outside the folder, and was not opened. "
            "Do not use this folder, or save the program again"
        )
    if not os.path.isfile(path):
        raise _damaged(directory, f"{name} is missing")
    if not isinstance(recorded, dict) or path.stat().st_size != recorded.get("bytes"):
        expected = recorded.get("bytes") if isinstance(recorded, dict) else "an unknown number of"
        raise _damaged(directory, f"{name} has {path.stat().st_size} bytes, and {expected} were written")
    if _file_hash(path) != recorded.get("sha256"):
        raise _damaged(directory, f"{name} has changed since it was written")


def _read_signature(directory: Path, manifest: dict[str, Any]) -> Signature:
    try:
        signature = Signature.from_dict(manifest["signature"])
    except UNREADABLE as error:
        raise _damaged(directory, f"the signature in {MANIFEST} cannot be read: {error!r}") from error
    if set(signature) - {FEATURES} != set(GRAPH_NAMES):
        raise _damaged(directory, f"the signature in {MANIFEST} has graphs {sorted(signature)}, expected {sorted(GRAPH_NAMES)}")
    return signature


def _read_model(directory: Path, name: str, files: dict[str, Any]) -> ir.Model:
    try:
        model = ir.load(directory / name)
    except Exception as error:  # the errors of the protobuf library differ from those of onnx_ir
        raise _damaged(directory, f"{name} cannot be read as an ONNX model: {error}") from error
    try:
        for value, tensor in external_tensors(model):
            if str(tensor.location) not in files:
                raise CheckpointError(
                    f"'{directory / name}' reads '{value}' from '{tensor.location}', which is not a file of this program, "
                    "and was not opened. Do not use this folder, or save the program again"
                )
        own_tensors(model, directory)
    except UNREADABLE as error:
        raise _damaged(directory, f"{name} holds a tensor that cannot be read: {error}") from error
    return model


def _damaged(directory: Path, what: str) -> CheckpointError:
    return CheckpointError(f"'{directory}' is not a whole saved program: {what}. Save the program again, or use another copy")
