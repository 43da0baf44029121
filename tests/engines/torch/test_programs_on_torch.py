"""Whole programs on PyTorch's kernels and on ONNX Runtime's: the same loss, gradients and state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import onnx_ir as ir
import pytest

import burnish
from burnish import losses, optim
from burnish.engines.onnxruntime import OnnxRuntimeEngine
from burnish.engines.reference import ReferenceEngine
from burnish.engines.torch import TorchEngine
from burnish.engines.torch.translate.translation import Late
from burnish.models import residual_network
from burnish.program import Program, Role
from burnish.random.draws import keep_mask
from oracles.combinations import diagonal, spread
from oracles.open_program import open_program
from oracles.small_graphs import SmallGraph
from oracles.small_networks import BATCH, CLASSES, batch_of, mobile, perceptron, transformer

TOLERANCE = 2e-5
STEPS = 3


def small_residual() -> ir.Model:
    return residual_network(width=4, blocks=(1, 1), classes=CLASSES, seed=1)


NETWORKS: dict[str, Callable[[], ir.Model]] = {
    "residual": small_residual,
    "perceptron": perceptron,
    "dropout": lambda: perceptron(dropout=True),
    "transformer": transformer,
    "mobile": mobile,
}


def gradients(engine: TorchEngine | OnnxRuntimeEngine | ReferenceEngine, program: Program, state, batch) -> dict[str, np.ndarray]:
    """All outputs of ``grad``, by the engine's own kernels where it has some."""
    if isinstance(engine, TorchEngine):
        return open_program(engine, program, state, threads=1)._arrays("grad", batch, {})
    values = {**state, **batch}
    return engine.run(program.grad, {entry.name: values[entry.name] for entry in program.signature["grad"].inputs})


