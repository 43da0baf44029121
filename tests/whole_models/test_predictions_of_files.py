"""In its initial state a program predicts what its file computes, or says why not; and says nothing where it does.

``make test-campaign`` asks this of some hundred files and prints how many of them are equal, differ with a warning, differ
without one, and are warned of though they are equal. The last two are none. It also gives each file to ``burnish inspect``,
``check`` and ``compile``, which all take it or all refuse it for one reason. The files of public packages are among them where
``make test-shipped`` has fetched these.
"""

from __future__ import annotations

import io
import json
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, NotImplemented, RuntimeException
from torch import nn
from typer.testing import CliRunner

import burnish
from burnish.cli.application import app
from burnish.compiler.compile import compile_inference
from burnish.errors import BurnishError, EngineError, ObjectiveWarning
from burnish.program import Program
from burnish.program.program import Inference
from burnish.training.objective import LEAST, OF_INTEGERS, OF_SIXTEEN_BITS, TOLERANCE
from oracles import classical_files, exporter_styles, runtime_operators, sixteen_bit_files, small_networks
from oracles.light_models import FOLDER, NAMES
from oracles.named_architectures import NAMED
from oracles.standard_cases import standard_cases
from strangers.shipped import CACHE, FILES, Shipped, make_inputs, read

BATCH = 3
"""Of every extent that a file leaves open."""
EQUAL, TOLD, SILENT, NEEDLESS = "equal", "differing with warning", "differing without", "warned though equal"
NARROW = "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float4_e2m1fn int4 uint4 int2 uint2".split()
"""Dtypes that are none of NumPy's own."""
MODULES = (
    "add averagepool batch_normalization clip concat conv convtranspose dequantizelinear div dropout dynamicquantizelinear "
    "elu gather gelu gemm globalaveragepool groupnormalization gru hardswish instance_normalization layernormalization "
    "leakyrelu lppool lrn lstm matmul matmulinteger maxpool meanvariancenormalization mul pow prelu qlinearconv "
    "qlinearmatmul quantizelinear reducemax reducemean reducesum relu reshape resize rmsnormalization rnn sigmoid softmax "
    "sqrt sub tanh transpose where"
).split()
"""Of the standard's own cases."""


def with_normalization(statistics: str = "fresh", mode: int = 1, head: str = "", outputs: str = "b, b_m, b_v") -> onnx.ModelProto:
    """A convolution, batch normalization in a mode, and a head."""
    rng = np.random.default_rng(0)
    numbers = {"fresh": ("0, 0, 0, 0", "1, 1, 1, 1"), "kept": ("0.5, -1, 2, 0", "4, 1, 0.5, 9")}[statistics]
    model = onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["": 17], producer_name: "pytorch">
g (float[batch, 3, 6, 6] x) => (float[batch, 2] y) <float[4] bn_weight = {{1, 1.2, 0.8, 1}},
  float[4] bn_bias = {{0.1, 0, 0, -0.1}}, float[4] rm = {{{numbers[0]}}}, float[4] rv = {{{numbers[1]}}},
  float[2, 4] head_weight = {{1, -1, 0.5, 2, 0, 1, -1, 1}}> {{
  c = Conv (x, conv_weight)
  {outputs if mode else "b"} = BatchNormalization <training_mode = {mode}> (c, bn_weight, bn_bias, rm, rv)
  r = Relu (b)
  p = GlobalAveragePool (r)
  f = Flatten (p)
  {head or "y = Gemm <transB = 1> (f, head_weight)"}
}}""")
    weight = (3 * rng.normal(size=(4, 3, 3, 3))).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "conv_weight"))
    return model


def with_dropout(training: bool) -> onnx.ModelProto:
    return onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["": 17]>
g (float[batch, 4] x) => (float[batch, 3] y) <float[4, 3] w = {{1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3}}, float ratio = {{0.5}},
  bool mode = {{{int(training)}}}> {{ d = Dropout (x, ratio, mode) y = MatMul (d, w) }}""")


def exported(module: nn.Module, inputs: Mapping[str, torch.Tensor], training: bool) -> bytes:
    """What PyTorch's older exporter writes in a mode, with an open batch."""
    file = io.BytesIO()
    mode = torch.onnx.TrainingMode.TRAINING if training else torch.onnx.TrainingMode.EVAL
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module.train(training), tuple(inputs.values()), file, dynamo=False, training=mode, opset_version=17,
            do_constant_folding=False, input_names=list(inputs), dynamic_axes={name: {0: "batch"} for name in inputs},
        )  # fmt: skip
    return file.getvalue()


