"""A program saved in a folder, and folders that are damaged, foreign or interrupted."""

from __future__ import annotations

import hashlib
import json
import os
import shutil

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from burnish.engines.onnxruntime import OnnxRuntimeEngine
from burnish.errors import CheckpointError
from burnish.files import folder, model_file
from burnish.files.identity import graph_hashes, program_hash
from burnish.files.state_file import write_state_file
from burnish.graph import Builder
from burnish.program import GRAPH_NAMES, Program, Signature
from files.stamping import write_manifest
from oracles.open_program import open_program
from oracles.tiny_program import tiny_batch, tiny_program

FILES = {*(f"{name}.onnx" for name in GRAPH_NAMES), "program.json", "state.safetensors"}


@pytest.fixture(scope="module")
def program():
    return tiny_program()


@pytest.fixture(scope="module")
def saved_once(program, tmp_path_factory):
    return program.save(tmp_path_factory.mktemp("saved") / "program")


@pytest.fixture
def saved(saved_once, tmp_path):
    """A copy of the saved program that a test may damage."""
    return shutil.copytree(saved_once, tmp_path / "program")


def identity(program):
    return program_hash(graph_hashes(program), program.signature)


def edit_manifest(directory, change):
    path = directory / "program.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    write_manifest(path, manifest)


def refused(directory, message):
    with pytest.raises(CheckpointError, match=message):
        Program.load(directory)


def test_a_loaded_program_is_the_saved_one(program, saved):
    loaded = Program.load(str(saved))
    assert set(os.listdir(saved)) == FILES
    assert loaded.signature == program.signature
    assert loaded.options == program.options
    assert identity(loaded) == identity(program)
    stated = json.loads((saved / "program.json").read_text())["identity"]
    assert stated == {"program": identity(loaded), "graphs": graph_hashes(loaded)}
    for name, array in program.weights.items():
        assert loaded.weights[name].tobytes() == array.tobytes()
    engine = OnnxRuntimeEngine()
    batch = {**tiny_batch(), "lr": np.float32(0.1)}
    runners = [open_program(engine, p, p.initial_state(0), threads=1) for p in (program, loaded)]
    for _ in range(2):
        first, second = (runner.step(batch) for runner in runners)
        assert first["loss"].tobytes() == second["loss"].tobytes()


def test_every_graph_is_a_plain_onnx_file(saved):
    for name in GRAPH_NAMES:
        onnx.checker.check_model(saved / f"{name}.onnx", full_check=True)


def test_the_signature_survives_as_json(program):
    assert Signature.from_dict(json.loads(json.dumps(program.signature.to_dict()))) == program.signature


def test_the_identity_of_a_program_is_that_of_its_graphs(program):
    assert identity(tiny_program(seed=1)) == identity(program)
    other = tiny_program()
    node = next(node for node in other.evaluate.graph if node.op_type == "ArgMax")
    node.doc_string, node.metadata_props["note"] = "documentation", "is no part of it"
    assert identity(other) == identity(program)
    node.attributes["select_last_index"] = ir.AttrInt64("select_last_index", 1)
    assert identity(other) != identity(program)
    assert identity(tiny_program(ir.DataType.DOUBLE)) != identity(program)


def test_saving_again_replaces_the_program(program, saved):
    wide = tiny_program(ir.DataType.DOUBLE)
    wide.save(saved)
    assert identity(Program.load(saved)) == identity(wide)
    assert os.listdir(saved.parent) == ["program"]


def test_an_empty_folder_is_used(program, tmp_path):
    (tmp_path / "empty").mkdir()
    assert identity(Program.load(program.save(tmp_path / "empty"))) == identity(program)
    assert Program.load(program.save(tmp_path / "new" / "folder"))


def test_other_files_are_never_replaced(program, saved, tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("cat")
    with pytest.raises(CheckpointError, match=r"holds files that are not a saved program's \('cat\.jpg'\): .*folder of its own"):
        program.save(tmp_path / "photos")
    (saved / "last.safetensors").write_text("mine")
    with pytest.raises(CheckpointError, match=r"\('last\.safetensors'\): save the program into a folder of its own"):
        program.save(saved)
    assert (saved / "last.safetensors").read_text() == "mine"
    with pytest.raises(CheckpointError, match=r"step\.onnx' is a file that is no saved program, and is not replaced"):
        program.save(saved / "step.onnx")
    with pytest.raises(CheckpointError, match=r"is a file; a program is saved as a folder"):
        program.save(saved / "state.safetensors")


@pytest.mark.parametrize("function", ["fsync", "rename"])
def test_a_save_that_fails_keeps_the_earlier_program(program, saved, monkeypatch, function):
    content = {path.name: path.read_bytes() for path in saved.iterdir()}

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, function, fail)
    monkeypatch.setattr(folder, "exchange", lambda *_: False)
    with pytest.raises(CheckpointError, match=r"could not be .*No space left on device"):
        tiny_program(ir.DataType.DOUBLE).save(saved)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == content
    assert os.listdir(saved.parent) == ["program"]


