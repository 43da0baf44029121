"""Parameters that an exporter merged are separate again; weights that are shared on purpose stay shared."""

from __future__ import annotations

import copy
import io
import itertools
import warnings
from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import burnish
from burnish.errors import ObjectiveWarning
from burnish.importer import load
from oracles.onnxruntime_outputs import onnxruntime_outputs
from torch_models import ResNet


def export(module: nn.Module, example: torch.Tensor, training: bool, folding: bool = False, opset: int = 17) -> onnx.ModelProto:
    buffer = io.BytesIO()
    module.train(training)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            (example,),
            buffer,
            input_names=["x"],
            output_names=["y"],
            dynamic_axes={"x": {0: "batch"}, "y": {0: "batch"}},
            opset_version=opset,
            training=torch.onnx.TrainingMode.TRAINING if training else torch.onnx.TrainingMode.EVAL,
            do_constant_folding=folding,
            dynamo=False,
        )
    return onnx.load_from_string(buffer.getvalue())


def fresh_resnet() -> ResNet:
    """All scales one, all biases zero: what the exporter merges."""
    torch.manual_seed(0)
    return ResNet((1, 2), width=8, classes=10)


def parameter_names(module: nn.Module) -> set[str]:
    return {name for name in module.state_dict() if not name.endswith("num_batches_tracked")}


def merged(proto: onnx.ModelProto) -> int:
    return sum(node.op_type == "Identity" for node in proto.graph.node)


@pytest.mark.parametrize("training", [False, True])
def test_every_parameter_of_a_fresh_network_is_an_initializer(training: bool) -> None:
    module = fresh_resnet()
    proto = export(module, torch.randn(2, 3, 32, 32), training)
    model = load(proto)
    assert set(model.graph.initializers) == parameter_names(module)
    assert not any(node.op_type == "Identity" for node in model.graph)
    for name, parameter in module.named_parameters():
        np.testing.assert_array_equal(model.graph.initializers[name].const_value.numpy(), parameter.detach().numpy())  # type: ignore[union-attr]
    used = [usage.node for value in model.graph.initializers.values() for usage in value.uses()]
    assert len(used) == len(model.graph.initializers)


def test_inference_export_merges_parameters_and_they_are_untied() -> None:
    proto = export(fresh_resnet(), torch.randn(2, 3, 32, 32), training=False)
    assert merged(proto) > 10
    x = {"x": np.random.default_rng(0).normal(size=(2, 3, 32, 32)).astype(np.float32)}
    np.testing.assert_array_equal(onnxruntime_outputs(load(proto), x)["y"], onnxruntime_outputs(proto, x)["y"])


def test_biases_that_folding_merged_are_untied() -> None:
    proto = export(fresh_resnet(), torch.randn(2, 3, 32, 32), training=False, folding=True)
    assert merged(proto) > 3
    model = load(proto)
    convolutions = [node for node in model.graph if node.op_type == "Conv"]
    operands = [value for node in convolutions for value in node.inputs[1:]]
    assert len(set(operands)) == 2 * len(convolutions)
    assert len({id(value.const_value) for value in operands if value is not None}) == 2 * len(convolutions)


class Shared(nn.Module):
    """One dense layer applied twice, and a third with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        with torch.no_grad():
            self.last.weight.copy_(self.first.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(torch.relu(self.first(x))))


def test_shared_weights_stay_shared() -> None:
    model = load(export(Shared(), torch.randn(2, 4), training=False))
    assert set(model.graph.initializers) == {"first.weight", "first.bias", "last.weight", "last.bias"}
    assert {name: len(value.uses()) for name, value in model.graph.initializers.items()} == {
        "first.weight": 2,
        "first.bias": 2,
        "last.weight": 1,
        "last.bias": 1,
    }


class Twice(nn.Module):
    """Layers that are called twice on sequences, for which the exporter transposes their weights ahead of time."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(4, 4, bias=False)
        self.recurrent = nn.LSTM(4, 4, batch_first=True)
        nn.init.zeros_(self.recurrent.bias_ih_l0)
        nn.init.zeros_(self.recurrent.bias_hh_l0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.dense(torch.relu(self.dense(x))))
        return self.recurrent(self.recurrent(x)[0])[0]