def recurrent_of_integers() -> onnx.ModelProto:
    """An LSTM that rounds what it reads, and what it remembers, in each step."""
    rng = np.random.default_rng(0)
    arrays = {
        "w": rng.integers(-99, 99, (1, 3, 16)).astype(np.int8),
        "r": rng.integers(-99, 99, (1, 4, 16)).astype(np.int8),
        "b": rng.normal(size=(1, 32)).astype(np.float32),
        "scale": np.full(1, 0.02, np.float32),
        "zero": np.zeros(1, np.int8),
        "head": rng.normal(size=(4, 2)).astype(np.float32),
    }
    proto = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 13, "com.microsoft": 1]>
g (float[5, batch, 3] x) => (float[1, batch, 2] y) {
  all, last = com.microsoft.DynamicQuantizeLSTM <hidden_size = 4> (x, w, r, b, "", "", "", "", scale, zero, scale, zero)
  y = MatMul (last, head) }""")
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in arrays.items())
    return proto


def few() -> Iterator[tuple[str, Any]]:
    """Files of each kind of departure, and those beside them that have none."""
    for statistics in ("fresh", "kept"):
        for mode in (0, 1):
            yield f"{statistics} statistics, mode {mode}", with_normalization(statistics, mode)
    for training in (False, True):
        yield f"dropout, training={training}", with_dropout(training)
    yield "DynamicQuantizeLSTM", recurrent_of_integers()


@dataclass(frozen=True)
class File:
    """A file of the campaign.

    Attributes:
        name: says where it comes from.
        source: the model.
        inputs: where random ones do not do.
        expected: what the standard says that it gives of these, where it does.
        shipped: how it is compiled, and what its inputs are, where a package carries it.
    """

    name: str
    source: Any
    inputs: Mapping[str, np.ndarray] | None = None
    expected: Mapping[str, np.ndarray] | None = None
    shipped: Shipped | None = None


def many() -> Iterator[File]:
    """Some hundred files: of packages, exporters, runtimes and the standard."""
    yield from of_packages()
    for case in runtime_operators.cases():
        if case.rows is None:  # else the runtime leaves some open
            yield File(f"runtime {case}", case.model(), case.feeds("float32"))
    for name, source in of_exporters():
        yield File(name, source)
    for case in standard_cases(MODULES):
        graph, (given, expected) = case.model.graph, case.data_sets[0]
        inputs, outputs = (
            {value.name: array_of(array) for value, array in zip(values, arrays, strict=False)}
            for values, arrays in ((graph.input, given), (graph.output, expected))
        )
        yield File(f"standard {case.name}", *with_narrow_inputs_held(case.model, inputs), outputs)


def array_of(given: Any) -> np.ndarray:
    return onnx.numpy_helper.to_array(given) if isinstance(given, onnx.TensorProto) else np.asarray(given)


def with_narrow_inputs_held(
    model: onnx.ModelProto, inputs: Mapping[str, np.ndarray]
) -> tuple[onnx.ModelProto, Mapping[str, np.ndarray]]:
    """A file whose inputs of few bits, which a runtime takes in no array of NumPy's, are initializers, and the other inputs."""
    held = {name: array for name, array in inputs.items() if array.dtype.name in NARROW}
    if not held:
        return model, inputs
    changed = onnx.ModelProto.FromString(model.SerializeToString())
    kept = [value for value in changed.graph.input if value.name not in held]
    del changed.graph.input[:]
    changed.graph.input.extend(kept)
    changed.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in held.items())
    return changed, {name: array for name, array in inputs.items() if name not in held}


def of_packages() -> Iterator[File]:
    """What ``make test-shipped`` has fetched."""
    for case in FILES:
        name, version = case.package.split("==")
        for wheel in CACHE.glob(f"{name.replace('-', '_')}-{version}-*.whl"):
            yield File(f"{case.package} {case.file}", with_scores(read(wheel, case.file)), shipped=case)


def with_scores(content: bytes) -> bytes:
    """A file that gives, if it gives whole numbers alone, the scores of classes too: classes may agree where scores do not."""
    proto = onnx.load_from_string(content)
    integers = (onnx.TensorProto.INT64, onnx.TensorProto.INT32)
    if all(value.type.tensor_type.elem_type in integers for value in proto.graph.output):
        scores = [node.input[0] for node in proto.graph.node if node.op_type == "ArgMax"]
        proto.graph.output.extend(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in scores)
    return proto.SerializeToString()


