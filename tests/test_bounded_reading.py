"""Files that ask for far more memory than they have bytes, and what is no file: refused before anything is taken."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import resource
import struct
import zipfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import burnish
from burnish.data import DataSpec, open_dataset
from burnish.data.idx import read_idx
from burnish.data.tar_shards import shards_of
from burnish.errors import BurnishError, CheckpointError, ConfigurationError, DataError, ModelError
from burnish.targets import read_target
from burnish.untrusted_files import MEMORY_LIMIT

BOTH_NUMBERS = r"takes [\d,]{13,} bytes of memory, and a file of [\d,]+ bytes may take 1,073,741,824"
TABLE = "a,label\n"


def _model(nodes: list[onnx.NodeProto], **constants: object) -> bytes:
    """``y = x w + f``, where the nodes make ``z`` and ``f`` is its sum."""
    nodes = [
        *nodes,
        helper.make_node("ReduceSum", ["z"], ["sum"], keepdims=0),
        helper.make_node("Cast", ["sum"], ["f"], to=onnx.TensorProto.FLOAT),
        helper.make_node("MatMul", ["x", "w"], ["product"]),
        helper.make_node("Add", ["product", "f"], ["y"]),
    ]
    held = {"w": np.eye(4, dtype=np.float32), **{name: np.asarray(value) for name, value in constants.items()}}
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in held.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10).SerializeToString()


def _doubled(op_type: str, start: str, end: str, times: int, *operands: str, **attributes: int) -> list[onnx.NodeProto]:
    names = [start, *(f"{end}{time}" for time in range(1, times)), end]
    return [
        helper.make_node(op_type, [before, *(operands or (before,))], [after], **attributes) for before, after in pairwise(names)
    ]


@pytest.mark.parametrize(
    "content",
    [
        _model(_doubled("Concat", "ones", "z", 28, axis=0), ones=[1, 1, 1, 1]),
        _model(_doubled("Concat", "ones", "z", 28, axis=-1), ones=[1, 1, 1, 1]),
        _model([helper.make_node("Shape", ["x"], ["shape"]), *_doubled("Concat", "shape", "z", 30, axis=0)]),
        _model(_doubled("Tile", "ones", "z", 30, "two"), ones=[1], two=[2]),
        _model([helper.make_node("Expand", ["ones", "extent"], ["z"])], ones=[1], extent=[2**31]),
        _model([helper.make_node("ConstantOfShape", ["extent"], ["z"])], extent=[2**40]),
        _model([helper.make_node("Range", ["zero", "extent", "one"], ["z"])], zero=0, extent=2**29, one=1),
        _model([helper.make_node("Mul", ["column", "row"], ["z"])], column=np.ones((2**14, 1)), row=np.ones((1, 2**14))),
    ],
    ids=["Concat", "Concat -1", "Shape", "Tile", "Expand", "ConstantOfShape", "Range", "Mul"],
)
def test_a_constant_larger_than_a_file_may_take_is_refused_with_its_node(content: bytes) -> None:
    with pytest.raises(ModelError, match=f"is a constant: it {BOTH_NUMBERS}; if you trust it, set {MEMORY_LIMIT}"):
        burnish.compile(content, loss="mse")
    with pytest.raises(ModelError, match=f"is a constant: it {BOTH_NUMBERS}"):
        burnish.grad(content, "x")


def test_constants_that_are_kept_add_up() -> None:
    """Three arrays of 400 MB that are multiplied with what the input decides; then five, each of which the next is made of."""
    make, names = helper.make_node, ["x", "scaled0", "scaled1", "z"]
    fills = [make("ConstantOfShape", ["extents"], [f"part{i}"]) for i in range(3)]
    kept = [make("Mul", [before, f"part{i}"], [after]) for i, (before, after) in enumerate(pairwise(names))]
    with pytest.raises(ModelError, match=rf"keeps 3 values .* 'part0', output of ConstantOfShape.*: it {BOTH_NUMBERS}"):
        burnish.compile(_model([*fills, *kept], extents=[25_000_000, 4]), loss="mse")
    names = ["part0", "part1", "part2", "part3", "z"]
    chain = [make("Abs", [before], [after]) for before, after in pairwise(names)]
    burnish.compile(_model([fills[0], *chain], extents=[25_000_000, 4]), loss="mse")


def test_the_remedy_of_a_large_constant_works(monkeypatch: pytest.MonkeyPatch) -> None:
    content = _model([helper.make_node("ConstantOfShape", ["extent"], ["z"])], extent=[2**29])
    with pytest.raises(ModelError) as told:
        burnish.compile(content, loss="mse")
    monkeypatch.setenv(*str(told.value).rpartition(" ")[2].split("="))
    assert burnish.compile(content, loss="mse").signature["predict"].outputs[0].name == "y"


def test_a_vector_joined_many_times_is_no_shape() -> None:
    nodes = [helper.make_node("Shape", ["x"], ["shape"]), *_doubled("Concat", "shape", "extents", 18, axis=0)]
    with pytest.raises(ModelError, match=r"ConstantOfShape.* is given a shape of more than 256 axes"):
        burnish.load(_model([*nodes, helper.make_node("ConstantOfShape", ["extents"], ["z"])]))


def test_shapes_beside_features_that_are_joined_layer_after_layer_are_still_propagated() -> None:
    nodes = [
        *_doubled("Concat", "x", "wide", 10, axis=-1),
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Slice", ["shape", "one", "two"], ["columns"]),
        helper.make_node("Concat", ["minus", "columns"], ["target"], axis=0),
        helper.make_node("Reshape", ["wide", "target"], ["rows"]),
        helper.make_node("Relu", ["rows"], ["z"]),
    ]
    model = burnish.load(_model(nodes, one=[1], two=[2], minus=[-1]))
    relu = next(node for node in model.graph if node.op_type == "Relu")
    assert relu.outputs[0].shape is not None
    assert relu.outputs[0].shape[1] == 4


def _gathered(times: int, rank: int = 2) -> bytes:
    """A Gather of indices by themselves has twice their axes, less one."""
    return _model(_doubled("Gather", "indices", "z", times), indices=np.zeros((1,) * rank, np.int64))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "name", "axes"),
    [
        (_gathered(6), "z", "65"),
        (_model([helper.make_node("Reshape", ["x", "extents"], ["z"])], extents=[-1] + [1] * 999), "z", "1,000"),
        (_model([helper.make_node("Unsqueeze", ["x", "axes"], ["z"])], axes=range(1, 41)), "z", "42"),
        (
            _model(
                [
                    helper.make_node("Tile", ["one", "times"], ["extents"]),
                    helper.make_node("Expand", ["x", "extents"], ["z"]),
                ],
                one=[1],
                times=[40],
            ),
            "z",
            "40",
        ),
    ],
    ids=["Gather", "Reshape", "Unsqueeze", "Tile"],
)
def test_a_value_of_more_axes_than_arrays_have_is_refused(content: bytes, name: str, axes: str) -> None:
    with pytest.raises(ModelError, match=f"'{name}' would have {axes} axes, and arrays have 32 at most"):
        burnish.load(content)


def test_as_many_axes_as_arrays_have_are_read() -> None:
    model = burnish.load(_model([helper.make_node("Reshape", ["x", "extents"], ["z"])], extents=[-1] + [1] * 31))
    assert any(len(output.shape or ()) == 32 for node in model.graph for output in node.outputs)


@pytest.mark.slow
def test_shapes_that_take_too_much_memory_are_inferred_in_another_process_and_refused() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelError, match=r"inferring the shapes .* more than the 1,073,741,824 bytes of memory or the 60 s"):
        burnish.load(_gathered(30))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


OPEN = """<ir_version: 9, opset_import: ["": 18]> g (float[n,2,h,w] x) => (float[?,?,?,?] y) <float[2,2,1,1] v = {1,2,3,4}> {
    c = Conv (x, v) y = LpPool <kernel_shape = [%d, 1]> (c) }"""


def test_a_pooling_of_a_kernel_larger_than_memory_is_refused() -> None:
    for extent in (2**29, 2**31, 2**62):
        with pytest.raises(ModelError, match=rf"constant of the shape \[{extent}, 1\] of its kernel: it takes .* may take 1,0"):
            burnish.compile(onnx.parser.parse_model(OPEN % extent), loss="mse")


@pytest.mark.parametrize(
    "text",
    [
        "(float[n,4,1] x) => (float[?,?,?,?] y) <int64[2] i = {2147483648,2147483648}, int64[2] b = {2,2}, float[1] w = {1}> "
        "{ z = Mul (x, w) y = Col2Im (z, i, b) }",
        '(float[1048576,1048576] x) => (float[?] y) <float[1] w = {1}> { c = Mul (x, w) y = Einsum <equation = "ii->i"> (c) }',
        "(float[n,2147483648] x) => (float[?,?] y) <float[1] w = {1}, int64 one = {1}, int64 at = {0}> "
        "{ c = Mul (x, w) q = SplitToSequence <axis = 1> (c, one) y = SequenceAt (q, at) }",
    ],
    ids=["Col2Im", "Einsum", "SplitToSequence"],
)
def test_extents_of_billions_make_no_constants(text: str) -> None:
    """A runtime says whether there is room for such values."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with contextlib.suppress(BurnishError):
        burnish.compile(onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 18]> g {text}'), loss="mse")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