def test_weights_that_the_exporter_computed_for_each_call_of_a_layer_are_one() -> None:
    proto = export(Twice(), torch.randn(2, 3, 4), training=False, folding=True)
    assert merged(proto) == 4
    graph = load(proto).graph
    read = {
        (node.op_type, index): value.name
        for node in graph
        for index, value in enumerate(node.inputs)
        if value in graph.initializers.values()
    }
    assert len(read) == len(set(read.values())) == len(graph.initializers) == 4
    assert all(len(value.uses()) == 2 for value in graph.initializers.values())


def test_a_layer_that_is_called_twice_trains_as_one() -> None:
    torch.manual_seed(0)
    module, x, targets = Twice(), torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    session = burnish.Session(burnish.compile(export(module, x, False, folding=True), loss="mse", optimizer="sgd:lr=0.5"))
    session.step({"x": x.numpy(), "targets": targets.numpy()})
    module.train()
    nn.functional.mse_loss(module(x), targets).backward()
    (dense,) = (array for name, array in session.state().items() if array.shape == (4, 4) and name.startswith("param/"))
    assert module.dense.weight.grad is not None
    expected = module.dense.weight - 0.5 * module.dense.weight.grad
    np.testing.assert_allclose(dense.T, expected.detach().numpy(), rtol=1e-5, atol=1e-6)


