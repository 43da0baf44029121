"""What `compile` warns of, beside a loss that does not fit: what was perhaps not meant to train as the file has it."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import pytest
import torch

import burnish
from burnish.errors import ObjectiveWarning
from burnish.importer import folded_layers
from oracles.combinations import spread


class Network(torch.nn.Module):
    """Convolutions, one without a bias, and a linear layer, each before batch normalization, and a learned temperature."""

    def __init__(self, temperature: bool = False):
        super().__init__()
        self.stem = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, bias=False), torch.nn.BatchNorm2d(4), torch.nn.ReLU())
        self.body = torch.nn.Sequential(torch.nn.Conv2d(4, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU())
        self.head = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        self.temperature = torch.nn.Parameter(torch.tensor(0.7)) if temperature else None
        for name, tensor in self.named_buffers():
            if tensor.ndim:
                tensor.copy_(torch.rand(tensor.shape) + len(name) / 10)
        for layer in (self.stem[1], self.body[1], self.head[1]):
            torch.nn.init.uniform_(layer.weight, 0.5, 2)
            torch.nn.init.uniform_(layer.bias)

    def forward(self, x):
        y = self.head(self.body(self.stem(x)).mean((2, 3)))
        return y if self.temperature is None else y * self.temperature


class Plain(torch.nn.Module):
    """The same without normalization."""

    def __init__(self):
        super().__init__()
        layers = [torch.nn.Conv2d(3 if index == 0 else 4, 4, 3, padding=1) for index in range(5)]
        self.layers = torch.nn.Sequential(*(each for layer in layers for each in (layer, torch.nn.ReLU())), torch.nn.Flatten())

    def forward(self, x):
        return self.layers(x)


def exported(module: torch.nn.Module, path, *, dynamo: bool, **options) -> str:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    torch.onnx.export(module.eval(), (x,), str(path), dynamo=dynamo, input_names=["x"], verbose=False, **options)
    return str(path)


def problems(source, **options) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ObjectiveWarning)
        burnish.compile(source, **options)
    return [str(each.message) for each in caught if isinstance(each.message, ObjectiveWarning)]


OF_TOKENS = "cross_entropy:class_axis=-1"


class Computed(torch.nn.Module):
    """A scale by its logarithm, and positions of which a part is read; a weight that is only transposed."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.logarithm = torch.nn.Parameter(torch.randn(8))
        self.positions = torch.nn.Embedding(20, 8)

    def forward(self, x):
        x = self.linear(x) + self.positions(torch.arange(x.shape[2]))
        return x * self.logarithm.exp() @ self.linear.weight.T


