"""Programs that compute their learning rate: what a session and a trainer make of them, on every engine, and what is saved."""

from __future__ import annotations

import csv
import json
import math
import re
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import burnish
from burnish.errors import ConfigurationError, NonFiniteLossError
from burnish.optim import schedules
from burnish.program import Program, Role
from burnish.training import TrainingInterrupted
from oracles.combinations import spread

pytestmark = pytest.mark.usefixtures("frequent_rows")

FEATURES, SAMPLES = 4, 24


def source() -> onnx.ModelProto:
    model = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["": 18]>
        line (float[N, 4] x) => (float[N, 1] y) { y = Gemm(x, weight, bias) }
    """)
    weights = {"weight": np.array([[0.5], [-0.25], [0.125], [1.0]], np.float32), "bias": np.zeros(1, np.float32)}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights.items())
    return model


def compiled(lr: Any, **options: Any) -> Program:
    return burnish.compile(source(), loss="mse", optimizer=burnish.optim.sgd(lr, momentum=0.9), **options)


def data(seed: int = 0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((SAMPLES, FEATURES)).astype(np.float32)
    return {"x": x, "targets": (x @ [[1.0], [2.0], [-1.0], [0.5]]).astype(np.float32)}


def trainer(folder: Path, program: Program, **options: Any) -> burnish.Trainer:
    settings: dict[str, Any] = {"epochs": 3, "batch_size": 8, "progress": False, **options}
    arrays = settings.pop("arrays", data())
    return burnish.Trainer(program, arrays, run_directory=folder, **settings)


def column(folder: Path, name: str) -> list[float]:
    with (folder / "metrics.csv").open(newline="", encoding="utf-8") as file:
        return [float(row[name]) for row in csv.DictReader(file)]


@pytest.mark.parametrize("engine", ["onnxruntime", "reference"])
def test_a_step_reports_the_rate_that_it_used(engine: str) -> None:
    session = burnish.Session(compiled(schedules.piecewise([2], [0.125, 0.03125])), engine)
    fed = burnish.Session(compiled(0.1), engine)
    for rate in (0.125, 0.125, 0.03125):
        results = session.step(data())
        assert results.pop("lr") == rate
        assert results == fed.step(data(), lr=rate)
    assert set(session.evaluate(data())) == {"loss"}
    for name, array in fed.state().items():
        np.testing.assert_array_equal(session.state()[name], array)


def test_the_signature_names_rate_and_end_and_survives_saving(tmp_path: Path) -> None:
    program = compiled(schedules.cosine(0.1, steps=7))
    program.save(tmp_path / "program")
    again = Program.load(tmp_path / "program")
    assert again.signature == program.signature
    for graph in ("step", "apply"):
        assert [entry.name for entry in again.signature[graph].outputs_of(Role.RATE)] == ["lr"]
        assert not again.signature[graph].inputs_of(Role.HYPERPARAMETER)
        assert again.signature[graph].end == 7
    assert again.signature["grad"].end is None
    assert burnish.optim.get(again.options["optimizer"]) == burnish.optim.sgd(schedules.cosine(0.1, steps=7), momentum=0.9)
    session = burnish.Session(again)
    rates = [session.step(data())["lr"] for _ in range(7)]
    assert rates == pytest.approx([0.05 * (1 + math.cos(math.pi * step / 7)) for step in range(7)], rel=1e-12)
    with pytest.raises(ConfigurationError, match="this program ends after 7 steps, and the state has taken 7: compile with a"):
        session.step(data())
    assert session.step_count == 7


def test_a_schedule_that_holds_goes_on_from_the_checkpoint_of_one_that_ends(tmp_path: Path) -> None:
    ending = burnish.Session(compiled(schedules.linear(0.1, 2, 0.05)))
    for _ in range(2):
        ending.step(data())
    ending.save_checkpoint(tmp_path / "end.safetensors")
    holding = burnish.Session(compiled(schedules.linear(0.1, 2, 0.05, past_end="hold")))
    holding.restore(tmp_path / "end.safetensors")
    assert [holding.step(data())["lr"] for _ in range(3)] == [0.05] * 3


def test_separate_gradients_and_update_have_the_same_rate() -> None:
    program = compiled(schedules.warmup(schedules.exponential(0.2, 0.5), 2))
    engine = burnish.engines.get("onnxruntime")
    state = program.initial_state()
    session = burnish.Session(program)
    for _ in range(4):
        gradients = engine.run(
            program.grad, {entry.name: (state | data())[entry.name] for entry in program.signature["grad"].inputs}
        )
        results = engine.run(
            program.apply, {entry.name: (state | gradients)[entry.name] for entry in program.signature["apply"].inputs}
        )
        assert results["lr"].item() == session.step(data())["lr"]
        state |= {name: results[output] for name, output in program.signature["apply"].updates.items()}


def test_a_rate_for_a_program_that_computes_its_own_is_refused(tmp_path: Path) -> None:
    program = compiled(schedules.constant(0.1))
    message = (
        "lr=0.2: this program computes .* from the step, by the schedule that it was compiled with: leave it out, or compile"
    )
    with pytest.raises(ConfigurationError, match=message):
        burnish.Session(program).step(data(), lr=0.2)
    with pytest.raises(ConfigurationError, match=message):
        trainer(tmp_path, program, lr=0.2)
    with pytest.raises(ConfigurationError, match="schedule: this program computes its learning rate from the step"):
        trainer(tmp_path, program, schedule="cosine")
    with pytest.raises(ConfigurationError, match=r"schedule: 'cosine' of burnish\.optim\.schedules is computed in the program"):
        trainer(tmp_path, compiled(0.1), schedule=schedules.cosine(0.1, 9))
    with pytest.raises(ConfigurationError, match="There is no hyperparameter 'rate'; a step of this program takes none"):
        burnish.Session(program).step(data(), rate=0.2)


def test_the_trainer_refuses_a_run_past_the_end_before_it_trains(tmp_path: Path) -> None:
    program = compiled(schedules.cosine(0.1, steps=8))
    message = (
        "The run has 9 steps, and .* ends after 8: compile with a schedule of 9 steps or with past_end='hold', or train fewer"
    )
    with pytest.raises(ConfigurationError, match=message):
        trainer(tmp_path, program)
    assert not list(tmp_path.rglob("*.safetensors"))
    first = trainer(tmp_path, program, epochs=2)
    assert first.run().steps == 6
    with pytest.raises(ConfigurationError, match=r"The run has 3 steps after the 6 that the state has taken, and .* after 8"):
        trainer(tmp_path, program, epochs=3, resume=True)
    with pytest.raises(ConfigurationError, match="The run has 3 steps after the 6"):
        trainer(tmp_path / "other", program, epochs=1, state=first.session.state())
    assert trainer(tmp_path, program, epochs=2, resume=True).finished


def test_the_table_of_a_run_has_the_rates(tmp_path: Path) -> None:
    rates = [0.1 * 0.9**step for step in range(9)]
    trainer(tmp_path, compiled(schedules.exponential(0.1, 0.9))).run()
    assert column(tmp_path, "lr") == pytest.approx(rates, rel=1e-12)
    assert "eval_lr" not in (tmp_path / "metrics.csv").read_text(encoding="utf-8")


@dataclass
class StopAfter:
    """A progress that stops the run after so many steps."""

    steps: int
    seen: list[int] = field(default_factory=list)

    def start(self, step: int, steps: int) -> None: ...
    def epoch(self, reached: Any, evaluation: Any) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...

    def step(self, reached: Any) -> None:
        self.seen.append(reached.step)
        if reached.step == self.steps:
            signal.raise_signal(signal.SIGINT)


@spread("stop", [None, 3, 4, 6], test=1)
def test_a_plateau_is_given_the_figures_of_each_epoch(tmp_path: Path, stop: int | None) -> None:
    program = compiled(schedules.plateau(0.1, factor=0.5, patience=0, threshold=0.5))
    options: dict[str, Any] = {"epochs": 6, "eval_data": data(1)}
    if stop is not None:
        with pytest.raises(TrainingInterrupted):
            trainer(tmp_path, program, progress=StopAfter(stop), **options).run()
    trainer(tmp_path, program, resume=stop is not None, **options).run()
    with (tmp_path / "metrics.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 18
    evaluations = [float(row["eval_loss"]) for row in rows if row["eval_loss"]]
    expected, best, rate = [], math.inf, 0.1
    for figure in [None, *evaluations[:-1]]:
        if figure is not None and figure < best * 0.5:
            best = figure
        elif figure is not None:
            rate *= 0.5
        expected += [rate] * 3
    assert len(set(expected)) > 1
    assert [float(row["lr"]) for row in rows] == pytest.approx(expected, rel=1e-12)


def test_a_plateau_can_go_by_a_metric_and_without_evaluation(tmp_path: Path) -> None:
    program = compiled(schedules.plateau(0.1, factor=0.5, patience=0, threshold=0.0, mode="max"), metrics=["mae"])
    trainer(tmp_path, program, monitor="mean_absolute_error").run()
    means = column(tmp_path, "mean_absolute_error")
    epochs = [sum(means[3 * epoch : 3 * epoch + 3]) / 3 for epoch in range(3)]
    assert epochs[1] < epochs[0]
    assert column(tmp_path, "lr")[::3] == pytest.approx([0.1, 0.1, 0.05], rel=1e-12)
    with pytest.raises(
        ConfigurationError, match="monitor='accuracy': there is no such figure; there is loss, mean_absolute_error"
    ):
        trainer(tmp_path / "other", program, monitor="accuracy")
    with pytest.raises(ConfigurationError, match="monitor='loss': the schedule of this program monitors nothing: leave it out"):
        trainer(tmp_path / "other", compiled(0.1), monitor="loss")


def test_a_figure_reaches_the_update_that_accumulation_puts_off(tmp_path: Path) -> None:
    plateau = schedules.plateau(0.25, factor=0.5, patience=0, threshold=0.0, mode="max")
    program = burnish.compile(source(), loss="mse", optimizer=burnish.optim.accumulate(burnish.optim.sgd(plateau), 2))
    with pytest.raises(TrainingInterrupted):
        trainer(tmp_path, program, epochs=5, progress=StopAfter(7)).run()
    run = trainer(tmp_path, program, epochs=5, resume=True)
    run.run()
    # Three steps an epoch and two an update; the first figure is the best there will be, each later one halves the rate.
    state = run.session.state()
    assert state["opt/plateau_seen"] == 4
    assert state["opt/plateau_rate"] == 0.25 / 2**3


def test_a_step_takes_any_finite_figure_to_monitor_or_none(tmp_path: Path) -> None:
    program = compiled(schedules.plateau(0.5, patience=0, factor=0.5, threshold=0.0, mode="max"))
    program.save(tmp_path / "program")
    manifest = (tmp_path / "program" / "program.json").read_text(encoding="utf-8")
    json.loads(manifest, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    again = Program.load(tmp_path / "program")
    assert again.signature == program.signature
    session = burnish.Session(again)
    fed: list[dict[str, float]] = [{}, {"monitored": -3.0}, {}, {"monitored": -3.0}, {"monitored": math.nan}, {"monitored": -2.5}]
    assert [session.step(data(), **given)["lr"] for given in fed] == [0.5, 0.5, 0.5, 0.25, 0.25, 0.25]
    session.save_checkpoint(tmp_path / "checkpoint.safetensors")
    for value in (math.inf, 1e300, "low"):
        with pytest.raises(
            ConfigurationError, match=re.escape(f"'monitored' is {value!r}: give one finite number, or leave it out")
        ):
            session.step(data(), monitored=value)


def test_a_loss_that_is_not_finite_names_the_rate_of_the_step_before(tmp_path: Path) -> None:
    program = compiled(schedules.piecewise([4], [0.01, 1e38]))
    with pytest.raises(
        NonFiniteLossError, match=r"The step before had a learning rate of 1e\+38: compile with a schedule that stays"
    ):
        trainer(tmp_path, program).run()


def test_a_scaled_loss_has_a_schedule_too() -> None:
    program = compiled(schedules.cosine(0.1, 3), precision="float16")
    assert program.signature["step"].end == 3
    session = burnish.Session(program)
    assert [session.step(data())["lr"] for _ in range(2)] == pytest.approx([0.1, 0.075], rel=1e-12)
    assert sum(node.op_type == "Sin" for node in program.step.graph) == 1


def test_every_group_reports_its_own_rate(tmp_path: Path) -> None:
    optimizer = burnish.optim.groups(
        burnish.optim.sgd(schedules.linear(0.1, 6)),
        {"bias": {"lr": schedules.warmup(schedules.constant(0.02), 3)}},
    )
    program = burnish.compile(source(), loss="mse", optimizer=burnish.optim.chain(burnish.optim.clip_by_value(1.0), optimizer))
    assert program.signature["step"].end == 6
    results = burnish.Session(program).step(data())
    assert (results["lr"], results["lr:bias"]) == pytest.approx((0.1, 0.005), rel=1e-12)
    trainer(tmp_path, program, epochs=2).run()
    assert column(tmp_path, "lr") == pytest.approx([0.1 * (6 - step) / 6 for step in range(6)], rel=1e-12)


def test_a_schedule_inside_accumulation_counts_updates() -> None:
    optimizer = burnish.optim.accumulate(burnish.optim.sgd(schedules.linear(0.1, 2)), 3)
    session = burnish.Session(burnish.compile(source(), loss="mse", optimizer=optimizer))
    assert [session.step(data())["lr"] for _ in range(6)] == pytest.approx([0.1] * 3 + [0.05] * 3, rel=1e-12)
    with pytest.raises(ConfigurationError, match="ends after 6 steps, and the state has taken 6"):
        session.step(data())


def test_the_schedule_of_a_trainer_changes_the_rates_of_all_groups(tmp_path: Path) -> None:
    """As PyTorch's schedulers do; a rate that the graph computes is its own affair."""

    def trained(lr: float, schedule: Any, folder: str) -> dict[str, np.ndarray]:
        optimizer = burnish.optim.groups(burnish.optim.sgd(0.1), {"bias": {"lr": lr}})
        program = burnish.compile(source(), loss="mse", optimizer=optimizer)
        run = trainer(tmp_path / folder, program, epochs=1, schedule=schedule)
        run.run()
        return run.session.state()

    falling = trained(0.02, lambda step, steps: 0.5**step, "falling")
    optimizer = burnish.optim.groups(burnish.optim.sgd(0.1), {"bias": {"lr": 0.02}})
    session = burnish.Session(burnish.compile(source(), loss="mse", optimizer=optimizer))
    run = trainer(tmp_path / "order", burnish.compile(source(), loss="mse", optimizer=optimizer), epochs=1)
    for step, batch in enumerate(run.loader.epoch(0)):
        session.step(batch, lr=0.1 * 0.5**step, **{"lr:bias": 0.02 * 0.5**step})
    for name, array in session.state().items():
        np.testing.assert_array_equal(falling[name], array, err_msg=name)
    constant = trained(0.02, "constant", "constant")
    assert not np.array_equal(constant["param/bias"], falling["param/bias"])


