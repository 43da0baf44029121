"""Every schedule against PyTorch's, at every step, in float64; and what holds for all of them."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

from burnish import optim
from burnish.errors import ConfigurationError
from burnish.optim import schedules
from burnish.optim.base import Scheduled
from burnish.training.learning_rates import factor_of
from oracles.optimizers import UpdateGraph
from oracles.small_graphs import SmallGraph

LR = 0.3


class RateGraph:
    """The rate of a schedule as a graph, with the state that it starts from."""

    def __init__(self, schedule: schedules.Schedule, opset: int = 18):
        initial = SmallGraph({}, opset)
        slots = schedule.init(initial.builder)
        for name, tensor in slots.items():
            initial.output(name, tensor)
        self.state: dict[str, np.ndarray] = initial.run() if slots else {}
        entries = {name: (str(array.dtype), array.shape) for name, array in self.state.items()}
        self.hyperparameters = schedule.hyperparameters()
        scalars = {"step": ("int64", ()), **{name: ("float32", ()) for name in self.hyperparameters}}
        self.graph = SmallGraph(scalars | entries, opset)
        given = {name: self.graph[name] for name in self.hyperparameters}
        rate, following = schedule.rate(self.graph.builder, self.graph["step"], {n: self.graph[n] for n in entries}, given)
        assert set(following) == set(slots)
        self.graph.output("rate", rate)
        for name, tensor in following.items():
            self.graph.output(f"next:{name}", tensor)

    def rates(self, steps: Sequence[int], fed: Sequence[Mapping[str, float]] = (), reference: bool = False) -> list[float]:
        """The rates of these steps, one after the other; ``fed`` are the hyperparameters of each."""
        run = self.graph.run_reference if reference else self.graph.session()
        state, rates = self.state, []
        for index, step in enumerate(steps):
            given = {name: np.float32(value) for name, value in self.hyperparameters.items()}
            given |= {name: np.float32(value) for name, value in (fed[index] if fed else {}).items()}
            results = run(step=np.int64(step), **state, **given)
            assert results["rate"].dtype == np.float64
            assert results["rate"].shape == ()
            rates.append(results.pop("rate").item())
            state = {name.removeprefix("next:"): array for name, array in results.items()}
        return rates


def torch_optimizer(lr: float = LR) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, dtype=torch.float64, requires_grad=True)], lr=lr, momentum=0.9)


def torch_rates(make: Callable[[torch.optim.Optimizer], Any], steps: int) -> list[float]:
    """The rates that PyTorch's schedule gives to the steps from 0 on."""
    optimizer = torch_optimizer()
    scheduler = make(optimizer)
    rates = []
    for step in range(steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        if step < steps - 1:
            scheduler.step()
    return rates


def by(factor: Callable[[int], float]) -> Callable[[torch.optim.Optimizer], Any]:
    """A closed form, for which PyTorch has no schedule of its own."""
    return lambda optimizer: lr_scheduler.LambdaLR(optimizer, factor)


def one_cycle_of_torch(**options: Any) -> Callable[[torch.optim.Optimizer], Any]:
    return lambda o: lr_scheduler.OneCycleLR(o, LR, cycle_momentum=False, **options)


def cyclic_of_torch(**options: Any) -> Callable[[torch.optim.Optimizer], Any]:
    return lambda o: lr_scheduler.CyclicLR(o, LR, 2.0, cycle_momentum=False, **options)


@dataclass
class Case:
    schedule: schedules.Schedule
    torch: Callable[[torch.optim.Optimizer], Any]
    steps: int = 60


hold = {"past_end": "hold"}
CASES = [
    Case(schedules.constant(LR), lambda o: lr_scheduler.ConstantLR(o, 1.0)),
    Case(schedules.linear(LR, 40, 0.03, **hold), lambda o: lr_scheduler.LinearLR(o, 1.0, 0.1, 40)),
    Case(schedules.linear(LR, 40, 0.9, **hold), by(lambda t: 1 + 2 * min(t, 40) / 40)),
    Case(schedules.linear(LR, 40), by(lambda t: (40 - t) / 40), 41),
    Case(schedules.cosine(LR, 60), lambda o: lr_scheduler.CosineAnnealingLR(o, 60)),
    Case(schedules.cosine(LR, 60, 0.01), lambda o: lr_scheduler.CosineAnnealingLR(o, 60, 0.01), 61),
    Case(schedules.cosine(LR, 7, 0.01, **hold), by(lambda t: (0.01 + 0.29 * (1 + math.cos(math.pi * min(t, 7) / 7)) / 2) / LR)),
    Case(schedules.cosine_restarts(LR, 7, final=0.02), lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 7, eta_min=0.02)),
    Case(schedules.cosine_restarts(LR, 5, 2), lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5, 2), 200),
    Case(schedules.cosine_restarts(LR, 1, 3, 0.1), lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 1, 3, 0.1), 200),
    Case(schedules.polynomial(LR, 60), lambda o: lr_scheduler.PolynomialLR(o, 60, 2.0), 61),
    Case(schedules.polynomial(LR, 30, 0.5, **hold), lambda o: lr_scheduler.PolynomialLR(o, 30, 0.5)),
    Case(schedules.polynomial(LR, 30, 3, 0.1, **hold), by(lambda t: (0.1 + 0.2 * (1 - min(t, 30) / 30) ** 3) / LR)),
    Case(schedules.exponential(LR, 0.97), lambda o: lr_scheduler.ExponentialLR(o, 0.97), 200),
    Case(schedules.exponential(LR, 1.01), lambda o: lr_scheduler.ExponentialLR(o, 1.01)),
    Case(schedules.step(LR, 7), lambda o: lr_scheduler.StepLR(o, 7)),
    Case(schedules.step(LR, 1, 0.9), lambda o: lr_scheduler.StepLR(o, 1, 0.9)),
    Case(
        schedules.piecewise([3, 17, 40], [LR * 0.5**n for n in range(4)]), lambda o: lr_scheduler.MultiStepLR(o, [3, 17, 40], 0.5)
    ),
    Case(schedules.piecewise([], [LR]), by(lambda t: 1.0)),
    Case(schedules.inverse_square_root(LR), by(lambda t: (1 + t) ** -0.5)),
    Case(schedules.inverse_square_root(LR, 9), by(lambda t: (1 + t / 9) ** -0.5)),
    Case(schedules.cyclic(LR, 2.0, 6), cyclic_of_torch(step_size_up=6)),
    Case(schedules.cyclic(LR, 2.0, 5, 8), cyclic_of_torch(step_size_up=5, step_size_down=8)),
    Case(schedules.cyclic(LR, 2.0, 5, 2, "triangular2"), cyclic_of_torch(step_size_up=5, step_size_down=2, mode="triangular2")),
    Case(
        schedules.cyclic(LR, 2.0, 4, shape="exponential", gamma=0.98),
        cyclic_of_torch(step_size_up=4, mode="exp_range", gamma=0.98),
    ),
    Case(schedules.one_cycle(LR, 60, final_divisor=10), one_cycle_of_torch(total_steps=60, final_div_factor=10)),
    Case(
        schedules.one_cycle(LR, 57, 0.25, 10, 100, "linear"),
        one_cycle_of_torch(total_steps=57, pct_start=0.25, div_factor=10, final_div_factor=100, anneal_strategy="linear"),
        57,
    ),
    Case(
        schedules.one_cycle(LR, 60, 0.35, 10, 10, three_phases=True),
        one_cycle_of_torch(total_steps=60, pct_start=0.35, div_factor=10, final_div_factor=10, three_phase=True),
    ),
    Case(
        schedules.one_cycle(LR, 45, 0.4, 4, 10, "linear", three_phases=True),
        one_cycle_of_torch(
            total_steps=45, pct_start=0.4, div_factor=4, final_div_factor=10, three_phase=True, anneal_strategy="linear"
        ),
        45,
    ),
    Case(schedules.warmup(schedules.constant(LR), 12, 0.25), lambda o: lr_scheduler.LinearLR(o, 0.25, total_iters=12)),
    Case(schedules.warmup(schedules.constant(LR), 4), by(lambda t: min(t + 1, 5) / 5)),
    Case(
        schedules.warmup(schedules.cosine(LR, 50, 0.01), 10, 0.1),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, total_iters=10), lr_scheduler.CosineAnnealingLR(o, 50, 0.01)], [10]
        ),
    ),
    # Vaswani et al. 2017: min(t / w, sqrt(w / t)).
    Case(
        schedules.warmup(schedules.inverse_square_root(LR, 20), 20, 0.0),
        by(lambda t: min(t / 20, math.sqrt(20 / max(t, 1)))),
        100,
    ),
]
every_case = pytest.mark.parametrize("case", CASES, ids=[json.dumps(case.schedule.options()) for case in CASES])
PLATEAU = schedules.plateau(LR, patience=2)
ONE_OF_EACH = [*{case.schedule.name: case.schedule for case in CASES}.values(), PLATEAU, schedules.warmup(PLATEAU, 5)]
one_of_each = pytest.mark.parametrize("schedule", ONE_OF_EACH, ids=[json.dumps(schedule.options()) for schedule in ONE_OF_EACH])


