"""Files whose values were changed, with their checksums: each is refused by name, and nothing else comes of it."""

from __future__ import annotations

import base64
import copy
import hashlib
import io
import json
import re
import shutil
import zipfile
import zlib

import numpy as np
import onnx
import onnx_ir as ir
import pyarrow
import pyarrow.parquet
import pytest

import burnish
from burnish.data import DataSpec, open_dataset
from burnish.errors import CheckpointError, DataError
from burnish.models import residual_network
from burnish.optim import schedules
from burnish.program import Program
from burnish.training import read_checkpoint, write_checkpoint
from files.stamping import write_manifest
from oracles.combinations import spread
from specs.program_inputs import classification


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """A saved program with rows that are held, and its folder."""
    optimizer = burnish.optim.sgd(lr=schedules.cosine(0.1, steps=20), momentum=0.9)
    model = residual_network((1, 4, 4), classes=3, width=2, blocks=(1,))
    compiled = burnish.compile(model, optimizer=optimizer, norm="ghost:2", hold_rows={"classifier.weight": [0]})
    return compiled.save(tmp_path_factory.mktemp("tampered") / "program")


def entry(manifest, graph, side, role):
    return next(entry for entry in manifest["signature"][graph][side] if entry["role"] == role)


CHANGES = {
    "a text for the smallest label": (lambda m: entry(m, "step", "inputs", "label").update(minimum="0"), "minimum='0'"),
    "a list for the largest label": (lambda m: entry(m, "evaluate", "inputs", "label").update(maximum=[2]), r"maximum=\[2\]"),
    "a number beyond 64 bits": (lambda m: entry(m, "step", "inputs", "label").update(ignored=10**30), "ignored=10{30}"),
    "a text for a rate": (lambda m: entry(m, "step", "outputs", "rate").update(default="a"), "default='a'"),
    "a number for a name": (lambda m: entry(m, "evaluate", "outputs", "metric").update(name=3.5), "name=3.5"),
    "an object in a shape": (lambda m: entry(m, "grad", "inputs", "parameter").update(shape=[{}]), "shape={}"),
    "a list for what is updated": (lambda m: entry(m, "step", "outputs", "parameter").update(updates=["a"]), r"updates=\['a'\]"),
    "a text for the end": (lambda m: m["signature"]["step"].update(end="20"), "end='20'"),
    "a group of none": (lambda m: m["signature"]["step"]["extents"][0].update(multiple=0), "multiple=0"),
    "another name": (
        lambda m: entry(m, "grad", "inputs", "parameter").update(name="param/other"),
        "the signature of the grad graph calls an input 'param/other' that the graph calls 'param/",
    ),
    "another shape": (
        lambda m: entry(m, "apply", "inputs", "parameter").update(shape=[1]),
        "the signature of the apply graph gives the input 'param/.*' another dtype or shape than the graph",
    ),
    "an input less": (lambda m: m["signature"]["predict"]["inputs"].pop(0), r"predict graph has \d+ inputs, and the graph \d+"),
    "an update of nothing": (
        lambda m: entry(m, "step", "outputs", "parameter").update(updates="param/other"),
        "says that 'next:param/.*' updates 'param/other', which is no state",
    ),
    "a number for the rows": (lambda m: m["options"]["hold_rows"].update({"classifier.weight": 1.5}), "option 'hold_rows' is"),
    "a text for a row": (lambda m: m["options"].update(hold_rows={"a": ["text"]}), "option 'hold_rows' is"),
    "a text for the predictions": (lambda m: m["options"].update(predictions="logits"), "option 'predictions' is 'logits'"),
    "a prediction of nothing": (lambda m: m["options"].update(predictions=[{}]), "option 'predictions' is"),
    "an unknown target": (lambda m: m["options"].update(target=["a"]), r"option 'target' is \['a'\], which no compilation"),
    "no name of a loss": (lambda m: m["options"].update(loss=1), "option 'loss' is 1"),
    "a text for the metrics": (lambda m: m["options"].update(metrics=7), "option 'metrics' is 7"),
}


