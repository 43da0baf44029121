"""Folders and files that were made to harm: the C client refuses them, under sanitizers, and reads nothing outside."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
from pathlib import Path

import c_library
import fuzz_c
import onnx
import programs
import pytest
from onnx import TensorProto

reason = c_library.missing()
pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))


def hostile_folders(good: Path, root: Path) -> list[Path]:
    """Copies of a program's folder, each broken in another way; hashes of what is read are right where that lets more be read."""
    manifest = (good / "program.json").read_text()
    texts = {
        "empty": "",
        "truncated": manifest[: len(manifest) // 2],
        "deep": "[" * 100_000,
        "deep_object": '{"a":' * 40 + "1" + "}" * 40,
        "many": "[" + "1," * 3_000_000 + "1]",
        "nan": manifest.replace('"version": 3', '"version": NaN'),
        "infinite": manifest.replace('"version": 3', '"version": 1e999'),
        "older": manifest.replace('"version": 3', '"version": 2'),
        "newer": manifest.replace('"version": 3', '"version": 4'),
        "no_base": manifest.replace('"base": []', '"base": {}'),
        "foreign_base": manifest.replace('"base": []', '"base": ["param/none"]'),
        "changing_base": manifest.replace('"base": []', '"base": ["param/head.bias"]'),
        "anonymous": manifest.replace('"identity"', '"nobody"'),
        "null_name": manifest.replace('"name": "x"', '"name": null'),
        "zero_byte": manifest.replace('"name": "x"', '"name": "x\\u0000y"'),
        "lone_surrogate": manifest.replace('"name": "x"', '"name": "\\ud800"'),
        "bad_escape": manifest.replace('"name": "x"', '"name": "\\'),
        "no_rank": manifest.replace('"shape": [', '"shapes": ['),
        "negative": manifest.replace('"shape": [\n', '"shape": [\n -5,\n'),
        "huge_extent": manifest.replace('     5\n', '     9223372036854775807\n'),
        "many_axes": manifest.replace('"shape": [\n', '"shape": [\n' + " 1,\n" * 9),
        "other_dtype": manifest.replace('"dtype": "FLOAT"', '"dtype": "STRING"'),
        "unknown_role": manifest.replace('"role": "label"', '"role": "surprise"'),
        "text_axis": manifest.replace('"role": "label"', '"role": "label", "sample_axis": "1"'),
        "far_axis": manifest.replace('"role": "label"', '"role": "label", "sample_axis": 3'),
        "wrong_updates": manifest.replace('"updates": "step"', '"updates": "rng/key"'),
        "no_files": manifest.replace('"files": {', '"files": [], "rest": {'),
        "huge_file": manifest.replace('"bytes": ', '"bytes": 99999999999999'),
        "other_hash": manifest.replace('"sha256": "', '"sha256": "00'),
    }  # fmt: skip
    folders = []
    for name, text in texts.items():
        assert text != manifest, name
        (root / name).mkdir(parents=True)
        for file in good.iterdir():
            (root / name / file.name).symlink_to(file)
        (root / name / "program.json").unlink()
        (root / name / "program.json").write_bytes(c_library.restamped(text.encode()))
        folders.append(root / name)
    state = (good / "state.safetensors").read_bytes()
    for name, changed in {
        "state_short": state[:-100],
        "state_stub": state[:4],
        "state_header": b"\xff" * 7 + b"\x7f" + state[8:],
        "state_offsets": state.replace(b'"data_offsets":[0,', b'"data_offsets":[9,'),
        "state_elsewhere": state.replace(b'"data_offsets":[0,', b'"data_offsets":[-1,'),
    }.items():
        assert changed != state, name
        folders.append(with_file(good, root / name, "state.safetensors", changed))
    step = (good / "step.onnx").read_bytes()
    init = (good / "init.onnx").read_bytes()
    folders += [with_file(good, root / "init_short", "init.onnx", init[: len(init) // 2])]
    folders += [with_file(good, root / "init_is_step", "init.onnx", step)]
    predict = (good / "predict.onnx").read_bytes()
    folders += [with_file(good, root / "predict_short", "predict.onnx", predict[:-20])]
    folders += [with_file(good, root / "predict_nested", "predict.onnx", nested_graphs(30))]
    return folders


def nested_graphs(depth: int) -> bytes:
    """A model whose graph has a node with a graph as an attribute, which has a node, and so on."""
    graph = onnx.GraphProto()
    for _ in range(depth):
        outer = onnx.GraphProto()
        attribute = outer.node.add(op_type="If").attribute.add(name="then_branch", type=onnx.AttributeProto.GRAPH)
        attribute.g.CopyFrom(graph)
        graph = outer
    return onnx.ModelProto(graph=graph).SerializeToString()


def with_file(good: Path, folder: Path, name: str, content: bytes) -> Path:
    """A copy with another file in it, whose size and hash the manifest states rightly."""
    folder.mkdir(parents=True)
    for file in good.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / name).unlink()
    (folder / name).write_bytes(content)
    manifest = json.loads((good / "program.json").read_text())
    manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "program.json").unlink()
    (folder / "program.json").write_bytes(c_library.restamped(json.dumps(manifest).encode()))
    return folder


@pytest.mark.slow
def test_hostile_folders_and_files_are_statuses_under_sanitizers(folder, tmp_path, session) -> None:
    opener = c_library.build(tmp_path, "open_all", Path(__file__).with_name("open_all.c"), flags=c_library.SANITIZED)
    good = folder("dropout")
    folders = hostile_folders(good, tmp_path / "hostile")
    session.save(tmp_path / "good.safetensors")
    content = (tmp_path / "good.safetensors").read_bytes()
    generator = random.Random(2)
    length = int.from_bytes(content[:8], "little")
    for number in range(60):
        changed = bytearray(content[: generator.randrange(len(content))] if number % 3 == 0 else content)
        for _ in range(generator.randrange(1, 4)):
            changed[generator.randrange(min(len(changed), 8 + length))] = generator.randrange(256)
        (tmp_path / f"{number}.safetensors").write_bytes(c_library.restamped(bytes(changed)))
    files = [tmp_path / f"{number}.safetensors" for number in range(60)]
    command = [str(opener), str(good), *map(str, folders), str(tmp_path / "good.safetensors"), *map(str, files)]
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=1:allocator_may_return_null=1"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert run.returncode == 0, run.stderr[-3000:]
    statuses = run.stdout.splitlines()
    names = ["good", *(path.name for path in folders), "good file", *(path.name for path in files)]
    assert len(statuses) == len(names)
    outcome = dict(zip(names, statuses, strict=True))
    assert outcome.pop("good").strip() == outcome.pop("good file").strip() == "0"
    accepted = {name for name, status in outcome.items() if status.startswith("0")}
    assert {name for name in accepted if not name.endswith(".safetensors")} == set()
    for name, status in outcome.items():
        assert name in accepted or len(status) > 20, name


def test_a_file_outside_of_the_folder_is_not_read(client, folder, tmp_path) -> None:
    """Constants of a graph that name a file outside: ONNX Runtime does not open it, and the client reports it."""
    good = folder("dropout")
    model = onnx.load(good / "predict.onnx")
    (tmp_path / "secret.bin").write_bytes(b"\0" * 4096)
    tensor = TensorProto(name="secret", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="../secret.bin")
    model.graph.initializer.append(tensor)
    model.graph.node.append(onnx.helper.make_node("Identity", ["secret"], ["unused"]))
    opened = client.open(with_file(good, tmp_path / "program", "predict.onnx", model.SerializeToString()))
    batch = programs.program("dropout")[1]
    with pytest.raises(c_library.ClientError, match=r"EngineError: .*secret"):
        opened.predict(batch)
    opened.close()


@pytest.mark.slow
def test_parsers_take_broken_files_under_sanitizers(tmp_path) -> None:
    corpus = fuzz_c.write_corpus(tmp_path)
    for kind in fuzz_c.KINDS:
        assert fuzz_c.fuzz(tmp_path, corpus, kind, seconds=600, first=0, cases=500).startswith("500 cases, ")
