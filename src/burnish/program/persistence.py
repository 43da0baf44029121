"""A program in a folder: one ``.onnx`` per graph, ``program.json``, ``state.safetensors``; and what identifies a program."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
import onnx_ir as ir

from burnish.errors import CheckpointError
from burnish.graph import model_proto, named_failures
from burnish.importer import external_tensors, own_tensors
from burnish.program.consistency import inconsistency
from burnish.program.signature import GRAPH_NAMES, Role, Signature
from burnish.program.state import check_state, flush_to_disk, partial_path, remove_left_behind
from burnish.program.state_file import read_state_file, write_state_file

if TYPE_CHECKING:
    from burnish.program.program import Program

FORMAT = "burnish program"
FORMAT_VERSION = 1
MANIFEST = "program.json"
DIGEST = "sha256"
"""Of what a program says of itself, in its manifest or metadata; programs of earlier versions have none."""
TRAINING = "burnish.training"
"""The entry in the metadata of one ONNX file that holds a program."""
SEMANTIC_SUFFIX = ".semantic.onnx"
STATE_FILE = "state.safetensors"
ONE_FILE_LIMIT = 1 << 30
"""Bytes of constants above which a graph is written with external data; a protobuf file ends at 2 GiB."""


def fits_one_file(model: ir.Model) -> bool:
    """Whether a model's constants leave it well below the 2 GiB that a protobuf can hold."""
    return constant_bytes(model) <= ONE_FILE_LIMIT


def constant_bytes(model: ir.Model) -> int:
    """Return the bytes of a model's initializers and constants."""
    total = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value is not None)
    for node in model.graph.all_nodes():
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.TENSOR and not attribute.is_ref():
                total += attribute.as_tensor().nbytes
    return total


def model_bytes(model: ir.Model) -> bytes:
    """Return a model as a serialized ModelProto, the same bytes for the same model."""
    return model_proto(model).SerializeToString(deterministic=True)


def save_model(model: ir.Model, path: Path) -> None:
    """Write a model; large constants go into ``<name>.data`` beside it when one file cannot hold them."""
    if fits_one_file(model):
        path.write_bytes(model_bytes(model))
        return
    copy = model.clone()
    ir.passes.common.LiftConstantsToInitializersPass()(copy)
    with named_failures():
        ir.save(copy, path, external_data=f"{path.stem}.data")


def digest_of(record: Mapping[str, Any]) -> str:
    """Return the SHA-256 of what a program says of itself, except the entry that holds it."""
    rest = {key: value for key, value in record.items() if key != DIGEST}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def graph_hashes(program: Program) -> dict[str, str]:
    """Return a SHA-256 of each graph: its operators, constants, inputs and outputs; not its documentation."""
    return {name: graph_hash(model) for name, model in program.graphs.items()}


def program_hash(hashes: dict[str, str], signature: Signature) -> str:
    """Return the SHA-256 that identifies a program: its graphs and signature.

    Defaults of hyperparameters are left out, as every step may override them; and where a schedule ends, which changes no step.
    """
    values = signature.to_dict()
    for graph in values.values():
        graph.pop("end", None)
        for entry in graph["inputs"]:
            entry.pop("default", None)
    return hashlib.sha256(json.dumps([hashes, values], sort_keys=True).encode()).hexdigest()


def graph_hash(model: ir.Model) -> str:
    """Return the SHA-256 of one graph; see ``graph_hashes``."""
    digest = hashlib.sha256()
    digest.update(json.dumps(sorted(model.opset_imports.items())).encode())
    proto = model_proto(model).graph
    for field in ("name", "doc_string", "value_info", "metadata_props", "quantization_annotation"):
        proto.ClearField(field)
    _forget_remarks(proto)
    for value in (*proto.input, *proto.output):
        value.ClearField("doc_string")
        value.ClearField("metadata_props")
    for node in proto.node:
        digest.update(node.SerializeToString(deterministic=True))
    for initializer in proto.initializer:
        digest.update(initializer.SerializeToString(deterministic=True))
    proto.ClearField("node")
    proto.ClearField("initializer")
    digest.update(proto.SerializeToString(deterministic=True))
    return digest.hexdigest()


def _forget_remarks(graph: onnx.GraphProto) -> None:
    """Clear what is said of nodes and changes nothing, in bodies too; reading a constant may give its tensor a name."""
    for node in graph.node:
        node.ClearField("doc_string")
        node.ClearField("metadata_props")
        for attribute in node.attribute:
            if attribute.HasField("t"):
                attribute.t.ClearField("name")
            if attribute.HasField("g"):
                _forget_remarks(attribute.g)


def save_program(program: Program, directory: Path) -> Path:
    """Write a program into ``directory``, whole or not at all; see ``Program.save``."""
    _refuse_other_content(directory)
    partial = partial_path(directory)
    try:
        partial.mkdir(parents=True)
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
        own |= set(_read_manifest(directory)["files"])
    foreign = sorted(present - own)
    if foreign or MANIFEST not in present:
        names = ", ".join(f"'{name}'" for name in foreign[:3])
        raise CheckpointError(
            f"'{directory}' holds files that are not a saved program's ({names}): save the program into a folder of its own"
        )


