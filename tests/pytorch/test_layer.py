"""An ONNX file as a layer of a PyTorch model, beside a session that trains it and PyTorch's own autograd."""

from __future__ import annotations

import threading

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import burnish
from burnish.errors import ConfigurationError
from burnish.graph import Builder
from burnish.models import residual_network
from burnish.torch import Layer
from oracles.combinations import spread
from oracles.small_networks import perceptron

LABELS = torch.arange(4)


def network() -> ir.Model:
    return residual_network(width=2, blocks=(1, 1))


def images(seed: int = 0) -> torch.Tensor:
    return torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


def smooth_model(dtype: ir.DataType = ir.DataType.DOUBLE, normalized: bool = False) -> ir.Model:
    """tanh(x @ weight + bias) and its square, with names that PyTorch would not take; with batch normalization before tanh."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 20}, name="smooth")
    x = ir.Value(name="x", type=ir.TensorType(dtype), shape=ir.Shape(["batch", 3]))
    graph.inputs.append(x)
    builder, generator = Builder(graph), np.random.default_rng(0)
    weights = {}
    shapes: dict[str, tuple[int, ...]] = {"forward": (3, 2), "a..b": (2,)}
    for name, shape in (shapes | dict.fromkeys(("scale", "mean", "variance") if normalized else (), (2,))).items():
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        value.const_value = ir.tensor(generator.uniform(0.5, 2, size=shape).astype(dtype.numpy()), name=name)
        graph.register_initializer(value)
        weights[name] = builder.tensor(value)
    product = builder.op("MatMul", builder.tensor(x), weights["forward"])
    if normalized:
        operands = [weights[name] for name in ("scale", "a..b", "mean", "variance")]
        y = builder.op("Tanh", builder.op("BatchNormalization", product, *operands))
    else:
        y = builder.op("Tanh", product + weights["a..b"])
    square = y * y
    for name, tensor in {"y": y, "square": square}.items():
        tensor.value.name = name
        graph.outputs.append(tensor.value)
    return ir.Model(graph, ir_version=10)


@pytest.mark.slow
def test_a_layer_trains_with_pytorch_as_the_file_does_in_a_session():
    layer, x = Layer(network()), images()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    program = burnish.compile(network(), optimizer=burnish.optim.sgd(lr=0.1, momentum=0.9))
    session = burnish.Session(program, engine="torch")
    batch = {"x": x.numpy(), "labels": LABELS.numpy()}
    for _ in range(3):
        optimizer.zero_grad()
        loss = cross_entropy(layer(x), LABELS)
        loss.backward()
        optimizer.step()
        assert loss.item() == pytest.approx(session.step(batch)["loss"], rel=2e-6)
    layer.eval()
    assert cross_entropy(layer(x), LABELS).item() == pytest.approx(session.evaluate(batch)["loss"], rel=2e-5)
    trained = {name.partition("/")[2]: array for name, array in session.state().items() if name.startswith(("param/", "stat/"))}
    state = layer.state_dict()
    assert state.keys() == trained.keys()
    for name, array in trained.items():
        np.testing.assert_allclose(state[name].numpy(), array, rtol=1e-4, atol=1e-6, err_msg=name)


def test_gradients_of_inputs_and_parameters_are_those_of_differences_twice():
    layer = Layer(smooth_model())
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    parameters = tuple(layer.parameters())
    assert torch.autograd.gradcheck(lambda *_: layer(x), (x, *parameters))
    assert torch.autograd.gradgradcheck(lambda *_: layer(x), (x, *parameters))


@pytest.mark.slow
def test_batch_normalization_is_differentiated_twice():
    layer = Layer(smooth_model(normalized=True))
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda *_: layer(x)[0], (x, *layer.parameters()))


def test_only_gradients_that_are_asked_for_are_computed():
    layer = Layer(perceptron())
    names = [name for name, _ in layer.named_parameters()]
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name == names[-1])
    layer(torch.randn(4, *_input_shape(perceptron()))).sum().backward()
    assert [name for name, parameter in layer.named_parameters() if parameter.grad is not None] == names[-1:]
    (passes,) = next(iter(layer._graphs.values()))._graph._passes.values()
    assert len(passes.reached) == 1


def _input_shape(model: ir.Model) -> list[int]:
    return [int(extent) for extent in model.graph.inputs[0].shape[1:]]


def test_values_saved_for_one_backward_outlive_other_calls():
    """Two forwards before a backward, a graph that is kept, calls in several threads: each has its own values."""
    layer, inputs = Layer(network()).eval(), [images(seed) for seed in range(4)]

    def gradient(x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        return torch.autograd.grad(cross_entropy(layer(x), LABELS), x)[0]

    expected = [gradient(x) for x in inputs]
    leaves = [x.clone().requires_grad_() for x in inputs]
    losses = [cross_entropy(layer(x), LABELS) for x in leaves]
    for x, loss, wanted in zip(leaves, losses, expected, strict=True):
        for _ in range(2):
            assert torch.equal(torch.autograd.grad(loss, x, retain_graph=True)[0], wanted)
    results: dict[int, torch.Tensor] = {}
    threads = [threading.Thread(target=lambda i=i: results.update({i: gradient(inputs[i])})) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(results[index], wanted) for index, wanted in enumerate(expected))


@spread("reentrant", [True, False], test=1)
def test_a_checkpointed_layer_draws_the_same_dropout_again(reentrant):
    layer = Layer(perceptron(dropout=True))
    x = torch.randn(4, *_input_shape(perceptron()))

    def gradients(call) -> list[torch.Tensor]:
        torch.manual_seed(3)
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(call(leaf).square().sum(), [leaf, *layer.parameters()])

    if reentrant:
        torch.manual_seed(3)
        leaf = x.clone().requires_grad_()
        checkpoint(layer, leaf, use_reentrant=True).square().sum().backward()
        found = [leaf.grad, *(parameter.grad for parameter in layer.parameters())]
    else:
        found = gradients(lambda leaf: checkpoint(layer, leaf, use_reentrant=False))
    for checkpointed, plain in zip(found, gradients(layer), strict=True):
        # A reentrant checkpoint runs its first forward without gradients, in a graph of its own, which rounds otherwise.
        torch.testing.assert_close(checkpointed, plain, **({} if reentrant else {"rtol": 0, "atol": 0}))


def test_dropout_follows_the_seed_of_pytorch_and_the_mode():
    layer = Layer(perceptron(dropout=True))
    x = torch.randn(4, *_input_shape(perceptron()))

    def drawn(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return layer(x).detach()

    assert torch.equal(drawn(0), drawn(0))
    assert not torch.equal(drawn(0), drawn(1))
    layer.eval()
    assert torch.equal(drawn(0), drawn(1))


@pytest.mark.slow
def test_running_statistics_move_in_training_alone_also_without_gradients():
    layer, x = Layer(network()), images()
    before = layer.stem.normalization.running_mean.clone()
    with torch.no_grad():
        layer(x)
    moved = layer.stem.normalization.running_mean.clone()
    assert not torch.equal(before, moved)
    layer.eval()(x)
    assert torch.equal(layer.stem.normalization.running_mean, moved)


def test_a_state_dict_makes_the_round_trip_and_parameters_stay_the_same_objects():
    layer, other = Layer(network()), Layer(network())
    kept = dict(layer.named_parameters())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    layer.load_state_dict(other.state_dict())
    assert all(parameter is kept[name] for name, parameter in layer.named_parameters())
    assert torch.equal(layer.eval()(images()), other.eval()(images()))


def test_what_changes_in_place_after_the_forward_is_told():
    layer = Layer(perceptron())
    loss = layer(torch.randn(4, *_input_shape(perceptron()))).square().sum()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_names_that_pytorch_does_not_take_are_escaped():
    layer = Layer(smooth_model())
    assert set(layer.state_dict()) == {"forward_", "a__b"}
    y, square = layer(x=torch.ones(1, 3, dtype=torch.float64))
    assert torch.equal(y * y, square)


def test_under_autocast_products_are_computed_in_sixteen_bits_and_gradients_keep_float32():
    layer, x = Layer(network()), images()
    exact = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = layer(x.bfloat16())
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, exact, rtol=0.1, atol=0.1)
    assert not torch.equal(rounded, exact)
    rounded.sum().backward()
    assert layer.stem.convolution.weight.grad.dtype == torch.float32


def test_inputs_that_do_not_fit_are_named():
    layer = Layer(smooth_model())
    with pytest.raises(ConfigurationError, match=r"takes the inputs 'x', and was given 0 by position and 'z' by name"):
        layer(z=torch.ones(1, 3))
    with pytest.raises(ConfigurationError, match=r"'x' is torch.float32, and the graph 'smooth' computes with torch.float64"):
        layer(torch.ones(1, 3))


def test_a_policy_that_counts_steps_is_refused():
    with pytest.raises(ConfigurationError, match=r"norm: 'renorm' of '.*' counts the steps of a session"):
        Layer(network(), norm="renorm")