@every_case
def test_every_rate_is_that_of_torch(case: Case) -> None:
    ours = RateGraph(case.schedule).rates(range(case.steps))
    # PyTorch's 1 + cos(x) is exact to an ulp of 1, not of the result: that much of the rate it begins with is left to it.
    np.testing.assert_allclose(ours, torch_rates(case.torch, case.steps), rtol=1e-12, atol=1e-16)


@one_of_each
def test_the_reference_evaluator_and_later_opsets_give_the_same_rates(schedule: schedules.Schedule) -> None:
    steps = [0, 1, 5, 20, 39]
    expected = RateGraph(schedule).rates(steps)
    assert all(math.isfinite(rate) for rate in expected)
    np.testing.assert_allclose(RateGraph(schedule).rates(steps, reference=True), expected, rtol=1e-14)
    np.testing.assert_allclose(RateGraph(schedule, opset=23).rates(steps), expected, rtol=1e-14)
    RateGraph(schedule).graph.check()


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # (1 + cos(x)) / 2 = sin²((pi - x) / 2) is about ((pi - x) / 2)² where x is nearly pi.
        (schedules.cosine(1.0, 10**7), (math.pi / 2e7) ** 2),
        (schedules.linear(1.0, 10**7), 1e-7),
        (schedules.polynomial(1.0, 10**7), 1e-14),
    ],
)
def test_the_last_rate_keeps_its_digits(schedule: schedules.Schedule, expected: float) -> None:
    assert RateGraph(schedule).rates([10**7 - 1]) == pytest.approx([expected], rel=1e-12)