@spread("change", CHANGES, test=6)
def test_programs(program, tmp_path, change):
    apply, message = CHANGES[change]
    shutil.copytree(program, tmp_path / "changed")
    manifest = json.loads((program / "program.json").read_text())
    apply(manifest)
    write_manifest(tmp_path / "changed" / "program.json", manifest)
    with pytest.raises(CheckpointError, match=rf"is not a whole saved program: .*{message}"):
        Program.load(tmp_path / "changed")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensor: tensor.dims.__setitem__(slice(None), [2**63 - 1]), "cannot reshape array"),
        (lambda tensor: setattr(tensor, "data_type", 99), "99 is not a valid DataType"),
        (lambda tensor: setattr(tensor, "data_type", 0), "Bitwidth not available"),
    ],
)
def test_a_graph_with_a_damaged_tensor(program, tmp_path, change, message):
    shutil.copytree(program, tmp_path / "changed")
    graph = onnx.load(tmp_path / "changed" / "evaluate.onnx", load_external_data=False)
    change(next(attribute.t for node in graph.graph.node for attribute in node.attribute if attribute.HasField("t")))
    content = graph.SerializeToString()
    (tmp_path / "changed" / "evaluate.onnx").write_bytes(content)
    manifest = json.loads((program / "program.json").read_text())
    manifest["files"]["evaluate.onnx"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    write_manifest(tmp_path / "changed" / "program.json", manifest)
    with pytest.raises(CheckpointError, match=rf"evaluate\.onnx holds a tensor that cannot be read: .*{message}"):
        Program.load(tmp_path / "changed")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda node: setattr(node, "op_type", "BitShift"), "'direction' is expected"),
        (lambda node: setattr(node.outputs[0], "name", "other"), "Unable to find output name 'opt/"),
    ],
)
def test_an_init_graph_that_cannot_be_run(program, change, message):
    changed = Program.load(program)
    change(next(node for node in changed.init.graph if node.op_type == "ConstantOfShape"))
    with pytest.raises(
        CheckpointError, match=rf"init graph of the program.* cannot be run: .*{message}.*compile the model again"
    ):
        changed.initial_state()


def test_an_init_graph_that_fills_more_than_the_state_holds(program):
    changed = Program.load(program)
    shape = next(node for node in changed.init.graph if node.op_type == "ConstantOfShape").inputs[0].producer()
    shape.attributes["value"] = ir.AttrTensor("value", ir.tensor(np.array([2, 2**31 - 1])))
    with pytest.raises(
        CheckpointError, match=r"The init graph .* makes 'opt/.*' of shape \[2, 2147483647\], and the state has \["
    ):
        changed.initial_state()


@pytest.mark.slow
def test_an_unchanged_program_is_read(program, tmp_path):
    Program.load(program).save(tmp_path / "program.onnx")
    before, after = (Program.load(path).initial_state() for path in (program, tmp_path / "program.onnx"))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def archive(header: bytes | None = None, compression: int = zipfile.ZIP_STORED, **shown) -> bytes:
    """An archive with ``x`` of 3 x 2 and ``y``; the header of ``x`` as given, or of another shape or dtype."""
    x = io.BytesIO()
    described = {"descr": "<f4", "fortran_order": False, "shape": (3, 2), **shown}
    np.lib.format.write_array_header_1_0(x, described)
    start = x.getvalue() if header is None else header
    y = io.BytesIO()
    np.save(y, np.zeros(3, np.int64))
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as written:
        written.writestr("x.npy", start + np.zeros((3, 2), np.float32).tobytes())
        written.writestr("y.npy", y.getvalue())
    return file.getvalue()


def claiming(size: int) -> bytes:
    """An archive of zeros whose directory and header agree on a size that deflate cannot reach."""
    content = bytearray(archive(compression=zipfile.ZIP_DEFLATED, shape=(size // 4,)))
    directory = content.rindex(b"PK\x01\x02", 0, content.index(b"y.npy", content.index(b"PK\x01\x02")) - 40)
    content[directory + 24 : directory + 28] = (128 + size).to_bytes(4, "little")
    return bytes(content)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            archive(shape=(200_000_000_000, 2)),
            r"the header of 'x' claims 1,490\.12 GiB, shape \[200000000000, 2\] of float32, and 24",
        ),
        (claiming(2**31), r"the header of 'x' claims 2\.00 GiB, .* bytes can be there"),
        (archive(shape=(-3, 2)), r"the header of 'x' claims -24 bytes"),
        (archive(shape=(-3, -2)), r"the header of 'x' claims 24 bytes, shape \[-3, -2\]"),
        (archive(shape=(3, 3)), "the header of 'x' claims 36 bytes"),
        (archive(descr="|O"), "holds Python objects, or is no .npz file"),
        (archive(b"no array at all"), "damaged, or no .npz file"),
        (archive(b"\x93NUMPY\x03\x00\x00\x00\x00\x00"), r"'x' is of version 3\.0 of the format"),
        (archive(b"\x93NUMPY\x01\x00\x08\x00" + b"((((((((" * 1), "damaged, or no .npz file"),
    ],
)
def test_archives(tmp_path, content, message):
    (tmp_path / "data.npz").write_bytes(content)
    with pytest.raises(DataError, match=rf"data\.npz: .*{message}"):
        open_dataset(tmp_path / "data.npz", classification(2))


def test_an_encrypted_archive(tmp_path):
    content = bytearray(archive())
    for mark, offset in ((b"PK\x01\x02", 8), (b"PK\x03\x04", 6)):
        content[content.index(mark) + offset] |= 1
    (tmp_path / "data.npz").write_bytes(bytes(content))
    with pytest.raises(DataError, match="the array 'x' is encrypted"):
        open_dataset(tmp_path / "data.npz", classification(2))


