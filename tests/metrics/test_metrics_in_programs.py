"""Programs with metrics: compiled, trained, saved, evaluated over batches, replicas and clients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir
import pytest

import burnish
from burnish import losses, metrics
from burnish.compiler.options import read_metrics
from burnish.errors import ConfigurationError, InputError
from burnish.graph import Builder, Tensor
from burnish.training.metric_totals import Means
from oracles.combinations import diagonal, named, spread

CLASSES = [
    "accuracy",
    "top_2",
    "precision:macro",
    "recall:micro",
    "f1:weighted",
    "f1:1",
    "auc:macro,bins=256",
    "auc:0",
    "perplexity",
]
YES_OR_NO = ["accuracy", "precision", "recall:macro", "f1:macro,threshold=0.25", "auc", "normalized_entropy", "mae", "mse"]
VALUES = ["mean_absolute_error", "mean_squared_error", "root_mean_squared_error", "r2"]
CASES = [("cross_entropy", CLASSES), ("bce_with_logits", YES_OR_NO), ("mse", VALUES)]


def linear(classes: int = 3, features: int = 4) -> ir.Model:
    graph = ir.Graph([], [], nodes=[], name="linear", opset_imports={"": 18})
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["batch", features]))
    graph.inputs.append(x)
    weight = np.random.default_rng(1).normal(size=(features, classes)).astype(np.float32)
    value = ir.Value(name="w", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(weight.shape))
    value.const_value = ir.tensor(weight, name="w")
    graph.initializers.add(value)
    builder = Builder(graph)
    output = builder.op("MatMul", builder.tensor(x), builder.tensor(value))
    output.value.name = "y"
    graph.outputs.append(output.value)
    return ir.Model(graph, ir_version=10)


def samples(loss: str, size: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(size, 4)).astype(np.float32)
    if loss == "cross_entropy":
        return {"x": x, "labels": rng.integers(0, 3, size)}
    targets = (rng.random((size, 3)) < 0.5) if loss == "bce_with_logits" else rng.normal(size=(size, 3))
    return {"x": x, "targets": targets.astype(np.float32)}


def cut(batch: Mapping[str, np.ndarray], sizes: tuple[int, ...]) -> list[dict[str, np.ndarray]]:
    ends = np.cumsum(sizes)
    return [{name: array[end - size : end] for name, array in batch.items()} for end, size in zip(ends, sizes, strict=True)]


@diagonal(("engine", ["onnxruntime", "reference"]), (("loss", "names"), named(CASES, [case[0] for case in CASES])), test=1)
def test_batches_of_any_size_come_to_the_figures_of_the_whole(loss: str, names: list[str], engine: str, tmp_path: Path) -> None:
    compiled = burnish.compile(linear(), loss=loss, metrics=names)
    program = burnish.Program.load(compiled.save(tmp_path / "program"))
    session = burnish.Session(program, engine=engine)
    whole = samples(loss, 50)
    batches = cut(whole, (1, 30, 4, 15))
    once = session.evaluate(whole)
    expected = [metrics.get(name).name for name in names]
    assert list(once) == ["loss", *expected]
    over = session.evaluate_data(batches)
    assert over.keys() == once.keys()
    of_whole = session.combine_totals(session.evaluate_totals(whole))
    for name in once:
        assert over[name] == pytest.approx(of_whole[name], rel=1e-6)
        assert over[name] == pytest.approx(once[name], rel=1e-5, abs=5e-3 if name.startswith("auc") else 0)
    for name in expected:
        assert math.isfinite(over[name])
    step = session.step(whole)
    for name in once:
        assert step[name] == pytest.approx(once[name], rel=1e-5)
    totals = [session.evaluate_totals(batch) for batch in batches]
    added = {name: sum(part[name] for part in totals) for name in totals[0]}
    again = session.evaluate_data(batches)
    assert session.combine_totals(added) == pytest.approx(again, rel=1e-12)
    for name, array in added.items():
        is_sum = any(word in name for word in ("loss", "sum:mean", "squares", "likelihood", "entropy:targets", "r2:targets"))
        assert array.dtype == (np.float64 if is_sum else np.int64), name


@spread("watched", ["f1:macro", "auc:macro", "perplexity", None], test=1)
def test_a_metric_says_which_epoch_is_the_best(watched: str | None, tmp_path: Path) -> None:
    program = burnish.compile(linear(), optimizer=burnish.optim.sgd(lr=3.0), metrics=["f1:macro", "auc:macro", "perplexity"])
    trainer = burnish.Trainer(
        program,
        samples("cross_entropy", 48),
        samples("cross_entropy", 30, seed=1),
        epochs=5,
        batch_size=7,
        best_metric=watched,
        run_directory=tmp_path,
        progress=False,
    )
    result = trainer.run()
    name = watched or "f1:macro"
    values = [row[f"eval_{name}"] for row in result.history if row.get(f"eval_{name}") is not None]
    assert len(set(values)) > 1
    assert result.best is not None
    assert result.best["value"] == (min(values) if name == "perplexity" else max(values))


@pytest.mark.slow
def test_a_batch_in_which_nothing_counts_is_left_out_of_the_averages(tmp_path: Path) -> None:
    data = samples("cross_entropy", 12)
    data["labels"][:] = [0, 1, 2] * 4
    program = burnish.compile(linear(), optimizer=burnish.optim.sgd(lr=0.0), metrics=["auc:0", "accuracy"])
    session = burnish.Session(program)
    one_by_one = [session.step(batch)["auc:0"] for batch in cut(data, (1,) * 12)]
    assert all(map(math.isnan, one_by_one))
    for size in (1, 2, 5):
        folder = tmp_path / str(size)
        result = burnish.Trainer(program, data, epochs=1, batch_size=size, run_directory=folder, progress=False).run()
        assert math.isnan(result.metrics["auc:0"]) is (size == 1)
        assert math.isfinite(result.metrics["accuracy"])
    means = Means()
    means.add({"a": math.nan, "b": 1.0}, 3)
    assert math.isnan(means.values()["a"])
    means.add({"a": 0.5, "b": 2.0}, 1)
    assert means.values() == {"a": 0.5, "b": 1.25}


def test_nothing_to_evaluate_is_named() -> None:
    session = burnish.Session(burnish.compile(linear(), metrics=["f1:2"]))
    with pytest.raises(InputError, match="Nothing counts towards 'loss': every label is ignored"):
        session.evaluate_data([{"x": np.zeros((2, 4)), "labels": np.array([-100, -100])}])
    positive = np.ones((2, 3))
    session = burnish.Session(burnish.compile(linear(), loss="bce_with_logits", metrics=["auc"]))
    with pytest.raises(InputError, match=r"Nothing counts towards 'auc': .* or none is of a class that it is about"):
        session.evaluate_data([{"x": np.zeros((2, 4)), "targets": positive}])
    with pytest.raises(
        InputError, match=r"The totals of 'auc:none' are a, and no metric of that name .* burnish\.metrics\.METRICS"
    ):
        session.combine_totals({"total:auc:none:a": np.ones(1)})


@dataclass(frozen=True)
class Largest(metrics.MetricBase):
    """The share of a batch's elements above a bound, squared: no quotient."""

    word: ClassVar[str] = "largest"
    higher_is_better: ClassVar[bool] = True

    bound: float = 0.0

    def totals(self, compared: losses.Compared) -> dict[str, Tensor]:
        builder = compared.prediction.builder
        above = builder.cast(builder.op("Greater", compared.prediction, self.bound), ir.DataType.INT64)
        return {"above": builder.op("ReduceSum", above, keepdims=0), "all": builder.op("Size", compared.prediction)}

    def figure(self, compared: losses.Compared, totals: Mapping[str, Tensor], dtype: ir.DataType) -> Tensor:
        above, size = (compared.prediction.builder.cast(totals[part], dtype) for part in ("above", "all"))
        return above * above / (size * size)

    def combine(self, totals: Mapping[str, np.ndarray]) -> float:
        return float(totals["above"] / totals["all"]) ** 2


