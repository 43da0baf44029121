"""Constants in a file beside the model are found by whatever runs the model, wherever the file or the process goes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import burnish
from burnish.engines import Engine
from burnish.errors import ModelError
from burnish.files.identity import graph_hash
from burnish.importer import FileTensor, load
from burnish.importer import file_tensors as external_data
from oracles.standard_operators import STANDARD

RANDOM = np.random.default_rng(0)
POSITIONS = np.arange(4096, dtype=np.int64)
TABLE = RANDOM.permutation(20_000).astype(np.int32)
MASK = (RANDOM.random((300, 300)) > 0.5).astype(np.float32)
SMALL = RANDOM.normal(size=(3, 40)).astype(np.float32)
LARGE = RANDOM.normal(size=(40, 500)).astype(np.float32)
ENGINES = ("onnxruntime", "torch", "reference")
DATA = "weights.data"

needs_open_files = pytest.mark.skipif(not hasattr(os, "preadv"), reason="an open file cannot be replaced here")


def constant(name: str, array: np.ndarray) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array, f"{name}_value"))


def value(name: str, dtype: int = TensorProto.FLOAT, shape: list[int | str] | None = None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def body(name: str, nodes: list[onnx.NodeProto], initializers: list[onnx.TensorProto], **outputs: int) -> onnx.GraphProto:
    return helper.make_graph(nodes, name, [], [value(name, dtype, None) for name, dtype in outputs.items()], initializers)


def model() -> onnx.ModelProto:
    """Constants as initializers and in Constant nodes, of a function, of a branch that is not decided, and of a loop's body."""
    take = helper.make_function(
        "local",
        "Take",
        ["indices"],
        ["taken"],
        [
            constant("table", TABLE),
            helper.make_node("Gather", ["table", "indices"], ["found"]),
            helper.make_node("Cast", ["found"], ["taken"], to=TensorProto.FLOAT),
        ],
        [helper.make_opsetid("", 18)],
    )
    divided = body(
        "divided",
        [
            helper.make_node("Cast", ["kept"], ["kept_floating"], to=TensorProto.FLOAT),
            helper.make_node("ReduceMax", ["kept_floating"], ["most"], keepdims=0),
            helper.make_node("Div", ["x", "most"], ["divided_x"]),
        ],
        [numpy_helper.from_array(TABLE, "kept")],
        divided_x=TensorProto.FLOAT,
    )
    shifted = body(
        "shifted",
        [
            constant("shift", MASK),
            helper.make_node("ReduceMean", ["shift", "shift_axes"], ["mean"], keepdims=0),
            helper.make_node("Add", ["x", "mean"], ["shifted_x"]),
        ],
        [numpy_helper.from_array(np.array([0]), "shift_axes")],
        shifted_x=TensorProto.FLOAT,
    )
    loop = helper.make_graph(
        [
            constant("steps", POSITIONS),
            helper.make_node("Gather", ["steps", "iteration"], ["position"]),
            helper.make_node("Cast", ["position"], ["floating"], to=TensorProto.FLOAT),
            helper.make_node("Add", ["carried", "floating"], ["next"]),
            helper.make_node("Identity", ["condition"], ["go_on"]),
        ],
        "loop",
        [
            value("iteration", TensorProto.INT64, []),
            value("condition", TensorProto.BOOL, []),
            value("carried", shape=["batch", 1]),
        ],
        [value("go_on", TensorProto.BOOL, []), value("next", shape=["batch", 1])],
    )
    nodes = [
        helper.make_node("If", ["flag"], ["chosen"], then_branch=divided, else_branch=shifted),
        helper.make_node("Gather", ["chosen", "first"], ["narrow"], axis=1),
        helper.make_node("MatMul", ["narrow", "small"], ["hidden"]),
        helper.make_node("MatMul", ["hidden", "large"], ["wide"]),
        helper.make_node("Take", ["ids"], ["drawn"], domain="local"),
        helper.make_node("ReduceSum", ["drawn", "last"], ["total"], keepdims=1),
        helper.make_node("Loop", ["count", "", "total"], ["looped"], body=loop),
        helper.make_node("Log", ["looped"], ["logarithm"]),
        helper.make_node("Add", ["wide", "logarithm"], ["offset"]),
        constant("scores", MASK),
        helper.make_node("ReduceMean", ["scores"], ["score"], keepdims=0),
        helper.make_node("Add", ["offset", "score"], ["logits"]),
    ]
    initializers = {
        "small": SMALL,
        "large": LARGE,
        "first": POSITIONS[:3],
        "last": np.array([1]),
        "count": np.array(2),
    }
    graph = helper.make_graph(
        nodes,
        "g",
        [
            value("x", shape=["batch", 300]),
            value("ids", TensorProto.INT64, ["batch", 5]),
            value("flag", TensorProto.BOOL, []),
        ],
        [value("logits", shape=["batch", 500])],
        [numpy_helper.from_array(array, name) for name, array in initializers.items()],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("local", 1)]
    return helper.make_model(graph, opset_imports=opsets, functions=[take], ir_version=9)


def tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor of a model, in functions and bodies too."""

    def of_graph(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
        yield from graph.initializer
        yield from of_nodes(graph.node)

    def of_nodes(nodes: object) -> Iterator[onnx.TensorProto]:
        for node in nodes:  # type: ignore[attr-defined]
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    yield attribute.t
                if attribute.HasField("g"):
                    yield from of_graph(attribute.g)

    yield from of_graph(proto.graph)
    for function in proto.functions:
        yield from of_nodes(function.node)


def move_out(proto: onnx.ModelProto, folder: Path) -> None:
    """Move the data of every tensor with a dimension into one file in ``folder``."""
    content = bytearray()
    for tensor in tensors(proto):
        if not tensor.dims:
            continue
        data = numpy_helper.to_array(tensor).tobytes()
        tensor.data_location = TensorProto.EXTERNAL
        for key, entry in (("location", DATA), ("offset", str(len(content))), ("length", str(len(data)))):
            tensor.external_data.add(key=key, value=entry)
        tensor.ClearField("raw_data")
        content += data
    (folder / DATA).write_bytes(content)


def write(folder: Path) -> Path:
    folder.mkdir()
    proto = model()
    move_out(proto, folder)
    path = folder / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


def batch(flag: bool) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    return {
        "x": random.normal(size=(2, 300)).astype(np.float32),
        "ids": random.integers(0, len(TABLE), size=(2, 5)),
        "flag": np.array(flag),
        "labels": np.array([3, 7]),
    }


class MovedAway:
    """A model in a folder that is moved when the model has been read, by a relative path, and a process that goes elsewhere."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self._folder, self._monkeypatch = folder, monkeypatch
        write(folder / "source")
        (folder / "elsewhere").mkdir()
        monkeypatch.chdir(folder)
        self.path = Path("source", "model.onnx")

    def leave(self) -> None:
        (self._folder / "source").rename(self._folder / "moved")
        self._monkeypatch.chdir(self._folder / "elsewhere")


@pytest.fixture
def moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MovedAway:
    return MovedAway(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def expected() -> burnish.Program:
    """The program of the same model with its data in it."""
    return burnish.compile(model())


def assert_same(program: burnish.Program, expected: burnish.Program, engine: str | Engine) -> None:
    """Check that two programs train, evaluate and predict alike, bit for bit."""
    first, second = (burnish.Session(it, engine, threads=1) for it in (program, expected))
    for flag in (True, False):
        assert first.step(batch(flag)) == second.step(batch(flag))
        assert first.evaluate(batch(flag)) == second.evaluate(batch(flag))
        outputs = second.predict(batch(flag))
        for name, array in first.predict(batch(flag)).items():
            np.testing.assert_array_equal(array, outputs[name])
    state = second.state()
    for name, array in first.state().items():
        np.testing.assert_array_equal(array, state[name])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_session_finds_constants_of_a_file_that_was_moved(moved: MovedAway, expected: burnish.Program, engine: str) -> None:
    program = burnish.compile(moved.path)
    moved.leave()
    assert_same(program, expected, engine)


def test_an_exported_model_holds_its_constants(moved: MovedAway, expected: burnish.Program) -> None:
    program = burnish.compile(moved.path)
    moved.leave()
    for name, exported in (("first.onnx", program), ("second.onnx", expected)):
        burnish.Session(exported).export(name)
    assert graph_hash(ir.load("first.onnx")) == graph_hash(ir.load("second.onnx"))


@pytest.mark.slow
def test_a_loaded_model_finds_its_constants(moved: MovedAway, expected: burnish.Program) -> None:
    loaded = load(moved.path)
    moved.leave()
    assert graph_hash(loaded) == graph_hash(load(model()))
    assert_same(burnish.compile(loaded), expected, "onnxruntime")


def test_an_ir_model_finds_its_constants(moved: MovedAway, expected: burnish.Program) -> None:
    source = ir.load(moved.path)
    for function in source.functions.values():  # onnx_ir does not say where these are from
        for node in function:
            if node.op_type == "Constant":
                node.attributes["value"].as_tensor().base_dir = "source"  # type: ignore[attr-defined]
    program = burnish.compile(source)
    moved.leave()
    assert_same(program, expected, "onnxruntime")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["program", "program.onnx"])
