"""The loss scale: the sequence of scales, what a skipped step changes, and that grad and apply make the same step."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
import torch

import burnish
from burnish import optim
from burnish.engines.onnxruntime import OnnxRuntimeEngine
from burnish.graph import Builder
from burnish.models import residual_network
from burnish.optim import adam, sgd
from burnish.optim.loss_scale import GOOD_STEPS, LOSS_SCALE, SKIPPED_STEPS, SMALLEST, LossScaled, all_finite
from burnish.optim.schedules import linear
from burnish.program import Role
from oracles.combinations import diagonal

GENERATOR = np.random.default_rng(0)
BATCH = {"x": GENERATOR.normal(size=(16, 1, 8, 8)).astype(np.float32), "labels": GENERATOR.integers(0, 10, 16)}


AROUND = {
    "adam": adam(1e-3),
    "clipped": optim.chain(optim.clip_by_global_norm(1.0), sgd(0.1, momentum=0.9)),
    "accumulated": optim.accumulate(sgd(0.1), 2),
    "averaged": optim.ema(adam(1e-3)),
    "partly frozen": optim.groups(adam(1e-3), {"*.bias": {"lr": 0.1}, "stem.*": "frozen"}),
    "scheduled": adam(linear(1e-3, steps=100)),
}


def network(optimizer: optim.Optimizer = AROUND["adam"], **settings) -> burnish.Program:
    precision = burnish.MixedPrecision(**{"dtype": "float16", **settings})
    return burnish.compile(residual_network(width=4, blocks=(1,)), optimizer=optimizer, precision=precision)


def scale_sequence(scaled: LossScaled, finite: list[bool]) -> list[tuple[float, int, int]]:
    """Scale, good steps and skipped steps after each step of a graph that holds nothing but the optimizer."""
    inputs = {
        "parameter": (ir.DataType.FLOAT, [2]),
        "gradient": (ir.DataType.FLOAT, [2]),
        LOSS_SCALE: (ir.DataType.FLOAT, []),
        GOOD_STEPS: (ir.DataType.INT64, []),
        SKIPPED_STEPS: (ir.DataType.INT64, []),
        "step": (ir.DataType.INT64, []),
        "lr": (ir.DataType.FLOAT, []),
    }
    values = [ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape)) for name, (dtype, shape) in inputs.items()]
    graph = ir.Graph(values, [], nodes=[], opset_imports={"": 18})
    builder = Builder(graph)
    given = {value.name: builder.tensor(value) for value in values}
    state = {name: given[name] for name in (LOSS_SCALE, GOOD_STEPS, SKIPPED_STEPS)}
    parameters, slots = scaled.apply(
        optim.UpdateInputs(
            builder, {"w": given["parameter"]}, {"w": given["gradient"]}, state, given["step"], {"lr": given["lr"]}
        )
    )
    for name, tensor in {"next:parameter": parameters["w"], **{f"next:{name}": slots[name] for name in state}}.items():
        tensor.value.name = name
        graph.outputs.append(tensor.value)
    engine, model = burnish.engines.get("onnxruntime"), ir.Model(graph, ir_version=10)
    held = {"parameter": np.ones(2, np.float32), LOSS_SCALE: np.float32(scaled.initial)}
    held |= {GOOD_STEPS: np.asarray(0), SKIPPED_STEPS: np.asarray(0), "step": np.asarray(0), "lr": np.float32(0.5)}
    sequence = []
    for is_finite in finite:
        gradient = np.asarray([0.25, 0.25 if is_finite else np.inf], np.float32)
        outputs = engine.run(model, {name: np.asarray(array) for name, array in {**held, "gradient": gradient}.items()})
        expected = held["parameter"] - 0.5 * gradient if is_finite else held["parameter"]
        np.testing.assert_array_equal(outputs["next:parameter"], expected)
        held |= {name.removeprefix("next:"): array for name, array in outputs.items()}
        sequence.append((float(held[LOSS_SCALE]), int(held[GOOD_STEPS]), int(held[SKIPPED_STEPS])))
    return sequence


def torch_sequence(scaled: LossScaled, finite: list[bool]) -> list[float]:
    scaler = torch.amp.GradScaler("cpu", scaled.initial, scaled.growth_factor, scaled.backoff_factor, scaled.growth_interval)
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    scales = []
    for is_finite in finite:
        scaler.scale(torch.tensor(1.0))
        parameter.grad = torch.tensor([0.25, 0.25 if is_finite else torch.inf])
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def test_the_scales_of_a_sequence_worked_out_by_hand():
    scaled = LossScaled(sgd(0.5), initial=64.0, growth_interval=3)
    finite = [True, True, False, True, True, True, True, False, False, True]
    assert scale_sequence(scaled, finite) == [
        (64, 1, 0),
        (64, 2, 0),
        (32, 0, 1),
        (32, 1, 1),
        (32, 2, 1),
        (64, 0, 1),
        (64, 1, 1),
        (32, 0, 2),
        (16, 0, 3),
        (16, 1, 3),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("growth_factor", "backoff_factor", "interval"), [(2.0, 0.5, 2), (1.5, 0.25, 3), (4.0, 0.75, 1)])
def test_the_scales_are_those_of_pytorch(growth_factor, backoff_factor, interval):
    scaled = LossScaled(sgd(0.5), 1024.0, growth_factor, backoff_factor, interval)
    finite = list(np.random.default_rng(3).random(40) > 0.2)
    assert [scale for scale, _, _ in scale_sequence(scaled, finite)] == torch_sequence(scaled, finite)


def test_a_scale_grows_only_to_what_is_finite_and_shrinks_to_no_zero():
    largest = 2.0**127
    assert scale_sequence(LossScaled(sgd(0.5), largest, growth_interval=1), [True, True]) == [(largest, 0, 0), (largest, 0, 0)]
    sequence = scale_sequence(LossScaled(sgd(0.5), 4 * SMALLEST), [False] * 4)
    assert [scale for scale, _, _ in sequence] == [2 * SMALLEST, SMALLEST, SMALLEST, SMALLEST]


def test_a_static_scale_stays_and_overflows_are_skipped():
    scaled = LossScaled(sgd(0.5), 8.0, growth_interval=None)
    assert scale_sequence(scaled, [True, False, True]) == [(8, 1, 0), (8, 0, 1), (8, 1, 1)]


@pytest.mark.parametrize(
    ("gradients", "expected"),
    [
        ([[1e38, 1e38, 1e38, 1e38], [-0.0]], True),
        ([[1.0, np.inf], [1.0]], False),
        ([[np.inf, -np.inf], [1.0]], False),
        ([[1.0], [np.nan, 1.0]], False),
    ],
)
@pytest.mark.parametrize("engine", ["onnxruntime", "reference"])
def test_whether_all_gradients_are_finite(gradients, expected, engine):
    arrays = {f"g{index}": np.asarray(gradient, np.float32) for index, gradient in enumerate(gradients)}
    values = [ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(a.shape)) for name, a in arrays.items()]
    graph = ir.Graph(values, [], nodes=[], opset_imports={"": 18})
    builder = Builder(graph)
    finite = all_finite(builder, {value.name: builder.tensor(value) for value in values})
    finite.value.name = "finite"
    graph.outputs.append(finite.value)
    assert burnish.engines.get(engine).run(ir.Model(graph, ir_version=10), arrays)["finite"].item() is expected


def test_an_overflow_changes_nothing_but_the_key_and_the_scale():
    session = burnish.Session(network(loss_scale=2.0**40), threads=1)
    before = session.state()
    report = session.step(BATCH)
    after = session.state()
    assert report["skipped"] == 1.0
    assert report["loss_scale"] == 2.0**40
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {"rng/key", "opt/loss_scale", "opt/skipped_steps"}
    assert after["opt/loss_scale"] == 2.0**39
    assert after["opt/skipped_steps"] == 1


@pytest.mark.slow
def test_training_recovers_from_an_overflow_at_the_scale_that_fits():
    """Every skipped step halves the scale; the first that is taken is that of a program that began with this scale."""
    session = burnish.Session(network(loss_scale=2.0**40), threads=1)
    reports = [session.step(BATCH) for _ in range(40)]
    skipped = int(sum(report["skipped"] for report in reports))
    assert 0 < skipped < 40
    assert [report["skipped"] for report in reports] == [1.0] * skipped + [0.0] * (40 - skipped)
    assert [report["loss_scale"] for report in reports] == [2.0 ** (40 - min(step, skipped)) for step in range(40)]
    assert session.step_count == 40 - skipped
    assert reports[-1]["loss"] < reports[0]["loss"]
    again = burnish.Session(network(loss_scale=2.0 ** (40 - skipped)), threads=1)
    for _ in range(40 - skipped):
        again.step(BATCH)
    for name, array in again.state().items():
        if name not in ("rng/key", "opt/skipped_steps"):
            np.testing.assert_array_equal(session.state()[name], array, err_msg=name)


@diagonal(("around", AROUND), ("scale", [1024.0, 2.0**40]), test=2)
def test_grad_and_apply_make_the_step(around, scale):
    """Bitwise, with the runtime's graph optimizations off; also where the step is skipped, and around other wrappers."""
    program = network(loss_scale=scale, optimizer=AROUND[around])
    engine = OnnxRuntimeEngine(optimization="none")
    state = program.initial_state(0)
    rates = program.signature["step"].inputs_of(Role.HYPERPARAMETER)
    hyperparameters = {entry.name: np.asarray(entry.default, np.float32) for entry in rates}
    everything = {**state, **BATCH, **hyperparameters}

    def run(graph: str, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        wanted = {entry.name for entry in program.signature[graph].inputs}
        return engine.run(program.graphs[graph], {name: array for name, array in values.items() if name in wanted})

    stepped = run("step", everything)
    gradients = run("grad", everything)
    applied = run("apply", {**everything, **gradients})
    assert bool(stepped["skipped"]) == (scale > 1e6)
    for state_name, name in program.signature["step"].updates.items():
        if scale > 1e6:
            moves = state_name in ("rng/key", "opt/loss_scale", "opt/skipped_steps")
            assert moves or np.array_equal(stepped[name], state[state_name]), state_name
        np.testing.assert_array_equal(stepped[name], applied.get(name, gradients.get(name)), err_msg=name)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_still_raises():
    session = burnish.Session(network())
    with pytest.raises(burnish.errors.NonFiniteLossError):
        session.step({**BATCH, "x": np.full_like(BATCH["x"], 1e38)})


def test_the_settings_reach_the_program_and_come_back():
    precision = burnish.MixedPrecision("float16", loss_scale=256.0, growth_interval=7, keep=["classifier"])
    program = burnish.compile(residual_network(width=4, blocks=(1,)), precision=precision)
    again = burnish.compile(residual_network(width=4, blocks=(1,)), precision=program.options["precision"])
    assert again.options == program.options
    assert precision == burnish.MixedPrecision(**program.options["precision"])
    assert program.initial_state(0)["opt/loss_scale"] == 256.0
    assert [entry.name for entry in program.signature["step"].outputs_of(Role.DIAGNOSTIC)] == ["loss_scale", "skipped"]


def test_bfloat16_is_not_scaled_unless_asked():
    model = residual_network(width=4, blocks=(1,))
    assert "opt/loss_scale" not in burnish.compile(model, precision="bfloat16").initial_state(0)
    scaled = burnish.compile(model, precision=burnish.MixedPrecision("bfloat16", loss_scale=4.0))
    assert scaled.initial_state(0)["opt/loss_scale"] == 4.0


def overflowing(frozen: str | None) -> burnish.Program:
    """A network with batch normalization in which, in sixteen bits, the gradient of the first weight alone overflows."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18]>
        net (float[N, 8] x) => (float[N, 4] logits) <float thousand = {1000.0}, float[6] gain = {1, 1, 1, 1, 1, 1},
            float[6] shift = {0, 0, 0, 0, 0, 0}, float[6] mean = {0, 0, 0, 0, 0, 0}, float[6] var = {1, 1, 1, 1, 1, 1}> {
            small = MatMul (x, stem) h = Mul (small, thousand) n = BatchNormalization (h, gain, shift, mean, var)
            r = Relu (n) logits = MatMul (r, head)
        }""")
    rng = np.random.default_rng(0)
    for name, array in (("stem", rng.normal(size=(8, 6))), ("head", rng.normal(size=(6, 4)) * 0.4)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    optimizer = sgd(0.05) if frozen is None else optim.groups(sgd(0.05), {frozen: "frozen"})
    return burnish.compile(model, optimizer=optimizer, precision="float16")


SMALL = {
    "x": (np.random.default_rng(1).normal(size=(32, 8)) * 1e-4 + 2e-3).astype(np.float32),
    "labels": np.random.default_rng(2).integers(0, 4, 32),
}


def followed(program: burnish.Program, engine: str, steps: int = 6) -> tuple[list[float], dict, dict]:
    """What was reported as skipped, the first state, and the last."""
    with burnish.Session(program, engine=engine, threads=1) as session:
        start = session.state()
        return [session.step(SMALL)["skipped"] for _ in range(steps)], start, session.state()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["onnxruntime", "reference", "torch"])