def test_restarts_find_the_first_step_of_far_cycles() -> None:
    for period, growth in ((1, 2), (7, 3), (10, 10)):
        graph = RateGraph(schedules.cosine_restarts(LR, period, growth))
        starts = [period * (growth**n - 1) // (growth - 1) for n in range(13)]
        assert graph.rates(starts) == [LR] * 13
        assert all(rate < LR / 10 for rate in graph.rates([start - 1 for start in starts[4:]]))


@pytest.mark.parametrize(
    "schedule",
    [
        schedules.linear(LR, 9, 0.1),
        schedules.cosine(LR, 9, 0.1),
        schedules.polynomial(LR, 9, final=0.1),
        schedules.one_cycle(LR, 9, 0.5, 1.0, 3.0),
        schedules.warmup(schedules.cosine(LR, 4, 0.1), 5),
    ],
    ids=lambda schedule: schedule.name,
)
def test_the_end(schedule: schedules.Schedule) -> None:
    assert schedule.end == 9
    assert RateGraph(schedule).rates([9, 10, 1000]) == pytest.approx([0.1, 0.1, 0.1], rel=1e-15)


@pytest.mark.parametrize("schedule", [case.schedule for case in CASES if case.schedule.options().get("past_end") == "hold"])
def test_a_schedule_that_holds_its_last_rate_has_no_end(schedule: schedules.Schedule) -> None:
    assert schedule.end is None
    assert schedules.warmup(schedule, 3).end is None


def plateau_of_torch(figures: Sequence[float], **options: Any) -> list[float]:
    optimizer = torch_optimizer()
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, **options)
    rates = []
    for figure in figures:
        if math.isfinite(figure):
            scheduler.step(figure)
        rates.append(float(optimizer.param_groups[0]["lr"]))
    return rates


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize(
    "options",
    [
        {"patience": 2, "factor": 0.5},
        {"patience": 0, "factor": 0.9, "threshold": 0.1},
        {"patience": 1, "factor": 0.5, "threshold": 0.2, "threshold_mode": "abs"},
        {"patience": 1, "factor": 0.3, "cooldown": 3, "lowest": 0.01},
        {"patience": 0, "factor": 0.1, "cooldown": 1, "eps": 1e-3},
    ],
    ids=str,
)
def test_plateau_heeds_each_new_figure_as_torch_does(mode: str, options: dict[str, Any]) -> None:
    drawn = random.Random(5)
    # Powers of two and their sums: what is monitored goes through a float32 input. Negative figures are among them.
    figures = [drawn.choice([1, -1]) ** (n > 120) * drawn.randrange(1, 64) / 16 for n in range(200)]
    figures = [figure if drawn.random() < 0.7 else drawn.choice([math.nan, math.inf, -math.inf]) for figure in figures]
    ours = RateGraph(schedules.plateau(LR, mode=mode, **options)).rates(range(200), [{"monitored": x} for x in figures])
    torch_options = {"min_lr" if name == "lowest" else name: value for name, value in options.items()}
    theirs = plateau_of_torch(figures, mode=mode, **torch_options)
    assert len(set(theirs)) > 2
    np.testing.assert_allclose(ours, theirs, rtol=1e-12)


