"""What each initializer is, and which are doubtful."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import burnish
from burnish.errors import ObjectiveWarning
from burnish.importer import InitializerKind, classify_initializers, load, perhaps_copied
from torch_models import MobileNetV2, ResNet, export_onnx

WEIGHT, STATISTIC, CONSTANT = InitializerKind.WEIGHT, InitializerKind.STATISTIC, InitializerKind.CONSTANT


def kinds(
    *nodes: onnx.NodeProto, inputs: dict[str, list[int | str]] | None = None, output: str = "y", **initializers: np.ndarray
) -> dict[str, InitializerKind]:
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in (inputs or {"x": ["n", 3]}).items()],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in initializers.items()],
    )
    return classify_initializers(load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)))


def floats(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


IMAGE: dict[str, list[int | str]] = {"x": ["n", 3, 8, 8]}


def test_every_parameter_of_a_residual_network() -> None:
    module = ResNet((1, 1), 8, 10)
    found = classify_initializers(load(export_onnx(module, torch.randn(2, 3, 32, 32))))
    expected = {name: WEIGHT for name, _ in module.named_parameters()}
    expected |= {name: STATISTIC for name, buffer in module.named_buffers() if buffer.ndim}
    assert found == expected


def test_every_parameter_of_a_mobile_network() -> None:
    module = MobileNetV2(((1, 16, 1, 1), (6, 24, 2, 2)), classes=10)
    found = classify_initializers(load(export_onnx(module, torch.randn(2, 3, 32, 32))))
    assert {name for name, kind in found.items() if kind is WEIGHT} == {name for name, _ in module.named_parameters()}


def test_names_say_nothing() -> None:
    found = kinds(
        helper.make_node("BatchNormalization", ["x", "running_mean", "running_var", "weight", "bias"], ["y"]),
        inputs=IMAGE,
        running_mean=floats(3),
        running_var=floats(3),
        weight=floats(3),
        bias=floats(3),
    )
    assert found == {"running_mean": WEIGHT, "running_var": WEIGHT, "weight": STATISTIC, "bias": STATISTIC}


def test_statistics_that_are_also_read_elsewhere_are_statistics() -> None:
    found = kinds(
        helper.make_node("BatchNormalization", ["x", "s", "b", "m", "v"], ["normal"]),
        helper.make_node("Reshape", ["m", "shape"], ["column"]),
        helper.make_node("Add", ["normal", "column"], ["y"]),
        inputs=IMAGE,
        s=floats(3),
        b=floats(3),
        m=floats(3),
        v=floats(3),
        shape=np.array([3, 1, 1]),
    )
    assert found == {"s": WEIGHT, "b": WEIGHT, "m": STATISTIC, "v": STATISTIC, "shape": CONSTANT}


CONFIGURATION = {
    "Clip": (["x", "c", "c"], {"c": np.float32(1)}),
    "Pow": (["x", "c"], {"c": floats(3)}),
    "Pad": (["x", "i", "c"], {"i": np.zeros(8, np.int64), "c": np.float32(1)}),
    "Resize": (["x", "", "c"], {"c": floats(4)}),
    "Dropout": (["x", "c"], {"c": np.float32(0.5)}),
    "QuantizeLinear": (["x", "c", "i"], {"c": floats(3), "i": np.zeros(3, np.uint8)}),
}


@pytest.mark.parametrize("op_type", CONFIGURATION)
def test_operands_that_configure_are_constants(op_type: str) -> None:
    operands, initializers = CONFIGURATION[op_type]
    nodes = [helper.make_node(op_type, operands, ["z"], **({"axis": 3} if op_type == "QuantizeLinear" else {}))]
    if op_type == "QuantizeLinear":
        nodes.append(helper.make_node("DequantizeLinear", ["z", "c", "i"], ["y"], axis=3))
    else:
        nodes.append(helper.make_node("Relu", ["z"], ["y"]))
    found = kinds(*nodes, inputs={"x": ["n", 1, 2, 3]}, **initializers)
    assert set(found.values()) == {CONSTANT}


def test_scalars_are_constants_and_vectors_weights() -> None:
    found = kinds(
        helper.make_node("Add", ["x", "epsilon"], ["a"]),
        helper.make_node("Mul", ["a", "scale"], ["y"]),
        epsilon=np.float32(1e-5),
        scale=floats(1),
    )
    assert found == {"epsilon": CONSTANT, "scale": WEIGHT}


def test_embedding_and_its_indices() -> None:
    found = kinds(
        helper.make_node("Gather", ["table", "indices"], ["rows"]),
        helper.make_node("Add", ["x", "rows"], ["y"]),
        table=floats(10, 3),
        indices=np.array([4]),
    )
    assert found == {"table": WEIGHT, "indices": CONSTANT}


def test_weight_behind_operators_that_pass_it_on() -> None:
    found = kinds(
        helper.make_node("Transpose", ["w"], ["wt"]),
        helper.make_node("Cast", ["wt"], ["wide"], to=TensorProto.DOUBLE),
        helper.make_node("Cast", ["wide"], ["narrow"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["x", "narrow"], ["y"]),
        w=floats(2, 3),
    )
    assert found == {"w": WEIGHT}


def test_what_reaches_only_integers_or_nothing_is_constant() -> None:
    found = kinds(
        helper.make_node("Greater", ["x", "threshold"], ["above"]),
        helper.make_node("Cast", ["above"], ["y"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["x", "aside"], ["unused"]),
        threshold=floats(3),
        aside=floats(3),
    )
    assert found == {"threshold": CONSTANT, "aside": CONSTANT}


def test_weights_that_a_branch_reads() -> None:
    branches = {}
    for name, op_type in (("then_branch", "MatMul"), ("else_branch", "Identity")):
        operands = ["x", "w"] if op_type == "MatMul" else ["x"]
        output = helper.make_tensor_value_info(name + "_y", TensorProto.FLOAT, ["n", 3])
        branches[name] = helper.make_graph([helper.make_node(op_type, operands, [output.name])], name, [], [output])
    found = kinds(
        helper.make_node("ReduceSum", ["x"], ["total"], keepdims=0),
        helper.make_node("Greater", ["total", "zero"], ["condition"]),
        helper.make_node("If", ["condition"], ["y"], **branches),
        w=floats(3, 3),
        zero=np.float32(0),
    )
    assert found == {"w": WEIGHT, "zero": CONSTANT}


BUFFER = InitializerKind.BUFFER
LAYER = [helper.make_node("Conv", ["prepared", "w"], ["c"]), helper.make_node("GlobalAveragePool", ["c"], ["y"])]


def image_weight() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(4, 3, 3, 3)).astype(np.float32)


@pytest.mark.parametrize("op_type", ["Sub", "Add", "Mul", "Div"])
@pytest.mark.parametrize("shape", [(1, 3, 8, 8), (3, 1, 1), (1,)])
def test_what_prepares_an_image_before_the_first_layer_is_no_weight(op_type: str, shape: tuple[int, ...]) -> None:
    node = helper.make_node(op_type, ["x", "mean_image"], ["prepared"])
    assert kinds(node, *LAYER, inputs=IMAGE, mean_image=floats(*shape), w=image_weight()) == {"mean_image": BUFFER, "w": WEIGHT}


def test_a_chain_that_resizes_and_arranges_prepares_too() -> None:
    nodes = [
        helper.make_node("Sub", ["x", "mean"], ["centred"]),
        helper.make_node("Resize", ["centred", "", "scales"], ["resized"]),
        helper.make_node("Reshape", ["deviation", "column"], ["per_channel"]),
        helper.make_node("Div", ["resized", "per_channel"], ["prepared"]),
    ]
    found = kinds(
        *nodes,
        *LAYER,
        inputs=IMAGE,
        mean=floats(1, 3, 8, 8),
        scales=np.array([1, 1, 2, 2], np.float32),
        deviation=floats(3),
        column=np.array([3, 1, 1]),
        w=image_weight(),
    )
    assert (found["mean"], found["deviation"], found["w"]) == (BUFFER, BUFFER, WEIGHT)


def of(text: str) -> dict[str, InitializerKind]:
    """The kinds of the initializers of a model in text: ``m`` of three numbers, ``w`` of a layer that makes two of three."""
    file = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 18]> g {text}')
    weights = {"m": np.array([1, 2, 3]), "w": np.random.default_rng(0).normal(size=(3, 2))}
    weights |= {"table": np.random.default_rng(1).normal(size=(7, 3)), "kernel": np.ones((2, 3, 1))}
    read = {name for node in file.graph.node for name in node.input}
    file.graph.initializer.extend(
        numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items() if name in read
    )
    return classify_initializers(load(file))


@pytest.mark.parametrize(
    "text",
    [
        "(float[N, 3] x) => (float[N, 2] y) { c = Clip (x) d = Sub (c, m) y = MatMul (d, w) }",
        "(float[N, 3] x) => (float[N, 2] y) { n = Neg (m) d = Add (x, n) y = MatMul (d, w) }",
        """(float[N, 3] x) => (float[N, 2] y) <float e = {0.00001}>
            { s = Add (m, e) r = Sqrt (s) d = Div (x, r) y = MatMul (d, w) }""",
        "(float[N, 3] x) => (float[N, 2] y) { d = Sub (x, m) e = Dropout (d) y = MatMul (e, w) }",
        '(float[N, 3] x) => (float[N, 2] y) { d = Sub (x, m) y = Einsum <equation = "ni,ij->nj"> (d, w) }',
        "(float[N, 3, 4] x) => (float[N, 2, 2] y) <float[3, 1] u = {1, 2, 3}> "
        "{ d = Sub (x, u) e = MaxPool <kernel_shape = [2], strides = [2]> (d) y = Conv (e, kernel) }",
        "(float[N, 1] a, float[N, 2] b) => (float[N, 2] y) { x = Concat <axis = 1> (a, b) d = Sub (x, m) y = MatMul (d, w) }",
        "(float[N, 3] x) => (float[N, 2] y, float[N, 3] d) { d = Sub (x, m) y = MatMul (d, w) }",
        """(float[N, 3] x, int64[N] i) => (float[N, 2, 2] y) <int64[3] k = {0, 2, 3}>
            { e = Gather (table, i) d = Sub (x, m) c = Concat <axis = 1> (e, d) r = Reshape (c, k) y = MatMul (r, w) }""",
    ],
    ids=["raw data", "negative", "of a variance", "dropout", "einsum", "pooling", "two inputs", "an output", "beside a table"],
)
def test_what_prepares_data_in_other_ways_before_the_first_layer(text: str) -> None:
    found = of(text)
    assert {found[name] for name in found.keys() & {"m", "u"}} == {BUFFER}
    assert {found[name] for name in found.keys() & {"w", "kernel", "table"}} == {WEIGHT}


@pytest.mark.parametrize(
    "nodes",
    [
        pytest.param([helper.make_node("Mul", ["x", "a"], ["y"])], id="the model is this alone"),
        pytest.param(
            [
                helper.make_node("Mul", ["x", "a"], ["m"]),
                helper.make_node("Relu", ["m"], ["r"]),
                helper.make_node("MatMul", ["r", "w"], ["y"]),
            ],
            id="an activation makes a layer of it",
        ),
        pytest.param(
            [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Add", ["m", "a"], ["y"])],
            id="after the first layer",
        ),
        pytest.param(
            [
                helper.make_node("Mul", ["x", "a"], ["m"]),
                helper.make_node("MatMul", ["m", "w"], ["h"]),
                helper.make_node("Add", ["h", "a"], ["y"]),
            ],
            id="read after it as well",
        ),
    ],
)
def test_what_does_not_only_prepare_an_input_is_a_weight(nodes: list[onnx.NodeProto]) -> None:
    weights = {"w": np.random.default_rng(0).normal(size=(3, 3)).astype(np.float32)} if len(nodes) > 1 else {}
    assert kinds(*nodes, a=floats(3), **weights)["a"] is WEIGHT


def test_a_layer_normalization_of_the_input_in_pieces_is_of_weights() -> None:
    nodes = [
        helper.make_node("ReduceMean", ["x", "last"], ["mean"]),
        helper.make_node("Sub", ["x", "mean"], ["centred"]),
        helper.make_node("Mul", ["centred", "centred"], ["squares"]),
        helper.make_node("ReduceMean", ["squares", "last"], ["variance"]),
        helper.make_node("Sqrt", ["variance"], ["deviation"]),
        helper.make_node("Div", ["centred", "deviation"], ["normalized"]),
        helper.make_node("Mul", ["normalized", "gamma"], ["scaled"]),
        helper.make_node("MatMul", ["scaled", "w"], ["y"]),
    ]
    w = np.random.default_rng(0).normal(size=(3, 3)).astype(np.float32)
    assert kinds(*nodes, last=np.array([-1]), gamma=floats(3), w=w)["gamma"] is WEIGHT


def angles(positions: int, width: int, kind: str) -> np.ndarray:
    """Sines and cosines of positions, as transformers add them."""
    phases = np.arange(positions)[:, None] / 10000 ** (np.arange(0, width, 2) / width)
    sines, cosines = np.sin(phases), np.cos(phases)
    if kind == "in turns":
        return np.stack([sines, cosines], -1).reshape(positions, width)
    table = np.concatenate([sines, cosines], 1)
    return np.concatenate([np.zeros((1, width)), table]) if kind == "with a token" else table


@pytest.mark.parametrize("kind", ["in turns", "one after the other", "with a token", "of two coordinates", "learned"])
def test_sines_and_cosines_of_positions_are_no_weights(kind: str) -> None:
    table = angles(9, 8, kind)
    if kind == "of two coordinates":
        table = np.concatenate([np.repeat(table, 2, 0), np.tile(table, (2, 1))], 1)
    elif kind == "learned":
        table = table + np.random.default_rng(0).normal(size=table.shape) / 10
    nodes = [
        helper.make_node("MatMul", ["x", "first"], ["h"]),
        helper.make_node("Add", ["h", "positions"], ["p"]),
        helper.make_node("MatMul", ["p", "w"], ["y"]),
    ]
    rng = np.random.default_rng(1)
    found = kinds(
        *nodes,
        inputs={"x": ["n", len(table), 3]},
        first=rng.normal(size=(3, table.shape[1])).astype(np.float32),
        positions=table[None].astype(np.float32),
        w=rng.normal(size=(table.shape[1], 2)).astype(np.float32),
    )
    assert found == {"first": WEIGHT, "positions": WEIGHT if kind == "learned" else BUFFER, "w": WEIGHT}


def fourier(window: bool) -> np.ndarray:
    """Cosines and then sines of 33 frequencies over 64 samples, as filters of a convolution."""
    time = np.arange(64)
    phases = 2 * np.pi * np.arange(33)[:, None] * time / 64
    waves = np.concatenate([np.cos(phases), np.sin(phases)]) * (np.hanning(64) if window else 1)
    return waves[:, None].astype(np.float32)


def triangles() -> np.ndarray:
    """Twelve filters over 33 frequencies, as those of mel spectra."""
    centres = np.geomspace(3, 30, 14)
    rows = [
        np.interp(np.arange(33), [low, middle, high], [0, 1, 0], left=0, right=0)
        for low, middle, high in zip(centres, centres[1:], centres[2:], strict=False)
    ]
    return np.array(rows, np.float32)


@pytest.mark.parametrize("window", [False, True])
def test_bases_of_spectra_are_no_weights(window: bool) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "basis"], ["spectrum"], strides=[32]),
        helper.make_node("Mul", ["spectrum", "spectrum"], ["power"]),
        helper.make_node("Slice", ["power", "zero", "half", "one"], ["real"]),
        helper.make_node("Slice", ["power", "half", "whole", "one"], ["imaginary"]),
        helper.make_node("Add", ["real", "imaginary"], ["sum"]),
        helper.make_node("MatMul", ["mel", "sum"], ["bands"]),
        helper.make_node("Conv", ["bands", "w"], ["y"]),
    ]
    found = kinds(
        *nodes,
        inputs={"x": ["n", 1, 512]},
        basis=fourier(window),
        mel=triangles(),
        w=np.random.default_rng(0).normal(size=(4, 12, 3)).astype(np.float32),
        **{name: np.array([number]) for name, number in {"zero": 0, "one": 1, "half": 33, "whole": 66}.items()},
    )
    assert (found["basis"], found["mel"], found["w"]) == (BUFFER, BUFFER, WEIGHT)


@pytest.mark.parametrize("weight", [np.random.default_rng(1).normal(size=(16, 1, 64)), np.eye(64)[:, None]])
def test_filters_that_are_no_waves_are_weights(weight: np.ndarray) -> None:
    node = helper.make_node("Conv", ["x", "filters"], ["h"], strides=[32])
    head = helper.make_node("Conv", ["h", "w"], ["y"])
    w = np.random.default_rng(0).normal(size=(4, len(weight), 3)).astype(np.float32)
    assert kinds(node, head, inputs={"x": ["n", 1, 512]}, filters=weight.astype(np.float32), w=w)["filters"] is WEIGHT


pytestmark = pytest.mark.filterwarnings("ignore::burnish.errors.UntrainedWeightsWarning")

TABLE = np.random.default_rng(0).standard_normal((6, 3)).astype(np.float32)


def language_model(head: np.ndarray, body: str = "", transposed: int = 0) -> onnx.ModelProto:
    """A table of rows, and a head."""
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 18]> g (int64[N] tokens) => (float[N, 6] logits) {{
        rows = Gather (table, tokens)
        {body or "shown = Identity (rows)"}
        logits = Gemm <transB = {transposed}> (shown, head)
    }}""")
    for name, array in {"table": TABLE, "head": head, "ones": np.ones(3, np.float32), "zeros": np.zeros(3, np.float32)}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


