"""Weighted sums of losses, losses given as ONNX graphs, and models that compute their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F

import burnish
from burnish import losses
from burnish.data.data_spec import DataSpec
from burnish.data.sources import open_dataset
from burnish.errors import ConfigurationError, DataError
from burnish.graph import Builder, Tensor
from burnish.program import Role
from oracles.scaled_model import RATE, scaled_outputs
from oracles.small_graphs import SmallGraph

SAMPLES = {name: np.random.default_rng(seed).standard_normal((8, 3)) for seed, name in enumerate("ab")}
CLASSES = np.array([0, 2, 1, -100, 0, 2, 2, 1])
VALUES = np.random.default_rng(9).standard_normal((8, 3))
BATCH = {f"in:{name}": array for name, array in SAMPLES.items()}
BOTH = {"a": (2.0, "cross_entropy"), "b": (0.5, losses.huber(delta=0.5))}


def label_names(program: burnish.Program) -> set[str]:
    return {entry.name for entry in program.signature["step"].inputs_of(Role.LABEL)}


def steps_of_torch(session: burnish.Session, loss_of: Callable[..., torch.Tensor], names: str = "ab") -> tuple[list[float], Any]:
    weights = {name: torch.tensor(session.state()[f"param/w:{name}"]).requires_grad_() for name in names}
    optimizer = torch.optim.SGD(weights.values(), lr=RATE)
    values = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = loss_of(*(torch.from_numpy(SAMPLES[name]) * weight for name, weight in weights.items()))
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return values, weights


def check_two_steps(session: burnish.Session, batch: Any, loss_of: Callable[..., torch.Tensor], names: str = "ab") -> None:
    values, weights = steps_of_torch(session, loss_of, names)
    for value in values:
        np.testing.assert_allclose(session.step(batch)["loss"], value, rtol=1e-10)
    for name, weight in weights.items():
        np.testing.assert_allclose(session.state()[f"param/w:{name}"], weight.detach().numpy(), rtol=1e-10)


def compiled(names: str, loss: Any, **options: Any) -> burnish.Program:
    model = scaled_outputs({name: SAMPLES[name] for name in names})
    return burnish.compile(model, loss=loss, optimizer=burnish.optim.sgd(lr=RATE, momentum=0), **options)


@pytest.mark.slow
def test_a_sum_over_two_outputs_trains_as_in_torch(tmp_path: Path) -> None:
    program = compiled("ab", losses.weighted_sum(BOTH))
    assert label_names(program) == {"labels:a", "targets:b"}
    assert program.options["loss_terms"] == {"loss:a": 2.0, "loss:b": 0.5}
    program.save(tmp_path / "program")
    session = burnish.Session(burnish.Program.load(tmp_path / "program"), threads=1)
    batch = BATCH | {"labels:a": CLASSES, "targets:b": VALUES}

    def loss_of(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        first = F.cross_entropy(a, torch.from_numpy(CLASSES))
        return 2 * first + 0.5 * F.huber_loss(b, torch.from_numpy(VALUES), delta=0.5)

    check_two_steps(session, batch, loss_of)
    results = session.evaluate(batch)
    assert set(results) == {"loss", "loss:a", "loss:b", "accuracy"}
    np.testing.assert_allclose(results["loss"], 2 * results["loss:a"] + 0.5 * results["loss:b"], rtol=1e-14)


@pytest.mark.parametrize("cuts", [(0, 1, 8), (0, 3, 4, 8)], ids=str)
def test_the_loss_of_a_data_set_is_exact_though_terms_count_different_things(cuts: tuple[int, ...]) -> None:
    session = burnish.Session(compiled("ab", losses.weighted_sum(BOTH)), threads=1)
    whole = BATCH | {"labels:a": CLASSES, "targets:b": VALUES}
    parts = [{name: array[start:stop] for name, array in whole.items()} for start, stop in pairwise(cuts)]
    apart, together = session.evaluate_data(parts), session.evaluate(whole)
    assert list(apart) == list(together)
    np.testing.assert_allclose(list(apart.values()), list(together.values()), rtol=1e-13)


def test_summands_on_one_output_share_its_labels() -> None:
    loss = losses.weighted_sum([(1.0, "cross_entropy"), (0.25, "multi_margin"), (0.5, "multi_margin")])
    program = compiled("a", loss)
    assert label_names(program) == {"labels"}
    (entry,) = program.signature["step"].inputs_of(Role.LABEL)
    assert (entry.minimum, entry.maximum, entry.ignored) == (0, 2, None)
    assert list(program.options["loss_terms"]) == ["loss:cross_entropy", "loss:multi_margin:1", "loss:multi_margin:2"]
    labels = np.abs(CLASSES) % 3

    def loss_of(a: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(a, torch.from_numpy(labels)) + 0.75 * F.multi_margin_loss(a, torch.from_numpy(labels))

    check_two_steps(burnish.Session(program, threads=1), {"in:a": SAMPLES["a"], "labels": labels}, loss_of, "a")


def test_a_summand_may_read_several_outputs_and_another_sum() -> None:
    inner = losses.weighted_sum([(2.0, losses.l1(), "a")])
    loss = losses.weighted_sum([(1.0, "cosine_embedding", ("a", "b")), (3.0, inner), (1.0, "mse", "a")])
    program = compiled("ab", loss)
    assert label_names(program) == {"targets:a+b", "targets:a"}
    assert program.options["loss_terms"] == {"loss:a+b": 1.0, "loss:weighted_sum:a": 6.0, "loss:a": 1.0}
    signs = np.where(CLASSES > 0, 1.0, -1.0)

    def loss_of(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        values = torch.from_numpy(VALUES)
        return F.cosine_embedding_loss(a, b, torch.from_numpy(signs)) + 6 * F.l1_loss(a, values) + F.mse_loss(a, values)

    batch = BATCH | {"targets:a+b": signs, "targets:a": VALUES}
    check_two_steps(burnish.Session(program, threads=1), batch, loss_of)


@pytest.mark.parametrize(
    "loss",
    [
        losses.weighted_sum(BOTH),
        losses.weighted_sum([(1, "mse"), (0.5, "triplet", ("a", "b", "c"))]),
        losses.output("loss", reduction="sum"),
    ],
    ids=lambda loss: loss.name,
)
def test_options_make_the_loss_again(loss: losses.Loss) -> None:
    assert losses.get(json.loads(json.dumps(loss.options()))) == loss
    assert isinstance(loss, losses.Loss)


def test_the_order_of_a_mapping_and_of_a_list_is_one() -> None:
    pairs = [(2.0, "cross_entropy", "a"), (0.5, losses.huber(delta=0.5), "b")]
    assert losses.weighted_sum(pairs) == losses.weighted_sum(BOTH)
    assert losses.weighted_sum({"a": "mse"}) == losses.weighted_sum([(1.0, "mse", "a")])


def loss_of_logarithms(opset: int = 18, **changes: Any) -> onnx.ModelProto:
    """mean over the samples of ``scale * log(cosh(a - goal)) * importance``, with a scale that is an initializer."""
    dtype, n = changes.get("dtype", "float64"), changes.get("batch", "n")
    graph = SmallGraph({changes.get("read", "a"): (dtype, (n, 3)), "goal": (dtype, (n, 3)), "importance": (dtype, (n,))}, opset)
    b = graph.builder
    difference = graph[changes.get("read", "a")] - graph["goal"]
    logarithms = b.op("Log", (b.op("Exp", difference) + b.op("Exp", -difference)) * 0.5)
    scale = ir.Value(name="scale", type=ir.TensorType(ir.DataType.from_numpy(np.dtype(dtype))), shape=ir.Shape([3]))
    scale.const_value = ir.tensor(np.array([1.0, 2.0, 3.0], dtype), name="scale")
    graph.graph.initializers.add(scale)
    per_sample = b.op("ReduceSum", logarithms * b.tensor(scale), b.integers([1]), keepdims=0) * graph["importance"]
    graph.output("loss", per_sample if changes.get("unreduced") else b.op("ReduceMean", per_sample, keepdims=0))
    for name in changes.get("more", ()):
        graph.output(name, per_sample)
    return graph.model()


IMPORTANCE = np.random.default_rng(5).uniform(0.5, 1.5, 8)


def logarithms_by_torch(a: torch.Tensor) -> torch.Tensor:
    terms = torch.log(torch.cosh(a - torch.from_numpy(VALUES))) * torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    return (terms.sum(1) * torch.from_numpy(IMPORTANCE)).mean()


@pytest.mark.slow
@pytest.mark.parametrize("given", ["from_onnx", "path", "text", "proto", "ir"])
def test_a_loss_given_as_an_onnx_graph(given: str, tmp_path: Path) -> None:
    proto = loss_of_logarithms()
    onnx.save(proto, tmp_path / "loss.onnx")
    forms = {"from_onnx": losses.from_onnx(proto), "path": tmp_path / "loss.onnx", "text": str(tmp_path / "loss.onnx")}
    forms |= {"proto": proto, "ir": ir.from_proto(proto)}
    with pytest.warns(burnish.errors.UntrainedWeightsWarning, match="'w:b': nothing that leads to 'a' reads it"):
        program = compiled("ab", forms[given])
    assert [(entry.name, entry.shape) for entry in program.signature["step"].inputs_of(Role.LABEL)] == [
        ("goal", ("batch", 3)),
        ("importance", ("batch",)),
    ]
    program.save(tmp_path / "program")
    again = burnish.Program.load(tmp_path / "program")
    assert losses.get(again.options["loss"]) == losses.get(forms[given])
    session = burnish.Session(again, threads=1)
    batch = BATCH | {"goal": VALUES, "importance": IMPORTANCE}
    check_two_steps(session, batch, logarithms_by_torch, "a")
    parts = [{name: array[part] for name, array in batch.items()} for part in (slice(0, 3), slice(3, 8))]
    np.testing.assert_allclose(session.evaluate_data(parts)["loss"], session.evaluate(batch)["loss"], rtol=1e-13)


@pytest.mark.parametrize("opset", [18, 21, 24])
def test_a_loss_graph_of_another_opset(opset: int) -> None:
    session = burnish.Session(compiled("a", loss_of_logarithms(opset)), threads=1)
    batch = {"in:a": SAMPLES["a"], "goal": VALUES, "importance": IMPORTANCE}
    check_two_steps(session, batch, logarithms_by_torch, "a")


def with_own_loss(per_sample: bool) -> ir.Model:
    """A model of one output ``a`` that also computes its squared error from an input ``y``."""
    model = scaled_outputs({"a": SAMPLES["a"]})
    graph = model.graph
    y = ir.Value(name="y", type=ir.TensorType(ir.DataType.DOUBLE), shape=ir.Shape(["batch", 3]))
    graph.inputs.append(y)
    builder = Builder(graph)
    difference = builder.tensor(graph.outputs[0]) - builder.tensor(y)
    axes = builder.integers([1]) if per_sample else None
    loss: Tensor = builder.op("ReduceMean", difference * difference, axes, keepdims=0)
    loss.value.name = "own"
    graph.outputs.append(loss.value)
    return model


@pytest.mark.parametrize("per_sample", [False, True])
def test_a_model_that_computes_its_loss(per_sample: bool) -> None:
    optimizer = burnish.optim.sgd(lr=RATE, momentum=0)
    program = burnish.compile(with_own_loss(per_sample), output="own", optimizer=optimizer)
    assert program.options["loss"] == losses.output("own").options()
    assert label_names(program) == set()
    session = burnish.Session(program, threads=1)
    batch = {"in:a": SAMPLES["a"], "y": VALUES}
    check_two_steps(session, batch, lambda a: F.mse_loss(a, torch.from_numpy(VALUES)), "a")
    parts = [{name: array[part] for name, array in batch.items()} for part in (slice(0, 3), slice(3, 8))]
    np.testing.assert_allclose(session.evaluate_data(parts)["loss"], session.evaluate(batch)["loss"], rtol=1e-13)


def test_a_sum_that_a_model_computes_is_taken_as_it_is() -> None:
    program = burnish.compile(with_own_loss(per_sample=True), loss=losses.output("own", reduction="sum"))
    total = burnish.Session(program).evaluate({"in:a": SAMPLES["a"], "y": VALUES})["loss"]
    mean = burnish.Session(burnish.compile(with_own_loss(per_sample=True), output="own"))
    np.testing.assert_allclose(total, 8 * mean.evaluate({"in:a": SAMPLES["a"], "y": VALUES})["loss"], rtol=1e-13)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: losses.weighted_sum([]), "weighted_sum: there is no loss to sum"),
        (lambda: losses.weighted_sum("mse"), r"weighted_sum: give {output: \(weight, loss\)} or a list .*, not 'mse'"),
        (lambda: losses.weighted_sum(["mse"]), r"weighted_sum: a summand is \(weight, loss\) or .*, not 'mse'"),
        (lambda: losses.weighted_sum([(-1, "mse")]), "the weight of 'mse' must be a finite number of at least 0, not -1"),
        (lambda: losses.weighted_sum([(1, "nse")]), r"there is no loss 'nse' \(did you mean 'mse'\?\)"),
        (lambda: losses.weighted_sum([(1, "mse", 3.5)]), "weighted_sum: an output is the name of one, not 3.5"),
        (
            lambda: losses.weighted_sum([(1, "mse", ("a", "b"))]),
            r"reads 1 outputs, .*, not \['a', 'b'\]",
        ),
        (
            lambda: losses.weighted_sum([(1, losses.output("loss"), "a")]),
            "weighted_sum: the loss output says itself which outputs it reads",
        ),
        (lambda: compiled("ab", losses.weighted_sum({"a": "mse", "c": "mse"})), "loss weighted_sum: the model has no output 'c'"),
        (lambda: losses.get("weighted_sum"), "loss 'weighted_sum' needs the option 'losses': give it"),
        (lambda: losses.get("huber:0.5"), "loss 'huber:0.5': settings are written name=value"),
        (lambda: losses.output(3), "output: give the name of the output that is the loss, not 3"),
        (lambda: compiled("a", "mse", output="a"), "loss and output: the model computes its loss as 'a'"),
        (
            lambda: losses.from_onnx(loss_of_logarithms(more=("x",))),
            "has the outputs 'loss', 'x': it must have one",
        ),
        (
            lambda: losses.from_onnx(loss_of_logarithms(unreduced=True)),
            "the output 'loss' .* is .*, not a .* scalar",
        ),
        (
            lambda: compiled("a", loss_of_logarithms(read="z")),
            "reads 'z', 'goal', 'importance', and the outputs .* 'a'",
        ),
        (
            lambda: compiled("a", loss_of_logarithms(dtype="float32")),
            "reads 'a' as FLOAT .*, and the model gives DOUBLE",
        ),
    ],
)
def test_bad_settings_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_labels_of_one_name_that_are_different_things_are_refused() -> None:
    loss = losses.weighted_sum([(1, "mse"), (1, losses.cosine_embedding(outputs=["a", "b"]))])
    with pytest.raises(ConfigurationError, match=r"cosine_embedding reads 'targets' as DOUBLE of shape \['batch'\], and"):
        compiled("ab", loss, outputs="a")


def test_settings_behind_a_colon() -> None:
    assert losses.get("huber:delta=0.5,reduction=sum") == losses.huber(delta=0.5, reduction="sum")
    assert losses.get("output:output=loss") == losses.output("loss")


@pytest.mark.slow
def test_an_archive_fills_the_labels_of_every_summand(tmp_path: Path) -> None:
    model = scaled_outputs({"a": SAMPLES["a"]})
    head = ir.from_proto(ir.to_proto(model))
    builder = Builder(head.graph)
    second = builder.op("Identity", builder.tensor(head.graph.outputs[0]))
    second.value.name = "b"
    head.graph.outputs.append(second.value)
    program = burnish.compile(head, loss=losses.weighted_sum(BOTH))
    wanted = DataSpec.by(program)
    arrays = {"in:a": SAMPLES["a"], "labels:a": CLASSES, "targets:b": VALUES}
    np.savez(tmp_path / "data.npz", **arrays)
    data = open_dataset(tmp_path / "data.npz", wanted)
    result = burnish.Trainer(program, data, data, epochs=1, batch_size=4, run_directory=tmp_path / "run").run()
    assert np.isfinite(result.metrics["loss"])
    del arrays["targets:b"]
    np.savez(tmp_path / "lacking.npz", **arrays)
    with pytest.raises(DataError, match=r"lacking\.npz: no array 'targets:b' for the loss; the file has 'in:a'"):
        open_dataset(tmp_path / "lacking.npz", wanted)
    (tmp_path / "data.csv").write_text("p,q,r,label\n1,2,3,0\n")
    with pytest.raises(DataError, match=r"compares with 'labels:a' and 'targets:b', and this format fills exactly one"):
        open_dataset(tmp_path / "data.csv", wanted)