@pytest.mark.slow
def test_a_model_of_too_many_parts_is_refused_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    content = _model(_doubled("Add", "x", "z", 1000))
    monkeypatch.setattr("burnish.untrusted_files.LEAST", 1 << 20)
    with pytest.raises(
        ModelError, match=r"the bytes: the model has too many nodes, .* takes [\d,]+ bytes of memory, and a file of .* 1,048,576"
    ) as told:
        burnish.load(content)
    monkeypatch.setenv(*str(told.value).rpartition(" ")[2].split("="))
    burnish.load(content)


def test_a_dimension_with_a_long_name_is_refused() -> None:
    model = onnx.ModelProto.FromString(_model([helper.make_node("Identity", ["x"], ["z"])]))
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "b" * 1001
    with pytest.raises(ModelError, match="a dimension of 'x' has a name of 1,001 letters, and 1,000 are the most"):
        burnish.load(model)


@pytest.fixture
def little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a file may take 50 ms."""
    monkeypatch.setattr("burnish.untrusted_files.SECONDS", 0.05)


IN_TIME = r"takes more than 0 s, and a file of [\d,]+ bytes may take no longer; if you trust it, set .*=2GiB, for"


@pytest.mark.usefixtures("little_time")
def test_reading_a_model_for_too_long_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "long.onnx"
    path.write_bytes(_model([helper.make_node("Add", ["x", "x"], ["z0"]), *_doubled("Add", "z0", "z", 10_000)]))
    with pytest.raises(ModelError, match=rf"'.*long\.onnx': reading it {IN_TIME}"):
        burnish.load(path)


@pytest.fixture(scope="module")
def program() -> burnish.Program:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
        g (float[b,1] x) => (float[b,2] y) <float[1,2] w = {1,2}> { y = MatMul(x, w) }""")
    return burnish.compile(model, loss="cross_entropy", optimizer="sgd")