@pytest.mark.parametrize(("head", "transposed"), [(TABLE.T, 0), (TABLE, 1)], ids=["transposed", "the same"])
def test_a_copy_of_a_table_is_warned_of(head, transposed):
    source = language_model(np.ascontiguousarray(head), transposed=transposed)
    assert perhaps_copied(burnish.load(source)) == {"head": "table"}
    message = "a weight holds the same numbers as a table .* trains apart from it: 'head' of 'table'.*do_constant_folding=False"
    with pytest.warns(ObjectiveWarning, match=message):
        burnish.compile(source)


@pytest.mark.parametrize("head", [TABLE.T + 1, TABLE.T[::-1], np.ones((3, 6))], ids=["shifted", "turned", "of one value"])
def test_another_matrix_is_not(head):
    assert perhaps_copied(burnish.load(language_model(np.ascontiguousarray(head, dtype=np.float32)))) == {}


def test_two_equal_tables_are_one_pair():
    source = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 18]> g (int64[N] a, int64[N] b) => (float[N, 3] y) {
        one = Gather (first, a)
        two = Gather (second, b)
        y = Add (one, two)
    }""")
    source.graph.initializer.extend([onnx.numpy_helper.from_array(TABLE, name) for name in ("first", "second")])
    assert perhaps_copied(burnish.load(source)) == {"second": "first"}


def test_a_vector_that_several_layers_read_is_warned_of():
    layers = "once = LayerNormalization (rows, ones, zeros)\n shown = LayerNormalization (once, ones, zeros)"
    source = language_model(np.ascontiguousarray(TABLE.T) + 1, layers)
    with pytest.warns(ObjectiveWarning, match=r"several layers read train as one: 'ones' \(2 layers\), 'zeros' \(2 layers\)\. "):
        burnish.compile(source)


def test_what_does_not_train_is_not_warned_of():
    layers = "once = LayerNormalization (rows, ones, zeros)\n shown = LayerNormalization (once, ones, zeros)"
    with warnings.catch_warnings():
        warnings.simplefilter("error", ObjectiveWarning)
        head = burnish.compile(language_model(np.ascontiguousarray(TABLE.T) + 1, layers), trainable=["head"])
        whole = burnish.compile(language_model(np.ascontiguousarray(TABLE.T) + 1))
    for program, trained in ((head, {"grad:head"}), (whole, {"grad:head", "grad:table"})):
        assert {entry.name for entry in program.signature["grad"].outputs if entry.name.startswith("grad:")} == trained