class Copies(nn.Module):
    """Two dense layers of the same numbers, whose biases are zero or not there."""

    def __init__(self, bias: bool, initialize: Callable[[torch.Tensor], torch.Tensor] = nn.init.normal_) -> None:
        super().__init__()
        self.dense_1 = nn.Linear(4, 4, bias=bias)
        initialize(self.dense_1.weight)
        if bias:
            nn.init.zeros_(self.dense_1.bias)
        self.dense_2 = copy.deepcopy(self.dense_1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense_2(torch.relu(self.dense_1(x)))


def encoder(bias: bool) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(4, 1, 8, batch_first=True, bias=bias)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def matrices(graph: ir.Graph) -> list[ir.Value]:
    return [value for value in graph.initializers.values() if value.shape is not None and len(value.shape) == 2]


@pytest.mark.slow
@pytest.mark.parametrize("bias", [True, False])
def test_copies_of_an_encoder_that_was_not_trained_are_separate(bias: bool) -> None:
    weights = matrices(load(export(encoder(bias), torch.randn(2, 3, 4), training=False, folding=True)).graph)
    assert len(weights) == 8
    assert all(len(value.uses()) == 1 for value in weights)


@pytest.mark.parametrize("initialize", [nn.init.normal_, nn.init.zeros_, nn.init.ones_])
@pytest.mark.parametrize("bias", [True, False])
def test_copies_of_a_layer_are_separate(bias: bool, initialize: Callable[[torch.Tensor], torch.Tensor]) -> None:
    weights = matrices(load(export(Copies(bias, initialize), torch.randn(2, 3, 4), training=False, folding=True)).graph)
    assert len(weights) == 2
    assert all(len(value.uses()) == 1 for value in weights)


class CalledTwice(nn.Module):
    """A module that is called twice, and a copy of it that is, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Copies(bias=False)
        self.second = copy.deepcopy(self.first)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(self.second(self.first(x))))


def test_each_copy_of_a_module_that_is_called_twice_is_one() -> None:
    graph = load(export(CalledTwice(), torch.randn(2, 3, 4), training=False, folding=True)).graph
    module_of = {value: {(reader.name or "").split("/")[1] for reader, _ in value.uses()} for value in matrices(graph)}
    assert all(len(value.uses()) == 2 for value in module_of)
    assert sorted(name.removesuffix("_1") for (name,) in module_of.values()) == ["first", "first", "second", "second"]


def test_layers_of_the_same_numbers_train_apart_with_a_warning() -> None:
    source = export(Copies(bias=False), torch.randn(2, 3, 4), False, folding=True)
    names = [value.name for value in matrices(load(source).graph)]
    message = f"two layers hold the same numbers, and train apart: '{names[1]}' and '{names[0]}'.*do_constant_folding=False"
    with pytest.warns(burnish.errors.ObjectiveWarning, match=message):
        burnish.compile(source, loss="mse")


@pytest.mark.parametrize(
    ("module", "count"),
    [(Twice(), 4), (Copies(bias=False, initialize=nn.init.zeros_), 2)],
    ids=["called twice", "of one value"],
)
def test_other_layers_train_without_a_warning(module: nn.Module, count: int) -> None:
    source = export(module, torch.randn(2, 3, 4), False, folding=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", burnish.errors.ObjectiveWarning)
        program = burnish.compile(source, loss="mse")
    assert sum(name.startswith("param/") for name in program.initial_state()) == count


@pytest.mark.parametrize(("module", "count"), [(Twice(), 4), (Copies(bias=False, initialize=nn.init.zeros_), 2)])
def test_without_the_names_of_modules_numbers_tell_what_is_one_layer(module: nn.Module, count: int) -> None:
    source = export(module, torch.randn(2, 3, 4), training=False, folding=True)
    for node in source.graph.node:
        node.name = ""
    graph = load(source).graph
    assert len([value for value in graph.initializers.values() if (value.name or "").startswith("onnx::")]) == count


def _model(*nodes: onnx.NodeProto, output: str = "y") -> onnx.ModelProto:
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3])],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.ones(3, np.float32), "a")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def test_chain_of_merged_parameters() -> None:
    model = load(
        _model(
            helper.make_node("Identity", ["a"], ["b"], name="Identity_0"),
            helper.make_node("Identity", ["b"], ["c"], name="Identity_1"),
            helper.make_node("Add", ["x", "a"], ["xa"]),
            helper.make_node("Mul", ["xa", "b"], ["xab"]),
            helper.make_node("Sub", ["xab", "c"], ["y"]),
        )
    )
    assert list(model.graph.initializers) == ["a", "b", "c"]


def _normalized(layers: int) -> onnx.ModelProto:
    """Fresh layers of which an optimizer of graphs keeps equal tensors once."""
    sources = ["x", *(f"h{layer}" for layer in range(layers))]
    nodes = [
        helper.make_node("BatchNormalization", [source, "ones", "zeros", "zeros", "ones"], [result])
        for source, result in itertools.pairwise(sources)
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3])],
        [helper.make_tensor_value_info(sources[-1], TensorProto.FLOAT, ["batch", 3])],
        [numpy_helper.from_array(array, name) for name, array in {"ones": np.ones(3, "f"), "zeros": np.zeros(3, "f")}.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def test_statistics_that_are_merged_with_scale_and_bias_are_apart() -> None:
    program = burnish.compile(_normalized(1), loss="mse", optimizer=burnish.optim.sgd(lr=0.5))
    assert set(program.initial_state()) >= {"param/ones", "param/zeros", "stat/zeros_statistic", "stat/ones_statistic"}
    session = burnish.Session(program)
    rng = np.random.default_rng(0)
    session.step({"x": rng.normal(1, 2, (8, 3)).astype("f"), "targets": rng.normal(size=(8, 3)).astype("f")})
    moved = {name: array for name, array in session.state().items() if name.endswith(("ones", "zeros", "_statistic"))}
    assert len(moved) == 4
    assert all(np.ptp(array) > 0 for array in moved.values())


def test_each_layer_has_statistics_of_its_own_where_they_are_merged_with_scale_and_bias() -> None:
    with pytest.warns(burnish.errors.ObjectiveWarning, match="'ones'"):
        program = burnish.compile(_normalized(2), loss="mse")
    statistics = {name for name in program.initial_state() if name.startswith("stat/")}
    assert statistics == {f"stat/{name}_statistic{layer}" for name in ("zeros", "ones") for layer in ("", "_1")}


@pytest.mark.slow
@pytest.mark.parametrize("numbers", ["0, 0, 0", "2, 2, 2"])
def test_layers_of_one_mean_and_variance_have_statistics_of_their_own(numbers: str) -> None:
    """Their scales tell them apart; measured on a batch, each normalizes by what it met there."""
    model = onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["": 17]> g (float[n, 3] x) => (float[n, 3] y)
<float[3] a = {{1, 2, 3}}, float[3] b = {{5, 6, 7}}, float[3] c = {{1, 1.5, 0.5}}, float[3] d = {{0, 0.1, 0.2}},
 float[3] mean = {{{numbers}}}, float[3] var = {{1, 1, 1}}, float[3, 3] w = {{1, 2, 0, 0, 1, 0, 1, 0, 1}}> {{
  p = BatchNormalization (x, a, b, mean, var) h = MatMul (p, w) y = BatchNormalization (h, c, d, mean, var) }}""")
    program = burnish.compile(model, loss="mse", running_variance="onnx")
    state = program.initial_state()
    assert {name for name in state if name.startswith("stat/")} == {
        "stat/mean", "stat/var", "stat/mean_statistic", "stat/var_statistic"
    }  # fmt: skip
    np.testing.assert_array_equal(state["stat/mean_statistic"], state["stat/mean"])
    x = (np.random.default_rng(0).normal(size=(64, 3)) * 3 + 1).astype(np.float32)
    first = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5) * [1, 2, 3] + [5, 6, 7]
    h = first @ np.array([[1, 2, 0], [0, 1, 0], [1, 0, 1]])
    expected = (h - h.mean(0)) / np.sqrt(h.var(0) + 1e-5) * [1, 1.5, 0.5] + [0, 0.1, 0.2]
    with burnish.Session(program) as session:
        burnish.surgery.recalibrate(session, [{"x": x}])
        np.testing.assert_allclose(session.predict({"x": x})["y"], expected, atol=1e-4)