def test_the_gradient_of_a_frozen_weight_skips_no_step(engine):
    """What moves with a step, what is reported of it and the scale agree; with the weight trained the steps are skipped."""
    skipped, start, state = followed(overflowing("stem"), engine)
    assert skipped == [0.0] * 6
    assert state["step"] == 6
    assert state["opt/skipped_steps"] == 0
    assert state["opt/loss_scale"] == start["opt/loss_scale"]
    assert not np.array_equal(state["stat/mean"], start["stat/mean"])
    np.testing.assert_array_equal(state["param/stem"], start["param/stem"])
    if engine == "onnxruntime":
        return  # whose optimizer leaves out casts to sixteen bits and back
    everything, _, whole = followed(overflowing(None), engine)
    assert everything[0] == 1.0
    assert whole["opt/loss_scale"] < start["opt/loss_scale"]


@pytest.mark.slow
@pytest.mark.parametrize("loaded", [False, True])
def test_another_optimizer_that_trains_what_was_frozen_skips_the_whole_step(loaded, tmp_path):
    """The graph of the gradients looks at those that its own optimizer reads; the step looks at all that this one reads."""
    program = overflowing("stem").with_optimizer(sgd(0.05))
    if loaded:
        program.save(tmp_path / "program")
        program = burnish.Program.load(tmp_path / "program")
    skipped, _, state = followed(program, "reference")
    expected, _, wanted = followed(overflowing(None), "reference")
    assert skipped == expected
    assert skipped[0] == 1.0
    for name, array in wanted.items():
        np.testing.assert_array_equal(state[name], array, err_msg=name)


def test_another_optimizer_that_freezes_more_takes_or_skips_the_whole_step():
    skipped, start, state = followed(overflowing(None).with_optimizer(optim.groups(sgd(0.05), {"stem": "frozen"})), "reference")
    taken = 6 - sum(skipped)
    assert state["step"] == taken
    assert state["opt/skipped_steps"] == sum(skipped)
    assert (state["opt/loss_scale"] < start["opt/loss_scale"]) == (sum(skipped) > 0)
    assert (not np.array_equal(state["stat/mean"], start["stat/mean"])) == (taken > 0)
