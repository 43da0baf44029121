"""What holds for every optimizer there is: each name in ``optim.OPTIMIZERS`` is run through all of this.

A new optimizer adds its rows to ``PARABOLA`` and ``ROSENBROCK``, to ``SETTINGS`` if options change its state, and to
``docs/optimizers.md``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

import burnish
from burnish import optim
from burnish.engines.onnxruntime import OnnxRuntimeEngine
from burnish.graph import Builder, Tensor
from burnish.optim.accumulate import weighing
from burnish.optim.loss_scale import LossScaled
from burnish.optim.schedules import exponential
from burnish.optim.slots import parameter_of, slot_of, slots_of
from burnish.program import Program, Role
from oracles.combinations import diagonal, named, spread
from oracles.optimizers import LR, SHAPES, Arrays, UpdateGraph, next_state, parabola, random_problem, rosenbrock, run_steps
from oracles.small_graphs import SmallGraph

PAGE = Path(__file__).resolve().parents[2] / "docs" / "optimizers.md"


@dataclass(frozen=True)
class Run:
    """Options and steps of a run that ends at the bottom; where ``falling``, the rate falls to zero on a straight line."""

    options: Mapping[str, Any]
    steps: int = 600
    falling: bool = False

    def of(self, name: str) -> dict[str, Any]:
        optimizer = optim.OPTIMIZERS[name](**self.options)
        lr = optimizer.hyperparameters().get("lr") or 0.0
        rate = (lambda step: lr * (1.0 - step / self.steps)) if self.falling else None
        return {"optimizer": optimizer, "steps": self.steps, "rate": rate}


# Lion, LAMB and LARS take steps of the length of the rate, however near the bottom is; Muon takes these vectors by its Adam.
PARABOLA = {
    "adadelta": Run({"lr": 10.0}),
    "adafactor": Run({"lr": 1.0}),
    "adagrad": Run({"lr": 1.0}),
    "adam": Run({"lr": 0.1}),
    "adamax": Run({"lr": 0.1}),
    "adamw": Run({"lr": 0.1, "weight_decay": 0.0}),
    "asgd": Run({"lr": 0.1, "lambd": 0.0}),
    "lamb": Run({"lr": exponential(0.1, 0.975), "weight_decay": 0.0}),
    "lars": Run({"lr": exponential(0.1, 0.975), "trust_coefficient": 1.0}),
    "lion": Run({"lr": exponential(0.2, 0.97)}),
    "muon": Run({"lr": 0.1}),
    "nadam": Run({"lr": 0.1}),
    "radam": Run({"lr": 0.1}),
    "rmsprop": Run({"lr": 0.01, "momentum": 0.9}),
    "rowwise_adagrad": Run({"lr": 1.0}),
    "rprop": Run({"lr": 0.1, "step_sizes": (1e-9, 50.0)}),
    "sgd": Run({"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "sparse_adam": Run({"lr": 0.1}),
}
ROSENBROCK = {
    "adadelta": Run({}, 8000, falling=True),
    "adafactor": Run({}, 8000, falling=True),
    "adagrad": Run({"lr": 0.5}, 8000),
    "adam": Run({"lr": 0.02}, 4000),
    "adamax": Run({"lr": 0.05}, 4000),
    "adamw": Run({"lr": 0.02, "weight_decay": 0.0, "amsgrad": True}, 8000),
    "asgd": Run({"lr": 1.5e-3, "lambd": 0.0}, 8000),
    "lamb": Run({"lr": 0.02, "weight_decay": 0.0}, 8000, falling=True),
    "lars": Run({"lr": 0.01, "trust_coefficient": 1.0}, 8000, falling=True),
    "lion": Run({"lr": 0.005}, 8000, falling=True),
    "muon": Run({"lr": 0.02}, 4000),
    "nadam": Run({"lr": 0.02}, 4000),
    "radam": Run({"lr": 0.005, "betas": (0.9, 0.99)}, 4000),
    "rmsprop": Run({"lr": 0.001, "momentum": 0.9}, 4000),
    "rowwise_adagrad": Run({"lr": 0.5}, 8000),
    "rprop": Run({"lr": 0.01}, 4000),
    "sgd": Run({"lr": 1e-3, "momentum": 0.9}, 4000),
    "sparse_adam": Run({"lr": 0.02}, 4000),
}
# With every part of the state and of the update that the defaults leave out.
SETTINGS: dict[str, dict[str, Any]] = {
    "adafactor": {"weight_decay": 0.01, "eps": (1e-30, 1e-3), "clipping_threshold": 2.0},
    "adagrad": {"lr_decay": 0.1, "weight_decay": 0.01, "initial_accumulator_value": 0.1},
    "adam": {"amsgrad": True, "weight_decay": 0.01},
    "adamw": {"amsgrad": True},
    "asgd": {"lambd": 0.01, "t0": 2, "weight_decay": 0.01},
    "lamb": {"adapt_vectors": False},
    "lars": {"nesterov": True, "weight_decay": 0.01, "eps": 1e-3, "adapt_vectors": False},
    "lion": {"weight_decay": 0.1},
    "muon": {"flatten_kernels": True, "adjust_lr_fn": "match_rms_adamw", "others": {"name": "sgd", "momentum": 0.9}},
    "nadam": {"weight_decay": 0.01, "decoupled_weight_decay": True},
    "radam": {"weight_decay": 0.01, "decoupled_weight_decay": True, "betas": (0.5, 0.9)},
    "rmsprop": {"momentum": 0.9, "centered": True, "weight_decay": 0.01},
    "rprop": {"etas": (0.25, 1.5), "step_sizes": (1e-4, 0.05)},
    "sgd": {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01},
}


def every_name(*, test: int | None = None) -> pytest.MarkDecorator:
    return spread("name", sorted(optim.OPTIMIZERS), test=test)


EVERY = [
    *(make() for make in optim.OPTIMIZERS.values()),
    *(optim.OPTIMIZERS[name](**options) for name, options in SETTINGS.items()),
]


def name_of(optimizer: optim.Optimizer) -> str:
    return "-".join(map(str, optimizer.options().values()))


def every_optimizer(*, test: int | None = None, test_all: int | None = None) -> pytest.MarkDecorator:
    return spread("optimizer", EVERY, test=test, test_all=test_all, ids=name_of)


@every_name(test=9)
def test_finds_the_bottom_of_a_parabola(name: str) -> None:
    np.testing.assert_allclose(parabola(**PARABOLA[name].of(name)), 0.0, atol=1e-6)


@every_name()
@pytest.mark.slow
def test_goes_down_the_valley_of_rosenbrock(name: str) -> None:
    assert rosenbrock(**ROSENBROCK[name].of(name)) < 1e-4


@every_name()
def test_is_public_under_its_name_and_described(name: str) -> None:
    optimizer = optim.OPTIMIZERS[name]()
    assert optimizer.name == name
    assert getattr(optim, name) is optim.OPTIMIZERS[name]
    assert {name, type(optimizer).__name__} <= set(optim.__all__)
    assert optim.get(name) == optimizer
    assert f"| `{name}` |" in PAGE.read_text(encoding="utf-8")


AROUND = [
    lambda inside: inside,
    lambda inside: optim.accumulate(inside, 2),
    optim.diloco,
    optim.proximal,
    lambda inside: optim.chain(optim.clip_by_norm(1.0), inside),
    lambda inside: optim.groups(inside, {"b*": {"lr_scale": 0.5}}),
    lambda inside: optim.groups(inside, {"b*": optim.rmsprop(momentum=0.9), "s*": "frozen"}),
    lambda inside: LossScaled(inside, 1.0, 2.0, 0.5, 10),
    lambda inside: optim.sgd(lr=optim.schedules.warmup(optim.schedules.plateau(0.1), 3)),
]
AVERAGED = [
    optim.ema,
    lambda inside: optim.ema(inside, bias_correction=False),
    lambda inside: optim.swa(optim.accumulate(inside, 2)),
]


@every_optimizer(test=14)
def test_it_declares_what_it_keeps(optimizer: optim.Optimizer) -> None:
    shapes = {"w": (4, 3, 2, 2), "matrix": (4, 3), "bias": (4,), "offset": (3,), "scalar": ()}
    infos = {name: optim.ParameterInfo(name, shape, ir.DataType.FLOAT) for name, shape in shapes.items()}
    for wrap in AROUND if any(slot.is_average for slot in slots_of(optimizer)) else (*AROUND, *AVERAGED):
        whole = optim.bind(wrap(optimizer), infos)
        graph = SmallGraph({name: ("float32", shape) for name, shape in shapes.items()})
        kept = weighing(whole, ir.DataType.FLOAT).init(graph.builder, {name: graph[name] for name in shapes})
        declared = slots_of(whole)
        assert {slot_of(f"opt/{name}") for name in kept} == set(declared)
        for name in kept:
            slot = slot_of(f"opt/{name}", declared)
            assert slot.per_parameter == ("/" in name), name
            assert slot.entry(parameter_of(f"opt/{name}") or "") == f"opt/{name}" or ":" in name


@every_optimizer()
def test_its_options_build_it_again(optimizer: optim.Optimizer) -> None:
    assert isinstance(optimizer, optim.Optimizer)
    assert optim.get(optimizer) is optimizer
    assert optim.get(json.loads(json.dumps(optimizer.options()))) == optimizer
    assert hash(optimizer) == hash(optim.get(optimizer.options()))


@every_optimizer(test=7)
def test_every_dtype_and_shape_is_kept_and_a_gradient_of_zero_leaves_all_finite(optimizer: optim.Optimizer) -> None:
    shapes: dict[str, tuple[int, ...]] = {"half": (4, 3), "single": (2, 3), "double": (5,), "filters": (2, 3, 2, 2), "scale": ()}
    dtypes = {"half": "float16", "double": "float64"}
    rng = np.random.default_rng(0)
    parameters = {name: np.asarray(rng.standard_normal(shape), dtypes.get(name, "float32")) for name, shape in shapes.items()}
    graphs = UpdateGraph(optimizer, shapes, "float32", dtypes=dtypes)
    graphs.initial.check()
    graphs.apply.check()
    state = graphs.first_state(parameters)
    for name, array in parameters.items():
        assert graphs.next_params[name].dtype.numpy() == array.dtype
        assert graphs.next_params[name].shape == array.shape
    for gradients in (
        {f"grad:{name}": np.asarray(rng.standard_normal(array.shape), array.dtype) for name, array in parameters.items()},
        {f"grad:{name}": np.zeros_like(array) for name, array in parameters.items()},
    ):
        for first in (state, graphs.first_state(parameters)):
            hyperparameters = {key: np.float32(value) for key, value in optimizer.hyperparameters().items()}
            results = next_state(graphs.apply.run(**first, **gradients, **hyperparameters, step=np.int64(0)))
            assert {key: (array.dtype, array.shape) for key, array in results.items()} == {
                key: (array.dtype, array.shape) for key, array in first.items()
            }
            assert all(np.isfinite(array).all() for array in results.values())
            state = results


@every_optimizer(test=6)
def test_the_reference_evaluator_computes_the_same(optimizer: optim.Optimizer) -> None:
    initial, gradients = random_problem("float64")
    graphs = UpdateGraph(optimizer, SHAPES, "float64")
    state = {f"param/{name}": array for name, array in initial.items()}
    if graphs.initial.graph.outputs:
        ours, theirs = graphs.initial.run(**state), graphs.initial.run_reference(**state)
        assert {key: (array.dtype, array.shape) for key, array in ours.items()} == {
            key: (array.dtype, array.shape) for key, array in theirs.items()
        }
        state |= theirs
    hyperparameters = {key: np.float32(value) for key, value in optimizer.hyperparameters().items()}
    for step in range(8):
        feeds = {f"grad:{name}": array for name, array in gradients[step].items()} | hyperparameters
        ours = graphs.apply.run(**state, **feeds, step=np.int64(step))
        theirs = graphs.apply.run_reference(**state, **feeds, step=np.int64(step))
        for key, array in theirs.items():
            np.testing.assert_allclose(ours[key], array, rtol=1e-10, atol=1e-13, err_msg=key)
        state = next_state(theirs)


@dataclass(frozen=True)
class EverSmaller:
    """A rate that halves with every step; the factor is state, and there is no input."""

    name = "ever_smaller"
    end = None

    def hyperparameters(self) -> dict[str, float | None]:
        return {}

    def init(self, builder: Builder) -> dict[str, Tensor]:
        return {"halvings": builder.constant(np.asarray(1.0))}

    def rate(
        self, builder: Builder, step: Tensor, state: Mapping[str, Tensor], hyperparameters: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return state["halvings"] * LR, {"halvings": state["halvings"] * 0.5}

    def options(self) -> dict[str, Any]:
        return {"name": self.name}


@every_name()
def test_a_schedule_takes_the_place_of_the_rate_and_keeps_its_state(name: str) -> None:
    initial, gradients = random_problem("float64")

    def run(**arguments: Any) -> list[Arrays]:
        return run_steps(initial=initial, gradient=lambda step, _: gradients[step], steps=12, **arguments)

    given = run(optimizer=optim.OPTIMIZERS[name](lr=LR), rate=lambda step: LR * 0.5**step)
    scheduled = run(optimizer=optim.OPTIMIZERS[name](lr=EverSmaller()))
    assert scheduled[-1]["opt/halvings"] == 0.5**12
    for ours, theirs in zip(scheduled, given, strict=True):
        for key, array in theirs.items():
            np.testing.assert_array_equal(ours[key], array, err_msg=key)


@every_optimizer()
def test_a_learning_rate_of_zero_changes_no_parameter(optimizer: optim.Optimizer) -> None:
    initial, gradients = random_problem("float32")
    last = run_steps(optimizer, initial, lambda step, _: gradients[step], 3, lambda _: 0.0)[-1]
    for name, array in initial.items():
        np.testing.assert_array_equal(last[f"param/{name}"], array)


@every_optimizer(test=9)
def test_a_group_of_equal_settings_and_an_accumulation_of_one_step_change_nothing(optimizer: optim.Optimizer) -> None:
    """State that belongs to no parameter is each group's own."""
    initial, gradients = random_problem("float64")
    plain, grouped, accumulated = (
        run_steps(around, initial, lambda step, _: gradients[step], 8)[-1]
        for around in (optimizer, optim.groups(optimizer, {"bias": {"lr_scale": 1.0}}), optim.accumulate(optimizer, 1))
    )
    for key, array in plain.items():
        np.testing.assert_array_equal(grouped[key], array, err_msg=key)
        np.testing.assert_array_equal(accumulated[key], array, err_msg=key)