def test_plateau_stays_where_nothing_is_monitored() -> None:
    graph = RateGraph(schedules.plateau(LR, patience=0))
    assert graph.rates(range(5)) == [LR] * 5
    assert all(np.isfinite(array).all() for array in graph.state.values())


@one_of_each
def test_the_options_build_it_again(schedule: schedules.Schedule) -> None:
    assert isinstance(schedule, schedules.Schedule)
    assert schedules.get(json.loads(json.dumps(schedule.options()))) == schedule
    assert schedules.get(schedule) is schedule
    for optimizer in (optim.sgd(schedule, momentum=0.9), optim.adamw(schedule)):
        assert optim.get(json.loads(json.dumps(optimizer.options()))) == optimizer
        assert "lr" not in optimizer.hyperparameters()


@pytest.mark.parametrize("make", [optim.sgd, optim.adam, optim.adamw], ids=lambda make: make.__name__)
def test_an_optimizer_takes_its_rate_from_the_schedule(make: Callable[..., optim.Optimizer]) -> None:
    """At rates that float32 holds, a schedule inside does bit for bit what the same rates do as an input."""
    rates = [2.0**-4, 2.0**-6, 2.0**-5]
    scheduled = UpdateGraph(make(schedules.piecewise([1, 2], rates)), {"w": (5,)}, "float64")
    fed = UpdateGraph(make(0.5), {"w": (5,)}, "float64")
    generator = np.random.default_rng(0)
    start = {"param/w": generator.standard_normal(5)}
    states = []
    for graphs in (scheduled, fed):
        state = start | (graphs.initial.run(**start) if graphs.initial.graph.outputs else {})
        states.append(state)
    for step, rate in enumerate(rates):
        gradient = {"grad:w": generator.standard_normal(5), "step": np.int64(step)}
        ours = scheduled.apply.run(**states[0], **gradient)
        theirs = fed.apply.run(**states[1], **gradient, lr=np.float32(rate))
        states = [{name.removeprefix("next:"): array for name, array in results.items()} for results in (ours, theirs)]
        for name, array in states[0].items():
            np.testing.assert_array_equal(array, states[1][name])


def test_the_rate_stands_in_the_graph_once_however_often_it_is_asked_for() -> None:
    optimizer = optim.sgd(schedules.cosine(LR, 10))
    assert isinstance(optimizer, Scheduled)
    graphs = UpdateGraph(optimizer, {"a": (2,), "b": (3,)}, "float64")
    before = graphs.apply.operators()
    rates = optimizer.rates(optim.UpdateInputs(graphs.apply.builder, {}, {}, {}, graphs.apply["step"], {}))
    assert graphs.apply.operators() == before
    assert before.count("Sin") == 1
    graphs.apply.output("lr", rates["lr"])
    feeds = {f"{kind}{name}": np.ones(size) for kind in ("param/", "grad:") for name, size in (("a", 2), ("b", 3))}
    results = graphs.apply.run(**feeds, step=np.int64(5))
    assert results["lr"] == pytest.approx(LR / 2, rel=1e-15)
    np.testing.assert_allclose(results["next:param/a"], 1 - LR / 2, rtol=1e-15)


