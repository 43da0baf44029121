"""Bags of embeddings as PyTorch exports them: no loop is left, and values and gradients are PyTorch's, of empty bags too."""

from __future__ import annotations

import io
import warnings

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper

import burnish
from oracles.combinations import diagonal

ROWS, WIDTH = 20, 4


class Bags(torch.nn.Module):
    """indices, offsets and perhaps weights of the indices to results [bags, WIDTH]."""

    def __init__(self, mode: str, include_last_offset: bool):
        super().__init__()
        self.bags = torch.nn.EmbeddingBag(ROWS, WIDTH, mode=mode, include_last_offset=include_last_offset)

    def forward(self, indices, offsets, factors=None):
        return self.bags(indices, offsets, per_sample_weights=factors)


class EqualBags(torch.nn.Module):
    """indices [bags, size] to results [bags, WIDTH]."""

    def __init__(self, mode: str):
        super().__init__()
        self.bags = torch.nn.EmbeddingBag(ROWS, WIDTH, mode=mode)

    def forward(self, indices):
        return self.bags(indices)


def export(module: torch.nn.Module, arguments: tuple, exporter: str) -> onnx.ModelProto:
    names = ["indices", "offsets", "factors"][: len(arguments)]
    axes = {"indices": "count", "offsets": "bags", "factors": "count"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if exporter == "older":
            target = io.BytesIO()
            dynamic = {name: {0: axes[name]} for name in names}
            torch.onnx.export(module, arguments, target, dynamo=False, input_names=names, dynamic_axes=dynamic)
            return onnx.load_from_string(target.getvalue())
        dimensions = {axis: torch.export.Dim(axis, min=2) for axis in set(axes.values())}
        shapes = tuple({0: dimensions[axes[name]]} for name in names) if exporter == "newer, open" else None
        program = torch.onnx.export(module, arguments, dynamo=True, verbose=False, optimize=False, dynamic_shapes=shapes)
        return program.model_proto


def inputs_of(model: onnx.ModelProto, arguments: tuple) -> dict[str, np.ndarray]:
    return {value.name: tensor.numpy() for value, tensor in zip(model.graph.input, arguments, strict=True)}


def arguments_of(include_last_offset: bool, factors: bool, empty: bool) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    offsets = [0, 0, 3, 7, 7, 12] if empty else [0, 1, 3, 7, 8, 12]
    given = [torch.randint(0, ROWS, (13,), generator=generator), torch.tensor(offsets + [13] * include_last_offset)]
    return (*given, torch.rand(13, generator=generator)) if factors else tuple(given)


def check(module: torch.nn.Module, model: onnx.ModelProto, arguments: tuple) -> None:
    """Values, and the gradients of the table, on every engine."""
    result = module(*arguments)
    cotangent = torch.randn(result.shape, generator=torch.Generator().manual_seed(1))
    (gradient,) = torch.autograd.grad((result * cotangent).sum(), module.bags.weight)
    loaded = burnish.load(model)
    assert "Loop" not in {node.op_type for node in loaded.graph}
    (table,) = (name for name, value in loaded.graph.initializers.items() if list(value.shape) == [ROWS, WIDTH])
    (output,) = (value.name for value in loaded.graph.outputs)
    given = inputs_of(model, arguments)
    backward = burnish.grad(model, wrt=[table])
    for name in ("onnxruntime", "reference", "torch"):
        engine = burnish.engines.get(name)
        np.testing.assert_allclose(engine.run(loaded, given)[output], result.detach().numpy(), rtol=1e-5, atol=1e-6)
        found = engine.run(backward, {**given, f"cotangent:{output}": cotangent.numpy()})[f"grad:{table}"]
        np.testing.assert_allclose(found, gradient.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@diagonal(("mode", ["sum", "mean"]), ("include_last_offset", [False, True]), ("exporter", ["older", "newer", "newer, open"]))
def test_bags_between_offsets(mode, include_last_offset, exporter):
    module = Bags(mode, include_last_offset)
    model = export(module, arguments_of(include_last_offset, factors=False, empty=False), exporter)
    for empty in (False, True):
        check(module, model, arguments_of(include_last_offset, factors=False, empty=empty))


@pytest.mark.slow
@pytest.mark.parametrize("exporter", ["older", "newer", "newer, open"])
def test_bags_whose_indices_have_weights(exporter):
    module, arguments = Bags("sum", False), arguments_of(False, factors=True, empty=False)
    check(module, export(module, arguments, exporter), arguments)


@pytest.mark.slow
@diagonal(("mode", ["sum", "mean"]), ("exporter", ["older", "newer"]))
def test_bags_of_one_size(mode, exporter):
    module = EqualBags(mode)
    arguments = (torch.randint(0, ROWS, (5, 3), generator=torch.Generator().manual_seed(0)),)
    check(module, export(module, arguments, exporter), arguments)


@pytest.mark.slow
def test_more_bags_than_were_exported():
    module = Bags("mean", False)
    model = export(module, arguments_of(False, factors=False, empty=False), "older")
    check(module, model, (torch.randint(0, ROWS, (40,)), torch.arange(0, 40, 4)))


@pytest.mark.parametrize("exporter", ["older", "newer"])
def test_the_largest_of_a_bag_stays_a_loop(exporter):
    module, arguments = Bags("max", False), arguments_of(False, factors=False, empty=False)
    model = export(module, arguments, exporter)
    loaded = burnish.load(model)
    assert "Loop" in {node.op_type for node in loaded.graph}
    found = burnish.engines.get("onnxruntime").run(loaded, inputs_of(model, arguments))
    np.testing.assert_allclose(next(iter(found.values())), module(*arguments).detach().numpy(), rtol=1e-6)


def the_loop(model: onnx.ModelProto) -> onnx.NodeProto:
    (loop,) = (node for node in model.graph.node if node.op_type == "Loop")
    return loop


def of_body(loop: onnx.NodeProto, op_type: str) -> list[onnx.NodeProto]:
    return [node for node in loop.attribute[0].g.node if node.op_type == op_type]


def fewer_iterations(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.int64(3), "three"))
    the_loop(model).input[0] = "three"


def another_axis(model: onnx.ModelProto) -> None:
    (reduced,) = of_body(the_loop(model), "ReduceSum")
    model.graph.initializer.append(numpy_helper.from_array(np.array([1]), "one"))
    reduced.input[1] = "one"


def other_ends(model: onnx.ModelProto) -> None:
    gathers = of_body(the_loop(model), "Gather")
    gathers[1].input[0] = gathers[0].input[0]


def another_operator(model: onnx.ModelProto) -> None:
    (reduced,) = of_body(the_loop(model), "ReduceSum")
    reduced.op_type = "ReduceL1"


def something_behind(model: onnx.ModelProto) -> None:
    body = the_loop(model).attribute[0].g
    body.node.append(helper.make_node("Neg", [body.output[1].name], ["negative"]))
    body.output[1].name = "negative"


def a_table_of_the_body(model: onnx.ModelProto) -> None:
    body = the_loop(model).attribute[0].g
    gather = of_body(the_loop(model), "Gather")[2]
    body.node.insert(0, helper.make_node("Neg", [gather.input[0]], ["negative_table"]))
    of_body(the_loop(model), "Gather")[2].input[0] = "negative_table"


def rows_of_two_axes(model: onnx.ModelProto) -> None:
    gather = of_body(the_loop(model), "Gather")[2]
    model.graph.initializer.append(numpy_helper.from_array(np.ones((ROWS, 2, 3), np.float32), "deep"))
    gather.input[0] = "deep"
    del the_loop(model).attribute[0].g.output[1].type.tensor_type.shape.dim[:]
    the_loop(model).attribute[0].g.output[1].type.tensor_type.ClearField("shape")
    model.graph.output[0].type.tensor_type.ClearField("shape")


def sums_of_whole_numbers(model: onnx.ModelProto) -> None:
    body = the_loop(model).attribute[0].g
    (reduced,) = of_body(the_loop(model), "ReduceSum")
    place = [node.op_type for node in body.node].index("ReduceSum")
    cast = helper.make_node("Cast", [reduced.input[0]], ["whole"], to=onnx.TensorProto.INT64)
    reduced.input[0], reduced.output[0] = "whole", "whole_sum"
    body.node.insert(place, cast)
    body.node.insert(place + 2, helper.make_node("Cast", ["whole_sum"], [body.output[1].name], to=onnx.TensorProto.FLOAT))


CHANGES = [
    fewer_iterations,
    another_axis,
    other_ends,
    another_operator,
    something_behind,
    a_table_of_the_body,
    rows_of_two_axes,
    sums_of_whole_numbers,
]


@pytest.mark.parametrize("change", CHANGES)
def test_other_loops_stay(change):
    model = export(Bags("sum", False), arguments_of(False, factors=False, empty=False), "older")
    assert "Loop" not in {node.op_type for node in burnish.load(model).graph}
    change(model)
    assert "Loop" in {node.op_type for node in burnish.load(model).graph}


class Recommender(torch.nn.Module):
    """Numbers and two features of bags, their products in pairs, and a layer on top, as DLRM has them."""

    def __init__(self):
        super().__init__()
        self.tables = torch.nn.ModuleList(torch.nn.EmbeddingBag(ROWS, WIDTH, mode="sum") for _ in range(2))
        self.bottom = torch.nn.Linear(3, WIDTH)
        self.top = torch.nn.Linear(WIDTH + 3, 2)

    def forward(self, numbers, indices, offsets):
        below = torch.relu(self.bottom(numbers))
        bags = [table(indices[place], offsets[place]) for place, table in enumerate(self.tables)]
        vectors = torch.stack([below, *bags], dim=1)
        pairs = torch.bmm(vectors, vectors.transpose(1, 2))
        return self.top(torch.cat([below, pairs[:, 0, 1:2], pairs[:, 0, 2:3], pairs[:, 1, 2:3]], dim=1))


@pytest.mark.slow
def test_a_recommender_trains_as_in_pytorch():
    torch.manual_seed(0)
    module = Recommender()
    numbers, indices = torch.randn(6, 3), torch.randint(0, ROWS, (2, 14))
    offsets, labels = torch.tensor([[0, 2, 2, 5, 9, 12], [0, 1, 4, 6, 6, 10]]), torch.tensor([0, 1, 1, 0, 1, 0])
    target = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = ["numbers", "indices", "offsets"]
        torch.onnx.export(
            module,
            (numbers, indices, offsets),
            target,
            dynamo=False,
            input_names=names,
            training=torch.onnx.TrainingMode.TRAINING,
            do_constant_folding=False,
        )
    program = burnish.compile(target.getvalue(), loss="cross_entropy", optimizer=burnish.optim.sgd(lr=0.5), metrics=())
    sessions = [burnish.Session(program, engine=name) for name in ("onnxruntime", "torch")]
    batch = {"numbers": numbers.numpy(), "indices": indices.numpy(), "offsets": offsets.numpy(), "labels": labels.numpy()}
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    losses = []
    for _ in range(5):
        loss = torch.nn.functional.cross_entropy(module(numbers, indices, offsets), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        for session in sessions:
            assert float(session.step(batch)["loss"]) == pytest.approx(losses[-1], rel=1e-4)
    assert losses[-1] < losses[0]