def _long_text(path: Path) -> None:
    path.write_text(TABLE + "x" * 100_000 + ",0\n" + "x,0\n" * 10_000, encoding="utf-8")


def _npz(path: Path) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (3 << 30,)})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        info = zipfile.ZipInfo("x.npy")
        info.compress_type = zipfile.ZIP_DEFLATED
        archive.writestr(info, header.getvalue() + bytes(8 << 20))
    content = path.read_bytes()
    size, claimed = len(header.getvalue()) + (8 << 20), len(header.getvalue()) + (3 << 30)
    packed = struct.unpack_from("<I", content, content.index(b"PK\1\2") + 20)[0]
    content = content.replace(struct.pack("<II", packed, size), struct.pack("<II", 4 << 20, claimed))
    path.write_bytes(content)


@pytest.mark.parametrize(("name", "write"), [("t.csv", _long_text), ("t.npz", _npz)])
def test_data_larger_than_their_file_may_take_are_refused(
    tmp_path: Path, program: burnish.Program, name: str, write: object
) -> None:
    write(tmp_path / name)  # type: ignore[operator]
    with pytest.raises(DataError, match=BOTH_NUMBERS):
        open_dataset(tmp_path / name, DataSpec.by(program))


@pytest.mark.slow
def test_reading_data_for_too_long_is_refused(tmp_path: Path, program: burnish.Program, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = DataSpec.by(program)
    (tmp_path / "t.csv").write_text(TABLE + "1,0\n" * 400_000)
    assert len(open_dataset(tmp_path / "t.csv", spec)) == 400_000
    monkeypatch.setattr("burnish.untrusted_files.SECONDS", 0.05)
    with pytest.raises(DataError, match=rf"t\.csv: reading it {IN_TIME}"):
        open_dataset(tmp_path / "t.csv", spec)


@pytest.mark.parametrize("numbers", ["0..99999999999", "0..1" + "0" * 30])
def test_a_sequence_of_more_archives_than_there_can_be_is_refused(numbers: str) -> None:
    with pytest.raises(DataError, match="a sequence of more than 100,000 archives"):
        shards_of(f"a{{{numbers}}}.tar")


def test_a_place_for_each_of_many_categories_is_refused(tmp_path: Path) -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
        g (float[b,n] x) => (float[b,2] y) <float[1,2] w = {1,2}> { s = ReduceSum <keepdims = 1> (x, a) y = MatMul(s, w) }""")
    model.graph.initializer.append(numpy_helper.from_array(np.array([1]), "a"))
    spec = DataSpec.by(burnish.compile(model, loss="cross_entropy", optimizer="sgd"))
    (tmp_path / "t.csv").write_text("a,b,label\n" + "".join(f"1,t{row},0\n" for row in range(20_000)))
    with pytest.raises(DataError, match=rf"t\.csv: 20,000 rows with a place for each of 20,000 categories .*: it {BOTH_NUMBERS}"):
        open_dataset(tmp_path / "t.csv", spec)


@pytest.mark.parametrize("texts", [False, True], ids=["numbers", "texts"])
def test_a_parquet_file_that_expands_is_refused(
    tmp_path: Path, program: burnish.Program, texts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("burnish.untrusted_files.LEAST", 1 << 22)
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path, rows = tmp_path / "t.parquet", 1_000_000
    if texts:
        column = pyarrow.DictionaryArray.from_arrays(np.zeros(rows // 10, np.int32), ["x" * 1000])
        parquet.write_table(pyarrow.table({"a": column, "label": np.zeros(rows // 10, np.int8)}), path)
    else:
        table = pyarrow.table({"a": np.zeros(rows, np.float32), "label": np.zeros(rows, np.int8)})
        parquet.write_table(table, path)
    with pytest.raises(
        DataError,
        match=r"larger than it looks: it takes [\d,]{9,} bytes of memory, and a .* may take 4,194,304",
    ):
        open_dataset(path, DataSpec.by(program))


def test_an_idx_file_that_expands_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("burnish.untrusted_files.LEAST", 1 << 20)
    path = tmp_path / "images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(b"\0\0\x08\3" + struct.pack(">3I", 1 << 12, 1 << 10, 1 << 10) + bytes(1 << 23)))
    with pytest.raises(DataError, match=r"takes [\d,]+ bytes of memory, and a file of [\d,]+ bytes may take 1,048,576"):
        read_idx(path)


LONG = "a" * 5000


@pytest.mark.parametrize(
    "given", ["pipe", "/dev/zero", LONG, f"{LONG}.csv", "a\0b.csv", "\ud800.csv", "a\0b", "\ud800"], ids=range(8)
)
def test_what_is_no_file_is_an_error_of_its_reader(tmp_path: Path, program: burnish.Program, given: str) -> None:
    path = tmp_path / given
    if given == "pipe":
        os.mkfifo(path)
    with pytest.raises(ModelError):
        burnish.load(path)
    with pytest.raises(DataError):
        open_dataset(path, DataSpec.by(program))
    for load in (burnish.Program.load, burnish.training.read_checkpoint, burnish.Session(program, engine="reference").restore):
        with pytest.raises((CheckpointError, ModelError)):
            load(path)
    with pytest.raises(DataError):
        read_idx(path)
    with pytest.raises(BurnishError):
        burnish.data.Text(tokenizer=path) and open_dataset(path, DataSpec.by(program), text=path)
    with pytest.raises(ConfigurationError):
        read_target(path)


def test_hostile_texts_in_a_manifest_are_checkpoint_errors(tmp_path: Path, program: burnish.Program) -> None:
    program.save(tmp_path / "program")
    manifest = tmp_path / "program" / "program.json"
    text = manifest.read_text(encoding="utf-8")
    version = json.loads(text)["version"]
    deep = "[" * 100_000 + "]" * 100_000
    hostile = [
        deep,
        text.replace(f'"version": {version}', '"version": 1e999', 1),
        text.replace('"signature"', '"options"', 1),
        "[]",
    ]
    for content in hostile:
        manifest.write_text(content, encoding="utf-8")
        with pytest.raises(CheckpointError, match=r"program\.json cannot be read"):
            burnish.Program.load(tmp_path / "program")