def of_exporters() -> Iterator[tuple[str, Any]]:
    yield from few()
    for style in (exporter_styles.tensorflow, exporter_styles.keras, exporter_styles.paddle, exporter_styles.ultralytics):
        yield f"exporter {style.__name__}", style()
    yield "classical regression", classical_files.linear_regression()
    yield "classical perceptron", classical_files.perceptron_regression()
    for name in ("perceptron", "transformer", "mobile"):
        yield f"network {name}", getattr(small_networks, name)()
        yield f"float16 {name}", sixteen_bit_files.single(name, "float16")
    for name in NAMES:
        yield f"light {name}", (FOLDER / f"light_{name}.onnx").read_bytes()
    generator = torch.Generator().manual_seed(0)
    for name, named in NAMED.items():
        if name not in ("bert", "gpt2"):
            for training in (False, True):
                inputs = named.inputs(BATCH, generator)
                yield f"exported {name}, training={training}", exported(named.module(torch.float32), inputs, training)


def inputs_of(session: onnxruntime.InferenceSession, rng: np.random.Generator) -> dict[str, np.ndarray]:
    kinds = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(float16)": np.float16, "tensor(bool)": np.bool_}
    kinds |= {f"tensor({name})": np.dtype(name) for name in ("int64", "int32", "int8", "uint8")}
    inputs = {}
    for value in session.get_inputs():
        shape = [extent if isinstance(extent, int) else BATCH for extent in value.shape]
        dtype = np.dtype(kinds[value.type])
        drawn = rng.standard_normal(shape) if dtype.kind == "f" else rng.integers(0, 2, shape)
        inputs[value.name] = np.asarray(drawn).astype(dtype)
    return inputs


def predicted(file: File, inputs: Mapping[str, np.ndarray]) -> tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]]:
    """The inputs of a file, and what a program predicts of them that is compiled to train, or just to predict if nothing trains.

    Args:
        file: one of a package is compiled as it trains, and has inputs of its own.
        inputs: for any other one.
    """
    options = {"loss": "mse"} if file.shipped is None else file.shipped.options
    program: Program | Inference
    try:
        program = burnish.compile(file.source, **options)
    except BurnishError:
        program = compile_inference(file.source)
    bound: dict[str, np.ndarray] = {}
    if file.shipped is not None:
        inputs = make_inputs(file.shipped, program)
        bound = {name: np.asarray(value) for name, value in options.get("bind", {}).items()}
        if options.get("batch") == "open":
            inputs = {name: array[:1] for name, array in inputs.items()}
    if isinstance(program, Inference):
        try:
            return inputs | bound, burnish.engines.get("onnxruntime").run(program.predict, inputs)
        except EngineError:  # it has no kernel for these dtypes, or no array
            if file.expected is None:
                raise
            return inputs | bound, burnish.engines.get("reference").run(program.predict, inputs)
    with burnish.Session(program, engine="onnxruntime", threads=1) as session:
        return inputs | bound, session.predict(inputs)


