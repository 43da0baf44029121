"""Notes of PyTorch's exporter: what was no parameter does not train, and copies of a weight are the weight again."""

from __future__ import annotations

import warnings
from functools import cache

import numpy as np
import onnx
import pytest
import torch
from onnxscript import opset18
from torch import nn
from torch.nn.functional import cross_entropy

import burnish
from burnish.errors import ObjectiveWarning
from burnish.importer import InitializerKind, classify_initializers

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