def test_saved_programs_hold_their_constants(moved: MovedAway, expected: burnish.Program, name: str) -> None:
    program = burnish.compile(moved.path)
    moved.leave()
    program.save(name)
    for path in Path("..", "moved").iterdir():
        path.unlink()
    # One file holds the step in standard operators, in which an engine puts fewer kernels.
    assert_same(burnish.Program.load(name), expected, STANDARD)


@pytest.mark.slow
def test_a_saved_program_with_large_constants_finds_them(
    moved: MovedAway, expected: burnish.Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("burnish.files.model_file.ONE_FILE_LIMIT", 1 << 10)
    burnish.compile(moved.path).save("program")
    assert Path("program", "step.data").is_file()
    program = burnish.Program.load("program")
    os.rename("program", "renamed")
    moved.leave()
    assert_same(program, expected, "onnxruntime")


def test_the_gradient_model_holds_its_constants(moved: MovedAway) -> None:
    gradient = burnish.grad(moved.path, wrt=["small"], of="logits")
    moved.leave()
    assert graph_hash(gradient) == graph_hash(burnish.grad(model(), wrt=["small"], of="logits"))


def test_standard_models_hold_their_constants(moved: MovedAway) -> None:
    lowered = burnish.lower(moved.path)
    moved.leave()
    assert graph_hash(lowered) == graph_hash(burnish.lower(model()))


class Encoder(torch.nn.Module):
    """Embeddings of tokens and of positions, whose numbers are a buffer, as BERT has them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = torch.nn.Embedding(100, 16), torch.nn.Embedding(512, 16)
        self.register_buffer("position_ids", torch.arange(512)[None])
        self.classifier = torch.nn.Linear(16, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        positions = self.position_ids[:, : ids.shape[1]]  # type: ignore[index]
        return self.classifier((self.tokens(ids) + self.places(positions)).mean(1))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder as PyTorch's exporter writes it when it is told no more than a path and the open dimensions."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("exported") / "encoder.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        example, dims = (
            torch.zeros(2, 8, dtype=torch.int64),
            {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=512)},
        )
        torch.onnx.export(Encoder(), (example,), path, dynamic_shapes=(dims,), dynamo=True, verbose=False)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_what_pytorch_exports_by_default_trains(exported: Path, engine: str) -> None:
    assert exported.with_name("encoder.onnx.data").is_file()
    inputs = {"ids": np.arange(16).reshape(2, 8), "labels": np.array([1, 3])}
    inside = burnish.compile(onnx.load(exported))
    losses = [burnish.Session(program, engine).step(inputs) for program in (burnish.compile(exported), inside)]
    assert losses[0] == losses[1]


@pytest.mark.slow
@needs_open_files
@pytest.mark.parametrize("engine", ENGINES)
def test_constants_of_a_file_that_was_written_to_are_refused(tmp_path: Path, engine: str) -> None:
    path = write(tmp_path / "source")
    data = path.with_name(DATA)
    session = burnish.Session(burnish.compile(path), engine)
    session.step(batch(True))
    before = data.stat().st_mtime_ns
    data.write_bytes(bytes(data.stat().st_size))
    os.utime(data, ns=(before, before + 1))
    message = rf"the tensor '\w+' is to be read from '.*{DATA}', and that file has been written to since .*: load or compile"
    with pytest.raises(ModelError, match=message):
        session.predict(batch(True))
    assert np.isfinite(session.step(batch(True))["loss"])  # what was read before is there


@needs_open_files
def test_large_tensors_stay_in_their_file(tmp_path: Path) -> None:
    loaded = load(write(tmp_path / "source"))
    constants = {node.outputs[0].name: node.attributes["value"].value for node in loaded.graph if node.op_type == "Constant"}
    assert isinstance(loaded.graph.initializers["large"].const_value, FileTensor)
    assert isinstance(constants["scores"], FileTensor)
    assert not isinstance(loaded.graph.initializers["small"].const_value, FileTensor)


def test_a_file_for_each_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more files stay open than are allowed to; the tensors of the others are read at once."""
    path = write(tmp_path / "source")
    proto = onnx.load(path, load_external_data=False)
    content = path.with_name(DATA).read_bytes()
    for number, tensor in enumerate(tensors(proto)):
        if tensor.data_location == TensorProto.EXTERNAL:
            entries = {entry.key: entry for entry in tensor.external_data}
            start = int(entries["offset"].value)
            path.with_name(f"{number}.data").write_bytes(content[start : start + int(entries["length"].value)])
            entries["location"].value, entries["offset"].value = f"{number}.data", "0"
    path.write_bytes(proto.SerializeToString())
    monkeypatch.setattr(external_data, "OPEN_FILES", 2)
    opened: list[Path] = []
    keep = external_data.SourceFile.of
    monkeypatch.setattr(external_data.SourceFile, "of", lambda path, file: [opened.append(path), keep(path, file)][1])
    loaded = load(path)
    assert [path.suffix for path in opened] == [".onnx", ".data", ".data"]
    assert graph_hash(loaded) == graph_hash(load(model()))


def test_packed_integers(tmp_path: Path) -> None:
    """Elements of less than a byte are no array in the file."""
    values = (np.arange(-8, 8).repeat(20_000)).reshape(-1, 16)
    packed = helper.make_tensor("packed", TensorProto.INT4, values.shape, values.ravel())
    graph = helper.make_graph(
        [helper.make_node("Cast", ["packed"], ["wide"], to=TensorProto.FLOAT), helper.make_node("MatMul", ["x", "wide"], ["y"])],
        "g",
        [value("x", shape=["batch", len(values)])],
        [value("y")],
        [packed],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    expected = load(proto).graph.initializers["packed"].const_value
    content = ir.from_proto(packed).tobytes()
    packed = proto.graph.initializer[0]
    packed.ClearField("int32_data")
    packed.data_location = TensorProto.EXTERNAL
    for key, entry in (("location", DATA), ("length", str(len(content)))):
        packed.external_data.add(key=key, value=entry)
    (tmp_path / DATA).write_bytes(content)
    (tmp_path / "model.onnx").write_bytes(proto.SerializeToString())
    tensor = load(tmp_path / "model.onnx").graph.initializers["packed"].const_value
    assert tensor is not None
    assert expected is not None
    assert tensor.dtype == ir.DataType.INT4
    np.testing.assert_array_equal(tensor.numpy(), expected.numpy())
    np.testing.assert_array_equal(tensor.numpy().astype(np.int64), values)


def test_text_has_no_place_in_another_file(tmp_path: Path) -> None:
    text = helper.make_tensor("text", TensorProto.STRING, [1], [b"word"])
    text.ClearField("string_data")
    text.data_location = TensorProto.EXTERNAL
    text.external_data.add(key="location", value=DATA)
    (tmp_path / DATA).write_bytes(b"word")
    graph = helper.make_graph(
        [helper.make_node("Equal", ["x", "text"], ["y"])],
        "g",
        [value("x", TensorProto.STRING, ["batch"])],
        [value("y", TensorProto.BOOL, ["batch"])],
        [text],
    )
    path = tmp_path / "model.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)]).SerializeToString())
    with pytest.raises(ModelError, match=r"tensor 'text' holds text as raw or external data.*string_data"):
        load(path)