DAMAGED_STATISTICS = """
eNqVVM1u00AQnnVc40SRSCvWsqUcfEhXBbWFIiVCqJWyTkIakUISqaBIXOwQJRVNkzqF9MChQhw48wCceAgeAnFAHDn2xIEzR3bWfzQpiI6snfH8fN/Mju
wW72xRlZbprSbVKawA2AAlAlBOXy/kyiDFLFOgN6i5LlJyVKNa3tSjSGTBmQFrc15Rfra8LIxMQRGnTpTUOUi2ezGbSiBNQElfK0MqRFJDjaTFC6RRxNRJ
aCHpovcyUtF/UygkzRQw0cfDEyQr1EhISrBGfJN4EiJtBxAklRGlNi1ECLntkAlI0uwFnKSZ+IZks4veOSaNqtazIpjatDfsj1yqAxWTmMQVQ6wK7QHNCq
2+ODh6vgrNPHJjYOnQ9fqHYOhW3moyyNOMVQQtZ4lKqhi68ZMY3wl7xPT/XB4Ey7PWcWSq4IA5obZvahYDzEAONeLwIo4fhH1S2Dm52rb+zZINWeTMkui1
8ZawNyr7kvpzYQso4jIu6za4Kgn0mRjfCHu/xL6qV1vZ3zs2PmqGznTjgwZW3szyTufx0/vBMs1fym2UU+5wzts8kIecz7gz4A84H/DKQPockbCHRoXzhn
QkOiytzNBy8ajKohoevZbAx0i7IfHrcX4gDpr102F39GSK78dRPtILGcf1+7Jod75egp5MvFE7eq8F8eoejiZdQxnqJf0mpV3Z6oBX5Tw9nC+UgF+A7WNc
3Mcu3oskj0FqVTmkk8zLoyruCNYu4tVRB9II9c4OmPbE9Y9f9k82epPJhuv745n9qu9PD8ZH9t3S5p3NLQs/pviBd+J/1BK/x9+De743
"""
"""A table whose numbers of missing values have a length that does not fit, compressed, in base64: pyarrow ends the process."""


def test_a_table_whose_statistics_are_damaged(tmp_path):
    (tmp_path / "data.parquet").write_bytes(zlib.decompress(base64.b64decode(DAMAGED_STATISTICS)))
    with pytest.raises(DataError, match=r"data\.parquet: damaged, or no Parquet file \(Definition level histogram size mismatch"):
        open_dataset(tmp_path / "data.parquet", classification(2), label="label")


def test_a_table_whose_column_has_no_name_in_utf8(tmp_path):
    path = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"column": [1.0, 2.0], "label": [0, 1]}), path, store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"column", b"\xff\xfflumn"))
    with pytest.raises(DataError, match=r"data\.parquet: damaged, or no Parquet file \(.*utf-8"):
        open_dataset(path, classification(2), label="label")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    program = burnish.compile(residual_network((1, 4, 4), classes=3, width=2, blocks=(1,)))
    data = {"x": np.zeros((6, 1, 4, 4), np.float32), "labels": np.arange(6) % 3}
    burnish.Trainer(program, data, batch_size=3, run_directory=folder, progress=False).run()
    return program, data, folder


@spread(
    ("name", "value"),
    [
        ("epoch", "text"),
        ("batch", {"a": 1}),
        ("step", ["a"]),
        ("samples", -1),
        ("seconds", []),
        ("rate", "fast"),
        ("unheeded", 1.5),
        ("metrics", 3.5),
        ("metrics", {"loss": "low"}),
        ("best", True),
        ("best", {"epoch": 1, "metric": "loss", "value": []}),
        ("since_row", {"samples": True, "sums": {}}),
        ("since_epoch", {"samples": {}, "sums": {"loss": 1.0}}),
        ("course", []),
        ("course", "text"),
    ],
    test=6,
)
def test_positions_of_a_run(run, tmp_path, name, value):
    program, data, folder = run
    shutil.copytree(folder, tmp_path / "run")
    path = tmp_path / "run" / "checkpoints" / "latest.safetensors"
    checkpoint = read_checkpoint(path)
    extra = copy.deepcopy(checkpoint.extra)
    (extra if name == "course" else extra["position"])[name] = value
    write_checkpoint(
        path, checkpoint.state, step=checkpoint.step, identity=checkpoint.identity, engine=checkpoint.engine, extra=extra
    )
    with pytest.raises(CheckpointError, match=rf"{re.escape(str(path))}' was not written by a Trainer|was started with"):
        burnish.Trainer(program, data, batch_size=3, epochs=2, run_directory=tmp_path / "run", progress=False, resume=True)


def test_wanted_of_a_program_that_was_read(program):
    assert DataSpec.by(Program.load(program)).label is not None