def test_two_stateful_schedules_in_one_graph_stay_apart() -> None:
    graph = SmallGraph({"step": ("int64", ()), "monitored": ("float32", ()), "x": ("float64", ()), "y": ("float64", ())})
    counts = graph.builder.integers([0])
    zero = graph.builder.op("Squeeze", counts)
    optimizer = optim.sgd(schedules.plateau(LR))
    rates = []
    for name in ("x", "y"):
        state = dict.fromkeys(schedules.plateau(LR).init(graph.builder), zero) | {
            "plateau_rate": graph[name],
            "plateau_best": graph["x"],
        }
        inputs = optim.UpdateInputs(graph.builder, {}, {}, state, graph["step"], {"monitored": graph["monitored"]})
        rates.append(optimizer.rate(inputs)[0])
    for name, rate in zip("ab", rates, strict=True):
        graph.output(name, rate)
    results = graph.run(step=np.int64(0), monitored=np.float32("nan"), x=np.float64(1.0), y=np.float64(2.0))
    assert (results["a"], results["b"]) == (1.0, 2.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: schedules.constant(-0.1), "constant: lr must be a finite number that is not negative, not -0.1"),
        (lambda: schedules.linear(0.1, 0), "linear: steps must be a whole number of at least 1, not 0"),
        (lambda: schedules.linear(0.1, 10.0), "linear: steps must be a whole number of at least 1, not 10.0"),
        (lambda: schedules.cosine(0.1, 10, -1.0), "cosine: final must be a finite number that is not negative, not -1.0"),
        (lambda: schedules.cosine(0.1, 10, past_end="stop"), "cosine: past_end must be 'error' or 'hold', not 'stop'"),
        (lambda: schedules.cosine_restarts(0.1, 5, 1.5), "cosine_restarts: growth must be a whole number of at least 1, not 1.5"),
        (lambda: schedules.polynomial(0.1, 10, 0), "polynomial: power must be above 0, not 0"),
        (lambda: schedules.exponential(0.1, -0.9), "exponential: gamma must be a finite number that is not negative, not -0.9"),
        (
            lambda: schedules.cyclic(0.1, 0.2, 3, gamma=0.5),
            "cyclic: shape='triangular' with gamma=0.5: a gamma other than 1 is for",
        ),
        (lambda: schedules.cyclic(0.1, 0.2, 3, shape="exponential"), "'exponential' with gamma=1: .* give both, or neither"),
        (lambda: schedules.step(0.1, True), "step: every must be a whole number of at least 1, not True"),
        (lambda: schedules.piecewise(3, [0.1]), "piecewise: boundaries must be a list of numbers, not 3"),
        (lambda: schedules.piecewise([3, 3], [1, 2, 3]), r"piecewise: boundaries must ascend, not \[3, 3\]"),
        (
            lambda: schedules.piecewise([3], [1]),
            "piecewise: there must be one rate more than boundaries, not 1 rates for 1 bound",
        ),
        (lambda: schedules.piecewise([3], [1, math.nan]), r"piecewise: rates\[1\] must be a finite number .*, not nan"),
        (lambda: schedules.inverse_square_root(0.1, 0), "inverse_square_root: timescale must be a whole number of at least 1"),
        (lambda: schedules.cyclic(0.1, 0.2, 5, shape="saw"), "cyclic: shape must be 'triangular' or .*, not 'saw'"),
        (lambda: schedules.one_cycle(0.1, 100, 1.0), "one_cycle: rising must be at least 0 and less than 1, not 1.0"),
        (lambda: schedules.one_cycle(0.1, 10, 0.1), "one_cycle: rising=0.1 of 10 steps leaves no step for one of its parts"),
        (lambda: schedules.one_cycle(0.1, 20, 0.6, three_phases=True), "they would end at the steps 11, 22, 19; give more steps"),
        (lambda: schedules.one_cycle(0.0, 20), "one_cycle: lr must be above 0, not 0.0"),
        (lambda: schedules.warmup(0.1, 10), "warmup: it stands before a schedule, not before 0.1: give one of burnish.optim"),
        (lambda: schedules.warmup(schedules.constant(0.1), 0), "warmup: steps must be a whole number of at least 1, not 0"),
        (lambda: schedules.plateau(0.1, 1.0), "plateau: factor must be at least 0 and less than 1, not 1.0"),
        (lambda: schedules.cosine(0.1, steps=10**20), r"cosine: steps must be below 2\^62, not 1000+: give a smaller one"),
        (lambda: schedules.plateau(0.1, patience=10**20), r"plateau: patience must be below 2\^62, not 1000"),
        (lambda: schedules.plateau(0.1, patience=-1), "plateau: patience must be a whole number that is not negative, not -1"),
        (lambda: schedules.plateau(0.1, mode="best"), "plateau: mode must be 'min' or 'max', not 'best'"),
        (lambda: schedules.get({"name": "stairs"}), "there is no learning-rate schedule 'stairs'; choose among constant, cosine"),
        (lambda: schedules.get({"name": "cosine", "lr": 0.1}), "schedule 'cosine' needs the option 'steps'"),
        (lambda: schedules.get("cosine"), "schedule 'cosine' needs the option 'lr': give it"),
        (lambda: optim.get({"name": "sgd", "lr": {"name": "sine"}}), "there is no learning-rate schedule 'sine'"),
    ],
)
def test_bad_settings_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_factors_that_a_trainer_computes():
    assert [factor_of("constant")(step, 4) for step in range(4)] == [1, 1, 1, 1]
    cosine = factor_of("cosine")
    assert [cosine(step, 4) for step in (0, 2, 4)] == pytest.approx([1, 0.5, 0])
    assert cosine(1, 4) == pytest.approx((2 + math.sqrt(2)) / 4)
    assert factor_of(cosine) is cosine
    with pytest.raises(ConfigurationError, match="there is no learning-rate schedule 'step'; choose among constant, cosine"):
        factor_of("step")
