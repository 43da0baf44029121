"""Parameters as a module had them."""

from __future__ import annotations

import copy
import io
import itertools
import warnings
from collections.abc import Callable
from functools import cache

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnxscript import opset18
from torch import nn
from torch.nn.functional import cross_entropy

import burnish
from burnish.errors import ObjectiveWarning
from burnish.importer import InitializerKind, classify_initializers, load
from oracles.onnxruntime_outputs import onnxruntime_outputs
from torch_models import ResNet

VOCABULARY, WIDTH, LENGTH = 24, 8, 5


class Tied(nn.Module):
    """A head that is the transposed table of the embedding; positions, a scale and a constant that do not train."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", torch.randn(2 * LENGTH, WIDTH))
        self.register_buffer("scale", torch.rand(WIDTH) + 0.5, persistent=False)
        self.shift = torch.randn(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + torch.sin(self.positions[: tokens.shape[1]]) * self.scale + self.shift
        return self.head(torch.tanh(self.dense(x))).mean(1)


@cache
def module() -> Tied:
    torch.manual_seed(0)
    return Tied()


pytestmark = pytest.mark.filterwarnings("ignore:Exporting a model while:UserWarning", "ignore:.*treespec:FutureWarning")


@cache
def exported(optimize: bool = True) -> onnx.ModelProto:
    tokens = torch.zeros(2, LENGTH, dtype=torch.int64)
    program = torch.onnx.export(
        module(),
        (tokens,),
        dynamo=True,
        optimize=optimize,
        input_names=["tokens"],
        dynamic_shapes=({0: "batch"},),
        opset_version=20,
        verbose=False,
    )
    return program.model_proto


def of_kind(model: onnx.ModelProto, kind: InitializerKind) -> set[str]:
    return {name for name, other in classify_initializers(burnish.load(model)).items() if other is kind}


@pytest.mark.slow
@pytest.mark.parametrize("optimize", [True, False])
def test_what_was_no_parameter_is_no_weight(optimize):
    model = exported(optimize)
    weights = of_kind(model, InitializerKind.WEIGHT)
    assert {name for name in weights if "dense" not in name and "weight" not in name and not name.startswith("val")} == set()
    assert "shift" in of_kind(model, InitializerKind.BUFFER)
    assert len(of_kind(model, InitializerKind.BUFFER)) == (2 if optimize else 3)


@pytest.mark.parametrize("optimize", [True, False])
def test_steps_are_pytorchs_with_tied_weights_and_still_buffers(optimize):
    generator = np.random.default_rng(0)
    batches = [(generator.integers(0, VOCABULARY, (3, LENGTH)), generator.integers(0, VOCABULARY, 3)) for _ in range(4)]
    reference = Tied()
    reference.load_state_dict(module().state_dict(), strict=False)
    reference.scale, reference.shift = module().scale, module().shift
    optimizer = torch.optim.Adam(reference.parameters(), lr=0.05)
    losses = []
    for tokens, labels in batches:
        optimizer.zero_grad()
        loss = cross_entropy(reference(torch.from_numpy(tokens)), torch.from_numpy(labels))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    session = burnish.Session(burnish.compile(exported(optimize), optimizer=burnish.optim.adam(lr=0.05)))
    steps = [session.step({"tokens": tokens, "labels": labels})["loss"] for tokens, labels in batches]
    np.testing.assert_allclose(steps, losses, rtol=2e-5)


class Fresh(nn.Module):
    """Layers whose scales of one and biases of zero are equal, as those of a model are that has not been trained."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(3)])
        self.dense = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.shared = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        for layer in (*self.dense, self.head):
            nn.init.zeros_(layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, dense in zip(self.norms, self.dense, strict=True):
            x = torch.tanh(dense(norm(x) * self.shared))
        return self.head(x.mean(1))


@pytest.mark.slow
def test_parameters_that_were_merged_or_left_out_train_as_pytorchs():
    torch.manual_seed(0)
    reference = Fresh()
    x = torch.randn(4, LENGTH, WIDTH)
    model = torch.onnx.export(
        reference, (x,), dynamo=True, input_names=["x"], dynamic_shapes=({0: "batch"},), opset_version=20, verbose=False
    ).model_proto
    held = {tensor.name for tensor in model.graph.initializer}
    assert "norms.1.weight" not in held
    assert "head.bias" not in held
    names = of_kind(model, InitializerKind.WEIGHT)
    parameters = {name for name, _ in reference.named_parameters()}
    assert {name for name in parameters - names if not name.endswith(".weight") or "dense" not in name} == set()
    assert len(names) == len(parameters)
    labels = torch.randint(0, VOCABULARY, (4,))
    losses = steps_of(reference, x, labels)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ObjectiveWarning)
        session = burnish.Session(burnish.compile(model, optimizer=burnish.optim.sgd(lr=0.5)))
    steps = [session.step({"x": x.numpy(), "labels": labels.numpy()})["loss"] for _ in range(4)]
    np.testing.assert_allclose(steps, losses, rtol=2e-5)