def test_a_save_removes_what_killed_processes_left(program, saved):
    for name in (".program.0123abcd.partial", ".program.0123abcd.earlier", ".other.0123abcd.partial"):
        shutil.copytree(saved, saved.parent / name)
    program.save(saved)
    assert set(os.listdir(saved.parent)) == {"program", ".other.0123abcd.partial"}


def test_the_earlier_program_comes_back_when_the_new_one_cannot_be_put_in_place(program, saved, monkeypatch):
    rename = os.rename

    def fail_for_new(source, target):
        if str(source).endswith(".partial"):
            raise PermissionError(13, "Permission denied")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail_for_new)
    monkeypatch.setattr(folder, "exchange", lambda *_: False)
    with pytest.raises(CheckpointError, match=r"could not be saved in .*Permission denied.*What was there is untouched"):
        tiny_program(ir.DataType.DOUBLE).save(saved)
    assert identity(Program.load(saved)) == identity(program)
    assert os.listdir(saved.parent) == ["program"]


def killed_between_renames(program, directory):
    """Save over a program in a process that dies when the earlier program has stepped aside."""
    child = os.fork()
    if not child:
        folder.exchange = lambda *_: False
        rename = os.rename
        os.rename = lambda source, target: rename(source, target) if target.suffix == ".earlier" else os._exit(9)
        program.save(directory)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def test_a_program_is_found_when_the_process_that_replaces_it_is_killed(program, saved):
    killed_between_renames(tiny_program(ir.DataType.DOUBLE), saved)
    assert not saved.exists()
    assert identity(Program.load(saved)) == identity(program)
    program.save(saved)
    assert os.listdir(saved.parent) == ["program"]


def test_a_save_keeps_the_program_that_it_could_not_find(program, saved):
    killed_between_renames(program, saved)
    wide = tiny_program(ir.DataType.DOUBLE)
    wide.save(saved)
    assert identity(Program.load(saved)) == identity(wide)
    assert os.listdir(saved.parent) == ["program"]


def test_a_folder_that_is_no_program_is_named(tmp_path):
    refused(tmp_path / "none", r"'.*none' is not a saved program: it has no program\.json")
    refused(tmp_path, r"is not a saved program")


@pytest.mark.parametrize("name", sorted(FILES - {"program.json"}))
def test_a_missing_file_is_named(saved, name):
    (saved / name).unlink()
    refused(saved, rf"is not a whole saved program: {name} is missing\. Save the program again, or use another copy")


@pytest.mark.parametrize("name", sorted(FILES - {"program.json"}))
def test_a_truncated_file_is_named(saved, name):
    path = saved / name
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-5])
    refused(saved, rf"{name} has {size - 5} bytes, and {size} were written")


def test_a_changed_file_is_named(saved):
    path = saved / "step.onnx"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    refused(saved, r"step\.onnx has changed since it was written")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"format": "recipe", "version": 3}', '{"format": "burnish program"}'])
def test_a_damaged_manifest_is_named(saved, content):
    (saved / "program.json").write_text(content)
    refused(saved, r"program\.json cannot be read as one")


def test_a_truncated_manifest_is_named(saved):
    path = saved / "program.json"
    path.write_text(path.read_text()[:400])
    refused(saved, r"program\.json cannot be read as one")


def test_a_newer_format_is_named(saved):
    edit_manifest(saved, lambda manifest: manifest.update(version=4))
    refused(saved, r"is of format version 4, and this burnish reads version 3: update burnish")