def test_a_metric_of_ones_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"METRICS does not lead from 'largest:0\.5' to this metric.*METRICS\['largest'\] = Largest"
    ):
        burnish.compile(linear(), metrics=[Largest(0.5)])
    monkeypatch.setitem(metrics.METRICS, "largest", Largest)
    folder = burnish.compile(linear(), metrics=["largest:0.5"]).save(tmp_path / "program")
    session = burnish.Session(burnish.Program.load(folder))
    batch = samples("cross_entropy", 20)
    assert session.evaluate_data(cut(batch, (13, 7)))["largest:0.5"] == pytest.approx(session.evaluate(batch)["largest:0.5"])


def test_a_metric_asked_for_twice_is_reported_once() -> None:
    program = burnish.compile(linear(), metrics=["top_2", metrics.top_k(2), "top_k:2"])
    assert program.options["metrics"] == ["top_2"]


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (["accuracy,top_5"], ["accuracy", "top_5"]),
        (["f1:macro,threshold=0.3,mae"], ["f1:macro,threshold=0.3", "mae"]),
        (["auc:average=macro,bins=64", "f1:2"], ["auc:average=macro,bins=64", "f1:2"]),
    ],
)
def test_commas_on_the_command_line(given: Any, names: list[str]) -> None:
    assert read_metrics(given) == names
    assert all(metrics.is_known(metrics.get(name)) for name in names)