def test_layers_that_share_updated_statistics_keep_them_and_are_named() -> None:
    text = """<ir_version: 9, opset_import: ["": 17]> g (float[n, 3] x) => (float[n, 3] y)
<float[3] a = {1, 2, 3}, float[3] b = {5, 6, 7}, float[3] c = {1, 1.5, 0.5},
 float[3] mean = {1, 2, 3}, float[3] var = {1, 4, 9}, float[3, 3] w = {1, 2, 0, 0, 1, 0, 1, 0, 1}> {
  p = BatchNormalization (x, a, b, mean, var) h = MatMul (p, w) y = BatchNormalization (h, c, b, mean, var) }"""
    model = onnx.parser.parse_model(text)
    with pytest.warns(ObjectiveWarning, match=r"each updates them in its turn: 'mean' \(2 layers\), 'var' \(2 layers\)"):
        state = burnish.compile(model, loss="mse").initial_state()
    assert {name for name in state if name.startswith("stat/")} == {"stat/mean", "stat/var"}
    with warnings.catch_warnings():
        warnings.simplefilter("error", ObjectiveWarning)
        burnish.compile(model, loss="mse", norm="frozen")  # what the message advises
        one_layer = onnx.parser.parse_model(text.replace("(h, c, b,", "(h, a, b,"))
        burnish.compile(one_layer, loss="mse")


def test_a_layer_without_parameters_that_is_called_twice_keeps_one_pair_of_statistics() -> None:
    model = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["": 17]> g (float[n, 3] x) => (float[n, 3] y)
<float[3] mean = {1, 2, 3}, float[3] var = {1, 4, 9}, float[3, 3] w = {1, 2, 0, 0, 1, 0, 1, 0, 1}> {
  s = Constant <value = float[3] {1, 1, 1}> () z = Constant <value = float[3] {0, 0, 0}> ()
  t = Constant <value = float[3] {1, 1, 1}> () u = Constant <value = float[3] {0, 0, 0}> ()
  p = BatchNormalization (x, s, z, mean, var) h = MatMul (p, w) y = BatchNormalization (h, t, u, mean, var) }""")
    state = burnish.compile(model, loss="mse").initial_state()
    assert {name for name in state if name.startswith("stat/")} == {"stat/mean", "stat/var"}


def test_identity_that_the_model_computes_stays() -> None:
    model = load(
        _model(
            helper.make_node("Identity", ["a"], ["/layer/Identity_output_0"], name="/layer/Identity"),
            helper.make_node("Add", ["x", "/layer/Identity_output_0"], ["z"]),
            helper.make_node("Mul", ["z", "a"], ["y"]),
        )
    )
    assert list(model.graph.initializers) == ["a"]
    assert [node.op_type for node in model.graph] == ["Identity", "Add", "Mul"]


def test_identity_that_is_an_output_stays() -> None:
    model = load(_model(helper.make_node("Identity", ["a"], ["y"]), helper.make_node("Add", ["x", "y"], ["z"])))
    assert [value.name for value in model.graph.outputs] == ["y"]
    onnx.checker.check_model(ir.to_proto(model))


def test_weights_that_one_identity_alone_reads_keep_their_names():
    model = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["": 17]>
        g (float[n, 2] x) => (float[n, 2] y) <float[2, 2] kernel = {1, 2, 3, 4}, float[2] s = {1, 2}, float[2] b = {3, 4},
        float[2] mean = {5, 6}, float[2] variance = {7, 8}> {
        k = Identity(kernel) m = Identity(mean) v = Identity(variance)
        h = MatMul(x, k) y = BatchNormalization(h, s, b, m, v) }""")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        state = burnish.compile(model, loss="mse", optimizer="sgd").initial_state()
    assert {"param/kernel", "stat/mean", "stat/variance"} <= set(state)
    assert not [warning for warning in said if "no gradient reaches" in str(warning.message)]