def outcome(file: File) -> str:
    """How what is predicted stands to what the file computes."""
    content = bytes_of(file.source)
    runtime = opened(content, file.expected is None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        is_drawn = runtime is not None and file.inputs is None and file.shipped is None
        given = inputs_of(runtime, np.random.default_rng(0)) if is_drawn else file.inputs
        inputs, results = predicted(file, given or {})
    own = again = file.expected or {}
    if runtime is not None:
        inputs = {value.name: inputs[value.name] for value in runtime.get_inputs()}
        names = [value.name for value in runtime.get_outputs()]
        try:
            own, again = (dict(zip(names, runtime.run(None, inputs), strict=True)) for _ in range(2))
        except RuntimeException:
            if file.expected is None:
                raise
    said = [str(each.message) for each in caught if issubclass(each.category, ObjectiveWarning)]
    told = [message for message in said if "not compute what the file" in message]
    graph = onnx.load_from_string(content).graph
    operators = {node.op_type for node in graph.node}
    bounded = {name for node in graph.node if node.op_type == "Sigmoid" for name in node.output}
    is_rounded = any("Quantize" in name or name.startswith("Q") or name.endswith(("Integer", "NBits")) for name in operators)
    equal = True
    for name, expected in own.items():
        if not isinstance(expected, np.ndarray) or (expected.dtype.kind not in "fiub" and expected.dtype.name not in NARROW):
            continue
        tolerance = OF_INTEGERS if is_rounded else OF_SIXTEEN_BITS if expected.dtype == np.float16 else TOLERANCE
        result = results[name]
        if expected.dtype.name in NARROW and result.dtype == np.uint8:  # the bits
            result = result.view(expected.dtype)
        wide, exact = np.asarray(result, np.float64), np.asarray(expected, np.float64)
        finite = np.isfinite(exact)
        largest = np.abs(exact[finite]).max(initial=LEAST if name in bounded else 0.0)
        apart = np.abs(wide[finite] - exact[finite]).max(initial=0.0) if wide.shape == exact.shape else np.inf
        equal &= bool(apart <= tolerance * (largest or 1.0)) and np.array_equal(expected, again[name], equal_nan=True)
    if equal and all("never does" in message for message in told):  # which says for which inputs it holds
        return EQUAL
    return (NEEDLESS if equal else TOLD) if told else SILENT


def opened(content: bytes, is_needed: bool) -> onnxruntime.InferenceSession | None:
    """A file on ONNX Runtime; None if that has no kernel for it, and the file can do without."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except (NotImplemented, Fail):
        if is_needed:
            raise
        return None


def disagreement(file: File, folder: Path) -> str | None:
    """What `inspect`, `check` and `compile` say of a file where they do not all take it, or all refuse it for one reason."""
    path = folder / "file.onnx"
    path.write_bytes(bytes_of(file.source))
    options = {} if file.shipped is None else file.shipped.options
    named = ["--outputs", options["outputs"]] if "outputs" in options else []
    named += ["--batch", options["batch"]] if "batch" in options else []
    named += [word for name, value in options.get("bind", {}).items() for word in ("--bind", f"{name}={value}")]
    told = CliRunner().invoke(app, ["inspect", str(path), "--json", *named])
    compiled = CliRunner().invoke(app, ["compile", str(path), "-o", str(folder / "program"), *named])
    checked = CliRunner().invoke(app, ["check", str(path), "--no-gradients", *named])
    codes = (told.exit_code, checked.exit_code, compiled.exit_code)
    if told.exit_code == 0:
        reason = json.loads(told.stdout)["refused"]
        wanted = (0, 0, 0) if reason is None else (0, 1, 1)
    else:
        reason, wanted = told.stderr.strip().removeprefix("error: "), (1, 1, 1)
    of_one_reason = reason is None or all(f"error: {reason}" in result.stderr for result in (checked, compiled))
    if codes == wanted and of_one_reason and "no reason is known" not in checked.output:
        return None
    said = [f"{result.output[-400:]} {result.exception!r}" for result in (checked, compiled)]
    return f"inspect {codes[0]}: {reason}; check {codes[1]}: {said[0]}; compile {codes[2]}: {said[1]}"


def bytes_of(source: Any) -> bytes:
    """A model as a file has it."""
    if isinstance(source, bytes):
        return source
    proto = ir.to_proto(source) if isinstance(source, ir.Model) else source
    return proto.SerializeToString()


@pytest.mark.parametrize(("name", "source"), [pytest.param(name, source, id=name) for name, source in few()])
def test_a_program_predicts_what_its_file_computes_or_says_why_not(name: str, source: Any) -> None:
    departs = "mode 1" in name or name == "dropout, training=True" or "LSTM" in name
    assert outcome(File(name, source)) == (TOLD if departs else EQUAL)


@pytest.mark.parametrize(("asked", "found"), [(True, TOLD), (False, EQUAL)])
def test_a_dropout_that_an_input_asks_for(asked: bool, found: str) -> None:
    proto = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["": 17]>
g (float[batch, 4] x, bool mode) => (float[batch, 3] y) <float[4, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3}> {
  d = Dropout (x, "", mode) y = MatMul (d, w) }""")
    inputs = {"x": np.ones((64, 4), np.float32), "mode": np.array(asked)}
    assert outcome(File("dropout", proto, inputs)) == found
    with pytest.warns(
        ObjectiveWarning, match=r"drops out at random in '\w+' if 'mode' is true \(training_mode\), and inference never"
    ):
        burnish.Session(burnish.compile(proto, loss="mse")).predict(inputs)


@pytest.mark.campaign
def test_programs_of_many_files() -> None:
    counts: Counter[str] = Counter()
    for file in many():
        try:
            found = outcome(file)
        except Exception as error:
            found = f"not compared ({type(error).__name__})"
        counts[found] += 1
        if found not in (EQUAL, TOLD):
            print(f"{found}: {file.name}")
    print(dict(counts))
    assert counts[SILENT] == counts[NEEDLESS] == 0
    assert counts[EQUAL] + counts[TOLD] >= 200


@pytest.mark.campaign
def test_commands_give_one_verdict_on_many_files(tmp_path: Path) -> None:
    said = {file.name: disagreement(file, tmp_path) for file in many()}
    assert {name: each for name, each in said.items() if each is not None} == {}
    assert len(said) >= 200