class Vanishing(torch.nn.Module):
    """A layer whose scale and shift are equal."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = torch.nn.LayerNorm(8), torch.nn.Linear(8, 4)
        torch.nn.init.zeros_(self.norm.weight)

    def forward(self, x):
        return self.head(x + self.norm(x))


@pytest.mark.slow
def test_what_an_exporter_computed_from_parameters_is_warned_of(tmp_path):
    path = exported(Computed(), tmp_path / "model.onnx", dynamo=True)
    (problem,) = problems(path, loss=OF_TOKENS)
    assert problem == (
        "the exporter computed weights from parameters of the module, and they train in the place of these: 'embedding' of "
        "'positions.weight', 'exp' of 'logarithm'. To train the parameters themselves, export the model again with "
        "torch.onnx.export(..., dynamo=True, optimize=False)"
    )
    assert problems(path, loss=OF_TOKENS, trainable=["linear.*"]) == []
    assert problems(exported(Computed(), tmp_path / "whole.onnx", dynamo=True, optimize=False), loss=OF_TOKENS) == []


@pytest.mark.slow
def test_what_the_older_exporter_computed_is_warned_of(tmp_path):
    path = exported(Computed(), tmp_path / "model.onnx", dynamo=False)
    shared, problem = problems(path, loss=OF_TOKENS)
    # The layer and the module around it read one parameter, which the file holds for each of them.
    assert shared.startswith("weights of two layers hold the same numbers, and train apart: 'onnx::MatMul_")
    assert "Where the layers share a parameter, export the model again with do_constant_folding=False" in shared
    assert "of which the file does not say what they were" in problem
    assert "'onnx::" in problem
    assert "do_constant_folding=False" in problem
    assert problems(path, loss=OF_TOKENS, trainable=["linear.*"]) == [shared]  # its weight, which the file calls onnx::MatMul_
    assert problems(path, loss=OF_TOKENS, trainable=["linear.bias"]) == []
    assert problems(exported(Computed(), tmp_path / "whole.onnx", dynamo=False, do_constant_folding=False), loss=OF_TOKENS) == []


@pytest.mark.slow
def test_parameters_that_were_merged_within_a_layer_are_warned_of(tmp_path):
    path = exported(Vanishing(), tmp_path / "model.onnx", dynamo=True)
    merged, lost = problems(path, loss=OF_TOKENS)
    assert "train as one: 'norm." in merged
    assert "merged parameters of the module with others, or left them out, and they do not train: 'norm." in lost
    assert "optimize=False" in lost
    assert problems(exported(Vanishing(), tmp_path / "whole.onnx", dynamo=True, optimize=False)) == []


@pytest.mark.slow
@pytest.mark.parametrize("dynamo", [False, True], ids=["torchscript", "dynamo"])
def test_batch_normalization_that_an_exporter_folded_is_warned_of(tmp_path, dynamo):
    path = exported(Network(), tmp_path / "model.onnx", dynamo=dynamo)
    (problem,) = problems(path)
    assert f"batch normalization was folded into {3 if dynamo else 2} layers that train" in problem
    assert "burnish.surgery.insert" in problem
    assert "optimize=False" in problem
    assert problems(path, norm="frozen") == []
    inserted = burnish.surgery.insert(path, after="Conv")
    assert [name for name in folded_layers(burnish.load(inserted)) if "head" not in name] == []


@pytest.mark.slow
def test_the_layers_keep_their_own_names(tmp_path):
    """The parameters of a batch normalization that is gone do not stand for those of the layer that it was folded into."""
    model = burnish.load(exported(Network(), tmp_path / "model.onnx", dynamo=True))
    assert list(folded_layers(model)) == ["stem.0.weight", "body.0.weight", "head.0.weight"]
    assert {name for name in model.graph.initializers if "." in name} == {
        "stem.0.weight",
        "stem.0.weight_bias",
        "body.0.weight",
        "body.0.bias",
        "head.0.weight",
        "head.0.bias",
    }


@pytest.mark.slow
def test_layers_that_do_not_train_are_no_matter(tmp_path):
    path = exported(Network(), tmp_path / "model.onnx", dynamo=True)
    (problem,) = problems(path, trainable=["head.*"])
    assert "folded into a layer that trains when the model was exported, and is not trained: 'head.0.weight'. " in problem
    assert problems(exported(Network(), tmp_path / "kept.onnx", dynamo=False), trainable=["head.*"]) == []


@spread(
    ("module", "options"),
    [
        (Network(), {"dynamo": True, "optimize": False}),
        (Network(), {"dynamo": False, "training": torch.onnx.TrainingMode.TRAINING, "do_constant_folding": False}),
        (Plain(), {"dynamo": True}),
        (Plain(), {"dynamo": False}),
    ],
    test=2,
    ids=["kept by dynamo", "kept by torchscript", "none, dynamo", "none, torchscript"],
)
def test_nothing_is_said_where_nothing_was_folded(tmp_path, module, options):
    assert problems(exported(module, tmp_path / "model.onnx", **options)) == []


@pytest.mark.slow
def test_what_onnxruntime_and_burnish_fold_is_warned_of(tmp_path):
    import onnxruntime

    path = exported(Network(), tmp_path / "model.onnx", dynamo=True, optimize=False)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    onnxruntime.InferenceSession(path, options)
    assert any("'ConvBnFusion_W_body.0.weight'" in problem for problem in problems(tmp_path / "optimized.onnx"))
    session = burnish.Session(burnish.compile(path))
    session.export(tmp_path / "tuned.onnx")
    assert "folded into 3 layers that train" in problems(tmp_path / "tuned.onnx")[0]
    session.export(tmp_path / "kept.onnx", fold_norm=False)
    assert problems(tmp_path / "kept.onnx") == []


def test_files_of_those_who_always_fold_are_warned_of(tmp_path):
    model = onnx.load(exported(Plain(), tmp_path / "model.onnx", dynamo=False))
    model.metadata_props.add(key="author", value="Ultralytics")
    assert "folded into 5 layers that train" in problems(model)[0]


@pytest.mark.slow
def test_a_scalar_that_was_a_parameter_trains(tmp_path):
    """The newer exporter notes what it was, and so it trains; the older one does not, and a warning names it."""
    noted = exported(Network(temperature=True), tmp_path / "noted.onnx", dynamo=True, optimize=False)
    assert problems(noted) == []
    program = burnish.compile(noted, optimizer="sgd:lr=0.1")
    session = burnish.Session(program)
    assert session.state()["param/temperature"].shape == ()
    x = np.random.default_rng(0).normal(size=(2, 3, 8, 8)).astype(np.float32)
    session.step({"x": x, "labels": np.array([0, 2])})
    assert session.state()["param/temperature"] != np.float32(0.7)

    bare = exported(Network(temperature=True), tmp_path / "bare.onnx", dynamo=False, training=torch.onnx.TrainingMode.TRAINING)
    (problem,) = problems(bare)
    assert problem == (
        "scalars count as constants, and these stay as they are: 'temperature'. Where they were parameters, train them by name: "
        "trainable=['*', 'temperature']"
    )
    assert problems(bare, trainable="*") == []
    trained = burnish.compile(bare, trainable=["*", "temperature"])
    assert "grad:temperature" in {entry.name for entry in trained.signature["grad"].outputs}