def two_layers(dtype: str) -> onnx.ModelProto:
    """Two dense layers with a smooth activation and a learned scale between them, from 6 features to 3 classes."""
    rng = np.random.default_rng(11)
    shapes = {"weight1": (6, 5), "bias1": (5,), "scale": (1,), "weight2": (5, 3), "bias2": (3,)}
    weights = {name: np.asarray(rng.standard_normal(shape), dtype) for name, shape in shapes.items()}
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = helper.make_graph(
        [
            helper.make_node("Gemm", ["x", "weight1", "bias1"], ["a"]),
            helper.make_node("Tanh", ["a"], ["b"]),
            helper.make_node("Mul", ["b", "scale"], ["c"]),
            helper.make_node("Gemm", ["c", "weight2", "bias2"], ["y"]),
        ],
        "two_layers",
        [helper.make_tensor_value_info("x", element, ["batch", 6])],
        [helper.make_tensor_value_info("y", element, ["batch", 3])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


@cache
def compiled(optimizer: optim.Optimizer, dtype: str = "float32") -> Program:
    return burnish.compile(two_layers(dtype), optimizer=optimizer)


def batches(dtype: str, count: int) -> list[Arrays]:
    rng = np.random.default_rng(12)
    return [{"x": np.asarray(rng.standard_normal((8, 6)), dtype), "labels": rng.integers(0, 3, 8)} for _ in range(count)]


def run_graph(engine: OnnxRuntimeEngine, program: Program, graph: str, values: Arrays) -> Arrays:
    """Run a graph of the program over the inputs that its signature names; hyperparameters have their defaults."""
    inputs = program.signature[graph].inputs
    defaults = {entry.name: np.asarray(entry.default, np.float32) for entry in inputs if entry.role is Role.HYPERPARAMETER}
    known = defaults | values
    return engine.run(getattr(program, graph), {entry.name: known[entry.name] for entry in inputs})


@pytest.mark.slow
@diagonal(
    ("optimizer", named(EVERY, name_of)),
    (("dtype", "optimization", "tolerance"), [("float32", "none", 0.0), ("float64", "all", 1e-6), ("float64", "none", 0.0)]),
)
def test_a_step_is_gradients_and_their_application(
    optimizer: optim.Optimizer, dtype: str, optimization: Any, tolerance: float
) -> None:
    program = compiled(optimizer, dtype)
    engine = OnnxRuntimeEngine(optimization=optimization)
    first = program.initial_state(seed=0)
    whole, apart = first, first
    for batch in batches(dtype, 4):
        whole = whole | next_state(run_graph(engine, program, "step", whole | batch))
        gradients = run_graph(engine, program, "grad", apart | batch)
        apart = apart | next_state(gradients) | next_state(run_graph(engine, program, "apply", apart | batch | gradients))
    assert whole["step"] == 4
    for key in first:
        np.testing.assert_allclose(whole[key], apart[key], rtol=tolerance, atol=tolerance, err_msg=key)
        if key.startswith("param/"):
            assert not np.array_equal(whole[key], first[key]), key


@every_optimizer(test=6)
def test_the_second_step_compiles_nothing(optimizer: optim.Optimizer, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []
    load = OnnxRuntimeEngine.inference_session

    def counted(self: OnnxRuntimeEngine, model: Any, graph: str, threads: int | None) -> Any:
        loaded.append(graph)
        return load(self, model, graph, threads)

    session = burnish.Session(compiled(optimizer), threads=1)
    monkeypatch.setattr(OnnxRuntimeEngine, "inference_session", counted)
    for batch in batches("float32", 3):
        session.step(batch)
    assert loaded == ["step"]


@pytest.mark.slow
@every_optimizer(test_all=11)
def test_a_program_is_saved_and_goes_on_from_a_checkpoint(optimizer: optim.Optimizer, tmp_path: Path) -> None:
    program = compiled(optimizer)
    program.save(tmp_path / "program")
    first, second, third = batches("float32", 3)
    session = burnish.Session(program, threads=1)
    session.step(first)
    session.step(second)
    session.save_checkpoint(tmp_path / "checkpoint")
    session.step(third)
    again = burnish.Session(Program.load(tmp_path / "program"), threads=1)
    again.restore(tmp_path / "checkpoint")
    again.step(third)
    expected = session.state()
    assert again.state().keys() == expected.keys()
    for key, array in again.state().items():
        np.testing.assert_array_equal(array, expected[key], err_msg=key)
    assert optim.get(Program.load(tmp_path / "program").options["optimizer"]) == optimizer