def test_groups_alone_have_a_schedule_where_no_weight_takes_the_shared_rate(tmp_path: Path) -> None:
    optimizer = burnish.optim.groups(burnish.optim.sgd(0.1), {"bias": {"lr": 0.02}, "weight": {"lr": 0.04}})
    program = burnish.compile(source(), loss="mse", optimizer=optimizer)
    run = trainer(tmp_path / "run", program, epochs=1, schedule=lambda step, steps: 0.0)
    before = run.session.state()
    run.run()
    np.testing.assert_array_equal(run.session.state()["param/weight"], before["param/weight"])
    with pytest.raises(ConfigurationError, match="no learning rate 'lr' to change"):
        trainer(tmp_path / "other", program, lr=0.5)


@pytest.mark.parametrize("engine", ["onnxruntime", "torch"])
def test_a_plateau_is_given_one_figure_an_epoch_whatever_a_frozen_gradient_comes_to(engine: str, tmp_path: Path) -> None:
    """In sixteen bits the gradient of the frozen weight alone overflows, and no step is skipped for it."""
    model = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["": 18]>
        line (float[N, 4] x) => (float[N, 1] y) <float thousand = {1000.0}> {
            s = MatMul (x, stem) h = Mul (s, thousand) r = Relu (h) y = MatMul (r, weight)
        }
    """)
    rng = np.random.default_rng(0)
    for name, shape in (("stem", (4, 6)), ("weight", (6, 1))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name))
    falling = burnish.optim.groups(burnish.optim.sgd(schedules.plateau(1e-4, factor=0.5, patience=5)), {"stem": "frozen"})
    program = burnish.compile(model, loss="mse", optimizer=falling, precision="float16")
    arrays = {"x": data()["x"] * np.float32(1e-3), "targets": data()["targets"]}
    run = trainer(tmp_path, program, engine=engine, batch_size=4, arrays=arrays)
    run.run()
    state = run.session.state()
    assert state["opt/plateau_seen"] == 2
    assert state["opt/plateau_rate"] == 1e-4
    assert state["step"] + state["opt/skipped_steps"] == 18
    assert sum(column(tmp_path, "skipped")) == state["opt/skipped_steps"]