def fed(program: Program, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The batch with the rates that a step takes."""
    rates = program.signature["step"].inputs_of(Role.HYPERPARAMETER)
    return {**batch, **{entry.name: np.asarray(entry.default, entry.dtype.numpy()) for entry in rates}}


def assert_near(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray], what: str, tolerance: float = TOLERANCE) -> None:
    """Within ``tolerance`` of the norm, or of a thousandth of the largest norm: what cancels has the error of what cancelled."""
    assert set(actual) == set(expected)
    norms = {name: float(np.linalg.norm(array.astype(np.float64))) for name, array in expected.items()}
    largest = max(norms.values(), default=0.0)
    for name, array in expected.items():
        assert actual[name].dtype == array.dtype, f"{what}: {name}"
        assert actual[name].shape == array.shape, f"{what}: {name}"
        if array.dtype.kind in "iub":
            np.testing.assert_array_equal(actual[name], array, err_msg=f"{what}: {name}")
            continue
        error = float(np.linalg.norm(actual[name].astype(np.float64) - array.astype(np.float64)))
        assert error <= tolerance * max(norms[name], 1e-3 * largest), f"{what}: {name} is off by {error / (norms[name] or 1):.1e}"


def compare(program: Program, batches: list[dict[str, np.ndarray]], engine: TorchEngine | None = None) -> None:
    """Gradients at the start, then steps, each from the state that ONNX Runtime came to; evaluation and prediction at the end."""
    engine = engine or TorchEngine()
    state = program.initial_state(0)
    expected = gradients(OnnxRuntimeEngine(), program, state, batches[0])
    actual = gradients(engine, program, state, batches[0])
    for part in (True, False):
        chosen = [name for name in expected if name.startswith("grad:") == part]
        assert_near({name: actual[name] for name in chosen}, {name: expected[name] for name in chosen}, "gradient")
    runner = open_program(engine, program, state, threads=1)
    peer = open_program(OnnxRuntimeEngine(), program, state, threads=1)
    for number, batch in enumerate(batches):
        runner.load_state(peer.state())
        one, other = runner.step(fed(program, batch)), peer.step(fed(program, batch))
        assert_near(one, other, f"step {number}")
        assert_near(runner.state(), peer.state(), f"step {number}")
    runner.load_state(peer.state())
    assert_near(runner.evaluate(batches[0]), peer.evaluate(batches[0]), "evaluation")
    data = {name: array for name, array in batches[0].items() if name in {e.name for e in program.signature["predict"].inputs}}
    assert_near(runner.predict(data), peer.predict(data), "prediction")


def batches(model: ir.Model) -> list[dict[str, np.ndarray]]:
    return [batch_of(model, seed) for seed in range(STEPS)]


@pytest.mark.slow
@diagonal(("name", NETWORKS), ("compiled", ["regions", "none"]))
def test_networks(name: str, compiled: Literal["regions", "none"]) -> None:
    model = NETWORKS[name]()
    compare(burnish.compile(model, metrics=("accuracy",)), batches(model), TorchEngine(compile=compiled))


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["frozen", "ghost:4", "renorm", "train"])
def test_normalization_policies(norm: str) -> None:
    model = small_residual()
    compare(burnish.compile(model, norm=norm), batches(model))


@pytest.mark.slow
@spread("name", sorted(optim.OPTIMIZERS), test_all=6)
def test_optimizers(name: str) -> None:
    model = perceptron()
    compare(burnish.compile(model, optimizer=name), batches(model))


@spread(
    ("loss", "targets"),
    [
        ("bce_with_logits", "bits"),
        ("huber", "values"),
        ("kl_divergence", "shares"),
        ("l1", "values"),
        ("mean_squared_error", "values"),
        ("smooth_l1", "values"),
        ("hinge", "signs"),
        ("multi_margin", "classes"),
        ("focal", "classes"),
        (losses.cross_entropy(label_smoothing=0.1), "classes"),
    ],
    test=2,
    ids=lambda value: value if isinstance(value, str) else "label_smoothing",
)
def test_losses(loss: str | losses.Loss, targets: str) -> None:
    generator = np.random.default_rng(5)
    model = perceptron()
    program = burnish.compile(model, loss=loss)
    (label,) = program.signature["grad"].inputs_of(Role.LABEL)
    found = []
    for batch in batches(model):
        drawn = generator.random((BATCH, CLASSES))
        made = {
            "bits": drawn > 0.5,
            "signs": np.sign(drawn - 0.5),
            "values": drawn * 4 - 2,
            "shares": drawn / drawn.sum(1, keepdims=True),
            "classes": batch["labels"],
        }[targets]
        found.append({"x": batch["x"], label.name: made.astype(label.dtype.numpy())})
    compare(program, found)


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_with_a_symbolic_batch_nothing_is_decided_or_read_back_in_a_step(name: str) -> None:
    program = burnish.compile(NETWORKS[name](), optimizer="adam")
    runner = open_program(TorchEngine(), program, program.initial_state(0))
    for graph in ("step", "evaluate", "predict"):
        module = runner._translate(graph, fused=True)
        assert not [part for part in module.children() if isinstance(part, Late)], graph
        assert not [node for node in module.graph.nodes if node.target in ("item", "tolist")], graph


@pytest.mark.slow
@diagonal(("precision", ["float16", "bfloat16"]), ("name", ["residual", "transformer", "dropout"]))
def test_mixed_precision(name: str, precision: str) -> None:
    """What sixteen bits do to a gradient is the network's conditioning: the standard's reference, which rounds at every cast,
    meets it as this engine does, and neither by much more."""
    model = NETWORKS[name]()
    exact, mixed = burnish.compile(model), burnish.compile(model, precision=precision)
    batch, state = batch_of(model), mixed.initial_state(0)
    right = gradients(OnnxRuntimeEngine(), exact, exact.initial_state(0), batch)
    expected, actual = (gradients(engine, mixed, state, batch) for engine in (ReferenceEngine(), TorchEngine()))
    right = {entry: array for entry, array in right.items() if entry.startswith("grad:")}
    largest = max(float(np.linalg.norm(array)) for array in right.values())
    for entry, array in right.items():
        assert actual[entry].dtype == np.float32
        allowed = 1.5 * np.linalg.norm(expected[entry] - array) + 1e-3 * max(float(np.linalg.norm(array)), 1e-2 * largest)
        assert np.linalg.norm(actual[entry] - array) <= allowed, entry
    runner = open_program(TorchEngine(), mixed, state, threads=1)
    seen = [runner.step(fed(mixed, batch))["loss"].item() for _ in range(8)]
    assert seen[-1] < seen[0]
    assert {array.dtype for entry, array in runner.state().items() if entry.startswith("param/")} == {np.dtype(np.float32)}


@pytest.mark.parametrize("ratio", [0.1, 0.5])
def test_dropout_keeps_the_very_same_elements(ratio: float) -> None:
    graph = SmallGraph({"key": ("uint32", [2]), "x": ("float32", ["batch", 7])})
    graph.output("kept", keep_mask(graph.builder, graph["key"], 3, graph["x"], ratio))
    model = ir.Model(graph.graph, ir_version=10)
    for seed in range(3):
        key = burnish.random.keys.initial_key(seed)
        inputs = {"key": key, "x": np.zeros((301, 7), np.float32)}
        kept = TorchEngine().run(model, inputs)["kept"]
        np.testing.assert_array_equal(kept, OnnxRuntimeEngine().run(model, inputs)["kept"])
        assert abs(kept.mean() - (1 - ratio)) < 0.05


@pytest.mark.slow
@diagonal(("name", ["residual", "dropout"]), (("first", "second"), [("torch", "onnxruntime"), ("onnxruntime", "torch")]))
def test_training_goes_on_with_the_other_engine(name: str, first: str, second: str, tmp_path: Path) -> None:
    model = NETWORKS[name]()
    program = burnish.compile(model, optimizer="adam")
    data = [batch_of(model, seed) for seed in range(6)]

    def run(session: burnish.Session, part: list[dict[str, np.ndarray]]) -> list[float]:
        return [session.step(batch)["loss"] for batch in part]

    whole = burnish.Session(program, engine=second, seed=0, threads=1)
    expected = run(whole, data)
    session = burnish.Session(program, engine=first, seed=0, threads=1)
    started = run(session, data[:3])
    session.save_checkpoint(tmp_path / "half.safetensors")
    resumed = burnish.Session(program, engine=second, seed=1, threads=1)
    resumed.restore(tmp_path / "half.safetensors")
    np.testing.assert_allclose([*started, *run(resumed, data[3:])], expected, rtol=2e-4)
    assert resumed.state()["step"] == 6
    np.testing.assert_array_equal(resumed.state()["rng/key"], whole.state()["rng/key"])