class Started(nn.Module):
    """Convolutions whose biases start at zero, as those of most initializations do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up = nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 6, 2, groups=2)
        self.line = nn.Conv1d(6, VOCABULARY, 1)
        for layer in (self.first, self.up, self.line):
            nn.init.zeros_(layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(torch.tanh(self.up(torch.tanh(self.first(x)))).flatten(2)).mean(2)


def steps_of(module: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> list[float]:
    """The losses of PyTorch's steps; the module is trained."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = cross_entropy(module(x), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_biases_of_convolutions_that_were_left_out_train_as_pytorchs():
    torch.manual_seed(0)
    module, x, labels = Started(), torch.randn(4, 3, 5, 5), torch.randint(0, VOCABULARY, (4,))
    model = torch.onnx.export(
        module, (x,), dynamo=True, input_names=["x"], dynamic_shapes=({0: "batch"},), opset_version=18, verbose=False
    ).model_proto
    assert {tensor.name for tensor in model.graph.initializer if tensor.name.endswith("bias")} == set()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ObjectiveWarning)
        session = burnish.Session(burnish.compile(model, optimizer=burnish.optim.sgd(lr=0.5)))
    steps = [session.step({"x": x.numpy(), "labels": labels.numpy()})["loss"] for _ in range(4)]
    np.testing.assert_allclose(steps, steps_of(module, x, labels), rtol=2e-5)


def standardized_convolution(x, weight, bias, stride=None, padding=None, dilation=None, groups=1):
    """A user's own translation of a convolution, which reads its weight twice."""
    return opset18.Conv(x, opset18.Div(weight, opset18.ReduceL2(weight)), bias)


@pytest.mark.slow
def test_a_weight_that_its_call_reads_twice_does_not_stand_for_the_bias():
    """The weight is larger than what the exporter computes ahead of time, and the bias of zeros is left out."""
    module = nn.Sequential(nn.Conv2d(128, 128, 1), nn.Flatten())
    nn.init.zeros_(module[0].bias)
    model = torch.onnx.export(
        module,
        (torch.randn(2, 128, 1, 1),),
        dynamo=True,
        dynamic_shapes=({0: "batch"},),
        opset_version=18,
        verbose=False,
        custom_translation_table={torch.ops.aten.conv2d.default: standardized_convolution},
    ).model_proto
    assert [node.op_type for node in model.graph.node] == ["ReduceL2", "Div", "Conv", "Reshape"]
    assert "0.bias" not in {tensor.name for tensor in model.graph.initializer}
    loaded = burnish.load(model)
    names = ("0.weight", "0.bias")
    read = [(node.op_type, value.name) for node in loaded.graph for value in node.inputs if value.name in names]
    assert read == [("ReduceL2", "0.weight"), ("Div", "0.weight"), ("Conv", "0.bias")]
    assert not loaded.graph.initializers["0.bias"].const_value.numpy().any()
    assert loaded.graph.initializers["0.bias"].shape == [128]


@pytest.mark.slow
def test_without_notes_every_tensor_that_a_gradient_reaches_is_a_weight():
    bare = onnx.ModelProto.FromString(exported().SerializeToString())
    del bare.graph.value_info[:]
    del bare.graph.metadata_props[:]
    assert of_kind(bare, InitializerKind.BUFFER) == set()
    assert "shift" in of_kind(bare, InitializerKind.WEIGHT)


def test_a_buffer_trains_where_it_is_named():
    program = burnish.compile(exported(), optimizer="sgd", trainable=["shift", "dense.*"])
    trained = {entry.name for entry in program.signature["grad"].outputs if entry.name.startswith("grad:")}
    assert {"grad:shift", "grad:dense.bias"} <= trained


@pytest.mark.slow
def test_a_pattern_of_weights_and_a_predicate_leave_buffers_alone():
    for trainable in ["*", lambda name, array: True]:
        program = burnish.compile(exported(), optimizer="sgd", trainable=trainable)
        assert "param/shift" not in program.initial_state()


@pytest.mark.parametrize("note", ["no list", "{'a': 1}", "[1, 2]", "['nothing of that name']", "[" * 400])
def test_a_note_that_says_nothing_changes_nothing(note):
    model = onnx.ModelProto.FromString(exported().SerializeToString())
    for value in model.graph.value_info:
        for entry in value.metadata_props:
            if entry.key.endswith("folded_from"):
                entry.value = note
    weights = of_kind(model, InitializerKind.WEIGHT) | of_kind(model, InitializerKind.BUFFER)
    assert weights == of_kind(exported(), InitializerKind.WEIGHT) | of_kind(exported(), InitializerKind.BUFFER) | {
        name for name in weights if name.startswith("val")
    }


def test_a_copy_that_has_been_changed_is_a_weight_of_its_own():
    model = onnx.ModelProto.FromString(exported().SerializeToString())
    copies = {v.name for v in model.graph.value_info for e in v.metadata_props if "weight" in e.value and "folded" in e.key}
    table = next(t for t in model.graph.initializer if t.name in copies and list(t.dims) == [WIDTH, VOCABULARY])
    array = onnx.numpy_helper.to_array(table) * 1.5
    table.CopyFrom(onnx.numpy_helper.from_array(array, table.name))
    assert table.name in of_kind(model, InitializerKind.WEIGHT)
    assert table.name not in of_kind(exported(), InitializerKind.WEIGHT)


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