def test_an_older_format_is_named_and_made_again_in_its_place(program, saved):
    edit_manifest(saved, lambda manifest: manifest.update(version=2))
    refused(saved, r"of format version 2, and this burnish reads version 3: make it again .* burnish compile MODEL -o .*program$")
    program.save(saved)
    assert identity(Program.load(saved)) == identity(program)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.pop("signature"), r"program\.json has no 'signature'"),
        (lambda m: m["signature"].pop("grad"), r"has graphs .*expected"),
        (lambda m: m["signature"]["step"]["inputs"][0].update(role="guest"), r"the signature in program\.json cannot be read"),
        (lambda m: m["signature"]["step"]["inputs"][0].update(dtype="FLOAT7"), r"the signature in program\.json cannot be read"),
        (
            lambda m: m["signature"]["step"]["inputs"][0].update(shape=None),
            r"the signature in .* cannot be read: .*shape=None",
        ),
        (
            lambda m: m["signature"]["init"]["outputs"][0].update(shape=None),
            r"the signature in .* cannot be read: .*shape=None",
        ),
        (lambda m: m["signature"].update(step=3), r"the signature in program\.json cannot be read"),
        (lambda m: m["files"].pop("grad.onnx"), r"program\.json does not list grad\.onnx"),
        (lambda m: m["files"].update({"step.onnx": 3}), r"step\.onnx has \d+ bytes, and an unknown number of were written"),
    ],
)
def test_a_manifest_that_does_not_fit_is_named(saved, change, message):
    edit_manifest(saved, change)
    refused(saved, message)


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "..", "inner/../../secret"])
def test_a_path_outside_the_folder_is_not_opened(saved, name):
    (saved.parent / "secret").write_text("secret")
    edit_manifest(saved, lambda manifest: manifest["files"].update({name: {"bytes": 6, "sha256": ""}}))
    refused(saved, r"names '.*', which lies outside the folder, and was not opened")


def test_a_link_out_of_the_folder_is_not_opened(saved):
    moved = saved.parent / "elsewhere.onnx"
    (saved / "step.onnx").rename(moved)
    (saved / "step.onnx").symlink_to(moved)
    refused(saved, r"names 'step\.onnx', which lies outside the folder")


def record(directory, name):
    """Record a file as it is now in the manifest."""
    path = directory / name
    values = {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    edit_manifest(directory, lambda manifest: manifest["files"].update({name: values}))


def test_a_file_that_is_no_model_is_named(saved):
    (saved / "step.onnx").write_bytes(b"\xff" * 100)
    record(saved, "step.onnx")
    refused(saved, r"step\.onnx cannot be read as an ONNX model")


def test_external_data_outside_the_folder_is_not_opened(saved):
    model = onnx.load(saved / "predict.onnx")
    (saved.parent / "secret").write_bytes(b"\0" * 16)
    tensor = onnx.numpy_helper.from_array(np.zeros(4, np.float32), "leak")
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", "../secret"), ("offset", "0"), ("length", "16")):
        tensor.external_data.add(key=key, value=value)
    model.graph.initializer.append(tensor)
    (saved / "predict.onnx").write_bytes(model.SerializeToString())
    record(saved, "predict.onnx")
    refused(saved, r"reads 'leak' from '\.\./secret', which is not a file of this program, and was not opened")


def test_weights_that_do_not_fit_the_signature_are_named(program, saved):
    weights = {**program.weights, "param/bias": np.zeros(5, np.float32)}
    write_state_file(saved / "state.safetensors", weights, {})
    record(saved, "state.safetensors")
    refused(saved, r"state\.safetensors' does not fit the program: 'param/bias' has shape \[5\], expected \[3\]")


def test_large_constants_go_into_a_file_of_their_own(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(model_file, "ONE_FILE_LIMIT", 1 << 10)
    program = tiny_program()
    table = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    graph = program.predict.graph
    first = graph[0]
    builder = Builder(graph, before=first)
    offset = builder.op("ReduceSum", builder.constant(table), builder.integers([0]), keepdims=0)
    first.replace_input_with(0, (builder.tensor(first.inputs[0]) + offset).value)
    x = tiny_batch()["x"]
    state = program.initial_state(0)
    expected = open_program(OnnxRuntimeEngine(), program, state, threads=1).predict({"x": x})["logits"]
    directory = program.save(tmp_path / "large")
    assert set(os.listdir(directory)) == {*FILES, "predict.data"}
    loaded = Program.load(directory)
    (directory / "predict.data").unlink()
    runner = open_program(OnnxRuntimeEngine(), loaded, state, threads=1)
    np.testing.assert_allclose(runner.predict({"x": x})["logits"], expected, rtol=1e-6)
    refused(directory, r"predict\.data is missing")