def _write_files(program: Program, directory: Path) -> None:
    for name, model in program.graphs.items():
        save_model(model, directory / f"{name}.onnx")
    for name, model in program.semantic.items():
        save_model(model, directory / f"{name}{SEMANTIC_SUFFIX}")
    write_state_file(directory / STATE_FILE, program.weights, {"format": FORMAT, "version": str(FORMAT_VERSION)})
    files = {}
    for path in sorted(directory.iterdir()):
        flush_to_disk(path)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": _file_hash(path)}
    manifest = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "signature": program.signature.to_dict(),
        "options": program.options,
        "files": files,
    }
    manifest[DIGEST] = digest_of(manifest)
    path = directory / MANIFEST
    path.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    flush_to_disk(path)
    flush_to_disk(directory)


def _put_in_place(partial: Path, directory: Path) -> None:
    """Rename ``partial`` to ``directory``; an earlier program there steps aside first, and back if that fails."""
    earlier = partial_path(directory, "earlier")
    if directory.exists():
        os.rename(directory, earlier)
    try:
        os.rename(partial, directory)
    except OSError:
        if earlier.exists():
            os.rename(earlier, directory)
        raise
    flush_to_disk(directory.parent)
    remove_left_behind(directory)


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_program(directory: Path) -> dict[str, Any]:
    """Read what ``save_program`` wrote, as the fields of a Program; see ``Program.load``."""
    if not (directory / MANIFEST).is_file():
        raise CheckpointError(f"'{directory}' is not a saved program: it has no {MANIFEST}. Give the folder that was saved to")
    manifest = _read_manifest(directory)
    graphs = sorted(manifest["signature"])
    for name in [*(f"{graph}.onnx" for graph in graphs), STATE_FILE]:
        if name not in manifest["files"]:
            raise _damaged(directory, f"{MANIFEST} does not list {name}")
    for name, recorded in manifest["files"].items():
        _check_file(directory, name, recorded)
    signature = _read_signature(directory, manifest)
    weights, _ = read_state_file(directory / STATE_FILE, "state file")
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
    if manifest.get(DIGEST, digest_of(manifest)) != digest_of(manifest):
        raise _damaged(directory, f"{MANIFEST} has changed since it was written")
    return {**models, "semantic": semantic, "signature": signature, "weights": weights, "options": dict(manifest["options"])}


def _read_manifest(directory: Path) -> dict[str, Any]:
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise ValueError(f"format is {manifest['format']!r}, expected {FORMAT!r}")
        version = int(manifest["version"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(directory, f"{MANIFEST} cannot be read as one: {error}") from error
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"'{directory}' was saved in format version {version}, and this burnish reads up to {FORMAT_VERSION}: "
            "update burnish, or save the program again with this version"
        )
    expected = {"signature": dict, "options": dict, "files": dict}
    for key, kind in expected.items():
        if not isinstance(manifest.get(key), kind):
            raise _damaged(directory, f"{MANIFEST} has no '{key}'")
    return manifest


def _check_file(directory: Path, name: str, recorded: Any) -> None:
    path = directory / name
    if Path(name).name != name or name in ("", ".", "..") or path.resolve().parent != directory.resolve():
        raise CheckpointError(
            f"{MANIFEST} of '{directory}' names '{name}', which lies outside the folder, and was not opened. "
            "Do not use this folder, or save the program again"
        )
    if not path.is_file():
        raise _damaged(directory, f"{name} is missing")
    if not isinstance(recorded, dict) or path.stat().st_size != recorded.get("bytes"):
        expected = recorded.get("bytes") if isinstance(recorded, dict) else "an unknown number of"
        raise _damaged(directory, f"{name} has {path.stat().st_size} bytes, and {expected} were written")
    if _file_hash(path) != recorded.get("sha256"):
        raise _damaged(directory, f"{name} has changed since it was written")


def _read_signature(directory: Path, manifest: dict[str, Any]) -> Signature:
    try:
        signature = Signature.from_dict(manifest["signature"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(directory, f"the signature in {MANIFEST} cannot be read: {error!r}") from error
    if set(signature) != set(GRAPH_NAMES):
        raise _damaged(directory, f"the signature in {MANIFEST} has graphs {sorted(signature)}, expected {sorted(GRAPH_NAMES)}")
    return signature


def _read_model(directory: Path, name: str, files: dict[str, Any]) -> ir.Model:
    try:
        model = ir.load(directory / name)
    except Exception as error:  # the protobuf library's errors are not those of onnx_ir
        raise _damaged(directory, f"{name} cannot be read as an ONNX model: {error}") from error
    for value, tensor in external_tensors(model):
        if str(tensor.location) not in files:
            raise CheckpointError(
                f"'{directory / name}' reads '{value}' from '{tensor.location}', which is not a file of this program, "
                "and was not opened. Do not use this folder, or save the program again"
            )
    own_tensors(model, directory)
    return model


def _damaged(directory: Path, what: str) -> CheckpointError:
    return CheckpointError(f"'{directory}' is not a whole saved program: {what}. Save the program again, or use another copy")
